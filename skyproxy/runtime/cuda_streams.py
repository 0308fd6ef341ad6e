"""CUDA's current streams and device, which each thread has for itself, for threads that compute what another began."""

from __future__ import annotations

import sys
from collections.abc import Callable


def carry_streams() -> Callable[[], None]:
    """Return what has the thread that calls it compute on the CUDA streams of this one, and on its device.

    A worker's sessions have streams of their own, which do not wait for the default stream, nor does that for them: a
    thread that computes there reads what is not computed yet.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return lambda: None
    device = torch.cuda.current_device()
    streams = [torch.cuda.current_stream(index) for index in range(torch.cuda.device_count())]

    def use() -> None:
        for stream in streams:
            torch.cuda.set_stream(stream)
        torch.cuda.set_device(device)  # the last stream's is the current one; and cuBLAS wants a current context

    return use
