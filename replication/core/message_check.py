"""Whether a correct peer can have sent a message. Checked before the core receives the message.

The core asserts the invariants between correct replicas, and a failed assertion ends the process. A
message that no correct peer sends must therefore not reach the core. It is refused here: its stream
ends, and nothing else happens.

    leadership   A request names a leadership of its sender; an answer, one of this replica.
    epochs       An epoch is at most EPOCH_STEP_MAX above the highest one met. A promised epoch is
                 durable, and only a higher one replaces it.
    times        An echoed time is not in the future. A leader's lease is counted from that time.
    positions    An answer lies within the log that was sent. Entries are of the leader's epoch or
                 an earlier one. They agree with the entries committed or already matched here.

A message of an earlier leadership or bid passes, as the core ignores it. A false answer within
these bounds, for example about the sender's disk, can't be recognized.
"""

from typing import Final

from replication.core.core import Core
from replication.core.core_events import Role
from replication.core.peer_messages import (
    Append,
    AppendAnswer,
    Behind,
    Conflict,
    Entries,
    Fence,
    FenceAnswer,
    Fetch,
    FetchAnswer,
    Message,
    Refused,
    Release,
)
from timer.model.units import EPOCH_MAX, Epoch, LogIndex, MonoMs, ReplicaId

ID_MAX: Final = (1 << 63) - 1
"""Maximum of epochs, replica ids and nonces; none is 0."""
EPOCH_STEP_MAX: Final = 1 << 32
"""Each appointment raises the epoch by one. A cluster's whole life needs fewer than this."""


def epoch_limit(met: Epoch) -> int:
    """Return the highest epoch that is accepted if `met` is the highest one met so far."""
    return min(met + EPOCH_STEP_MAX, EPOCH_MAX)


def epoch_in(entries: Entries, index: LogIndex) -> Epoch:
    """Return the epoch that a message states for the entry at `index`."""
    epoch = entries.prev_epoch
    for start in entries.starts:
        if start.index > index:
            break
        epoch = start.epoch
    return epoch


def implausible(
    core: Core, sender: ReplicaId, message: Message, now_ms: MonoMs, limit: int
) -> str | None:
    """Return why no correct peer sends this message now. None: a correct peer may.

    `limit`: the highest epoch that is accepted.
    """
    under = message.under
    asks = isinstance(message, Append | Fence | Fetch | Behind | Release)
    if under.leader != (sender if asks else core.me):
        return f"under.leader = {under.leader:016x}: must be the replica that leads or bids"
    if under.epoch > limit:
        return f"under.epoch = {under.epoch}: must be at most {limit}"
    match message:
        case Append():
            return _append(core, message)
        case AppendAnswer():
            return _append_answer(core, message, now_ms, limit)
        case Fence(last_epoch=last_epoch) if last_epoch >= under.epoch:
            return f"last_epoch = {last_epoch}: must be below under.epoch = {under.epoch}"
        case FenceAnswer():
            return _fence_answer(core, message, now_ms)
        case FetchAnswer():
            return _fetch_answer(core, message)
        case Refused(promise=promise):
            if promise.epoch < under.epoch or promise == under or promise.epoch > limit:
                return f"promise.epoch = {promise.epoch}: must be in {under.epoch} .. {limit}"
        case _:
            pass
    return None


def _append(core: Core, append: Append) -> str | None:
    epoch = append.under.epoch
    if (highest := _highest(append)) > epoch:
        return f"entries of epoch {highest}: must be at most under.epoch = {epoch}"
    if epoch < core.promise.epoch:
        return None
    shape, prev, last = core.shape, append.prev_index, append.last_index
    settled = min(core.commit_index, last)
    if prev <= settled >= shape.base_index:
        claimed, held = epoch_in(append, settled), shape.epoch_at(settled)
        if claimed != held:
            return (
                f"entry {settled} is of epoch {claimed}: the one committed here is of epoch {held}"
            )
    if append.under == core.promise and prev <= core.matched_index:
        divergence_at = shape.divergence_at(max(prev, settled), append.starts, last)
        if divergence_at is not None and divergence_at <= core.matched_index:
            return f"log differs at {divergence_at}: it was matched up to {core.matched_index}"
    return None


def _append_answer(core: Core, answer: AppendAnswer, now_ms: MonoMs, limit: int) -> str | None:
    if answer.under != core.promise or core.role is not Role.LEADER:
        return None
    last = core.shape.last_index
    if not answer.durable_index <= answer.matched_index <= last or answer.prev_index > last:
        return (
            f"durable_index = {answer.durable_index}, matched_index = {answer.matched_index},"
            f" prev_index = {answer.prev_index}: must ascend up to the log's last index {last}"
        )
    if answer.fenced_by > limit:
        return f"fenced_by = {answer.fenced_by}: must be at most {limit}"
    return _echo(answer, now_ms) or _conflict(answer.conflict, answer.prev_index)


def _fence_answer(core: Core, answer: FenceAnswer, now_ms: MonoMs) -> str | None:
    under, sets = answer.under, answer.sets
    ends = [0, *(start.epoch for start in sets)]
    if not sets or sets[-1].index > answer.last_index or ends[1:] != sorted(set(ends[1:])):
        return f"sets = {[(s.index, s.epoch) for s in sets]}: must ascend up to the log's end"
    of_bid = _is_of_bid(core, answer)
    if not ends[-1] <= answer.last_epoch <= under.epoch - of_bid:
        return f"last_epoch = {answer.last_epoch}: must be in {ends[-1]} .. {under.epoch - of_bid}"
    if not of_bid:
        return None
    if answer.last_epoch > core.shape.last_epoch and answer.last_index < core.commit_index:
        return f"last_index = {answer.last_index}: entries up to {core.commit_index} are committed"
    return _echo(answer, now_ms)


def _fetch_answer(core: Core, answer: FetchAnswer) -> str | None:
    limit = answer.under.epoch - _is_of_bid(core, answer)
    if (highest := _highest(answer)) > limit:
        return f"entries of epoch {highest}: must be at most {limit}"
    return _conflict(answer.conflict, answer.prev_index)


def _is_of_bid(core: Core, answer: FenceAnswer | FetchAnswer) -> bool:
    """Return whether it answers the present bid. No entry of the bid's epoch exists yet."""
    return answer.under.nonce == core.nonce and answer.under.epoch == core.bid_epoch


def _highest(entries: Entries) -> Epoch:
    return entries.starts[-1].epoch if entries.starts else entries.prev_epoch


def _echo(answer: AppendAnswer | FenceAnswer, now_ms: MonoMs) -> str | None:
    if answer.echo_ms > now_ms or answer.waited_ms < 0:
        return f"echo_ms = {answer.echo_ms}, held_ms = {answer.waited_ms}: the time is {now_ms}"
    return None


def _conflict(conflict: Conflict | None, prev_index: LogIndex) -> str | None:
    if conflict is None or conflict.first_index <= conflict.last_index <= prev_index:
        return None
    return f"conflict = {tuple(conflict)}: must ascend up to prev_index = {prev_index}"
