"""How much of a device is in use."""

from __future__ import annotations

import mmap

import pytest
import torch

from skyproxy_server.usage import usage


def test_the_cpu_tells_what_this_process_has() -> None:
    before = usage({"type": "cpu", "index": 0})["used_memory_bytes"]
    with mmap.mmap(-1, 64 << 20) as held:  # PyTorch's allocator may take what other tests have left
        held.write(b"x" * len(held))
        assert usage({"type": "cpu", "index": 0})["used_memory_bytes"] >= before + (len(held) >> 1)


def test_a_gpu_that_nobody_has_used_is_not_touched() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("another test has used the GPU")
    assert usage({"type": "cuda", "index": 0}) == {}
    assert not torch.cuda.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")
def test_a_gpu_tells_what_everybody_has() -> None:
    held = torch.ones(256 << 20, dtype=torch.uint8, device="cuda")
    assert usage({"type": "cuda", "index": 0})["used_memory_bytes"] >= held.nbytes
