"""The rule by which a pool grows and shrinks, on a clock of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyproxy.errors import ConfigurationError
from skyproxy.pools.growth import Decision, Growth, Load, Nodes

SOON = 1.0
"""Longer than the rule's patience with calls that wait."""


@pytest.mark.parametrize(
    ("minimum", "maximum", "text"),
    [
        (-1, 2, "minimum is a whole number from 0"),
        (1.0, 2, "minimum is a whole number from 0"),
        (True, 2, "minimum is a whole number from 0"),
        ("1", 2, "minimum is a whole number from 0"),
        (0, 0, "maximum is a whole number from 1"),
        (1, None, "maximum is a whole number from 1"),
        (3, 2, "the minimum is above the maximum"),
    ],
)
def test_limits_that_are_none_are_refused(minimum: int, maximum: int, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Nodes(minimum, maximum)


def test_the_idle_time_is_a_duration() -> None:
    assert Nodes(0, 1, idle="2m").idle_seconds == 120
    assert Nodes(0, 1).idle_seconds == 60
    with pytest.raises(ConfigurationError, match=r"Nodes\(idle\)"):
        Nodes(0, 1, idle="soon")


def test_limits_are_values() -> None:
    assert Nodes(1, 4, idle="60s") == Nodes(1, 4)
    assert str(Nodes(1, 4)) == "1 to 4"


def busy(count: int) -> dict[int, float | None]:
    return dict.fromkeys(range(count))


def after_patience(growth: Growth, load: Load) -> Decision:
    growth.decide(load, 0.0)
    return growth.decide(load, SOON)


def test_calls_that_wait_for_a_moment_only_start_nothing() -> None:
    decision = Growth(Nodes(1, 8), 1).decide(Load(busy(1), waiting=5), 0.0)
    assert decision.start == 0
    assert decision.look_at is not None
    assert 0 < decision.look_at < SOON


def test_calls_that_wait_get_as_many_nodes_as_they_can_use() -> None:
    assert after_patience(Growth(Nodes(1, 8), 1), Load(busy(1), waiting=5)).start == 5
    assert after_patience(Growth(Nodes(1, 8), 4), Load(busy(1), waiting=5)).start == 2
    assert after_patience(Growth(Nodes(1, 8), 1), Load(busy(1), waiting=50)).start == 7
    assert after_patience(Growth(Nodes(1, 8), 1), Load(busy(2), starting=3, waiting=4)).start == 1


def test_the_first_call_of_an_empty_pool_starts_a_node_at_once() -> None:
    assert Growth(Nodes(0, 8), 1).decide(Load({}, waiting=1), 0.0).start == 1


def test_calls_that_a_free_process_will_take_start_nothing() -> None:
    assert after_patience(Growth(Nodes(1, 8), 4), Load(busy(1), free_slots=3, waiting=3)).start == 0


def test_a_lost_node_is_replaced_up_to_the_minimum() -> None:
    assert Growth(Nodes(3, 8), 1).decide(Load({0: 0.0, 2: 0.0}), 1.0).start == 1


def test_the_idle_node_with_the_highest_number_goes_first() -> None:
    growth = Growth(Nodes(1, 4, idle=10), 1)
    assert growth.decide(Load({0: 0.0, 1: 0.0, 2: 0.0}), 9.0) == Decision(look_at=10.0)
    assert growth.decide(Load({0: 0.0, 1: 0.0, 2: 0.0}), 10.0).stop == (2, 1)
    assert growth.decide(Load({0: 0.0, 1: None, 2: 5.0}), 10.0) == Decision(stop=(0,), look_at=15.0)


def test_nodes_that_somebody_wants_stay() -> None:
    growth = Growth(Nodes(0, 4, idle=1), 1)
    assert growth.decide(Load({0: 0.0, 1: 0.0}, wanted=3), 10.0) == Decision(start=1)
    assert growth.decide(Load({0: 0.0, 1: 0.0}, wanted=1), 10.0).stop == (1,)


def test_each_failure_doubles_the_pause_up_to_a_minute() -> None:
    growth = Growth(Nodes(1, 4), 1)
    now, pauses = 0.0, []
    for _ in range(9):
        pauses.append(growth.failed(now))
        assert growth.decide(Load({}), now) == Decision(look_at=now + pauses[-1])
        now += pauses[-1]
        assert growth.decide(Load({}), now).start == 1
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert growth.has_given_up
    growth.succeeded()
    assert not growth.has_given_up
    assert growth.decide(Load({}), now).start == 1


def test_nodes_that_fail_together_have_failed_once() -> None:
    growth = Growth(Nodes(1, 4), 1)
    assert growth.failed(5.0) == 1
    assert growth.failed(5.5) == 0.5
    assert growth.failures == 1


@dataclass
class Pool:
    """A pool whose calls take as long as the test says, and whose rule is the real one."""

    limits: Nodes
    slots: int
    now: float = 0.0
    waiting: int = 0
    starting: list[float] = field(default_factory=list)
    running: dict[int, list[float]] = field(default_factory=dict)
    used_at: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.growth = Growth(self.limits, self.slots)

    def step(self, seconds: float, call_seconds: float, start_seconds: float, lost: int | None) -> None:
        self.now += seconds
        for ready in [ready for ready in self.starting if ready <= self.now]:
            self.starting.remove(ready)
            number = next(n for n in range(self.limits.maximum) if n not in self.running)
            self.running[number], self.used_at[number] = [], self.now
        if lost is not None and lost in self.running:
            self.waiting += len(self.running.pop(lost))
        for number, ends in self.running.items():
            left = [end for end in ends if end > self.now]
            if len(left) < len(ends):
                self.running[number], self.used_at[number] = left, self.now
        for ends in self.running.values():
            while self.waiting and len(ends) < self.slots:
                self.waiting -= 1
                ends.append(self.now + call_seconds)
        free = sum(self.slots - len(ends) for ends in self.running.values())
        idle = {number: None if ends else self.used_at[number] for number, ends in self.running.items()}
        decision = self.growth.decide(Load(idle, len(self.starting), free, self.waiting), self.now)
        for number in decision.stop:
            assert not self.running.pop(number), "a busy node was ended"
            assert not self.waiting
        self.starting += [self.now + start_seconds] * decision.start
        assert len(self.running) + len(self.starting) <= self.limits.maximum
        assert len(self.running) + len(self.starting) >= self.limits.minimum


limits = st.integers(1, 6).flatmap(lambda top: st.builds(Nodes, st.integers(0, top), st.just(top)))
steps = st.tuples(
    st.sampled_from([0.05, 0.5, 3.0, 40.0, 200.0]),
    st.integers(0, 10),
    st.sampled_from([0.1, 1.0, 30.0]),
    st.sampled_from([0.1, 3.0, 90.0]),
    st.one_of(st.none(), st.integers(0, 5)),
)


@settings(deadline=None, max_examples=50)
@given(limits, st.integers(1, 4), st.lists(steps, max_size=40))
def test_the_size_stays_between_its_limits_and_settles(
    limits: Nodes, slots: int, story: list[tuple[float, int, float, float, int | None]]
) -> None:
    pool = Pool(limits, slots)
    for seconds, calls, call_seconds, start_seconds, lost in story:
        pool.waiting += calls
        pool.step(seconds, call_seconds, start_seconds, lost)
    for _ in range(60 + pool.waiting):
        pool.step(100.0, 0.1, 0.1, None)
    assert pool.waiting == 0
    assert len(pool.running) == limits.minimum
    assert not pool.starting
