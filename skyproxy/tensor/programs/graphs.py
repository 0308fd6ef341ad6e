"""`torch.sky.graph`: capture a step once, replay it with one tiny message. The shape of `torch.cuda.graph`.

A capture records and runs nothing; `replay()` runs what was recorded, on the same tensors. Numbers that Python computed
during the capture are frozen in it, as with CUDA graphs.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from skyproxy.errors import CaptureError
from skyproxy.interrupts import shielded
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.dispatch.capture import Capture, SessionCapture, is_capturing

if TYPE_CHECKING:
    import torch

_pools = itertools.count(1)


class SkyGraph:
    """A step that was captured, to be replayed.

    Tensors that the step read stay alive with the graph. Tensors that it made, and that are still held, get new values
    with each replay; before the first one they have none. When the graph dies, or is reset, they keep their last ones.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture: Capture | None = None
        self._parts: list[SessionCapture] | None = None
        self._pool: object = (0, next(_pools))

    @shielded
    def capture_begin(self, pool: object = None, capture_error_mode: str = "global", **unused: object) -> None:
        """Starts to capture what this thread does on any `sky` device; `torch.sky.graph` is the usual way.

        Args:
            pool: for code written for CUDA; the worker shares memory as it sees fit.
            capture_error_mode: likewise; operations of other threads are never part of the capture.

        Raises:
            CaptureError: the graph holds a capture already, or another capture is under way.
        """
        if self._parts is not None or self._capture is not None:
            raise CaptureError("this graph already holds a capture. Call reset() first, or make another graph.")
        capture = Capture()
        capture.begin()
        self._capture = capture
        if pool is not None:
            self._pool = pool

    @shielded
    def capture_end(self) -> None:
        """Ends the capture.

        Raises:
            CaptureError: nothing is being captured, or something inside could not be.
        """
        capture, self._capture = self._capture, None
        if capture is None:
            raise CaptureError("this graph is not being captured. Call capture_begin() first.")
        self._parts = capture.finish()

    @shielded
    def abort(self) -> None:
        """Ends the capture and keeps nothing of it. The tensors that it would have made do not exist."""
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.abort()

    def replay(self) -> None:
        """Runs the captured step once more, behind everything recorded so far. Does not wait.

        Raises:
            CaptureError: nothing was captured, or another graph is being captured.
            RemoteError: an op of the step failed, where `SKYPROXY_LAUNCH_BLOCKING` has each waited for.
            SessionLostError: the worker is gone.
        """
        if self._parts is None:
            raise CaptureError("this graph holds no capture. Capture one with torch.sky.graph(g) first.")
        for part in self._parts:
            part.replay()

    def reset(self) -> None:
        """Forgets the capture, here and on the worker; the graph can capture anew."""
        parts, self._parts = self._parts, None
        for part in parts or ():
            part.forget()

    def instantiate(self) -> None:
        """Nothing to do: the worker makes ready what it replays, in the first replays."""

    def pool(self) -> object:
        """The token of the graph's memory, for code written for CUDA."""
        return self._pool

    @shielded
    def __del__(self) -> None:
        try:
            self.abort()
            self.reset()
        except Exception:  # the interpreter may be shutting down, and this module's names may be gone
            pass


class graph:
    """Captures what happens inside a `with` block into a `SkyGraph`.

    ::

        g = torch.sky.SkyGraph()
        with torch.sky.graph(g):
            loss = step(x, y)
        for batch, labels in loader:
            x.copy_(batch), y.copy_(labels)
            g.replay()

    Args:
        sky_graph: where the capture goes.
        pool, stream, capture_error_mode: for code written for CUDA; there is nothing to choose here.
    """

    def __init__(
        self,
        sky_graph: SkyGraph,
        pool: object = None,
        stream: object = None,
        capture_error_mode: str = "global",
        **unused: object,
    ) -> None:
        self._graph = sky_graph
        self._pool = pool

    @shielded
    def __enter__(self) -> None:
        self._graph.capture_begin(self._pool)

    @shielded
    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is not None:
            self._graph.abort()
        else:
            self._graph.capture_end()


def is_current_stream_capturing() -> bool:
    """Return whether this thread captures a graph right now."""
    return is_capturing()


def graph_pool_handle() -> object:
    """A token of a memory pool, for code written for CUDA."""
    return 0, next(_pools)


def graph_report(device: torch.device | str | int | None = None) -> dict[str, int]:
    """Count the graphs that a worker holds for us, and those of them that it replays as CUDA graphs by now. Waits."""
    report: dict[str, int] = DEVICES.of(device).session.call("graph_report")
    return report
