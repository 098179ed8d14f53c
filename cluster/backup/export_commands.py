"""`timerctl export --into PLACE [--from STORE [--backup ID | --at-index N | --at TIME]]`.

Without --from, a backup of the running cluster is taken for it and deleted afterwards. So an export
is always the state at one log index. See `backup_commands.py` for the imports.
"""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.backup.backup_commands import (
    STORE,
    add_cluster,
    add_source,
    find_point,
    print_progress,
    print_result,
    store_of,
    take_backup,
    with_extra,
)
from timerclient.cli import cli_args, output
from timerclient.cli.cli_args import UsageError, help_arguments
from timerclient.cli.cli_errors import OK

if TYPE_CHECKING:
    from cluster.backup.backup_store import BackupStore
    from cluster.backup.catalogue import Catalogue
    from cluster.backup.roll_forward import Until


def register_export(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `timerctl export`."""
    text = "write pending timers and kept messages as Parquet"
    export = commands.add_parser("export", **help_arguments(text))
    export.set_defaults(run=with_extra(_export))
    add_cluster(export)
    cli_args.add_output(export)
    export.add_argument("--into", metavar="PLACE", required=True, help=f"{STORE}; absent or empty")
    add_source(export, required=False)


def _export(args: argparse.Namespace) -> int:
    from cluster.backup.backup_store import BackupStore

    target = BackupStore(args.into)
    if args.store is not None:
        store = store_of(args)
        return _written(args, target, store, *find_point(store, args))
    if args.backup or args.at_index or args.at:
        raise UsageError("--backup, --at-index and --at need --from STORE")
    with _temporary() as folder:
        store = BackupStore(str(folder))
        return _written(args, target, store, take_backup(args, store, is_kept=False), None)


@contextmanager
def _temporary() -> Iterator[Path]:
    """Make a temporary directory for the block.

    Raises:
        BackupError: it can't be made.
    """
    import tempfile

    from cluster.backup.restoration import converting_errors

    with ExitStack() as stack:
        with converting_errors(Path("TMPDIR")):
            made = tempfile.TemporaryDirectory(
                prefix="timerctl-export-", ignore_cleanup_errors=True
            )
        path = Path(made.name)
        stack.callback(_print_leftover, path)
        yield Path(stack.enter_context(made))


def _print_leftover(path: Path) -> None:
    if path.exists():
        print_progress(f"{path} could not be removed, and has readable payloads: remove it")


def _written(
    args: argparse.Namespace,
    target: "BackupStore",
    store: "BackupStore",
    found: "Catalogue",
    until: "Until | None",
) -> int:
    from cluster.backup.parquet_export import SCHEMA_VERSION, ParquetExport
    from cluster.backup.restoration import check_readable, receive
    from timer.files.disk import RealDisk

    check_readable(found)
    disk = RealDisk()
    with _temporary() as folder:
        state = folder / "state"
        found, _ = receive(disk, store, found, state, until)
        export = ParquetExport(disk, state, found)
        try:
            tables = export.write(target)
        finally:
            if export.leftovers:
                left = ", ".join(sorted(export.leftovers))
                print_progress(f"{target.root}: could not delete {left}: delete them")
    document = {
        "schema_version": SCHEMA_VERSION,
        "cluster_id": found.cluster_id,
        "index": found.index,
        "time_ms": found.time_ms,
        **{name: table._asdict() for name, table in tables.items()},
    }
    at = f"cluster {found.cluster_id} at log index {found.index}, {output.instant(found.time_ms)}"
    rows = [(name, table.rows, len(table.files)) for name, table in tables.items()]
    print_result(
        args, document, f"{at}\n\n{cli_args.table(args, ('TABLE', 'ROWS', 'FILES'), rows)}"
    )
    return OK
