"""A GPU that breaks, played on a worker's CPU: kernels fail late, and from then on everything does, as CUDA says."""

from __future__ import annotations

from typing import Any

ASSERT = "device-side assert triggered"
SUFFIX = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


def play_gpu(words: str = ASSERT, *, is_final: bool = True) -> None:
    """In the process that calls it, have `index`, `embedding` and `neg` break the device.

    They return at once, as a launch does. What is launched or waited for afterwards fails with the same error, always;
    where that is not final, once.

    Args:
        words: what CUDA says of the error.
        is_final: whether the context is lost with it.
    """
    import sys

    import torch

    is_broken: list[bool] = []

    def launch(device: object = None) -> None:
        if is_broken:
            if not is_final:
                is_broken.clear()
            raise torch.AcceleratorError(f"CUDA error: {words}{SUFFIX}")

    def breaking(like: Any, indices: Any = None, *args: object) -> torch.Tensor:
        launch()
        is_broken.append(True)
        if words == ASSERT:
            print("Indexing.cu:1: block: [0,0,0]: Assertion `index out of bounds` failed.", file=sys.stderr, flush=True)
        if isinstance(indices, list):
            return torch.empty(indices[0].shape)
        return torch.empty_like(like) if indices is None else torch.empty(*indices.shape, like.shape[1])

    def fill(tensor: torch.Tensor, value: Any) -> torch.Tensor:
        launch()
        tensor.numpy()[...] = value
        return tensor

    def add(one: torch.Tensor, other: Any, *, alpha: float = 1) -> torch.Tensor:
        launch()
        return torch.from_numpy(one.numpy() + alpha * (other.numpy() if isinstance(other, torch.Tensor) else other))

    def total(tensor: torch.Tensor, *, dtype: object = None) -> torch.Tensor:
        launch()
        return torch.tensor(tensor.numpy().sum())

    cuda: Any = torch.cuda
    cuda.is_initialized, cuda.device_count, cuda.memory_reserved = (lambda: True), (lambda: 1), (lambda index: 1)
    cuda.synchronize, cuda.current_device, cuda.set_device = launch, (lambda: 0), (lambda index: None)
    from skyproxy_server.controls import CONTROLS

    wait = CONTROLS["synchronize"]
    CONTROLS["synchronize"] = lambda session: (launch(), wait(session))[1]  # as where the device is a GPU
    kernels: Any = play_gpu
    kernels.library = torch.library.Library("aten", "IMPL")  # lives as long as its kernels are to
    for name in ("index.Tensor", "embedding", "neg"):
        kernels.library.impl(name, breaking, "CPU")
    for name, kernel in {"fill_.Scalar": fill, "add.Tensor": add, "sum": total}.items():
        kernels.library.impl(name, kernel, "CPU")
