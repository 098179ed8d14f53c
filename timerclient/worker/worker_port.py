"""The HTTP port of a worker, on a thread of its own: it answers while the event loop is blocked.

/healthz   200: the event loop runs. 503: a handler blocks it; restart the worker
/readyz    200: all consumers are connected. 503: they are not yet, or the worker drains
/metrics   the counters, for Prometheus
"""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, Self

from timerclient.worker.worker import Worker
from timerclient.worker.worker_metrics import exposition

READ_S: Final = 5.0
"""Longest wait for a request."""


class WorkerPort:
    """The port; entered as a context, it serves.

    Raises:
        OSError: The address is in use, or not of this machine.
    """

    def __init__(self, worker: Worker, host: str, port: int) -> None:
        class Request(BaseHTTPRequestHandler):
            timeout = READ_S

            def do_GET(self) -> None:
                status, kind, text = _answer(worker, self.path.partition("?")[0])
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Log no request: probes come every second."""

        self._server = ThreadingHTTPServer((host, port), Request)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="worker-port", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _answer(worker: Worker, path: str) -> tuple[int, str, str]:
    """Return the status, content type and body for a path."""
    plain = "text/plain; charset=utf-8"
    if path == "/metrics":
        text = exposition(each.metrics for each in worker.runners)
        return 200, "text/plain; version=0.0.4; charset=utf-8", text
    if path == "/healthz":
        return (200, plain, "ok\n") if worker.is_alive else (503, plain, "event loop blocked\n")
    if path == "/readyz":
        return (200, plain, "ready\n") if worker.is_ready else (503, plain, "not ready\n")
    return 404, plain, "paths: /healthz /readyz /metrics\n"
