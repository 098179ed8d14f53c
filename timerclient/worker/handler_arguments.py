"""Arguments of a handler: an object by the names of its parameters, checked at both ends.

A value must fit the annotation of its parameter. Checked are plain classes, None, `X | Y`,
`Literal`, and list, dict, tuple and set with their items. A bool is no int; an int is a float.
Parameters with other annotations, or none, take any value. JSON has no tuples and enums: a list
becomes a tuple, and a value the member of an Enum, if the annotation demands it.
"""

import inspect
import types
import typing
from abc import ABCMeta
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, Literal, Union

from timerclient.client.timer_calls import Seconds
from timerclient.rows.rows import DueTime, Headers, OnConflict
from timerclient.values.errors import Described, InvalidRequest


class NewTimerOptions(DueTime, total=False):
    """Fields of a timer beside its topic and payload, as in `NewTimer`."""

    key: str | None
    headers: Headers | None
    ordering_key: str | None
    priority: int | None


class ScheduleOptions(NewTimerOptions, total=False):
    """Options of `AsyncTimerClient.schedule`."""

    on_conflict: OnConflict
    request_id: str | None
    timeout: Seconds | None


OPTIONS: Final = (*ScheduleOptions.__annotations__,)
"""Arguments of `schedule` that are not the handler's."""
NO_FIT: Final = object()
"""Result of `fit` for a value that does not fit."""
_MAKES: Final = (list, tuple, set, frozenset)
"""Collections with checked items, beside dicts."""
_JSON_VALUES: Final[tuple[Any, ...]] = ({}, [], "", 0, 0.0, True, None)
"""One value of each type that JSON has."""
_CHECKS: Final = (type.__instancecheck__, ABCMeta.__instancecheck__)
"""Instance checks of classes without one of their own."""
_BY_NAME_KINDS: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class HandlerArguments:
    """The parameters of one handler.

    Raises:
        InvalidRequest: A parameter can't be given by name, or has the name of an option; or the
            function is a generator.
    """

    def __init__(self, function: Callable[..., object], name: str) -> None:
        self._function, self._name = function, name
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            limit = "must be no generator, which would not run"
            raise InvalidRequest.of(f"handler {name}", None, limit)
        self._signature = inspect.signature(function)
        self._parameters = self._signature.parameters
        for each in self._parameters.values():
            if each.kind not in _BY_NAME_KINDS:
                limit = "each parameter must have a name: no *args, no **kwargs, no /"
                raise InvalidRequest.of(f"handler {name}", str(each), limit)
            if each.name in OPTIONS:
                limit = f"rename its parameter {each.name!r}: schedule has an option of this name"
                raise InvalidRequest.of(f"handler {name}", None, limit)
        self._required = {
            each.name for each in self._parameters.values() if each.default is each.empty
        }
        self._types: dict[str, Any] | None = None

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, without those that are not given.

        Raises:
            InvalidRequest: One is missing, unknown or given twice.
        """
        try:
            return self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise InvalidRequest.of("arguments", None, f"{self._name}: {error}") from error

    def check(self, arguments: object, decoded_from: str = "") -> dict[str, Any]:
        """Return the arguments of a call, as their annotations have them.

        `decoded_from`: for errors, the content type that changed the arguments' types, if one did.

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
        out = {}
        for name, value in arguments.items():
            wanted = self._annotations().get(name, Any)
            out[name] = fit(value, wanted)
            if out[name] is NO_FIT:
                limit = f"{self._name} takes {inspect.formatannotation(wanted)}"
                limit += f", which {decoded_from} does not preserve" if decoded_from else ""
                raise InvalidRequest.of(name, Described(type(value).__name__), limit)
        return out

    def check_json(self) -> None:
        """Check that JSON has values for all parameters without a default.

        Annotations that can't be resolved yet are not checked.

        Raises:
            InvalidRequest: No JSON value fits the annotation of one.
        """
        for name, wanted in self._hints().items():
            if name in self._required and not has_json(wanted):
                limit = f"no JSON value is {inspect.formatannotation(wanted)}"
                limit += "; annotate it as str or dict, and convert it in the function"
                raise InvalidRequest.of(f"handler {self._name}", name, limit)

    def _annotations(self) -> Mapping[str, Any]:
        """Return the types of parameters; of annotations that can't be resolved, none."""
        if self._types is None:
            self._types = self._hints()
        return self._types

    def _hints(self) -> dict[str, Any]:
        try:
            return typing.get_type_hints(self._function)
        except Exception:  # noqa: BLE001 -- names that only type checkers import
            return {}


def has_json(wanted: Any) -> bool:
    """Return whether any JSON value may fit an annotation.

    A class may have an instance check of its own, such as one for texts that are not empty. It may
    fit any value, except if it is a model with fields (PEP 681), such as those of pydantic.
    """
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Union or origin is types.UnionType:
        return any(has_json(each) for each in inner)
    if origin is Literal or (isinstance(wanted, type) and issubclass(wanted, Enum)):
        return True
    whole = origin if isinstance(origin, type) else wanted
    check = getattr(type(whole), "__instancecheck__", None)
    if check not in _CHECKS and not hasattr(type(whole), "__dataclass_transform__"):
        return True
    return any(fit(each, whole) is not NO_FIT for each in _JSON_VALUES)


def fit(value: Any, wanted: Any) -> Any:
    """Return a value as an annotation has it, see the module. UNFIT: it does not fit."""
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Union or origin is types.UnionType:
        found = [each for each in (fit(value, one) for one in inner) if each is not NO_FIT]
        return next((each for each in found if type(each) is type(value)), [*found, NO_FIT][0])
    if isinstance(origin, type) or wanted is tuple:
        return _fit_items(value, origin or tuple, inner)
    if origin is Literal:
        fits = any(value == each and type(value) is type(each) for each in inner)
    elif wanted is None or wanted is type(None):
        fits = value is None
    elif wanted is Any or not isinstance(wanted, type) or typing.is_typeddict(wanted):
        fits = True
    elif issubclass(wanted, Enum):
        return _member(value, wanted)
    elif isinstance(value, bool):
        fits = wanted is not int and _is_of(value, wanted)
    else:
        fits = _is_of(value, wanted) or (wanted is float and isinstance(value, int))
    return value if fits else NO_FIT


def _is_of(value: object, wanted: type) -> bool:
    try:
        return isinstance(value, wanted)
    except TypeError:  # a class without instance checks, such as a plain Protocol
        return True


def _member(value: object, wanted: type[Enum]) -> Any:
    try:
        return wanted(value)
    except Exception:  # noqa: BLE001 -- an Enum may look values up by functions of its own
        return NO_FIT


def _fit_items(value: Any, origin: type, inner: tuple[Any, ...]) -> Any:
    """Return a collection of fitted items. It is the same one if no item changes."""
    if origin is tuple and isinstance(value, list):
        value = tuple(value)
    if not _is_of(value, origin):
        return NO_FIT
    make: Callable[[list[Any]], Any] = _dict_of
    if isinstance(value, dict) and len(inner) == 2:
        before = [*value, *value.values()]
        wanted = [inner[0]] * len(value) + [inner[1]] * len(value)
    elif origin is tuple and inner and inner[1:] != (...,):
        before, wanted, make = [*value], [*inner], tuple
    elif isinstance(value, _MAKES) and inner[1:] in ((), (...,)) and inner:
        before, wanted = [*value], [inner[0]] * len(value)
        make = next(each for each in _MAKES if isinstance(value, each))
    else:
        return value
    after = [fit(*each) for each in zip(before, wanted, strict=False)]
    if len(wanted) != len(before) or any(each is NO_FIT for each in after):
        return NO_FIT
    is_same = all(new is old for new, old in zip(after, before, strict=True))
    return value if is_same else make(after)


def _dict_of(items: list[Any]) -> dict[Any, Any]:
    """Return the dict of a list of all keys, then all values."""
    half = len(items) // 2
    return dict(zip(items[:half], items[half:], strict=True))
