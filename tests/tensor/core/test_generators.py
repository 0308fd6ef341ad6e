"""Random generators on a worker: seeds, states, and the errors for those of another device."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import skyproxy  # noqa: F401  (registers the device)


def round_trips() -> int:
    return int(torch.sky.stats()["round_trips"])  # type: ignore[attr-defined]


DRAWS: dict[str, Callable[[Any, torch.Generator], torch.Tensor]] = {
    "randn": lambda d, g: torch.randn(5, device=d, generator=g),
    "rand": lambda d, g: torch.rand(5, device=d, generator=g),
    "randint": lambda d, g: torch.randint(9, (5,), device=d, generator=g),
    "randperm": lambda d, g: torch.randperm(9, device=d, generator=g),
    "normal_": lambda d, g: torch.empty(5, device=d).normal_(generator=g),
    "normal": lambda d, g: torch.normal(torch.zeros(5, device=d), torch.ones(5, device=d), generator=g),
    "uniform_": lambda d, g: torch.empty(5, device=d).uniform_(1, 2, generator=g),
    "bernoulli": lambda d, g: torch.bernoulli(torch.full((9,), 0.5, device=d), generator=g),
    "multinomial": lambda d, g: torch.multinomial(torch.ones(9, device=d), 4, generator=g),
    "kaiming_uniform_": lambda d, g: nn.init.kaiming_uniform_(torch.empty(3, 3, device=d), generator=g),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_seeded_generator_draws_what_the_worker_draws_locally(name: str, sky1: str) -> None:
    remote, local = torch.Generator(device=sky1).manual_seed(3), torch.Generator().manual_seed(3)
    assert torch.equal(DRAWS[name](sky1, remote).cpu(), DRAWS[name]("cpu", local))
    assert torch.equal(DRAWS[name](sky1, remote).cpu(), DRAWS[name]("cpu", local))


def test_a_new_generator_starts_from_the_default_seed(sky1: str) -> None:
    remote, local = torch.Generator(device=sky1), torch.Generator()
    assert remote.initial_seed() == local.initial_seed()
    assert torch.equal(torch.randn(3, device=sky1, generator=remote).cpu(), torch.randn(3, generator=local))


def test_seeding_is_in_order_and_does_not_wait(sky1: str) -> None:
    generator = torch.Generator(device=sky1)
    before = round_trips()
    draws = []
    for seed in (1, 2, 1):
        generator.manual_seed(seed)
        draws.append(torch.rand(3, device=sky1, generator=generator))
    assert round_trips() == before
    assert torch.equal(draws[0].cpu(), draws[2].cpu())
    assert not torch.equal(draws[0].cpu(), draws[1].cpu())


def test_states_can_be_taken_and_put_back(sky1: str) -> None:
    generator = torch.Generator(device=sky1).manual_seed(5)
    state = generator.get_state()
    assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
    first = torch.rand(3, device=sky1, generator=generator)
    generator.manual_seed(6)
    assert generator.set_state(state) is generator
    assert generator.initial_seed() == 5
    assert torch.equal(torch.rand(3, device=sky1, generator=generator).cpu(), first.cpu())
    with pytest.raises(TypeError, match="ByteTensor"):
        generator.set_state(torch.zeros(3))


@pytest.mark.parametrize("clone", [lambda g: g.clone_state(), copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
def test_a_clone_goes_on_by_itself(clone: Callable[[torch.Generator], torch.Generator], sky1: str) -> None:
    generator = torch.Generator(device=sky1).manual_seed(5)
    torch.rand(2, device=sky1, generator=generator)
    other = clone(generator)
    expected = torch.rand(3, device=sky1, generator=generator)
    assert torch.equal(torch.rand(3, device=sky1, generator=other).cpu(), expected.cpu())
    assert other.device == torch.device(sky1)
    assert other.initial_seed() == 5


def test_a_generator_does_not_disturb_the_default_one(sky1: str) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3, device=sky1)
    torch.manual_seed(1)
    torch.rand(9, device=sky1, generator=torch.Generator(device=sky1))
    assert torch.equal(torch.rand(3, device=sky1).cpu(), expected.cpu())


def test_seed_takes_a_fresh_one(sky1: str) -> None:
    generator = torch.Generator(device=sky1)
    assert generator.seed() == generator.initial_seed() != generator.seed()
    assert generator.manual_seed(-1).initial_seed() == torch.Generator().manual_seed(-1).initial_seed()
    torch.rand(1, device=sky1, generator=generator.manual_seed(2**64 - 1)).item()


def test_a_generator_looks_like_one(sky1: str) -> None:
    generator = torch.Generator(device="sky")
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance("cpu", torch.Generator)
    assert issubclass(type(generator), torch.Generator)
    assert generator.device == torch.device("sky:0")
    assert repr(generator) == "<torch.Generator device=sky:0>"


@pytest.mark.parametrize("draw", [DRAWS["randn"], DRAWS["normal_"], DRAWS["multinomial"]])
def test_a_generator_of_another_device_is_refused_in_pytorchs_words(
    draw: Callable[[Any, torch.Generator], torch.Tensor], sky: str, sky1: str
) -> None:
    with pytest.raises(RuntimeError, match="Expected a 'sky' device type for generator but found 'cpu'"):
        draw(sky1, torch.Generator())
    with pytest.raises(RuntimeError, match="Expected a 'sky:0' device type for generator but found 'sky:1'"):
        draw(sky, torch.Generator(device=sky1))


def test_generators_of_the_cpu_are_as_before() -> None:
    generator = torch.Generator().manual_seed(3)
    twin = pickle.loads(pickle.dumps(generator))
    assert torch.equal(torch.rand(3, generator=twin), torch.rand(3, generator=generator))
    assert type(generator) is torch._C.Generator
    first, _ = torch.utils.data.random_split(range(10), [5, 5], generator=generator)  # type: ignore[arg-type,var-annotated]
    assert len(first) == 5


def test_the_class_has_what_pytorchs_has() -> None:
    class Own(torch.Generator):
        pass

    plain = torch._C.Generator
    assert [name for name in dir(plain) if not hasattr(torch.Generator, name)] == []
    assert torch.Generator.manual_seed(torch.Generator(), 3).initial_seed() == 3
    assert isinstance(Own(), Own)
    assert isinstance(Own(), torch.Generator)
    assert issubclass(Own, torch.Generator)
    assert not isinstance(torch.Generator(), Own)


def test_fork_rng_puts_the_state_back(sky: str, sky1: str) -> None:
    torch.manual_seed(1)
    with torch.random.fork_rng(devices=[0, 1], device_type="sky"):
        inside = [torch.rand(3, device=device) for device in ("cpu", sky, sky1)]
    outside = [torch.rand(3, device=device) for device in ("cpu", sky, sky1)]
    for a, b in zip(inside, outside, strict=True):
        assert torch.equal(a.cpu(), b.cpu())


def test_a_sampler_of_a_data_loader_keeps_its_own_generator(sky1: str) -> None:
    """The generator of a loader draws on the CPU; with a remote default device PyTorch makes it there all the same."""
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    order = torch.cat([batch[0] for batch in loader])
    assert sorted(order.tolist()) == list(range(8))


@pytest.mark.parametrize("seed", [-(1 << 63) - 1, 1 << 64])
def test_a_seed_of_more_than_64_bits_is_refused_and_the_session_lives_on(sky: str, seed: int) -> None:
    with pytest.raises((RuntimeError, ValueError), match="Overflow when unpacking") as local:
        torch.Generator().manual_seed(seed)
    for manual_seed in (torch.manual_seed, torch.sky.manual_seed):  # type: ignore[attr-defined]
        with pytest.raises((RuntimeError, ValueError), match="Overflow when unpacking") as raised:
            manual_seed(seed)
        assert raised.type is local.type
    assert torch.ones(2, device=sky).sum().item() == 2
