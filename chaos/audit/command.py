"""The command: `timerctl audit RUN`, `python -m chaos.audit RUN`, `spark-submit … RUN`.

Exit status: 0 every promise was kept; 1 a promise was broken, or the run itself failed; 2 the input
can't be audited; 3 no broken promise was seen, and a part of the run was not judged.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pyspark.errors import PySparkException

from chaos.audit.job import audit, folder_size
from chaos.audit.report.report import Report, describe
from chaos.history import history_check
from chaos.history.history import RunFolder
from chaos.spark.session import spark_session, why_no_java
from timer.model.timer_errors import StorageError

QUICK_SIZE_MAX: Final = 512 << 20
"""The most bytes of a run's files for a `quick` session."""
CHECKED_SIZE_MAX: Final = 256 << 20
"""The most bytes of histories that are checked by default: a dozen seconds."""
SPARK_LOG: Final = "spark.log"
REASON_MAX: Final = 300
"""The most characters of an error's first line that are printed."""
_UNUSABLE: Final = re.compile(
    r"^(?:timer\.model\.timer_errors\.\w+|zoneinfo[.\w]+|ValueError|FileNotFoundError): (.*)$", re.M
)
"""The form in which a Python worker reports an error that makes a run unusable."""


@contextlib.contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """Write stderr to a file, also that of the JVM that starts here and writes much."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ours = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(ours, 2)
            os.close(ours)


def _faulty_histories(run: RunFolder, *, check: bool | None) -> bool:
    """Print the faults of the histories; return whether there are any.

    `check`: False: no check. None: a check if they are small.
    """
    paths = run.history_files()
    size = sum(path.stat().st_size for path in paths)
    if check is None and size > CHECKED_SIZE_MAX:
        print(
            f"audit: {size / 1e6:,.0f} MB of histories: their format is not checked;"
            " --check-history checks it",
            file=sys.stderr,
        )
        return False
    if check is False:
        return False
    problems = (problem for path in paths for problem in history_check.check(path))
    found = [*itertools.islice(problems, history_check.PROBLEMS_MAX)]
    for problem in found:
        print(f"audit: {problem}", file=sys.stderr)
    if found:
        print("audit: --no-check-history audits the run without this check", file=sys.stderr)
    return bool(found)


def run_audit(
    folder: Path,
    *,
    output: str = "table",
    master: str | None = None,
    check_history: bool | None = None,
) -> int:
    """Audit a folder and print the report; return the exit status.

    `check_history`: check the histories against their format first. None: if they are small.
    """
    run = RunFolder(folder.resolve())
    why = why_no_java() if run.root.is_dir() else f"{folder}: no such folder"
    if why:
        print(f"audit: {why}", file=sys.stderr)
        return 2
    try:
        if _faulty_histories(run, check=check_history):
            return 2
        report = _audit(run, master)
    except Exception as failed:  # noqa: BLE001 - status 1 would say that a promise was broken
        print(f"audit: {_error_line(failed, run)}", file=sys.stderr)
        return 2
    if output == "json":
        print(json.dumps(report.summary, indent=2))
    else:
        print("\n".join(describe(report)))
        if report.why_bad:
            print(report.why_bad)
        print(f"report: {run.audit / 'report.html'}")
    if report.why_bad or report.verdict == "VIOLATED":
        return 1
    return 0 if report.ok else 3


def _audit(run: RunFolder, master: str | None) -> Report:
    """Audit a run in a session of its own.

    Raises:
        Exception: those of `job.audit`, and Spark's.
    """
    with _stderr_to(run.audit / SPARK_LOG):
        quick = folder_size(run.root) <= QUICK_SIZE_MAX
        spark = spark_session("timer-audit", quick=quick, master=master)
    try:
        return audit(spark, run)
    finally:
        with contextlib.suppress(Exception):  # its JVM may have ended
            spark.stop()


def _error_line(failed: Exception, run: RunFolder) -> str:
    """Return one line about the error that ended the audit. For Spark's own, its log has more."""
    if isinstance(failed, FileNotFoundError | StorageError | ValueError):
        return str(failed)
    try:
        text = str(failed)
    except Exception:  # noqa: BLE001 - py4j asks the JVM for the text
        text = "Spark's JVM has ended"
    if isinstance(failed, PySparkException) and (told := _UNUSABLE.findall(text)):
        return str(told[-1])
    log = run.audit / SPARK_LOG
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            traceback.print_exception(failed, file=file)
    first = next(filter(None, map(str.strip, text.splitlines())), "no reason given")
    return f"the run could not be judged: {type(failed).__name__}: {first[:REASON_MAX]} (see {log})"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m chaos.audit`; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m chaos.audit", description="Check a run's folder against the guarantees."
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--master", help="Spark's master; default local[*], or spark-submit's")
    parser.add_argument("--check-history", action=argparse.BooleanOptionalAction)
    args = parser.parse_args(argv)
    return run_audit(
        args.run, output=args.output, master=args.master, check_history=args.check_history
    )
