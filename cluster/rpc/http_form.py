"""The form of a route: the JSON of its requests and answers, in place of that of the contract."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from cluster.rpc.field_names import field_of_one
from cluster.rpc.json_bodies import SMALL_BYTES_MAX
from cluster.rpc.json_fields import Fields, check_known
from cluster.rpc.schemas import Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpForm:
    """How the JSON of one route becomes a request of the contract, and the answer becomes JSON."""

    request: Callable[[Fields], Message]
    """Returns the request of the fields of path, query and body. All names are known.

    Raises InvalidRequestError.
    """
    answer: Callable[[Any, Any], Mapping[str, Any]]
    """Returns the answer, of the contract's request and answer. Raises EngineError."""
    body: Schema = field(default_factory=lambda: {"properties": {}})
    """The schema of the body; without a title: a request has none."""
    answered: Schema = field(default_factory=lambda: {"type": "object"})
    """The schema of the answer."""
    bytes_max: int = SMALL_BYTES_MAX
    """Bytes of a body, at most."""
    field_in_json: Callable[[Any, str], str] = lambda _, name: field_of_one(name)
    """Returns the name in the JSON of a field that an error names, of the contract's request and
    the name."""
    takes_request_id: bool = False
    """The header `Idempotency-Key` is the field `request_id`."""

    def message(self, named: Fields, body: Fields) -> Message:
        """Return the request. `named`: fields of path and query.

        Raises:
            InvalidRequestError: a field is wrong, absent or not known.
        """
        check_known(body, self.body["properties"])
        return self.request({**body, **named})
