"""Calls for which rules of others answer: of views in place, conjugates, `out=`, integers and half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from skyproxy.tensor.dispatch import inference

Call = Callable[[torch.Tensor], torch.Tensor]
_ORDERS: tuple[Call, ...] = (lambda x: x, lambda x: x.mT, lambda x: x[:, ::2], lambda x: x[:1], lambda x: x[:0])
TURNS: dict[str, Call] = {
    "transpose_": lambda x: x.transpose_(0, -1),
    "swapdims_": lambda x: x.swapdims_(0, 1),
    "t_": lambda x: x[0].clone().t_() if len(x) else x.transpose_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.squeeze_(0),
    "squeeze_ of all": lambda x: x.squeeze_(),
    "transposed twice": lambda x: x.transpose_(0, 1).transpose_(0, 1),
}
OF_CONJUGATES: dict[str, Call] = {
    "conj": lambda x: x.conj(),
    "of a conjugate": lambda x: x.conj().conj(),
    "resolved": lambda x: x.conj().resolve_conj(),
    "real part": lambda x: x.conj().real,
    "imaginary part": lambda x: x.conj().imag,
    "part": lambda x: x.conj()[..., 1:],
    "turned": lambda x: x.mH,
    "parts": lambda x: x.conj().split(1, -1)[0],
    "sum": lambda x: x.conj().imag.sum(-1),
    "product": lambda x: x.mH @ x,
    "times another": lambda x: x.conj() * x,
    "copy": lambda x: x.mT.conj().clone(),
}
FILLED: dict[str, Callable[..., Any]] = {
    "add": lambda x, made: torch.add(x, x, out=made(x.shape)),
    "sum": lambda x, made: torch.sum(x, 1, out=made((*x.shape[:1], *x.shape[2:]))),
    "matmul": lambda x, made: torch.bmm(x, x.mT, out=made((*x.shape[:2], x.shape[1]))),
    "cat": lambda x, made: torch.cat((x, x), out=made((2 * x.shape[0], *x.shape[1:]))),
    "tril": lambda x, made: torch.tril(x, out=made(x.shape)),
    "cumsum": lambda x, made: torch.cumsum(x, 0, out=made(x.shape)),
    "where": lambda x, made: torch.where(x > 0, x, -x, out=made(x.shape)),
}
OF_INTEGERS: dict[str, Call] = {
    "//=": lambda x: x.clone().floor_divide_(2),
    "%=": lambda x: x.clone().remainder_(x + 1),
    "fill_": lambda x: x.clone().fill_(3),
    "clamp_": lambda x: x.clone().clamp_(1, 3),
    "round_": lambda x: x.clone().round_(),
    "index_fill_": lambda x: x.clone().index_fill_(1, torch.zeros(1, dtype=torch.int64, device=x.device), 1),
    "power": lambda x: x**x,
    "nansum": lambda x: x.nansum(1),
    "median": lambda x: x.median(),
    "isnan": lambda x: x.isnan(),
    "vectors": lambda x: x[0, 0].dot(x[0, 1]) + x[0].mv(x[0, 0]),
}
OF_HALVES: dict[str, Call] = {
    "entr": lambda x: torch.special.entr(x),
    "xlog1py": lambda x: torch.special.xlog1py(x, x.mT.mT),
    "angle": lambda x: x.angle(),
    "bilinear": lambda x: F.bilinear(x[0], x[0], x.new_ones(3, x.shape[2], x.shape[2])),
    "bags": lambda x: F.embedding_bag(x[0].long() % 3, x[0], mode="sum"),
    "means of bags": lambda x: F.embedding_bag(x[0].long() % 3, x[0], mode="mean"),
    "transposed convolution": lambda x: F.conv_transpose1d(x, x.new_ones(x.shape[1], 2, 3), stride=2),
    "cross entropy": lambda x: F.cross_entropy(x[0], x[0, :, 0].long() % 3),
}


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that fake tensors are asked about."""
    names: list[str] = []
    by_fake = inference._infer_by_fake
    monkeypatch.setattr(inference, "_infer_by_fake", lambda call: [names.append(call.info.name), by_fake(call)][1])
    return names


def _looks_alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return (found.shape, found.stride(), found.dtype, found.is_conj(), found.is_neg(), found.storage_offset()) == (
        expected.shape,
        expected.stride(),
        expected.dtype,
        expected.is_conj(),
        expected.is_neg(),
        expected.storage_offset(),
    )


@pytest.mark.parametrize("case", TURNS)
def test_views_in_place_are_inferred_as_those_that_are_none(case: str, sky1: str, faked: list[str]) -> None:
    x = torch.arange(42.0).view(2, 7, 3)
    for order in _ORDERS:
        found, expected = (TURNS[case](order(start)) for start in (x.to(sky1).clone(), x.clone()))
        assert _looks_alike(found, expected)
        assert torch.equal(found.cpu(), expected)
        assert torch.equal((found + 1).cpu(), expected + 1)
    assert not faked


@pytest.mark.parametrize("case", OF_CONJUGATES)
def test_conjugates_are_inferred_from_what_they_are_conjugates_of(case: str, sky1: str, faked: list[str]) -> None:
    x = torch.complex(torch.arange(42.0), torch.arange(42.0) + 1).view(2, 7, 3)
    for order in _ORDERS[:4]:
        expected = OF_CONJUGATES[case](order(x))
        found = OF_CONJUGATES[case](order(x.to(sky1)))
        assert _looks_alike(found, expected)
        assert torch.equal(found.cpu(), expected)
    assert not faked


@pytest.mark.parametrize("case", OF_INTEGERS)
def test_integers_have_rules_where_fractions_have_them(case: str, sky1: str, faked: list[str]) -> None:
    x = torch.arange(42).view(2, 7, 3) % 5
    for order in _ORDERS[:4]:
        found, expected = OF_INTEGERS[case](order(x.to(sky1))), OF_INTEGERS[case](order(x))
        assert _looks_alike(found, expected)
        assert torch.equal(found.cpu(), expected)
    assert not faked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8])
@pytest.mark.parametrize("size", [(2, 7, 3), (1, 4, 5), (2, 0, 3), (0,), ()], ids=str)
def test_an_empty_list_of_dimensions_is_what_it_is_locally(
    size: tuple[int, ...], dtype: torch.dtype, sky1: str
) -> None:
    x = torch.ones(size).to(dtype)
    for reduce in (torch.nansum, torch.nanmean, torch.sum, torch.all, torch.any, torch.count_nonzero):
        for keepdim in (False, True):
            for order in _ORDERS[:4] if len(size) == 3 else _ORDERS[:1]:
                options = {} if reduce is torch.count_nonzero else {"keepdim": keepdim}
                try:
                    expected = reduce(order(x), dim=(), **options)
                except RuntimeError:  # no means of integers
                    continue
                found = reduce(order(x.to(sky1)), dim=(), **options)
                if x.numel():
                    assert _looks_alike(found, expected)
                assert found.shape == expected.shape
                torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", OF_HALVES)
def test_halves_have_rules_where_others_have_them(case: str, dtype: torch.dtype, sky1: str, faked: list[str]) -> None:
    x = (torch.arange(42.0) / 20).view(2, 7, 3).to(dtype)
    found, expected = OF_HALVES[case](x.to(sky1)), OF_HALVES[case](x)
    assert _looks_alike(found, expected)
    assert torch.equal(found.cpu(), expected)
    assert not faked


@pytest.mark.parametrize("case", FILLED)
def test_what_has_its_size_or_nothing_is_filled_without_asking(case: str, sky1: str, faked: list[str]) -> None:
    x = torch.arange(1.0, 37.0).view(3, 4, 3)
    for way in ("whole", "turned", "empty"):

        def made(size: tuple[int, ...], device: str, way: str = way) -> torch.Tensor:
            if way == "turned" and len(size) == 3:
                return torch.zeros(size[::-1], device=device).permute(2, 1, 0)
            return torch.zeros((0,) if way == "empty" else size, device=device)

        remote = x.to(sky1)
        before = torch.sky.stats()["round_trips"]
        found = FILLED[case](remote, lambda size: made(size, sky1))
        assert torch.sky.stats()["round_trips"] == before
        expected = FILLED[case](x, lambda size: made(size, "cpu"))
        assert _looks_alike(found, expected)
        assert torch.equal(found.cpu(), expected)
    assert not faked


def test_what_has_another_size_or_dtype_is_asked_for(sky1: str) -> None:
    x = torch.arange(6.0).view(2, 3)
    for out in (
        torch.zeros(1),
        torch.zeros(2, 0),
        torch.zeros(4)[2:2],
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(1, 3).expand(2, 3),
    ):
        local, remote = out.clone() if out.stride()[0:1] != (0,) else out, out.to(sky1)
        if out.dim() == 2 and out.stride()[0] == 0:
            with pytest.raises(RuntimeError, match="single memory location"):
                torch.add(x.to(sky1), 1, out=torch.zeros(1, 3, device=sky1).expand(2, 3))
                torch.sky.synchronize(sky1)
            continue
        found, expected = torch.add(x.to(sky1), 1, out=remote), torch.add(x, 1, out=local)
        assert _looks_alike(found, expected)
        assert torch.equal(found.cpu(), expected)
