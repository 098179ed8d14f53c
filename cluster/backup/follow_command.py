"""`timerctl backup --into STORE --follow`: a continuous backup, until SIGTERM or Ctrl-C."""

import argparse
import json
import signal
import time
from datetime import timedelta
from typing import Final

from cluster.backup.backup_commands import HEADINGS, WIDE, document_of, print_progress, row_of
from cluster.backup.backup_store import BackupStore
from cluster.backup.catalogue import Catalogue
from cluster.backup.log_shipper import LogShipper, ShipPlan
from timerclient.cli import cli_args
from timerclient.cli.cli_args import UsageError, tls_of
from timerclient.cli.cli_errors import OK
from timerclient.cli.contexts import apply_context
from timerclient.client.timer_client import TimerClient

LOG_EVERY_S: Final = 5.0
BACKUP_EVERY_S: Final = 3600.0


def follow(args: argparse.Namespace, store: BackupStore) -> int:
    """Take a continuous backup until a signal; return the exit code.

    Raises:
        TimerError: see `LogShipper.run`.
        UsageError: an option is wrong.
    """
    apply_context(args)
    plan = ShipPlan(
        log_every_s=_seconds("--log-every", args.log_every, LOG_EVERY_S),
        backup_every_s=_seconds("--backup-every", args.backup_every, BACKUP_EVERY_S),
        keep=args.keep,
        node=args.node,
        patience_s=args.timeout.total_seconds(),
    )

    def on_backup(found: Catalogue) -> None:
        print(text_of(found), flush=True)  # noqa: T201

    def text_of(found: Catalogue) -> str:
        if args.output == "json":
            return json.dumps(document_of(found))  # one line for each backup
        return cli_args.table(args, HEADINGS, [row_of(found)], WIDE)

    with TimerClient(args.endpoints, timeout=args.timeout, credentials=tls_of(args)) as client:
        shipper = LogShipper(
            client,
            store,
            plan,
            wall_s=time.time,
            mono_s=time.monotonic,
            on_backup=on_backup,
            on_progress=print_progress,
        )

        def stop(number: int, _: object) -> None:
            signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
            shipper.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        shipper.run()
    return OK


def _seconds(option: str, given: timedelta | None, usual: float) -> float:
    """Return the seconds of an interval.

    Raises:
        UsageError: it is zero.
    """
    found = usual if given is None else given.total_seconds()
    if not found:
        raise UsageError(f"{option} 0: must be more than 0")
    return found
