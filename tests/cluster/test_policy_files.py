"""`timerctl policies export` and `apply`: round trips, diffs and failures halfway."""

import json
from pathlib import Path

import pytest

from tests.cluster.running import Running
from timerclient import TimerClient
from timerclient.cli import timerctl
from timerclient.cli.cli_args import UsageError
from timerclient.cli.cli_policy_files import from_document, read_cluster, to_document
from timerclient.rows import policy_fields

FILE = """
[cluster]
ttl_ms = 86400000

[namespace."files"]
tick_ms = 100

[topic."files/a"]
paused = true
delay_levels_ms = [1000, 5000]

[topic."default/b"]
catch_up = "latest"
"""


@pytest.mark.parametrize(
    ("document", "error"),
    [
        ({"topics": {}}, "'topics': must be a table"),
        ({"topic": []}, "'topic': must be a table"),
        ({"topic": {"a": 1}}, "topic.a: must be a table of fields"),
        ({"topic": {"a": {}, "default/a": {}}}, "topic a: is given twice"),
        ({"topic": {"": {}}}, "topic = '': must not be empty"),
        ({"cluster": {"ttl": 1}}, "the cluster: "),
        ({"topic": {"a": {"ttl_ms": "1"}}}, "topic a: ttl_ms = '1': "),
        ({"namespace": {"b": {"paused": 1}}}, "namespace b: paused = 1: "),
    ],
)
def test_file_that_is_wrong_is_refused(document: dict[str, object], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        from_document(document)


@pytest.mark.slow
def test_policies_of_a_file_are_applied_once_and_exported_as_they_are(
    cluster: Running, client: TimerClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ctl(*words: str) -> tuple[int, str, str]:
        code = timerctl.main(["--endpoints", ",".join(cluster.endpoints), "policies", *words])
        return code, *capsys.readouterr()

    file, copy = tmp_path / "policies.toml", tmp_path / "copy.json"
    file.write_text(FILE)
    client.alter_policies({"tick_ms": 7, "ready_max": 5}, namespace="files")
    client.alter_policies({"ready_max": 6}, topic="other")
    before = read_cluster(client)
    code, out, _ = ctl("apply", str(file), "--dry-run")
    assert (code, read_cluster(client)) == (0, before)
    assert "namespace files\n  - tick_ms = 7\n  + tick_ms = 100\n  - ready_max = 5\n" in out
    assert 'topic b\n  + catch_up = "latest"\n' in out
    assert "other" not in out
    code, _, said = ctl("apply", str(file))
    assert (code, read_cluster(client)) == (2, before)
    assert "needs --yes" in said
    assert ctl("apply", str(file), "--yes")[0] == 0
    assert client.describe_policies(namespace="files").own.tick_ms == 100
    assert policy_fields.fields_of(client.describe_policies(topic="other").own) == {"ready_max": 6}
    assert ctl("apply", str(file), "--yes")[1] == "no change\n"

    assert ctl("export", str(copy))[0] == 0
    exported = json.loads(copy.read_text())
    assert exported["topic"].keys() == {"files/a", "b", "other"}
    assert exported == to_document(read_cluster(client))
    assert ctl("apply", str(copy), "--prune", "--dry-run")[1] == "no change\n"
    toml = tmp_path / "export.toml"
    toml.write_text(ctl("export")[1])
    assert ctl("apply", str(toml), "--prune", "--dry-run")[1] == "no change\n"
    assert ctl("apply", str(file), "--prune", "--yes")[0] == 0
    assert ("topic", "other") not in read_cluster(client)

    # The second of three scopes is refused by the cluster: the first one is changed.
    parts = ("[cluster]\nready_max = 9", "[namespace.x]\ntick_ms = 0", "[topic.z]\npaused = true")
    file.write_text("\n".join(parts))
    code, _, said = ctl("apply", str(file), "--yes")
    assert code == 2
    assert "changed: the cluster\nfailed: namespace x\nnot tried: topic z\n" in said
    assert client.describe_policies().own.ready_max == 9
    error = json.loads(ctl("apply", str(file), "--yes", "-o", "json")[2])["error"]
    assert (error["failed"], error["not_tried"]) == (["namespace x"], ["topic z"])
    client.alter_policies(unset=["ready_max"], cluster=True)
