"""Arguments of a handler: an object by the names of its parameters, checked at both ends.

A value must fit the annotation of its parameter. Checked are plain classes, None, `X | Y`,
`Literal`, and list, dict, tuple and set with their items. A bool is no int; an int is a float.
Parameters without annotations, and with others, take any value that the codec can encode.
"""

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Union

from timerclient.values.errors import Described, InvalidRequest

OPTIONS: Final = (
    "key",
    "on_conflict",
    "headers",
    "ordering_key",
    "priority",
    "request_id",
    "timeout",
    "delay",
    "delay_level",
    "due",
    "due_ms",
)
"""Arguments of `schedule` that are not the handler's."""
_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class HandlerArguments:
    """The parameters of one handler.

    Raises:
        InvalidRequest: A parameter can't be given by name, or has the name of an option.
    """

    def __init__(self, function: Callable[..., object], name: str) -> None:
        self._function, self._name = function, name
        self._parameters = inspect.signature(function).parameters
        for each in self._parameters.values():
            if each.kind not in _NAMED:
                limit = "each parameter must have a name: no *args, no **kwargs, no /"
                raise InvalidRequest.of(f"handler {name}", str(each), limit)
            if each.name in OPTIONS:
                limit = f"the options of schedule have these names: {', '.join(OPTIONS)}"
                raise InvalidRequest.of(f"handler {name}", each.name, limit)
        self._required = {
            each.name for each in self._parameters.values() if each.default is each.empty
        }
        self._types: dict[str, Any] | None = None

    def check(self, arguments: object) -> dict[str, Any]:
        """Return the arguments of a call.

        Raises:
            InvalidRequest: They are no object, one is missing or unknown, or a value does not fit.
        """
        if not isinstance(arguments, dict):
            limit = f"must be an object with the arguments of {self._name}"
            raise InvalidRequest.of("payload", Described(type(arguments).__name__), limit)
        for name in arguments:
            if name not in self._parameters:
                known = ", ".join(self._parameters) or "none"
                limit = f"{self._name} has no such argument; it has: {known}"
                raise InvalidRequest.of(str(name), None, limit)
        for name in sorted(self._required - arguments.keys()):
            raise InvalidRequest.of(name, None, f"{self._name} needs this argument")
        for name, value in arguments.items():
            wanted = self._annotations().get(name, Any)
            if not fits(value, wanted):
                limit = f"{self._name} takes {inspect.formatannotation(wanted)}"
                raise InvalidRequest.of(name, Described(type(value).__name__), limit)
        return arguments

    def _annotations(self) -> Mapping[str, Any]:
        """Return the types of parameters; of annotations that can't be resolved, none."""
        if self._types is None:
            try:
                self._types = typing.get_type_hints(self._function)
            except Exception:  # noqa: BLE001 -- names that only type checkers import
                self._types = {}
        return self._types


def fits(value: object, wanted: Any) -> bool:
    """Return whether a value may be of an annotation; see the module."""
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Union or origin is types.UnionType:
        return any(fits(value, each) for each in inner)
    if origin is Literal:
        return any(value == each and type(value) is type(each) for each in inner)
    if wanted is None or wanted is type(None):
        return value is None
    if isinstance(origin, type):
        return _collection_fits(value, origin, inner)
    if wanted is Any or not isinstance(wanted, type) or typing.is_typeddict(wanted):
        return True
    if isinstance(value, bool):
        return wanted is not int and _is_of(value, wanted)
    return _is_of(value, wanted) or (wanted is float and isinstance(value, int))


def _is_of(value: object, wanted: type) -> bool:
    try:
        return isinstance(value, wanted)
    except TypeError:  # a class without instance checks, such as a plain Protocol
        return True


def _collection_fits(value: object, origin: type, inner: tuple[Any, ...]) -> bool:
    if not _is_of(value, origin):
        return False
    if isinstance(value, dict) and len(inner) == 2:
        return all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if isinstance(value, list | set | frozenset) and len(inner) == 1:
        return all(fits(each, inner[0]) for each in value)
    return True
