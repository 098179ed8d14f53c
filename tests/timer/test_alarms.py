"""Alarms: the earliest time counts, once, and stale entries take no memory."""

from hypothesis import given
from hypothesis import strategies as st

from timer.leader.groups.alarms import STALE_MAX, Alarms

DEEDS = ("set", "forget", "look")


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50), st.sampled_from(DEEDS)), max_size=400)
)
def test_what_is_due_is_what_a_dict_of_minima_says(steps: list[tuple[int, int, str]]) -> None:
    alarms, known = Alarms[int](), dict[int, int]()
    for key, at_ms, deed in steps:
        if deed == "forget":
            alarms.forget(key)
            known.pop(key, None)
        elif deed == "look":
            due = sorted(each for each, time_ms in known.items() if time_ms <= at_ms)
            taken = list[int]()
            while (first := alarms.next_ms()) is not None and first <= at_ms:
                before = len(alarms._heap)
                taken += alarms.take_due(at_ms, 2)
                assert 1 <= before - len(alarms._heap) <= 2, "replaced ones count too"
            assert sorted(taken) == due
            known = {each: time_ms for each, time_ms in known.items() if time_ms > at_ms}
        else:
            alarms.set(key, at_ms)
            known[key] = min(at_ms, known.get(key, at_ms))
        assert {key for key in range(6) if key in alarms} == known.keys()
        next_ms = alarms.next_ms()
        assert (next_ms is None) <= (not known)
        assert next_ms is None or next_ms <= min(known.values(), default=next_ms)
        assert len(alarms._heap) <= 2 * len(known) + STALE_MAX + 1


def test_far_alarm_that_nearer_ones_replace_again_and_again_is_kept_once() -> None:
    alarms = Alarms[str]()
    for now_ms in range(0, 100_000, 100):
        alarms.set("g", 10**8)
        alarms.set("g", now_ms + 50)
        assert [*alarms.take_due(now_ms + 99, STALE_MAX + 2)] == ["g"]
    assert len(alarms._heap) <= STALE_MAX + 2


def test_forgotten_alarms_take_no_memory() -> None:
    alarms = Alarms[int]()
    for key in range(200):
        alarms.set(key, key)
    for key in range(200):
        alarms.forget(key)
    assert len(alarms._heap) <= STALE_MAX
