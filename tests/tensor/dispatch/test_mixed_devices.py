"""Ops whose tensors are on several devices: raised, or right, as on CUDA. Never a write that goes nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

_MISMATCH = "Expected all tensors to be on the same device"

WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add_": lambda x, r: x.add_(r),
    "operator": lambda x, r: x.__imul__(r),
    "pow_": lambda x, r: x.pow_(r),
    "lerp_": lambda x, r: x.lerp_(r, 0.5),
    "lerp_ with a weight": lambda x, r: x.lerp_(torch.tensor(5.0), r),
    "clamp_": lambda x, r: x.clamp_(min=r),
    "logical_and_": lambda x, r: x.logical_and_(r),
    "addcmul_": lambda x, r: x.addcmul_(r, r),
    "masked_fill_ with a value": lambda x, r: x.masked_fill_(torch.tensor(True), r),
    "masked_fill_ with a mask": lambda x, r: x.masked_fill_(r > 0, 3.0),
    "an index with a mask": lambda x, r: x.expand(3).__setitem__(r.expand(3) > 0, 3.0),
    "out=": lambda x, r: torch.add(r, r, out=x),
    "out= of a reduction": lambda x, r: torch.sum(r.expand(3), 0, out=x),
    "out= of a composite": lambda x, r: torch.matmul(r.expand(3), r.expand(3), out=x),
    "the first of several": lambda x, r: torch.max(r.expand(3), 0, out=(x, torch.tensor(0, device=r.device))),
    "a list": lambda x, r: torch._foreach_add_([x], [r]),
    "a list and a number": lambda x, r: torch._foreach_mul_([x], r),
    "a fused optimizer's gradient scale": lambda x, r: torch._amp_foreach_non_finite_check_and_unscale_([r], x, r),
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_write_into_a_cpu_tensor_is_refused(
    sky1: str, write: Callable[..., Any], shape: tuple[int, ...], inference: bool
) -> None:
    with torch.inference_mode(inference):
        target, remote = torch.full(shape, 1.0), torch.tensor(2.0, device=sky1)
        with pytest.raises(RuntimeError, match=_MISMATCH):
            write(target, remote)
        assert torch.equal(target, torch.full(shape, 1.0))


def test_a_write_through_a_view_of_a_cpu_tensor_is_refused(sky1: str) -> None:
    losses = torch.zeros(3)
    with pytest.raises(RuntimeError, match=_MISMATCH):
        losses[1] += torch.tensor(2.0, device=sky1)
    assert losses.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_into_a_tensor_of_another_worker_is_refused(sky: str, sky1: str, write: Callable[..., Any]) -> None:
    target = torch.tensor(1.0, device=sky)
    with pytest.raises(RuntimeError, match=_MISMATCH):
        write(target, torch.tensor(2.0, device=sky1))
    assert target.item() == 1.0


def _setitem(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    x[index] = value
    return x


CROSSING: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], list[float]]] = {
    "fill_": (lambda x, r: x.fill_(r), [2, 2, 2]),
    "fill": (lambda x, r: torch.fill(x, r), [2, 2, 2]),
    "copy_": (lambda x, r: x.copy_(r), [2, 2, 2]),
    "index_fill_": (lambda x, r: x.index_fill_(0, torch.tensor([0, 2]), r), [2, 0, 2]),
    "index_put_": (lambda x, r: x.index_put_((torch.tensor([1]),), r), [0, 2, 0]),
    "index_put_ that adds": (lambda x, r: x.index_put_((torch.tensor([1, 1]),), r, accumulate=True), [0, 4, 0]),
    "an index": (lambda x, r: _setitem(x, 1, r), [0, 2, 0]),
    "a slice": (lambda x, r: _setitem(x, slice(1, None), r), [0, 2, 2]),
    "a mask": (lambda x, r: _setitem(x, torch.tensor([True, False, True]), r), [2, 0, 2]),
    "a list of copies": (lambda x, r: torch._foreach_copy_([x, x[:1]], [r, r + 1]) and x, [3, 2, 2]),
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize(("write", "expected"), CROSSING.values(), ids=CROSSING)
def test_what_crosses_devices_on_cuda_does_here(
    sky1: str, write: Callable[..., Any], expected: list[float], inference: bool
) -> None:
    with torch.inference_mode(inference):
        result = write(torch.zeros(3), torch.tensor(2.0, device=sky1))
    assert result.device.type == "cpu"
    assert result.tolist() == expected


@pytest.mark.parametrize("name", ["fill_", "fill", "copy_", "an index", "a slice", "a list of copies"])
def test_what_crosses_devices_does_so_between_workers(sky: str, sky1: str, name: str) -> None:
    write, expected = CROSSING[name]
    result = write(torch.zeros(3, device=sky), torch.tensor(2.0, device=sky1))
    assert str(result.device) == sky
    assert result.tolist() == expected


@pytest.mark.parametrize("value", [1, 1.0, True], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("mask", ["cpu", "sky"])
@pytest.mark.parametrize("index", [lambda m: m, lambda m: (slice(None), m), lambda m: (slice(1, 1), m)], ids="abc")
def test_a_mask_is_filled_with_a_number_of_another_dtype(
    sky1: str, value: float, shape: tuple[int, ...], mask: str, index: Callable[..., Any]
) -> None:
    """PyTorch converts it, where the mask is one. At positions it does not, so a mask of the CPU must stay a mask."""
    chosen, dtype = torch.tensor([True, False, True]), torch.float64 if type(value) is float else None
    expected = _setitem(torch.zeros(3, 3), index(chosen), torch.tensor(value, dtype=dtype).expand(shape))
    chosen = chosen.to(sky1) if mask == "sky" else chosen
    found = _setitem(
        torch.zeros(3, 3, device=sky1), index(chosen), torch.tensor(value, dtype=dtype, device=sky1).expand(shape)
    )
    assert torch.equal(found.cpu(), expected)


def test_a_larger_value_does_not_cross(sky1: str) -> None:
    with pytest.raises(RuntimeError, match=_MISMATCH):
        torch.zeros(3).fill_(torch.ones(3, device=sky1))
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(3).index_put_((torch.tensor([1]),), torch.ones(1, device=sky1))


def test_resize_as_takes_the_sizes_of_a_tensor_elsewhere(sky1: str) -> None:
    x = torch.tensor(1.0)
    assert x.resize_as_(torch.ones(2, 3, device=sky1)) is x
    assert x.shape == (2, 3)


def test_a_list_of_several_devices_is_taken_item_by_item(sky: str, sky1: str) -> None:
    def tensors(value: float) -> list[torch.Tensor]:
        return [torch.full((2,), value, device=place) for place in ("cpu", sky, sky1)]

    items = tensors(1.0)
    torch._foreach_add_(items, tensors(2.0))
    torch._foreach_mul_(items, torch.tensor(2.0))
    assert [item.tolist() for item in items] == [[6.0, 6.0]] * 3
    result = torch._foreach_add(items, tensors(2.0))
    assert [str(item.device) for item in result] == ["cpu", sky, sky1]
    assert [item.tolist() for item in result] == [[8.0, 8.0]] * 3


@pytest.mark.parametrize(
    "change",
    [
        lambda items, cpu: torch._foreach_add_(items, cpu),
        lambda items, cpu: torch._foreach_copy_(items, [torch.zeros(2) for _ in cpu]),
        lambda items, cpu: torch._foreach_pow_(items, cpu),
        lambda items, cpu: torch._foreach_addcmul_(items, items, items, torch.tensor([0.5] * len(items))),
    ],
)
def test_a_change_with_a_list_of_another_device_is_counted(change: Callable[[Any, Any], Any], sky1: str) -> None:
    items = [torch.ones(2, device=sky1), torch.ones(2)]
    change(items, [torch.tensor(2.0), torch.tensor(2.0)])
    assert [item._version for item in items] == [1, 1]
    saved = torch.ones(2, device=sky1, requires_grad=True) * 3
    squared = saved * saved
    with torch.no_grad():
        change([saved], [torch.tensor(2.0)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()
    with torch.inference_mode():
        of_inference = torch.ones(2, device=sky1)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        change([of_inference], [torch.tensor(2.0)])
    assert of_inference.tolist() == [1, 1]


def _foreach_writes() -> list[Any]:
    """Every op on lists that changes its first one, with an argument for each of the others that it must have."""
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if not name.startswith("aten::_foreach_") or not name.partition(".")[0].endswith("_"):
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        kinds = [str(a.type) for a in op._schema.arguments if not a.has_default_value()]
        if any("Tensor" in kind for kind in kinds[1:]):
            found.append(pytest.param(op, kinds[1:], id=name))
    return found


@pytest.mark.parametrize(("op", "kinds"), _foreach_writes())
def test_a_list_of_cpu_tensors_is_written_with_remote_operands_or_refused(sky1: str, op: Any, kinds: list[str]) -> None:
    def arguments(place: str) -> list[Any]:
        number = torch.tensor(0.5, device=place)
        # The factors of addcmul and addcdiv are in a tensor that is on the CPU on every device.
        given = {"List[Tensor]": [number], "Tensor": torch.tensor([0.5]) if "addc" in op.name() else number}
        return [given.get(kind, [0.5] if kind.startswith("List") else 0.5) for kind in kinds]

    for shape in ((), (2,)):
        before = torch.full(shape, 2.0)
        local, target = [before.clone()], [before.clone()]
        op(local, *arguments("cpu"))
        refused = ""
        try:
            op(target, *arguments(sky1))
        except RuntimeError as error:
            refused = str(error)
        assert torch.equal(target[0], before if refused else local[0])
        assert not refused or _MISMATCH in refused


@pytest.mark.parametrize("value", [torch.tensor(2.0, dtype=torch.float64), torch.tensor(2), torch.tensor(True)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bool])
def test_a_value_promotes_as_a_tensor_does(sky1: str, value: torch.Tensor, dtype: torch.dtype) -> None:
    local = torch.ones(3, dtype=dtype)
    for _ in range(2):
        for function in (torch.add, torch.mul, torch.true_divide, torch.maximum, lambda a, b: torch.where(a > 0, a, b)):
            ours, theirs = function(local.to(sky1), value), function(local, value)
            assert ours.dtype is theirs.dtype
            assert torch.equal(ours.cpu(), theirs)
            ours, theirs = function(value, local.to(sky1)), function(value, local)
            assert ours.dtype is theirs.dtype
            assert torch.equal(ours.cpu(), theirs)


def test_a_cpu_tensor_without_dimensions_where_a_rule_tells_the_shape(sky1: str) -> None:
    x = torch.arange(4.0, device=sky1)
    for _ in range(2):
        assert torch.index_select(x, 0, torch.tensor(2)).tolist() == [2.0]
        with pytest.raises(RuntimeError, match=_MISMATCH):
            torch.index_select(torch.arange(4.0), 0, torch.tensor([2], device=sky1))


def test_a_cpu_tensor_without_dimensions_that_is_only_read_is_a_value(sky1: str) -> None:
    x, value = torch.ones(3, device=sky1), torch.tensor(2.0)
    assert x.add_(value).tolist() == [3.0, 3.0, 3.0]
    assert torch.lerp(x, x * 2, value).tolist() == [9.0, 9.0, 9.0]
    assert torch.add(x, value, out=torch.empty(3, device=sky1)).tolist() == [5.0, 5.0, 5.0]
    with pytest.raises(RuntimeError, match=_MISMATCH):
        x.add_(torch.ones(3))


def test_a_graph_that_writes_into_a_cpu_tensor_is_refused_or_right(sky1: str) -> None:
    torch._dynamo.reset()
    remote = torch.full((4,), 2.0, device=sky1)

    def accumulate(total: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return total.add_(r.sum())

    total = torch.tensor(1.0)
    with pytest.raises(Exception, match=r"[Dd]evice"):
        torch.compile(accumulate, backend="sky")(total, remote)
    assert total.item() == 1.0
    torch._dynamo.reset()

    def fill(total: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return total.copy_(r.sum())

    torch.compile(fill, backend="sky")(total, remote)
    assert total.item() == 8.0
    total = torch.tensor(1.0)
    torch.func.functionalize(accumulate)(total, remote)
    assert total.item() == 9.0


def test_tensors_like_a_remote_one_are_pinned_on_the_cpu(sky1: str) -> None:
    """Programs that take activations to the CPU make them so, and fill them with a copy."""
    x = torch.arange(6.0, device=sky1).view(3, 2).t()
    for made in (
        torch.empty_like(x, device="cpu", pin_memory=True),
        x.new_empty_strided(x.shape, x.stride(), device="cpu", pin_memory=True),
        torch.zeros_like(x, device="cpu", pin_memory=True),
    ):
        assert made.is_pinned()
        assert (made.device, made.stride()) == (torch.device("cpu"), x.stride())
        assert made.copy_(x, non_blocking=True).tolist() == [[0, 2, 4], [1, 3, 5]]
    assert x.new_zeros(2, device="cpu", pin_memory=True).is_pinned()
