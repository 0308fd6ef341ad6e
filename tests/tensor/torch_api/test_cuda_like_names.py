"""What code written for `torch.cuda` finds under `torch.sky` and on storages."""

from __future__ import annotations

import copy
import importlib
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")


def test_mixed_precision_is_where_cuda_has_it(sky1: str) -> None:
    x = torch.ones(2, 2, device=sky1)
    with torch.sky.amp.autocast():
        assert (x @ x).dtype is torch.float16
    with torch.sky.amp.autocast(dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
    assert torch.sky.amp.GradScaler(init_scale=4.0).scale(x.sum()).item() == 16


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("amp", "GradScaler"),
        ("amp.autocast_mode", "autocast"),
        ("amp.grad_scaler", "GradScaler"),
        ("graphs", "graph"),
        ("memory", "empty_cache"),
        ("nvtx", "range_push"),
        ("random", "manual_seed"),
        ("streams", "Event"),
    ],
)
def test_parts_can_be_imported_as_those_of_cuda(part: str, name: str, sky: str) -> None:
    ours, theirs = (importlib.import_module(f"torch.{kind}.{part}") for kind in ("sky", "cuda"))
    assert hasattr(theirs, name)
    assert ours is getattr(torch.sky, part.split(".")[0])
    namespace: dict[str, object] = {}
    exec(f"from torch.sky.{part} import {name}", namespace)
    assert namespace[name] is getattr(ours, name)


@pytest.mark.parametrize("part", ["random", "memory"])
def test_parts_of_the_module_are_where_cuda_has_them(part: str, sky: str) -> None:
    ours, theirs = (vars(getattr(module, part)) for module in (torch.sky, torch.cuda))
    functions = {name for name, value in ours.items() if callable(value)}
    assert functions
    assert functions <= theirs.keys()
    assert all(ours[name] is getattr(torch.sky, name) for name in functions)


def test_errors_have_the_names_that_cuda_has_for_them(sky: str) -> None:
    assert torch.sky.OutOfMemoryError is torch.cuda.OutOfMemoryError
    assert torch.sky.AcceleratorError is torch.cuda.AcceleratorError


def test_each_device_has_a_default_generator(sky: str, sky1: str) -> None:
    generators = torch.sky.default_generators
    assert len(generators) == torch.sky.device_count()
    assert [generator.device.index for generator in generators] == list(range(len(generators)))
    generator = generators[1].manual_seed(5)
    assert generator.initial_seed() == 5
    state, first = generator.get_state(), torch.rand(3, device=sky1).tolist()
    assert generator.set_state(state).device == torch.device(sky1)
    assert torch.rand(3, device=sky1).tolist() == first
    with pytest.raises(IndexError):
        generators[99]


DRAWS: list[Callable[..., torch.Tensor]] = [
    lambda device, **g: torch.rand(3, device=device, **g),
    lambda device, **g: torch.randn(3, device=device, **g),
    lambda device, **g: torch.randint(9, (3,), device=device, **g),
    lambda device, **g: torch.randperm(5, device=device, **g),
    lambda device, **g: torch.empty(3, device=device).normal_(**g),
    lambda device, **g: torch.multinomial(torch.ones(4, device=device), 2, **g),
    lambda device, **g: torch.bernoulli(torch.full((4,), 0.5, device=device), **g),
]


@pytest.mark.parametrize("draw", DRAWS)
def test_operations_take_the_default_generator_as_if_they_were_given_none(
    draw: Callable[..., torch.Tensor], sky1: str
) -> None:
    generator = torch.sky.default_generators[1]
    assert isinstance(generator, torch.Generator)
    generator.manual_seed(5)
    first, second = draw(sky1), draw(sky1, generator=generator)
    generator.manual_seed(5)
    assert torch.equal(draw(sky1, generator=generator), first)
    assert torch.equal(draw(sky1), second)
    locally = torch.Generator().manual_seed(5)
    assert torch.equal(draw("cpu", generator=locally), first.cpu())


def test_a_default_generator_is_of_its_device_alone(sky: str, sky1: str) -> None:
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.rand(3, device=sky, generator=torch.sky.default_generators[1])
    generators = torch.sky.default_generators
    assert torch.rand(3, device=sky1, generator=generators[1 - len(generators)]).device == torch.device(sky1)
    assert torch.sky.default_generators[1] is torch.sky.default_generators[1]


def test_copies_of_a_default_generator_go_their_own_way(sky1: str) -> None:
    generator = torch.sky.default_generators[1].manual_seed(3)
    copies = [generator.clone_state(), copy.deepcopy(generator), pickle.loads(pickle.dumps(generator))]
    first = torch.rand(3, device=sky1)
    for each in copies:
        assert torch.equal(torch.rand(3, device=sky1, generator=each), first)
    for wrong in (1 << 64, -(1 << 63) - 1):
        with pytest.raises((RuntimeError, ValueError), match="Overflow") as expected:
            torch.Generator().manual_seed(wrong)
        with pytest.raises(expected.type, match="Overflow"):
            generator.manual_seed(wrong)
    with pytest.raises(TypeError, match="ByteTensor"):
        generator.set_state(torch.ones(3))


@pytest.mark.parametrize(("name", "dtype"), [("FloatTensor", torch.float32), ("LongTensor", torch.int64)])
def test_legacy_types_make_tensors_and_know_them(name: str, dtype: torch.dtype, sky: str) -> None:
    kind = getattr(torch.sky, name)
    assert kind(2, 3).shape == (2, 3)
    made = kind([1, 2])
    assert (made.tolist(), made.dtype, made.device) == ([1, 2], dtype, torch.device(sky))
    assert isinstance(made, kind)
    assert not isinstance(made.cpu(), kind)
    assert not isinstance(made.double(), kind)
    assert made.type() == f"torch.sky.{name}"
    assert torch.ones(2).type(kind).type() == f"torch.sky.{name}"


def test_storages_move_to_a_device_and_know_theirs(sky: str, sky1: str) -> None:
    here = torch.arange(4.0)
    for storage in (here.untyped_storage(), here.storage()):
        there = storage.sky(1)
        assert not storage.is_sky
        assert there.is_sky
        assert there.device == torch.device(sky1)
        assert type(there.cpu()) is type(storage)
        assert there.cpu().tolist() == storage.tolist()
    remote = here.to(sky).untyped_storage()
    assert remote.sky(0) is remote
    assert remote.sky(sky1).device == torch.device(sky1)


def test_pytorchs_profiler_takes_the_device_for_an_activity(sky: str) -> None:
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.PrivateUse1]
    x = torch.ones(2, 2, device=sky)
    with torch.profiler.profile(activities=kinds) as profile:
        (x + 1).sum().item()
    assert {"aten::add", "aten::sum"} <= {event.key for event in profile.key_averages()}


def test_a_profile_that_would_be_empty_is_warned_of(sky: str) -> None:
    activity = torch.profiler.ProfilerActivity
    x = torch.ones(2, 2, device=sky)
    with pytest.warns(UserWarning, match="SKY alone records nothing") as warned:
        profile = torch.profiler.profile(activities=[activity.PrivateUse1])
    assert [warning.filename for warning in warned] == [__file__]
    with profile:
        (x + 1).sum().item()
    assert not profile.events()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for chosen in ([activity.CPU], (kind for kind in (activity.CPU, activity.PrivateUse1))):
            torch.profiler.profile(activities=chosen)


def test_the_backend_has_its_name(sky: str) -> None:
    assert torch._C._get_privateuse1_backend_name() == "sky"
    assert torch.utils.backend_registration._privateuse1_backend_name == "sky"


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64])
def test_legacy_storage_types_are_where_cuda_has_them(dtype: torch.dtype, sky: str) -> None:
    local, remote = torch.ones(2, dtype=dtype), torch.ones(2, dtype=dtype, device=sky)
    kind = remote.storage_type()
    assert kind is getattr(torch.sky, local.storage_type().__name__)
    assert remote.storage().type() == local.storage().type().replace("torch.", "torch.sky.")
    assert isinstance(remote.storage(), kind)
    assert not isinstance(local.storage(), kind)
    made = kind(3)
    assert (made.dtype, made.device, len(made)) == (dtype, torch.device(sky), 3)
    assert copy.deepcopy(remote.storage()).tolist() == local.storage().tolist()
    with pytest.raises(RuntimeError, match="Not available for sky storage"):
        kind.from_buffer(b"1")


def test_what_libraries_call_beside_an_empty_cache_is_there(sky1: str) -> None:
    torch.sky.ipc_collect()
    torch.sky.reset_max_memory_allocated(sky1)
    torch.sky.reset_accumulated_memory_stats(sky1)
    assert not torch.sky.can_device_access_peer(0, 1)
    assert not torch.sky.is_tf32_supported()
    held = torch.ones(1000, device=sky1)
    nested = torch.sky.memory_stats_as_nested_dict(sky1)["allocated_bytes"]["all"]
    assert nested["peak"] >= nested["current"] >= held.nbytes
    assert torch.accelerator.memory_stats(1)["allocated_bytes.all.current"] == nested["current"]


def test_a_stream_context_is_where_cuda_has_it(sky1: str) -> None:
    stream = torch.sky.Stream(sky1)
    assert isinstance(torch.sky.stream(stream), torch.sky.StreamContext)
    with torch.sky.StreamContext(stream), torch.sky.StreamContext(None):
        assert torch.sky.current_stream() == stream
    assert torch.sky.current_device() == 0


@pytest.mark.parametrize(
    "ask",
    [
        lambda: torch.sky.set_device("cpu"),
        lambda: torch.sky.device(torch.device("cpu")),
        lambda: torch.sky.synchronize("cpu"),
        lambda: torch.sky.get_device_properties("cpu"),
        lambda: torch.sky.Stream("cpu"),
        lambda: torch.sky.memory_allocated("meta"),
    ],
)
def test_a_device_of_another_type_is_refused(ask: Callable[[], object], sky: str) -> None:
    with pytest.raises(ValueError, match="Expected a sky device, but got: "):
        ask()
