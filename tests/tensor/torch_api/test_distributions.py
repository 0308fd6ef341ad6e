"""Distributions on a worker check all of their parameters at once, and say what PyTorch says of invalid ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import distributions as D


@pytest.fixture(autouse=True)
def validation() -> Iterator[None]:
    before = D.Distribution._validate_args
    D.Distribution.set_default_validate_args(True)  # `torch.compile` switches it off in the whole process
    try:
        yield
    finally:
        D.Distribution.set_default_validate_args(before)


def round_trips() -> int:
    return int(torch.sky.stats()["round_trips"])  # type: ignore[attr-defined]


CASES: list[Callable[[torch.Tensor], D.Distribution]] = [
    lambda x: D.Normal(x, x.exp()),
    lambda x: D.StudentT(x.exp(), x, x.exp()),
    lambda x: D.Uniform(x, x + 1),
    lambda x: D.MultivariateNormal(x, scale_tril=torch.diag_embed(x.exp())),
    lambda x: D.VonMises(x, x.exp()),
]


@pytest.mark.parametrize("make", CASES)
def test_all_parameters_are_checked_with_one_answer(make: Callable[[torch.Tensor], D.Distribution], sky1: str) -> None:
    local = torch.linspace(-1, 1, 4, device="cpu")
    remote = local.to(sky1)
    make(remote)
    before = round_trips()
    ours = make(remote)
    inner = 1 if isinstance(ours, D.StudentT) else 0  # it has a Chi2, a distribution of its own
    assert round_trips() - before == 1 + inner
    theirs = make(local)
    assert vars(ours).get("_validate_args") == vars(theirs).get("_validate_args")
    assert (ours.batch_shape, ours.event_shape) == (theirs.batch_shape, theirs.event_shape)
    assert torch.equal(ours.log_prob(remote + 0.5).cpu(), theirs.log_prob(local + 0.5))


@pytest.mark.parametrize("validate_args", [None, True])
@pytest.mark.parametrize("wrong", ["loc", "scale"])
def test_an_invalid_parameter_has_pytorchs_words(wrong: str, validate_args: bool | None, sky1: str) -> None:
    words = []
    for device in ("cpu", sky1):
        values = {"loc": torch.zeros(2, device="cpu"), "scale": torch.ones(2, device="cpu")}
        values[wrong][1] = float("nan")
        with pytest.raises(ValueError, match=f"Expected parameter {wrong} ") as caught:
            D.Normal(**{name: value.to(device) for name, value in values.items()}, validate_args=validate_args)
        words.append(str(caught.value).replace("RemoteTensor", "Tensor").replace(f", device='{sky1}'", ""))
    assert words[0] == words[1]


def test_nothing_is_asked_where_nothing_is_validated(sky1: str) -> None:
    mean, negative = torch.zeros(2, device=sky1), -torch.ones(2, device=sky1)
    before = round_trips()
    distribution = D.Normal(mean, negative, validate_args=False)
    assert round_trips() == before
    assert vars(distribution)["_validate_args"] is False


def test_a_later_default_counts_for_distributions_that_were_checked(sky1: str) -> None:
    distribution = D.Normal(torch.zeros(2, device=sky1), torch.ones(2, device=sky1))
    D.Distribution.set_default_validate_args(False)
    distribution.log_prob(torch.full((2,), float("nan"), device=sky1))
    D.Distribution.set_default_validate_args(True)
    with pytest.raises(ValueError, match="within the support"):
        distribution.log_prob(torch.full((2,), float("nan"), device=sky1))


def test_parameters_on_two_workers_are_checked_each_on_its_own(sky: str, sky1: str) -> None:
    distribution = D.Normal(torch.zeros(2, device=sky), torch.ones(2, device=sky1))
    assert (distribution.mean.device, distribution.stddev.device) == (torch.device(sky), torch.device(sky1))
