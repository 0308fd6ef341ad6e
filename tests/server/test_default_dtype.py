"""Batches under another default dtype run alone; all others side by side."""

from __future__ import annotations

import threading

import torch

from skyproxy_server.default_dtype import DefaultDtype


def test_batches_of_the_usual_dtype_run_side_by_side() -> None:
    both = threading.Barrier(2, timeout=10)

    def batch() -> None:
        with DefaultDtype():
            both.wait()

    threads = [threading.Thread(target=batch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not both.broken


def test_nobody_sees_the_default_dtype_of_another_session() -> None:
    wrong: list[torch.dtype] = []

    def session(dtype: torch.dtype) -> None:
        own = DefaultDtype()
        own.dtype = dtype
        for _ in range(200):
            with own:
                wrong.extend(
                    result.dtype for result in [torch.arange(3) / 2 for _ in range(5)] if result.dtype is not dtype
                )

    threads = [
        threading.Thread(target=session, args=(dtype,))
        for dtype in (torch.float32, torch.float64, torch.float32, torch.bfloat16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    assert torch.get_default_dtype() is torch.float32


def test_a_change_inside_a_batch_counts_from_the_next_one_on() -> None:
    own = DefaultDtype()
    with own:
        own.dtype = torch.float64
        assert torch.get_default_dtype() is torch.float32
    with own:
        assert torch.get_default_dtype() is torch.float64
    assert torch.get_default_dtype() is torch.float32
