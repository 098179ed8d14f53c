"""A stand-in for timerd, for tests of the launcher alone.

It answers /readyz and /v1/status, and ends on SIGTERM.

The file `behaviour` beside its TOML file changes it. With `crash` it ends with an error message,
with `unready` it is never ready, with `unfit` it waits to be replaced, with `stubborn` it ignores
SIGTERM, and with `stranger` it belongs to another cluster.
"""

import json
import signal
import sys
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import NoReturn


def init(arguments: list[str]) -> None:
    """Make the data directory, as `timerd init` does; fail if it exists."""
    flags = ["--learner"] if "--learner" in arguments else []
    valued = [word for word in arguments if word not in flags]
    options = dict(zip(valued[::2], valued[1::2], strict=True)) | dict.fromkeys(flags, "yes")
    Path(options["--data"]).mkdir()
    (Path(options["--data"]) / "identity.json").write_text(repr(sorted(options.items())))


def serve(config: Path) -> NoReturn:
    """Serve until SIGTERM."""
    settings = tomllib.loads(config.read_text())
    told = config.parent / "behaviour"
    behaviour = told.read_text() if told.exists() else ""
    if behaviour == "crash":
        sys.exit(f"{settings['name']}: the dog ate my disk")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503 if behaviour in ("unready", "unfit") else 200)
            self.end_headers()
            if behaviour == "unfit":
                self.wfile.write(b"is waiting to be replaced: its promise")
            if self.path == "/v1/status":
                cluster_id = "other" if behaviour == "stranger" else settings["cluster_id"]
                status = {"cluster_id": cluster_id, "nodes": [{"name": settings["name"]}]}
                self.wfile.write(json.dumps(status).encode())

        def log_message(self, *_: object) -> None:
            pass

    def end(*_: object) -> None:
        sys.exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else end)
    host, _, port = settings["http"].rpartition(":")
    HTTPServer((host, int(port)), Handler).serve_forever()
    sys.exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "init":
        init(sys.argv[2:])
    else:
        serve(Path(sys.argv[2]))
