"""Compare this system with others: each takes its turn after ours, on this machine.

    make bench-peers ARGS="[--only redis,nats] [--full] [--rounds N]"
    make bench-peers ARGS="report FILE... [--out DIRECTORY]"

make installs the clients of the peers, and calls this module with them. The short form takes about
two minutes a peer and round. Results are stored in run/bench-peers/, as JSON with a report in
Markdown and plots beside it. `report` makes the report of several results together.
"""

import argparse
import asyncio
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench import bench_results
from bench.bench_machine import ROOT
from bench.measure import Form
from bench.peers import peer_report
from bench.peers.contest import FULL, PART_LIMIT_S, SHORT, Contest, Length, PeerResult
from bench.peers.contestants import OURS, ROSTER, peer_class
from bench.peers.installs import NotInstallable
from bench.peers.outcome import ContestOutcome, PeerTurn

RESULTS: Final = ROOT / "run" / "bench-peers"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the contest, or make a report of earlier ones. Return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it stops the servers
    try:
        return _report(arguments[1:]) if arguments[:1] == ["report"] else _contest(arguments)
    except KeyboardInterrupt:
        print("bench-peers: interrupted", file=sys.stderr)
        return 130


def _report(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers report")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    outcomes = [ContestOutcome.load(path) for path in args.files]
    print(peer_report.write(args.out, "peers", outcomes).read_text())
    return 0


def _contest(arguments: Sequence[str]) -> int:
    others = [name for name in ROSTER if name != OURS]
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description="Compare this system with others.",
        epilog=f"peers: {', '.join(others)}",
    )
    parser.add_argument("--only", default=",".join(others), metavar="NAME,NAME", help="peers")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--short", action="store_true", help="the short form, which is the default")
    form.add_argument("--full", action="store_true", help="longer turns, and a burst of a million")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each peer (default: 1)")
    parser.add_argument("--dir", type=Path, default=RESULTS, help="results, and the servers' data")
    args = parser.parse_args(arguments)
    names = args.only.split(",")
    if unknown := set(names) - set(others):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(others)}")
    head = bench_results.head_of(args.dir, Form.FULL if args.full else Form.SHORT)
    outcome = ContestOutcome(head=head)
    _install(outcome, names)
    path = args.dir / f"{head.stem}.json"
    asyncio.run(_turns(outcome, args.rounds, FULL if args.full else SHORT, path))
    written = peer_report.write(args.dir, path.stem, [outcome])
    print(written.read_text())
    print(f"{path}\n{written}")
    return 0


def _install(outcome: ContestOutcome, names: Sequence[str]) -> None:
    """Install the peers, and note the version of each or why it is left out."""
    for name in [OURS, *names]:
        _say(f"{name}: installing")
        try:
            outcome.versions[name] = peer_class(name).install()
        except (NotInstallable, ImportError) as error:
            outcome.left_out[name] = str(error)
            _say(f"{name}: left out: {error}")


async def _turns(outcome: ContestOutcome, rounds: int, length: Length, path: Path) -> None:
    """Let each peer take its turn after one of ours, `rounds` times. Save after each turn."""
    others = [name for name in outcome.versions if name != OURS]
    for number in range(rounds):
        for other in others:
            for name in (OURS, other):
                _say(f"round {number + 1} of {rounds}: {name}")
                result = await _turn(name, length, path.parent / f"data-{outcome.head.utc}")
                outcome.turns.append(PeerTurn(name, result))
                outcome.save(path)
                for error in result.errors:
                    _say(f"  {error}")


async def _turn(name: str, length: Length, data: Path) -> PeerResult:
    peer = peer_class(name)(data / name)
    try:
        async with asyncio.timeout(PART_LIMIT_S):
            await peer.start()
        result = await Contest(peer, length).run()
    except Exception as error:  # noqa: BLE001 -- one peer's failure leaves the others
        result = PeerResult(errors=[f"start: {type(error).__name__}: {error}"])
    finally:
        await peer.stop()
    shutil.rmtree(data, ignore_errors=True)
    return result


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
