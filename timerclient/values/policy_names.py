"""Names of the fields of a policy."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final, Literal, TypedDict, cast

CatchUp = Literal["all", "latest", "drop"]
"""The overdue timers that fire when their topic is resumed: all, the latest, or none."""


class PolicyFields(TypedDict, total=False):
    """Fields of a policy, explained in docs/features.md."""

    delayed_delivery: bool
    tick_ms: int
    delay_ms_min: int
    delay_ms_max: int
    fixed_delay_ms: int
    payload_bytes_max: int
    delay_levels_ms: Sequence[int]
    pending_max: int
    pending_bytes_max: int
    ready_max: int
    ready_bytes_max: int
    ttl_ms: int
    retention_ms: int
    paused: bool
    catch_up: CatchUp
    jitter_ms: int
    topic_rate_max: int
    group_rate_max: int


NOTHING: Final = cast("PolicyFields", MappingProxyType({}))
_KINDS: Final = PolicyFields.__annotations__
FIELDS: Final = tuple(_KINDS)
LEVELS: Final = "delay_levels_ms"
FLAGS: Final = tuple(name for name, kind in _KINDS.items() if kind is bool)
TEXTS: Final = tuple(name for name, kind in _KINDS.items() if kind == CatchUp)
