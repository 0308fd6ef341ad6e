"""Copies in pieces: the same values and strides as PyTorch's own, and an interrupt is heard before the next piece."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from skyproxy.tensor.core import pieces
from skyproxy.tensor.core.pieces import copied, copy_into


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64)


def values(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(size).numel()).reshape(size).to(dtype)


LAYOUTS: list[Callable[[], torch.Tensor]] = [
    lambda: values(100),
    lambda: values(100)[::3],
    lambda: values(7, 30),
    lambda: values(7, 30).t(),
    lambda: values(7, 30)[:, ::2],
    lambda: values(1, 3, 400)[:, :, 5:],
    lambda: values(2, 3, 8, 8).to(memory_format=torch.channels_last),
    lambda: values(2, 3, 8, 8).to(memory_format=torch.channels_last)[:, :, ::2],
    lambda: values(50).expand(4, 50),
    lambda: values(0, 5),
    lambda: torch.tensor(3.0),
    lambda: values(40, dtype=torch.complex64).conj(),
    lambda: torch._neg_view(values(40)),
    lambda: values(90, dtype=torch.bool),
]


@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.int16])
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_a_copy_is_what_pytorch_makes(make: Callable[[], torch.Tensor], dtype: torch.dtype | None) -> None:
    tensor = make()
    made, wanted = copied(tensor, dtype), tensor.to(dtype or tensor.dtype, copy=True)
    assert torch.equal(made, wanted)
    assert (made.stride(), made.dtype) == (wanted.stride(), wanted.dtype)
    assert made.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or not tensor.numel()


@pytest.mark.parametrize("make", LAYOUTS)
def test_what_is_written_is_what_pytorch_writes(make: Callable[[], torch.Tensor]) -> None:
    source = make()
    for target in (torch.zeros(source.shape, dtype=torch.complex64), torch.zeros(*source.shape, 2)[..., 0]):
        with torch.no_grad():
            wanted = target.clone().copy_(source.real if not target.is_complex() else source)
        assert copy_into(target, source.real if not target.is_complex() else source) is target
        assert torch.equal(target, wanted)


def test_a_source_is_broadcast_and_errors_are_those_of_pytorch() -> None:
    assert torch.equal(copy_into(torch.zeros(9, 20), values(20)), values(20).expand(9, 20))
    with pytest.raises(RuntimeError, match="expand"):
        copy_into(torch.zeros(9, 20), values(21))
    with pytest.raises(RuntimeError, match="single memory location"):
        copy_into(torch.zeros(20).expand(9, 20), values(20))


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Ctrl-C while the second piece of each copy is made; the pieces that were made."""
    made: list[int] = []
    copy_piece = pieces._copy_piece

    def strike(target: torch.Tensor, source: torch.Tensor) -> None:
        copy_piece(target, source)
        made.append(target.numel())
        if len(made) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(pieces, "_copy_piece", strike)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield made
    signal.signal(signal.SIGINT, before)


WORK: list[Callable[[str], object]] = [
    lambda sky: values(2000)[::2].to(sky),
    lambda sky: values(1000, dtype=torch.float64).to(sky, torch.float16),
    lambda sky: values(1, 4, 20, 20).to(sky, memory_format=torch.channels_last),
    lambda sky: torch.zeros(1000, device=sky).copy_(values(2000)[::2]),
    lambda sky: torch.zeros(1000, device=sky, dtype=torch.float16).copy_(values(1000)),
    lambda sky: torch.zeros(1000).copy_(torch.ones(1000, device=sky)),
    lambda sky: torch.ones(1000, device=sky).to("cpu", torch.float64),
    lambda sky: torch.nn.Linear(40, 30, device=sky).load_state_dict(torch.nn.Linear(40, 30).double().state_dict()),
    lambda sky: torch.nn.Linear(40, 30).load_state_dict(torch.nn.Linear(40, 30, device=sky).state_dict()),
]


@pytest.mark.parametrize("work", WORK)
def test_an_interrupt_is_heard_before_the_next_piece(
    sky: str, work: Callable[[str], object], struck: list[int]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        work(sky)
    assert len(struck) == 2
    assert (torch.ones(3, device=sky) + 1).tolist() == [2, 2, 2]
