"""What one value costs: `.item()` and `.cpu()` against a bare WebSocket round trip over the same way."""

from __future__ import annotations

import torch
from _figures import interleaved, latencies, percentile, ratio_at_most
from _links import Bench

AGAINST = "bare websockets round trip"


def round_trips(bench: Bench) -> None:
    """Median and 99th percentile of each."""
    scale = bench.scale
    count = scale.latency_calls
    if bench.link.rtt_seconds:
        count = max(5, min(count, int(scale.latency_seconds / bench.link.rtt_seconds)))
    one = torch.full((1,), 7.0, device=bench.device)  # a number without dimensions would be asked for once
    small = torch.arange(1024.0, device=bench.device)
    tails: dict[str, list[float]] = {"sky": [], "other": []}

    def middle(call: object, tail: list[float]) -> float:
        bench.synchronize()
        ordered = latencies(call, count)  # type: ignore[arg-type]
        tail.append(percentile(ordered, 99))
        return percentile(ordered, 50)

    for name, call in ((".item()", one.item), (".cpu() of 4 KiB", small.cpu)):
        tails["sky"].clear()
        tails["other"].clear()
        for warm in (call, bench.yardsticks.round_trip):
            latencies(warm, min(count, 20))
        figures = interleaved(
            {
                "sky": lambda call=call: middle(call, tails["sky"]),
                "other": lambda: middle(bench.yardsticks.round_trip, tails["other"]),
            },
            scale.rounds if bench.direct else scale.slow_rounds,
        )
        targets = (ratio_at_most(1.5),) if name == ".item()" else ()
        bench.add("values", f"{name}, p50", "us", figures["sky"], figures["other"], AGAINST, targets)
        bench.add("values", f"{name}, p99", "us", list(tails["sky"]), list(tails["other"]), AGAINST)
    assert one.item() == 7.0
    assert torch.equal(small.cpu(), torch.arange(1024.0))


__all__ = ["round_trips"]
