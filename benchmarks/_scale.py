"""How much of everything a run does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Counts and sizes.

    Attributes:
        rounds: figures of each kind and side; the median counts.
        calls: of a small operation for one figure.
        chain_ops: operations of an end-to-end figure.
        new_shapes: operations with a shape or scalar of their own for one figure.
        latency_calls: round trips for one figure on loopback.
        latency_seconds: how long the round trips of one figure may take on a slow link.
        mebibytes: size of the large tensor on a direct link.
        mebibytes_through_proxy: and through the proxy, which takes a share of the processor itself.
        busy_seconds: how long values are asked for while a tensor moves.
        steps: training steps of one figure.
        round_trips_worth: a run on a slow link, which waits for it once at its end, takes at least so many round trips.
        steady_steps: steps before a loop counts as steady, and as many after that.
        slow_rounds: rounds of what waits for a slow link again and again.
        slow_seconds: how long the steps of such a round may wait for the link in total.
        new_tokens: tokens of one decode.
        small_models: whether models are tiny; for tests of the benchmarks themselves.
    """

    rounds: int
    calls: int
    chain_ops: int
    new_shapes: int
    latency_calls: int
    latency_seconds: float
    mebibytes: int
    mebibytes_through_proxy: int
    busy_seconds: float
    steps: int
    round_trips_worth: int
    steady_steps: int
    slow_rounds: int
    slow_seconds: float
    new_tokens: int
    small_models: bool = False

    def waits(self, count: int, rtt_seconds: float) -> int:
        """How many waits for a link of that round-trip time a figure may hold: `count`, or fewer on a slow one."""
        return count if not rtt_seconds else max(3, min(count, int(self.slow_seconds / rtt_seconds)))


FULL = Scale(
    rounds=7,
    calls=5000,
    chain_ops=20_000,
    new_shapes=400,
    latency_calls=400,
    latency_seconds=1.0,
    mebibytes=256,
    mebibytes_through_proxy=64,
    busy_seconds=2.0,
    steps=30,
    round_trips_worth=25,
    steady_steps=60,
    slow_rounds=3,
    slow_seconds=2.0,
    new_tokens=64,
)
QUICK = Scale(
    rounds=2,
    calls=2000,
    chain_ops=10_000,
    new_shapes=150,
    latency_calls=100,
    latency_seconds=0.2,
    mebibytes=128,
    mebibytes_through_proxy=16,
    busy_seconds=0.3,
    steps=5,
    round_trips_worth=6,
    steady_steps=25,
    slow_rounds=2,
    slow_seconds=0.4,
    new_tokens=16,
)
TINY = Scale(
    rounds=2,
    calls=20,
    chain_ops=100,
    new_shapes=8,
    latency_calls=5,
    latency_seconds=0.05,
    mebibytes=1,
    mebibytes_through_proxy=1,
    busy_seconds=0.05,
    steps=2,
    round_trips_worth=1,
    steady_steps=6,
    slow_rounds=2,
    slow_seconds=0.1,
    new_tokens=4,
    small_models=True,
)

__all__ = ["FULL", "QUICK", "TINY", "Scale"]
