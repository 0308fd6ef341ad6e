"""Training steps: remote and local networks that start alike, see the same data and must end alike."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from _figures import Target, interleaved, ratio_at_least, value_at_most
from _links import Bench
from _models import Decoder, digits_net, mnist_net
from torch import nn
from torch.nn import functional as F

Batch = tuple[torch.Tensor, torch.Tensor]
_BATCHES = 4
_WARM_UP_STEPS = 3


class Trainer:
    """One network on one device.

    Attributes:
        losses: of the latest run, as numbers.
        rate: steps a second of the latest run.
        round_trips: waits for a worker in the latest run, fetching `losses` afterwards not counted.
        autocast: the lower precision to compute in; None for none.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: list[Batch],
        device: str,
        autocast: torch.dtype | None = None,
        adam: bool = True,
        learning_rate: float = 1e-3,
    ) -> None:
        """Args:
        model: is copied.
        batches: on the CPU; taken in turn, and moved at every step.
        device: where it trains.
        autocast: the lower precision to compute in.
        adam: whether the optimizer is AdamW, whose scalars change at every step, or SGD with momentum.
        learning_rate: of AdamW.
        """
        self.model = copy.deepcopy(model).to(device)
        self.batches = batches
        self.device = device
        self.losses: list[float] = []
        self.rate = 0.0
        self.round_trips = 0
        self.autocast = autocast
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(self.model.parameters(), lr=learning_rate, foreach=True)
            if adam
            else torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9, foreach=True)
        )
        self._number = 0

    def step(self, batch: Batch) -> torch.Tensor:
        """One step; the loss, detached, still on the device."""
        inputs, wanted = batch
        inputs, wanted = inputs.to(self.device), wanted.to(self.device)
        self._optimizer.zero_grad()
        with self._precision():
            scores = self.model(inputs)
            if isinstance(scores, tuple):
                scores = scores[0].flatten(0, 1)
            loss = F.cross_entropy(scores, wanted.flatten())
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def _precision(self) -> Any:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.device).type, self.autocast)

    def next_batch(self) -> Batch:
        """The data of the next step."""
        self._number += 1
        return self.batches[self._number % len(self.batches)]

    def run(self, count: int, log: str = "never") -> float:
        """Steps a second over `count` steps and the wait for the last one.

        Args:
            log: "never"; "item", which reads the loss at every step; "every 10", at every tenth; "later", which asks
                for it at every step and takes the answer when it is there.
        """
        kept: list[Any] = []
        before = torch.sky.stats()["round_trips"]
        started = time.perf_counter()
        for number in range(1, count + 1):
            loss = self.step(self.next_batch())
            if log == "every 10" and number % 10 == 0:
                loss.item()
            kept.append(loss.item() if log == "item" else later(loss) if log == "later" else loss)
        if log == "later":
            kept = [finish() for finish in kept]
        elif log != "item":
            kept[-1].item()
        took = time.perf_counter() - started
        self.round_trips = torch.sky.stats()["round_trips"] - before
        self.losses = torch.stack(kept).tolist() if log in ("never", "every 10") else [float(value) for value in kept]
        self.rate = count / took
        return self.rate


def later(value: torch.Tensor) -> Callable[[], float]:
    """Asks for a value without waiting; the function that gives it. `Tensor.item_async` where there is one."""
    if hasattr(value, "item_async"):
        answer = value.item_async()
        return answer.result if hasattr(answer, "result") else lambda: _awaited(answer)
    if value.device.type != "sky":
        return value.item  # type: ignore[return-value]
    from skyproxy.tensor.core.transfers import start_download

    finish = start_download(value)
    return lambda: finish().item()


def _awaited(answer: Any) -> float:
    import asyncio

    async def wait() -> float:
        return float(await answer)

    return asyncio.run(wait())


def _batches(shape: tuple[int, ...], labels: tuple[int, ...], classes: int, tokens: bool = False) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randint(classes, shape, generator=generator) if tokens else torch.rand(shape, generator=generator),
            torch.randint(classes, labels, generator=generator),
        )
        for _ in range(_BATCHES)
    ]


def _pair(bench: Bench, make: Callable[[], nn.Module], batches: list[Batch]) -> dict[str, Trainer]:
    """A remote and a local trainer that start alike, their random generators included."""
    torch.manual_seed(1)
    model = make()
    pair = {"sky": Trainer(model, batches, bench.device), "local": Trainer(model, batches, bench.local)}
    torch.manual_seed(2)  # of both devices; dropout draws from them
    for trainer in pair.values():
        trainer.run(_WARM_UP_STEPS)
    assert_alike(pair, bench)
    return pair


def assert_alike(pair: dict[str, Trainer], bench: Bench) -> None:
    """The losses must be the very same numbers on CPUs.

    Not on CUDA, where kernels may add in another order each time, nor in autocast, whose lists of operations differ
    between kinds of devices.
    """
    sky, local = pair["sky"].losses, pair["local"].losses
    if bench.local == "cpu" and pair["sky"].autocast is None:
        assert sky == local, f"remote training differs from local training: {sky} against {local}"
    else:
        torch.testing.assert_close(torch.tensor(sky), torch.tensor(local), rtol=5e-2, atol=5e-2)


def compare(
    bench: Bench, name: str, pair: dict[str, Trainer], steps: int, targets: tuple[Target, ...], log: str = "never"
) -> None:
    """Steps a second of both, round by round, with the losses compared after each."""
    if log != "item":  # the wait at the end of a run is no part of its steps, so it may not weigh much
        seconds = bench.scale.round_trips_worth * bench.link.rtt_seconds
        steps = max(steps, math.ceil(seconds * pair["local"].rate))
    figures: dict[str, list[float]] = {side: [] for side in pair}
    for number in range(bench.scale.rounds if bench.direct else bench.scale.slow_rounds):
        for side in ("sky", "local") if number % 2 == 0 else ("local", "sky"):
            figures[side].append(pair[side].run(steps, log))
        assert_alike(pair, bench)
    bench.compare("training", name, "steps/s", figures, targets)
    bench.add("training", f"{name}: round trips", "a step", [pair["sky"].round_trips / steps])


def cnn(bench: Bench) -> None:
    """The convolutional networks of the examples at batch 64, without and with a look at the loss in every step."""
    scale = bench.scale
    size = 4 if scale.small_models else 64
    rtt_seconds = bench.link.rtt_seconds
    # 95 percent on loopback, 90 at 20 ms; of other links nothing was said.
    bounds = {0.0: 0.95, 0.020: 0.90}
    capped = bench.link.conditions is not None and bench.link.conditions.mbit_up is not None
    targets = (ratio_at_least(bounds[rtt_seconds]),) if rtt_seconds in bounds and not capped else ()
    looks = scale.waits(scale.steps, rtt_seconds)
    for name, make, shape in (
        ("MNIST CNN, batch 64", mnist_net, (size, 1, 28, 28)),
        ("digits CNN, batch 64", digits_net, (size, 1, 8, 8)),
    ):
        pair = _pair(bench, make, _batches(shape, (size,), 10))
        compare(bench, name, pair, scale.steps, targets)
        compare(bench, f"{name}, loss.item() every step", pair, looks, (), "item")
        compare(bench, f"{name}, loss asked every step", pair, scale.steps, targets, "later")
        if bench.direct:
            client_time(bench, name, pair)


def transformer(bench: Bench) -> None:
    """A small decoder, 8 sequences of 64 tokens: many operations for little computing."""
    small = bench.scale.small_models
    layers, width, vocabulary, length = (1, 16, 32, 8) if small else (4, 128, 512, 64)
    batches = _batches((8, length), (8, length), vocabulary, tokens=True)
    pair = _pair(bench, lambda: Decoder(layers, width, 4, vocabulary, length), batches)
    compare(bench, f"transformer {layers}x{width}", pair, bench.scale.steps, ())


def client_time(bench: Bench, name: str, pair: dict[str, Trainer]) -> None:
    """What the program itself waits for a step that it only records, against the same step done locally."""
    count = max(2, bench.scale.steps // 4)

    def record(side: str) -> float:
        trainer = pair[side]
        bench.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            trainer.step(trainer.next_batch())
        took = time.perf_counter() - started
        bench.synchronize()
        return took / count * 1e3

    figures = interleaved({side: lambda side=side: record(side) for side in pair}, bench.scale.rounds)
    bench.compare("training", f"{name}: client time", "ms/step", figures)


_SETTLING_STEPS = 200


def op_traffic(bench: Bench) -> None:
    """Bytes that a steady step of a fixed-shape loop sends beyond its data, which lies on the device here."""
    small = bench.scale.small_models
    count = bench.scale.steady_steps if small else max(bench.scale.steady_steps, 30)
    size = 4 if small else 64
    layers, width, vocabulary, length = (1, 16, 32, 8) if small else (4, 128, 512, 64)
    images = _batches((size, 1, 28, 28), (size,), 10)
    for name, make, batches, adam in (
        ("MNIST CNN, SGD", mnist_net, images, False),
        ("MNIST CNN", mnist_net, images, True),
        ("digits CNN", digits_net, _batches((size, 1, 8, 8), (size,), 10), True),
        (
            f"transformer {layers}x{width}",
            lambda: Decoder(layers, width, 4, vocabulary, length),
            _batches((8, length), (8, length), vocabulary, tokens=True),
            True,
        ),
    ):
        torch.manual_seed(1)
        remote = [(inputs.to(bench.device), wanted.to(bench.device)) for inputs, wanted in batches[:1]]
        trainer = Trainer(make(), remote, bench.device, adam=adam)
        first_loss = trainer.step(remote[0]).item()
        # A batch travels by name from the third time on, and large ones come round only every few steps.
        for _ in range(count if small else _SETTLING_STEPS):
            loss = trainer.step(remote[0])  # held as below: the slots of a loop depend on what lives
        before = torch.sky.stats()
        for _ in range(count):
            loss = trainer.step(remote[0])
        after = torch.sky.stats()
        assert loss.item() < first_loss, "training does not train"
        sent, received, ops = ((after[key] - before[key]) / count for key in ("bytes_sent", "bytes_received", "ops"))
        bench.add("traffic", f"{name}: sent a step", "bytes", [sent], targets=(value_at_most(64),))
        bench.add("traffic", f"{name}: received a step", "bytes", [received])
        bench.add("traffic", f"{name}: operations a step", "ops", [ops])


__all__ = ["Trainer", "assert_alike", "client_time", "cnn", "compare", "later", "op_traffic", "transformer"]
