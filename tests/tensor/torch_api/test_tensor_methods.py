"""What shows values: printing, numbers, numpy, and `.data`. Each with one round trip, and with PyTorch's own words."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from skyproxy.tensor.core.remote_tensor import RemoteTensor


def round_trips() -> int:
    return int(torch.sky.stats()["round_trips"])  # type: ignore[attr-defined]


def without_device(text: str) -> str:
    """Without the device, and without spaces: the lines break elsewhere with it."""
    return "".join(re.sub(r",\s*device='sky:1'", "", text).split())


class Told(TorchFunctionMode):
    """A mode that notes the names of the functions that it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_mode_is_told_of_a_list_once(sky1: str) -> None:
    x = torch.arange(3, device=sky1)
    with Told() as told:
        assert x.tolist() == [0, 1, 2]
    assert told.names == ["tolist"]


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("__repr__", repr),
        ("__format__", lambda x: f"{x:.2f}"),
        ("data_ptr", lambda x: x.data_ptr() > 0),
        ("numpy", lambda x: x.numpy(force=True).tolist()),
    ],
)
def test_a_mode_is_told_of_what_is_asked_and_not_of_its_parts(name: str, ask: Any, sky1: str) -> None:
    here = torch.tensor(1.5)
    there = here.to(sky1)
    with Told() as told:
        found = ask(there)
    assert told.names == [name]
    assert found == ask(there)
    with Told(), Told() as inner:
        assert ask(there) == found
    assert inner.names == [name]
    assert str(found).replace(", device='sky:1'", "") == str(ask(here))


def test_a_mode_prints_rows_as_no_mode_does(sky1: str) -> None:
    for x in (torch.arange(12.0).view(3, 4), torch.eye(2).to_sparse(), torch.zeros(0), nn.Parameter(torch.ones(2, 2))):
        there = x.to(sky1) if not isinstance(x, nn.Parameter) else nn.Parameter(x.detach().to(sky1))
        with Told() as told:
            text = repr(there)
        assert text == repr(there)
        assert told.names == ["__repr__"]


def test_a_copy_by_new_tensor_warns_at_the_line_of_the_program(sky1: str) -> None:
    x = torch.arange(3, device=sky1)
    with pytest.warns(UserWarning, match="To copy construct from a tensor") as warned:
        copy = x.new_tensor(torch.ones(2, device="cpu"))
    assert warned[0].filename == __file__
    assert (copy.device, copy.dtype, copy.tolist()) == (x.device, x.dtype, [1, 1])


PRINTED: dict[str, Callable[[Any], torch.Tensor]] = {
    "vector": lambda d: torch.arange(3.0, device=d),
    "scalar": lambda d: torch.ones((), device=d),
    "integers": lambda d: torch.arange(3, device=d),
    "half": lambda d: torch.ones(2, device=d, dtype=torch.half),
    "large": lambda d: torch.arange(20000, device=d).view(10, -1, 20) * 1.5,
    "long": lambda d: torch.arange(3000, device=d),
    "barely too long": lambda d: torch.arange(7 * 200.0, device=d).view(200, 7),
    "short dimensions": lambda d: torch.arange(6 * 300.0, device=d).view(6, 300),
    "large bool": lambda d: (torch.arange(7 * 300, device=d).view(7, 300) % 2).bool(),
    "large bfloat16": lambda d: torch.arange(2000.0, device=d).bfloat16(),
    "large float8": lambda d: torch.arange(2000.0, device=d).to(torch.float8_e5m2).view(5, 400),
    "large complex": lambda d: torch.arange(2000.0, device=d).to(torch.cfloat).conj() * 1j,
    "large strided": lambda d: torch.arange(4000.0, device=d).view(40, 100).t()[::2],
    "conjugate": lambda d: torch.arange(3.0, device=d).to(torch.cfloat).conj(),
    "negative": lambda d: (torch.arange(3.0, device=d) * 1j).conj().imag,
    "gradient": lambda d: torch.ones(3, device=d, requires_grad=True),
    "history": lambda d: torch.ones(3, device=d, requires_grad=True) * 2,
    "infinite": lambda d: torch.tensor([1e-8, float("inf"), float("nan"), -1e8], device=d),
}


KNOWN = ("scalar", "infinite", "integers", "long")
"""Those whose numbers are known here."""


@pytest.mark.parametrize("name", PRINTED)
def test_a_tensor_prints_as_pytorch_prints_it_with_one_fetch(name: str, sky1: str) -> None:
    remote = PRINTED[name](sky1)
    before = round_trips()
    text = repr(remote)
    assert round_trips() == before + (name not in KNOWN)
    assert "device='sky:1'" in text
    assert without_device(text) == without_device(repr(PRINTED[name]("cpu")))
    assert str(remote) == text


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.empty(0, 2, device=d),
        lambda d: torch.eye(2).to_sparse().to(d),
        lambda d: torch.eye(2).to_sparse_csr().to(d),
        lambda d: torch.zeros(0).to_sparse().to(d),
        lambda d: nn.Parameter(torch.ones(2, device=d)),
    ],
    ids=["empty", "coo", "csr", "empty coo", "parameter"],
)
def test_unusual_tensors_print_as_pytorch_prints_them(make: Callable[[Any], torch.Tensor], sky1: str) -> None:
    assert without_device(repr(make(sky1))) == without_device(repr(make("cpu")))


def test_a_large_tensor_is_not_downloaded_to_be_printed(sky1: str) -> None:
    x = torch.zeros(1000, 1000, device=sky1)
    torch.sky.synchronize()  # type: ignore[attr-defined]
    before = torch.sky.stats()["bytes_received"]  # type: ignore[attr-defined]
    repr(x)
    assert torch.sky.stats()["bytes_received"] - before < 20_000  # type: ignore[attr-defined]


def test_print_options_hold(sky1: str) -> None:
    torch.set_printoptions(edgeitems=1, threshold=10, precision=2)
    try:
        assert without_device(repr(torch.arange(99.0, device=sky1))) == without_device(repr(torch.arange(99.0)))
    finally:
        torch.set_printoptions(profile="default")


def test_numbers_come_out_of_a_tensor(sky1: str) -> None:
    x = torch.arange(3.0, device=sky1)
    assert (int(x[2]), float(x[1]), bool(x[1]), bool(x[0])) == (2, 1.0, True, False)
    assert complex(x[2]) == 2 + 0j
    assert f"{x[1]:.2f}" == "1.00"
    assert x.tolist() == [0, 1, 2]
    assert x[1].tolist() == 1.0
    assert len(x) == 3
    assert 2.0 in x
    assert 5.0 not in x
    assert [int(item) for item in x] == [0, 1, 2]
    assert [item.device for item in x] == [torch.device(sky1)] * 3
    assert "abc"[torch.tensor(1, device=sky1)] == "b"
    assert list(range(torch.tensor(2, device=sky1))) == [0, 1]


MISUSES: dict[str, Callable[[torch.Tensor], Any]] = {
    "bool of many": bool,
    "bool of none": lambda x: bool(x[:0]),
    "int of many": int,
    "item of many": lambda x: x.item(),
    "index of a float": lambda x: "abc"[x[0]],
    "length of a scalar": lambda x: len(x[0]),
    "iterate a scalar": lambda x: list(x[0]),
    "format of many": lambda x: f"{x:.2f}",
    "foreign element": lambda x: "a" in x,
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises_what_pytorch_raises(name: str, sky1: str) -> None:
    with pytest.raises(Exception) as expected:
        MISUSES[name](torch.ones(3))
    with pytest.raises(expected.type) as got:
        MISUSES[name](torch.ones(3, device=sky1))
    if name != "format of many":  # that text names the class
        assert str(got.value) == str(expected.value)


def test_numpy_is_refused_in_the_words_for_any_device(sky1: str) -> None:
    x = torch.arange(3.0, device=sky1)
    words = r"can't convert sky:1 device type tensor to numpy\. Use Tensor\.cpu\(\) to copy the tensor to host memory"
    for convert in (lambda: x.numpy(), lambda: np.asarray(x)):
        with pytest.raises(TypeError, match=words):
            convert()


def test_numpy_can_be_forced(sky1: str) -> None:
    x = (torch.arange(3.0, device=sky1, requires_grad=True) * 1j).conj()
    assert np.array_equal(x.numpy(force=True), np.array([0, -1j, -2j], dtype=np.complex64))


def test_dlpack_is_refused_with_a_way_out(sky1: str) -> None:
    x = torch.ones(2, device=sky1)
    exports = (torch.utils.dlpack.to_dlpack, torch.to_dlpack, torch.from_dlpack, np.from_dlpack)
    for export in (*exports, RemoteTensor.__dlpack__, RemoteTensor.__dlpack_device__):
        with pytest.raises(BufferError, match=r"x\.cpu\(\)"):
            export(x)  # type: ignore[operator]
    assert torch.from_dlpack(torch.to_dlpack(torch.ones(2))).tolist() == [1, 1]


# --- .data -----------------------------------------------------------------------------------------------------------


def test_data_shares_storage_and_keeps_identity(sky1: str) -> None:
    p, q = nn.Parameter(torch.randn(3, 3, device=sky1)), torch.ones(2, 5, device=sky1)
    p.data = q
    assert p.shape == (2, 5)
    q.add_(1)
    assert p.data_ptr() == q.data_ptr()
    assert (p.cpu() == 2).all()
    p.data.mul_(2)
    assert (q.cpu() == 4).all()
    p.sum().backward()
    assert p.grad is not None
    assert p.grad.shape == (2, 5)
    p.data = q.half()
    assert (p.dtype, p.requires_grad, isinstance(p, nn.Parameter)) == (torch.half, True, True)


def test_data_has_metadata_of_its_own(sky1: str) -> None:
    p, q = torch.zeros(2, 3, device=sky1), torch.arange(6.0, device=sky1).view(2, 3)
    p.data = q
    q.t_()
    q.mul_(2)
    assert p.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert q.tolist() == [[0, 6], [2, 8], [4, 10]]


def test_data_leaves_version_and_history_alone(sky1: str) -> None:
    p = torch.ones(3, device=sky1, requires_grad=True)
    y, version = p * p, p._version
    p.data = torch.zeros(3, device=sky1)
    assert p._version == version
    y.sum().backward()
    assert p.grad is not None
    assert p.grad.tolist() == [0, 0, 0]  # PyTorch too sees the new values


def test_data_can_be_a_conjugate_or_come_from_inference_mode(sky1: str) -> None:
    p = torch.zeros(2, dtype=torch.cfloat, device=sky1)
    p.data = torch.tensor([1j, 2j], device=sky1).conj()
    assert p.is_conj()
    assert p.tolist() == [-1j, -2j]
    with torch.inference_mode():
        q = torch.ones(2, 2, device=sky1)
    parameter = nn.Parameter(torch.zeros(1, device=sky1))
    parameter.data = q
    assert not parameter.is_inference()
    (parameter * 2).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.shape == (2, 2)


def test_data_of_real_numbers_can_become_a_conjugate(sky1: str) -> None:
    for p in (torch.zeros(2, device=sky1), torch.zeros(2, dtype=torch.complex64, device=sky1).conj().imag):
        p.data = torch.tensor([1j, 2j], device=sky1).conj()
        assert (p.is_conj(), p.is_neg(), p.dtype) == (True, False, torch.complex64)
        assert p.tolist() == [-1j, -2j]


def test_metadata_can_change_in_place_in_inference_mode(sky1: str) -> None:
    x = torch.ones(2, 3, device=sky1)
    with torch.inference_mode():
        x.t_()
    assert x.shape == (3, 2)


def test_data_cannot_be_deleted_in_pytorchs_words(sky1: str) -> None:
    for x in (torch.ones(2), torch.ones(2, device=sky1)):
        with pytest.raises(RuntimeError, match="Delete tensor instead"):
            del x.data


def test_data_moves_a_parameter_to_the_worker_and_back(sky1: str) -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    p.data = p.data.to(sky1)
    assert type(p) is RemoteTensor
    assert isinstance(p, nn.Parameter)
    (p * 3).sum().backward()
    optimizer.step()
    assert p.tolist() == [-2, -2]
    p.grad = None
    p.data = p.data.cpu()
    assert type(p) is nn.Parameter
    assert (p.requires_grad, p.tolist()) == (True, [-2, -2])


def test_conjugate_and_negative_views_share_storage(sky1: str) -> None:
    x = torch.tensor([1 + 2j, 3 - 1j], device=sky1)
    view = x.conj()
    assert view.is_conj()
    assert view.data_ptr() == x.data_ptr()
    x.mul_(2)
    assert view.tolist() == [2 - 4j, 6 + 2j]
    assert view.imag.is_neg()
    assert view.imag.tolist() == [-4, 2]
    assert view.resolve_conj().cpu().is_conj() is False
    assert torch.equal((view + 1).cpu(), torch.tensor([3 - 4j, 7 + 2j]))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]
)
def test_slices_of_every_dtype_come_back_to_the_last_bit(dtype: torch.dtype, sky1: str) -> None:
    bits = torch.arange(64, dtype=torch.uint8).repeat(4) * 3
    local = bits.view(dtype) if dtype.itemsize <= 8 else bits
    remote = local.to(sky1)
    for cut in (slice(None), slice(1, 5), slice(None, None, 3), slice(7, 8)):
        back = remote[cut].cpu()
        assert back.dtype is dtype
        assert torch.equal(back.contiguous().view(torch.uint8), local[cut].contiguous().view(torch.uint8))


def test_an_error_of_printing_that_somebody_keeps_leaves_transforms_alone(sky1: str) -> None:
    """A notebook keeps the last error, and with it the frames that it came through."""
    x, rows = torch.arange(4.0, device=sky1), torch.ones(3, 2, dtype=torch.int32, device=sky1)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="storage") as kept:
        repr(x)
    assert torch.vmap(torch.vmap(lambda row: row.new_zeros(2) + row))(rows).tolist() == [[[1, 1]] * 2] * 3
    assert kept.value.__traceback__ is not None


@pytest.mark.parametrize("value", [None, 3, "a"], ids=str)
def test_data_that_is_no_tensor_is_refused_in_the_words_of_pytorch(value: Any, sky1: str) -> None:
    for place in ("cpu", sky1):
        x = torch.ones(2, device=place)
        with pytest.raises(TypeError, match="Variable data has to be a tensor, but got"):
            x.data = value
        assert x.tolist() == [1.0, 1.0]


NEW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "new_tensor of a list": lambda x: x.new_tensor([1.0, 2.0]),
    "new_tensor of a number": lambda x: x.new_tensor(3, dtype=torch.int8),
    "new_tensor of its like": lambda x: x.new_tensor(x),
    "new_tensor on a device without a number": lambda x: x.new_tensor([1.0], device="sky"),
    "new_tensor of a parameter": lambda x: nn.Parameter(x).new_tensor([1.0], requires_grad=True),
    "new of sizes": lambda x: x.new(2, 3).zero_(),
    "new of a size": lambda x: x.new(torch.Size([2])).zero_(),
    "new of a list": lambda x: x.new([1.0, 2.0]),
    "new of nothing": lambda x: x.new(),
    "new of its like": lambda x: x.new(x),
    "new of a storage": lambda x: x.new(x.untyped_storage()),
}


@pytest.mark.parametrize("name", NEW)
def test_a_new_tensor_is_where_the_old_one_is(name: str, sky_devices: tuple[str, str]) -> None:
    for device in sky_devices:
        for current in sky_devices:
            with torch.sky.device(current):  # type: ignore[attr-defined]
                made = NEW[name](torch.ones(2, device=device))
            assert made.device == torch.device(device)
    here = torch.ones(1) if "without a number" in name else NEW[name](torch.ones(2))
    assert torch.equal(made.cpu(), here)
    assert (made.dtype, made.requires_grad) == (here.dtype, here.requires_grad)


IN: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "a gradient": lambda f, x: torch.func.grad(lambda y: (y * f(y)).sum())(x),
    "a tangent": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "compiled code": lambda f, x: torch.compile(f, backend="aot_eager", fullgraph=True)(x),
    "a fake mode": lambda f, x: torch.ones_like(x) if wrapped_in_fake(f, x) == x.device else None,
}


def wrapped_in_fake(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.device:
    with torch._subclasses.FakeTensorMode() as mode:
        return function(mode.from_tensor(x)).device


def test_a_fake_tensor_is_refused_where_its_value_is_asked_for(sky1: str) -> None:
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(RuntimeError, match="no values: it is a fake one"):
        torch.tensor([mode.from_tensor(torch.ones(2, device=sky1))[0]])


@pytest.mark.parametrize("name", IN)
def test_a_wrapped_tensor_makes_others_where_it_is(name: str, sky_devices: tuple[str, str]) -> None:
    for make in (
        lambda x: x * x.new_tensor([1.0, 2.0]),
        lambda x: x * x.new_tensor(3.0),
        lambda x: x * x.new([1.0, 2.0]),
        lambda x: x * x.new(2).fill_(2),
    ):
        here = IN[name](make, torch.ones(2))
        for device in sky_devices:
            torch._dynamo.reset()
            made = IN[name](make, torch.ones(2, device=device))
            assert made.device == torch.device(device)
            assert torch.equal(made.cpu(), here)


def test_a_new_tensor_may_be_asked_for_elsewhere(sky_devices: tuple[str, str]) -> None:
    there = torch.ones(2, device=sky_devices[1])
    assert there.new_tensor([1], device=sky_devices[0]).device == torch.device(sky_devices[0])
    assert there.new(2, device=sky_devices[0]).device == torch.device(sky_devices[0])
    assert there.new_tensor([1], device="cpu").device == torch.device("cpu")
    with pytest.raises(RuntimeError, match="expects device type"):
        there.new(2, device="cpu")


def test_the_class_of_a_tensor_lies_in_torch_as_those_of_other_devices_do(sky1: str) -> None:
    # opt_einsum, autoray and eagerpy choose by this whose functions they call; wandb, what it takes for a tensor.
    for tensor in (torch.ones(2, device=sky1), nn.Parameter(torch.ones(2, device=sky1))):
        kind = type(tensor)
        assert kind.__module__.partition(".")[0] == "torch"
        assert getattr(sys.modules[kind.__module__], kind.__qualname__) is kind
        assert pickle.loads(pickle.dumps(kind)) is kind


def test_new_of_a_storage_warns_of_nothing(sky: str, recwarn: pytest.WarningsRecorder) -> None:
    x = torch.arange(3.0, device=sky)
    for storage in (x._typed_storage(), x.untyped_storage()):  # what a loader's processes collate with
        y = x.new(storage)
        assert (y.device, y.tolist()) == (x.device, [0.0, 1.0, 2.0])
    assert not recwarn.list
