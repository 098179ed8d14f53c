"""The checker of histories: finds what is wrong, says where, and leaves alone what is right."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chaos.history.history import OpOutcome, RunFolder
from chaos.history.history_check import COLUMNS, OPS, check, check_line, kind_of, main
from tests.chaos.told_history import ToldHistory

DOCUMENT = Path(__file__).parents[2] / "docs/history-format.md"
EXAMPLES = [
    json.loads(line)
    for block in re.findall(r"```json\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    for line in block.splitlines()
]
BY_OP = {kind_of(line): line for line in reversed(EXAMPLES) if line.get("outcome") != "asked"}
"""The first example of each operation; of schedule and of ack, one that was answered."""


def write(path: Path, lines: Sequence[Mapping[str, Any]], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return path


def changed(example: str, **fields: Any) -> dict[str, Any]:
    return {**BY_OP[example], **fields}


def asked(**fields: Any) -> dict[str, Any]:
    """Return what the document has as about to be sent, changed."""
    (line,) = [line for line in EXAMPLES if line.get("outcome") == "asked"]
    return {**line, **fields}


# ---- the document


def test_document_has_an_example_of_every_operation_and_all_are_right() -> None:
    assert {*BY_OP} == {*OPS}
    assert {line["outcome"] for line in EXAMPLES if "outcome" in line} == {*OpOutcome}
    for line in EXAMPLES:
        assert [*check_line(line)] == []


@pytest.mark.parametrize("op", OPS)
def test_document_names_every_required_field_of(op: str) -> None:
    section = DOCUMENT.read_text().split(f"**{op}**")[1].split("```")[0]
    wanted = {name for name, field in OPS[op].items() if field.required}
    assert wanted <= {*re.findall(r"`(\w+)`", section)}


def test_document_has_every_column_with_its_type() -> None:
    table = DOCUMENT.read_text().split("## Parquet")[1]
    rows = re.findall(r"^\| (?!type|-)([\w ]+) \| (.*) \|$", table, re.MULTILINE)
    found = {name: kind for kind, names in rows for name in names.split(", ")}
    spelt = {
        name: f"list of {kind.value_type}" if pa.types.is_list(kind) else str(kind)
        for name, kind in COLUMNS.items()
    }
    assert found == spelt


def test_columns_are_the_fields_of_all_operations() -> None:
    assert {*COLUMNS} == {"op", "client"}.union(*OPS.values())


# ---- what is wrong


@pytest.mark.parametrize("op", OPS)
def test_required_field_that_is_missing_is_named(op: str) -> None:
    for name, field in OPS[op].items():
        line = {key: value for key, value in BY_OP[op].items() if key != name}
        found = [each[0] for each in check_line(line)]
        if kind_of(line) == op:
            required = field.required or name == "end_ms"  # but of what was only asked
            assert found == ([name] if required else [])
        else:  # without it, it is a line of another kind
            assert found != [], name


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("value", [True, 1.5, -2, {}, [], "", [[]], 1 << 63])
def test_value_of_another_kind_is_named(op: str, value: Any) -> None:
    for name in OPS[op]:
        found = [field.split("[")[0] for field, _, _ in check_line(changed(op, **{name: value}))]
        may_be_empty = name == "detail" and value == ""
        assert may_be_empty or found == [name]


@pytest.mark.parametrize(
    ("line", "field", "allowed"),
    [
        (changed("open", outcome="asked"), "outcome", "open has no such field"),
        (changed("ack", outcome="asked"), "outcome", "one of ok, fail, unknown"),
        (asked(end_ms=1795252672009), "end_ms", "must not be there: outcome is asked"),
        (asked(request=None), "request", "must be there: outcome is asked"),
        (asked(answered=8), "answered", "in the line of an outcome"),
        (changed("cancel", request=8, answered=8), "answered", "must be above request (8)"),
        (changed("cancel", answered=8), "answered", "must be above request (absent)"),
        (asked(ids=["0" * 24] * 2), "ids", "only if, outcome is ok; it is asked"),
        (asked(outcome="unknown"), "end_ms", "must be there: outcome is unknown"),
        (changed("open", op="opened"), "op", "schedule, cancel, reschedule, open, deliver, ack"),
        (changed("open", client=""), "client", "a string that is not empty"),
        (changed("open", topic="default/orders"), "topic", "without default/"),
        (changed("open", gruop="g"), "gruop", "open has no such field; it has topic, group"),
        (changed("ack", end_ms=5), "end_ms", "not be before start_ms (1795252676271)"),
        (changed("ack", outcome="okay"), "outcome", "one of ok, fail, unknown"),
        (changed("ack", outcome="unknown"), "results", "only if, outcome is ok; it is unknown"),
        (changed("ack", results=["NACKED"]), "results[0]", "one of ACKED, ALREADY_ACKED"),
        (changed("ack", results=["ACKED"] * 2), "results", "one element for each of offsets (1)"),
        (changed("schedule", ids=["x" * 24, "0" * 24]), "ids[0]", "24 characters of 0-9 and a-v"),
        (changed("schedule", ids=None), "ids", "it is ok"),
        (changed("schedule", marks=[7, 7]), "marks", "all be different"),
        (changed("schedule", marks=[7, -1]), "marks[1]", "unique in the run"),
        (changed("schedule", due_ms=[1795252676.5, 1]), "due_ms[0]", "Unix milliseconds"),
        (changed("deliver", attempts=[0]), "attempts[0]", "an integer 1 .. 2147483647"),
        (changed("schedule", keys=[None, ""]), "keys[1]", "a string that is not empty"),
        (changed("schedule", on_conflict="raise"), "on_conflict", "one of reject, replace, keep"),
        (changed("schedule", results=["KEPT", "REJECTED"]), "ids[1]", "null if, and only if"),
        (changed("schedule", existing=[None, None]), "existing[0]", "or SCHEDULED; it is absent"),
        (changed("cancel", keys=["a", "b"]), "keys", "cancel has no such field"),
        (changed("cancel by key", changed=1), "changed", "cancel by key has no such field"),
        (changed("cancel by filter", changed=None), "changed", "outcome is ok"),
        (changed("reschedule", new_ids=[None, None]), "new_ids[0]", "it is RESCHEDULED"),
        (changed("deliver", marks=[-2]), "marks[0]", "an integer -1 .. "),
    ],
)
def test_wrong_line_is_explained(line: dict[str, Any], field: str, allowed: str) -> None:
    [(found, _, rule)] = check_line(line)
    assert found == field
    assert allowed in rule


def test_nulls_and_what_is_optional_may_be_absent() -> None:
    assert [*check_line(changed("schedule", due_ms=None, detail=None, group=None))] == []
    assert [*check_line(changed("deliver", lease_id=None, marks=[-1]))] == []


# ---- files


def test_problem_names_file_line_field_value_and_rule(tmp_path: Path) -> None:
    lines = [BY_OP["open"], BY_OP["ack"], changed("ack", offsets=["31"])]
    path = write(tmp_path / "c.jsonl", lines)
    [problem] = check(path)
    rule = "must be an integer 0 .. 9223372036854775807"
    assert str(problem) == f'{path}:3: offsets[0] = "31": {rule}'


def test_lines_that_are_no_objects_are_problems_and_the_rest_is_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [BY_OP["open"]], 'torn{"op":1}\n[1]\n\n{"op":"knock"}\n')
    found = [(problem.line, problem.field) for problem in check(path)]
    assert found == [(2, ""), (3, ""), (4, ""), (5, "op")]
    path.write_bytes(b'{"op":"\xff"}\n')
    [problem] = check(path)
    assert "not JSON" in problem.allowed


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_torn_last_line_is_left_out(tmp_path: Path, kept: int) -> None:
    torn = json.dumps(BY_OP["ack"])[:kept]
    assert [*check(write(tmp_path / "c.jsonl", [BY_OP["open"]], torn))] == []


def test_what_our_own_clients_write_is_right(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    ids = BY_OP["schedule"]["ids"]
    with ToldHistory(run, "c") as history:
        for due_ms in (None, [5, 6]):
            history.schedule([1, 2], ids=ids, due_ms=due_ms, topic="t", span_ms=(1, 2),
                             outcome=OpOutcome.OK)  # fmt: skip
        request = history.asks("cancel", start_ms=1, ids=ids)
        history.change(
            "cancel",
            ids=ids,
            request=request,
            results=None,
            span_ms=(1, 1),
            outcome=OpOutcome.UNKNOWN,
            detail="",
        )
        history.open("t", "g", start_ms=1)
    assert [*check(run.histories / "c.jsonl")] == []


def parquet(path: Path, lines: Sequence[Mapping[str, Any]], **types: pa.DataType) -> Path:
    schema = pa.schema({**COLUMNS, **types})
    pq.write_table(pa.Table.from_pylist([*lines], schema=schema), path)
    return path


def test_parquet_is_checked_row_by_row(tmp_path: Path) -> None:
    lines = [*EXAMPLES, *EXAMPLES, changed("ack", outcome="maybe")]
    path = parquet(tmp_path / "c.parquet", lines)
    [problem] = check(path)
    assert str(problem).startswith(f'{path}:{len(lines)}: outcome = "maybe": must be one of ok')


def test_parquet_without_columns_that_nothing_would_fill_is_right(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([BY_OP["open"]]), tmp_path / "c.parquet")
    assert [*check(tmp_path / "c.parquet")] == []


def test_parquet_with_large_offsets_is_right(tmp_path: Path) -> None:
    large = pa.large_list(pa.large_string())
    path = parquet(tmp_path / "c.parquet", EXAMPLES, ids=large, topic=pa.large_string())
    assert [*check(path)] == []


@pytest.mark.parametrize(
    ("types", "said"),
    [
        ({"start_ms": pa.float64()}, 'start_ms = "double": must be int64'),
        ({"attempts": pa.list_(pa.int64())}, 'attempts = "list<element: int64>": must be list'),
        ({"extra": pa.int64()}, 'extra = "int64": no such column; there are op, client'),
    ],
)
def test_parquet_column_of_another_type_is_a_problem_of_the_file(
    tmp_path: Path, types: dict[str, pa.DataType], said: str
) -> None:
    path = parquet(tmp_path / "c.parquet", EXAMPLES, **types)
    [problem] = check(path)
    assert str(problem).startswith(f"{path}: {said}")


def test_file_that_is_no_history_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    (tmp_path / "c.csv").write_bytes(b"op")
    for name, said in (("c.parquet", "not Parquet"), ("c.csv", "must be .jsonl or .parquet")):
        [problem] = check(tmp_path / name)
        assert said in str(problem)


def test_command_prints_problems_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = write(tmp_path / "right.jsonl", EXAMPLES)
    wrong = write(tmp_path / "wrong.jsonl", [changed("ack", outcome="maybe")] * 25)
    assert main([str(right)]) == 0
    assert main([str(right), str(wrong)]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[-2:] == [f"{right}: all right", f"{wrong}: 25 problems"]
    assert len(err.splitlines()) == 21
    assert err.splitlines()[-1] == f"{wrong}: 5 more problems"
    assert main([str(tmp_path / "none.jsonl")]) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"op": "deliver", "client": 1}', "client = 1: must be"),  # whole, but for its newline
        ('{"op": "open"}\r{"op": "open"}\r', "not JSON"),  # lines that end otherwise
        ("[" * 200_000 + "\n", "not JSON"),
        ('{"op": "deliv', None),  # torn
        ("", None),  # a client that crashed before it asked for anything
    ],
)
def test_last_line_is_left_out_only_if_a_crash_can_have_torn_it(
    tmp_path: Path, text: str, said: str | None
) -> None:
    (tmp_path / "c.jsonl").write_text(text)
    problems = [*check(tmp_path / "c.jsonl")]
    assert bool(problems) == bool(said)
    if said:
        assert said in str(problems[0])
