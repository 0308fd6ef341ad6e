"""A device without a number is the current one of the thread, in each function that takes a device."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

import skyproxy  # noqa: F401 - names the device
from skyproxy import patching

Device = str | torch.device | None


def _loaded(device: Device) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file, map_location=device)
    return loaded


MAKE: dict[str, Callable[[Device], torch.Tensor]] = {
    "to": lambda d: torch.ones(2).to(d),
    "to, by name": lambda d: torch.ones(2).to(device=d, dtype=torch.float64),
    "to, with a dtype": lambda d: torch.ones(2).to(d, torch.float64, True),
    "to of a remote tensor": lambda d: torch.ones(2, device="sky:0").to(d),
    "to of a parameter": lambda d: nn.Parameter(torch.ones(2)).to(d),
    "Module.to": lambda d: nn.Linear(2, 2).to(d).weight,
    "Module.to, by name": lambda d: nn.Linear(2, 2).to(device=d, dtype=torch.float64).weight,
    "Module.to_empty": lambda d: nn.Linear(2, 2, device="meta").to_empty(device=d).weight,
    "packed sequences": lambda d: nn.utils.rnn.pack_sequence([torch.ones(2, 1)]).to(d).data,
    "tensor": lambda d: torch.tensor([1.0, 2.0], device=d),
    "as_tensor": lambda d: torch.as_tensor([1.0, 2.0], device=d),
    "as_tensor of an array": lambda d: torch.as_tensor(np.ones(2), device=d),
    "asarray": lambda d: torch.asarray([1.0, 2.0], device=d),
    "new_tensor": lambda d: torch.ones(2).new_tensor([1.0], device=d),
    "ones": lambda d: torch.ones(2, device=d),
    "zeros_like": lambda d: torch.zeros_like(torch.ones(2), device=d),
    "new_zeros": lambda d: torch.ones(2).new_zeros(2, device=d),
    "new_tensor of a remote tensor": lambda d: torch.ones(2, device=d).new_tensor([1.0]),
    "sparse": lambda d: torch.sparse_coo_tensor([[0]], [1.0], (2,), device=d),
    "sparse rows": lambda d: torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 2), device=d),
    "nested": lambda d: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=d),
    "as nested": lambda d: torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], device=d),
    "jagged": lambda d: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=d, layout=torch.jagged),
    "a stored tensor": lambda d: _loaded(d),
    "layers": lambda d: nn.Linear(2, 2, device=d).weight,
}


@pytest.fixture(autouse=True)
def _current(sky_devices: tuple[str, str]) -> Iterator[None]:
    yield
    torch.sky.set_device(0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", ["sky", torch.device("sky")], ids=["name", "device"])
@pytest.mark.parametrize("name", MAKE)
def test_a_device_without_a_number_is_the_current_one(name: str, device: Device, sky: str, sky1: str) -> None:
    with torch.sky.device(sky1):  # type: ignore[attr-defined]
        assert MAKE[name](device).device == torch.device(sky1)
        assert MAKE[name](sky).device == torch.device(sky)
        assert MAKE[name]("cpu").device == torch.device("cpu")
    assert MAKE[name](device).device == torch.device(sky)


def test_a_type_without_a_number_is_of_the_current_device(sky: str, sky1: str) -> None:
    here, there = torch.ones(2), torch.ones(2, device=sky)
    with torch.sky.device(sky1):  # type: ignore[attr-defined]
        for kind in ("torch.sky.DoubleTensor", torch.sky.DoubleTensor):  # type: ignore[attr-defined]
            made = here.type(kind)
            assert (made.device, made.dtype) == (torch.device(sky1), torch.float64)
            assert here.type(dtype=kind).device == torch.device(sky1)
            assert there.type(kind).device == torch.device(sky)
        assert here.type() == "torch.FloatTensor"
        assert here.type(torch.float64).device == here.device
    assert here.type("torch.sky.DoubleTensor").device == torch.device(sky)


def test_each_thread_has_its_own(sky: str, sky1: str) -> None:
    torch.sky.set_device(sky1)  # type: ignore[attr-defined]
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(2).to("sky").device))
    thread.start()
    thread.join()
    assert found == [torch.device(sky)]
    assert torch.ones(2).to("sky").device == torch.device(sky1)


def test_what_takes_no_device_is_as_it_was(sky1: str) -> None:
    there = torch.ones(2, device=sky1)
    with torch.sky.device(sky1):  # type: ignore[attr-defined]
        assert torch.ones(2).to(there).device == torch.device(sky1)
        assert torch.ones(2).to(torch.float64).dtype is torch.float64
        assert torch.tensor([1, 2]).device == torch.device("cpu")
        with pytest.raises(RuntimeError, match="Expected one of cpu"):
            torch.ones(2).to("skye")
        with pytest.raises(TypeError):
            torch.tensor(1, nonsense=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["tensor", "as_tensor", "asarray", "ones", "layers"])
def test_a_default_device_without_a_number_is_the_current_one(name: str, sky: str, sky1: str) -> None:
    with torch.sky.device(sky1), torch.device("sky"):  # type: ignore[attr-defined]
        assert MAKE[name](None).device == torch.device(sky1)
        assert MAKE[name](sky).device == torch.device(sky)
        assert torch.get_default_device() == torch.device(sky1)
        assert torch.compile(lambda a: a + torch.ones(2), backend="eager")(torch.ones(2)).device == torch.device(sky1)
    with torch.device("sky"):
        assert MAKE[name](None).device == torch.device(sky)
    with torch.device(sky1):
        assert MAKE[name](None).device == torch.device(sky1)
    assert MAKE[name](None).device == torch.device("cpu")


def test_a_compiled_function_makes_tensors_there(sky1: str) -> None:
    with torch.sky.device(sky1):  # type: ignore[attr-defined]
        x = torch.ones(2).to("sky")
        assert torch.compile(lambda a: a * 2 + a.new_tensor([1.0, 2.0]), backend="eager")(x).tolist() == [3, 4]
        assert torch.compile(lambda a: a.to("sky") * 2, backend="eager")(x).device == torch.device(sky1)


def test_a_script_makes_tensors(sky1: str) -> None:
    def made(x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([1.0, 2.0])

    with torch.sky.device(sky1):  # type: ignore[attr-defined]
        assert torch.jit.script(made)(torch.ones(2)).tolist() == [2, 3]


def test_lazy_parameters_move(sky1: str) -> None:
    with torch.sky.device(sky1):  # type: ignore[attr-defined]
        layer = nn.LazyLinear(3).to("sky").to(torch.float64).to("cpu").to("sky")
        assert layer(torch.ones(2, 4, dtype=torch.float64, device="sky")).shape == (2, 3)
        assert layer.weight.device == torch.device(sky1)


def test_threads_that_begin_with_another_device_each_have_it(sky1: str) -> None:
    patching.undo_all(but=[when for when in patching.When if when is not patching.When.OTHER_DEVICE])
    begin, found = threading.Barrier(8), []

    def work() -> None:
        begin.wait(30)
        torch.sky.set_device(sky1)  # type: ignore[attr-defined]
        found.append(torch.tensor([1.0], device="sky").device)

    threads = [threading.Thread(target=work) for _ in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == [torch.device(sky1)] * 8
    places = [patch.place for patch in patching.PATCHES if patch.when is patching.When.OTHER_DEVICE]
    assert len(places) == len(set(places)) == 14


@pytest.mark.parametrize("name", ["torch.tensor", "tensor.new_tensor"])
def test_the_warning_of_a_copied_tensor_is_at_the_line_of_the_program(name: str, sky: str, sky1: str) -> None:
    source = torch.arange(6.0).view(2, 3).t()
    with torch.sky.device(1):
        copy = torch.tensor if name == "torch.tensor" else torch.zeros(1, dtype=torch.float64).new_tensor
        for options in ({}, {"device": "sky"}, {"device": torch.device("cpu"), "requires_grad": True}):
            with pytest.warns(UserWarning, match=f"rather than {name}") as told:
                found = copy(source, **options)
            assert [warning.filename for warning in told] == [__file__]
            assert found.device == torch.device("sky:1" if options.get("device") == "sky" else "cpu")
            assert found.dtype is (torch.float32 if name == "torch.tensor" else torch.float64)
            assert found.stride() == source.stride()
            assert found.requires_grad is ("requires_grad" in options)
            assert torch.equal(found.cpu().float(), source)
