"""Nodes that ask for tokens."""

import contextlib
import datetime
import hashlib
import http.client
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from deploy.local import LocalNode, free_ports
from deploy.local_tls import FOLDER
from tests.cluster.running import CALL_S, Running
from timerclient import ClientTls, TimerClient

RPC_S: Final = 10.0


RULE: Final = """
[[rule]]
who = ["token/*"]
topics = ["payments/*"]
may = ["produce", "consume", "observe", "manage"]
"""


class WithTokens(Running):
    """Nodes with TLS and a port for tokens each."""

    def __init__(self, directory: Path, nodes: int = 1) -> None:
        super().__init__(directory, nodes=nodes, tls=True)
        ports = enumerate(free_ports(nodes), 1)
        self.token_ports = {f"n{number}": f"127.0.0.1:{port}" for number, port in ports}
        self.token_port = self.token_ports["n1"]
        self.tokens = directory / FOLDER / "tokens.toml"

    def _config(self, cluster_id: str, node: LocalNode, nodes: Sequence[LocalNode]) -> str:
        self.allow()
        text = super()._config(cluster_id, node, nodes)
        tls = f'[tls]\ntokens = "{self.tokens}"'
        return f'tokens = "{self.token_ports[node.name]}"\n' + text.replace("[tls]", tls)

    def allow(self, **expires_s: float) -> None:
        """Put these tokens in the file: name, which is the token too, and when it expires."""
        entries = "".join(
            f'[[token]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
            f"expires = {datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat()}\n"
            for name, at in expires_s.items()
        )
        self.tokens.write_text(entries or "token = []")

    @property
    def ca(self) -> Path:
        return self.directory / FOLDER / "ca.pem"

    def by_token(self, token: str) -> TimerClient:
        tls = ClientTls(ca=self.ca)
        return TimerClient(self.token_port, credentials=tls, token=token, timeout=CALL_S)

    def http(
        self,
        path: str,
        token: str = "",
        verb: str = "GET",
        body: str | None = None,
        media: str = "application/json",
    ) -> tuple[int, str, http.client.HTTPMessage]:
        context = ssl.create_default_context(cafile=str(self.ca))
        address = self.node("n1").http
        connection = http.client.HTTPSConnection(address, timeout=RPC_S, context=context)
        with contextlib.closing(connection):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            connection.request(verb, path, body, headers | {"Content-Type": media})
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers
