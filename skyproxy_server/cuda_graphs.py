"""Replays of a captured stream as real CUDA graphs: when to warm up, when to capture, when to fall back to the list.

`CudaReplayer` decides, `CudaDriver` acts; the decisions are tested with another driver, without a GPU.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from skyproxy_server.random_state import RandomState
from skyproxy_server.recordings import Made, Recording, Run

logger = logging.getLogger("skyproxy.server")

WARM_UPS = 3
"""Replays that run as plain lists first: kernels are loaded, workspaces and plans are made."""
MAX_CAPTURES = 3
"""The number of times that a graph is captured anew because its inputs moved, before it stays a list."""
_READS_ITS_STATUS = frozenset(
    f"aten::{name}" for name in ("_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "linalg_eig", "linalg_lstsq")
)
"""Operators that read from the device whether they succeeded, which ends every capture. A capture that ends so inside
cuSOLVER leaves this thread's handle of it broken: it fails from then on, as it did on an H200."""
_capturing = threading.Lock()
"""CUDA allows one capture a process at a time."""


class Driver(Protocol):
    """The calls of CUDA that a replayer needs."""

    def addresses(self, inputs: list[object]) -> list[int]:
        """Return the addresses of the inputs."""

    def warm_up(self, run: Callable[[], tuple[Made, bool]]) -> tuple[Made, bool]:
        """Runs the commands as the capture will, on the side."""

    def capture(self, inputs: list[object], run: Callable[[], Made]) -> tuple[object, Made]:
        """A graph of what `run` does, and the values that the graph will fill. Runs nothing on the device."""

    def launch(self, graph: object) -> None:
        """Runs a captured graph."""


class CudaReplayer:
    """A replayer of one recording on one CUDA device.

    The first replays run command by command; they are the warm-up. Then the commands are captured, and from there on
    a replay is one launch, as long as the inputs lie where they lay. Whatever goes wrong, the list still works.

    Attributes:
        refusal: why the recording stays a list; empty while it may become a graph.
    """

    def __init__(self, driver: Driver, warm_ups: int = WARM_UPS, max_captures: int = MAX_CAPTURES) -> None:
        self._driver = driver
        self._warm_ups_left = warm_ups
        self._captures_left = max_captures
        self._graph: object = None
        self._made: Made = {}
        self._addresses: list[int] = []
        self.refusal = ""

    @property
    def is_live(self) -> bool:
        """True if replays are launches of a graph by now."""
        return self._graph is not None

    def replay(self, inputs: list[object], run: Run) -> Made:
        """Replays once.

        Args:
            inputs: everything that the commands read from outside: tensors and generators.
            run: replays command by command.
        """
        if self.refusal:
            return run(False)[0]
        if self._warm_ups_left > 0:
            made, intact = self._driver.warm_up(lambda: run(False))
            if intact:
                self._warm_ups_left -= 1
            return made
        addresses = self._driver.addresses(inputs)
        if self._graph is not None and addresses == self._addresses:
            self._driver.launch(self._graph)
            return self._made
        self._graph, self._made = None, {}  # before a new capture, so that the old one's memory is free for it
        if self._captures_left <= 0:
            return self._refuse("its inputs keep moving", run)
        self._captures_left -= 1
        try:
            graph, made = self._driver.capture(inputs, lambda: run(True)[0])
        except Exception as error:
            return self._refuse(f"it could not be captured: {error!r:.300}", run)
        # A capture only records; the requested replay is still to be done.
        self._graph, self._made, self._addresses = graph, made, addresses
        self._driver.launch(graph)
        return made

    def _refuse(self, reason: str, run: Run) -> Made:
        self.refusal = reason
        logger.warning("a graph is replayed command by command from now on: %s", reason)
        return run(False)[0]


class CudaDriver:
    """A replayer's hands on one CUDA device."""

    def __init__(self, index: int, random: RandomState) -> None:
        self._index = index
        self._random = random
        self._side = torch.cuda.Stream(index)
        self._pool = torch.cuda.graph_pool_handle()

    def addresses(self, inputs: list[object]) -> list[int]:
        return [value.data_ptr() for value in inputs if isinstance(value, torch.Tensor)]

    @contextlib.contextmanager
    def _enter_device(self) -> Iterator[None]:
        """The device is the current one, and its default generator is this session's."""
        with torch.cuda.device(self._index), self._random.exclusive():
            self._random.generator("cuda", self._index)
            yield

    def warm_up(self, run: Callable[[], tuple[Made, bool]]) -> tuple[Made, bool]:
        with self._enter_device():
            current = torch.cuda.current_stream()
            self._side.wait_stream(current)
            try:
                with torch.cuda.stream(self._side):
                    result = run()
            finally:
                current.wait_stream(self._side)
            # They were created on the side stream, and are used and freed elsewhere.
            for value in result[0].values():
                if isinstance(value, torch.Tensor) and value.is_cuda:
                    value.record_stream(current)
            return result

    def capture(self, inputs: list[object], run: Callable[[], Made]) -> tuple[object, Made]:
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        if any(tensor.device != torch.device("cuda", self._index) and tensor.dim() for tensor in tensors):
            raise RuntimeError("it uses tensors of several devices")
        graph = torch.cuda.CUDAGraph()
        for value in inputs:
            if isinstance(value, torch.Generator):
                graph.register_generator_state(value)  # the default generator registers itself
        with _capturing, self._enter_device():
            generator = torch.cuda.default_generators[self._index]
            state = generator.get_state()
            # The outer context restores the stream even where the end of a broken capture raises inside the inner one.
            with torch.cuda.stream(torch.cuda.current_stream()):
                try:
                    with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
                        made = run()
                except Exception:
                    with contextlib.suppress(RuntimeError):
                        generator.set_state(state)
                    raise
        for value in made.values():
            if isinstance(value, torch.Tensor) and value.device != torch.device("cuda", self._index):
                raise RuntimeError("it leaves tensors on another device")
        return graph, made

    def launch(self, graph: Any) -> None:
        with self._enter_device():
            graph.replay()


def replayer_for(places: list[list[Any]], recording: Recording, random: RandomState) -> CudaReplayer | None:
    """Return the replayer of a recording; None for command by command.

    That is the only way on a CPU, across devices, and where an operator reads from the device.

    Args:
        places: the devices that it computes on, each `[type, index]`.
        recording: the captured stream.
        random: the session's generators.
    """
    if len(places) != 1 or places[0][0] != "cuda" or not recording.steps:
        return None
    names = {step.signature.name.partition(".")[0] for step in recording.steps if step.signature is not None}
    if names & _READS_ITS_STATUS:
        return None
    return CudaReplayer(CudaDriver(int(places[0][1] or 0), random))
