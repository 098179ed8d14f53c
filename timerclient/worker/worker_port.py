"""The HTTP port of a worker, on a thread of its own: it answers while the event loop is blocked.

/healthz   200: the worker works. 503: a handler blocks the event loop, or all calls of a handler
           exceed `hold_max`; restart the worker
/readyz    200: all consumers are connected. 503: they are not yet, or the worker drains
/metrics   the counters, for Prometheus, and the default registry of prometheus_client if the
           application has imported it. If that fails, a line of log says so once until it works
"""

import logging
import socket
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self

from timerclient.values.codecs import reason_of
from timerclient.worker.worker import Worker
from timerclient.worker.worker_metrics import exposition

LOG: Final = logging.getLogger("timerclient.worker")
READ_S: Final = 5.0
"""Longest time of a connection."""
CONNECTIONS_MAX: Final = 64
"""Open connections, each with a thread. A further one ends the oldest."""
_CHECK_INTERVAL_S: Final = 0.5


class _Server(ThreadingHTTPServer):
    """Ends connections that are old, or too many: a scanner must not use up threads and files."""

    daemon_threads = True
    request_queue_size = CONNECTIONS_MAX
    """Connections that wait for the thread. A further one waits a second or longer."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[socket.socket, float] = {}
        """Open connections, the oldest first, with the time of their end."""
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection on a thread."""
        with self._lock:
            self._open[request] = time.monotonic() + READ_S
            if len(self._open) > CONNECTIONS_MAX:
                self._end(next(iter(self._open)))
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a served connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End old connections."""
        with self._lock:
            now_s = time.monotonic()
            for each in [each for each, end_s in self._open.items() if end_s <= now_s]:
                self._end(each)

    def _end(self, request: socket.socket) -> None:
        """Wake the thread of a connection, which closes it. The lock is held."""
        del self._open[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about a connection that broke."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class ApplicationMetrics:
    """The metrics of the application's own registry."""

    def __init__(self) -> None:
        self._has_failed = False

    def exposition(self) -> str:
        """Return their text. Empty: there are none, or one of the collectors fails."""
        if (library := sys.modules.get("prometheus_client")) is None:  # the application's
            return ""
        try:
            text = str(library.generate_latest(library.REGISTRY).decode())
        except Exception as error:  # noqa: BLE001 -- an edge: the application's collectors
            if not self._has_failed:
                LOG.warning("metrics of the application left out: %s", reason_of(error))
            self._has_failed = True
            return ""
        self._has_failed = False
        return text


class WorkerPort:
    """The port; entered as a context, it serves.

    Raises:
        OSError: The address is in use, or not of this machine.
    """

    def __init__(self, worker: Worker, host: str, port: int) -> None:
        application = ApplicationMetrics()

        class Request(BaseHTTPRequestHandler):
            timeout = READ_S

            def do_GET(self) -> None:
                status, kind, text = _answer(worker, application, self.path.partition("?")[0])
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Log no request: probes come every second."""

        self._server = _Server((host, port), Request)
        self.port: int = self._server.server_address[1]

    def __enter__(self) -> Self:
        serve = self._server.serve_forever
        threading.Thread(
            target=serve, args=[_CHECK_INTERVAL_S], name="worker-port", daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _answer(worker: Worker, application: ApplicationMetrics, path: str) -> tuple[int, str, str]:
    """Return the status, content type and body for a path."""
    plain = "text/plain; charset=utf-8"
    if path == "/metrics":
        text = exposition(each.metrics for each in worker.runners) + application.exposition()
        return 200, "text/plain; version=0.0.4; charset=utf-8", text
    if path == "/healthz":
        problem = worker.problem
        return (200, plain, "ok\n") if problem is None else (503, plain, f"{problem}\n")
    if path == "/readyz":
        return (200, plain, "ready\n") if worker.is_ready else (503, plain, "not ready\n")
    return 404, plain, "paths: /healthz /readyz /metrics\n"
