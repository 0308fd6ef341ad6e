"""What the client believes of a tensor after ops that were refused, or that failed on the worker."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.dispatch import entries, inference
from skyproxy.tensor.dispatch.binding import BoundCall
from skyproxy.tensor.dispatch.op_info import info_of
from tests.conformance.twins import tree_differences
from tests.operator_database import op_db

REFUSED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    name: lambda a, b, name=name: getattr(a, name)(b)
    for name in (
        *("atan2_", "pow_", "fmod_", "remainder_", "eq_", "lt_", "ge_", "hypot_", "copysign_", "nextafter_", "xlogy_"),
        *("igamma_", "floor_divide_", "logical_xor_", "clamp_min_", "add_", "mul_", "copy_", "ldexp_", "not_equal_"),
    )
}
REFUSED |= {
    "clamp_": lambda a, b: a.clamp_(b, b),
    "lerp_": lambda a, b: a.lerp_(b, b),
    "masked_fill_": lambda a, b: a.masked_fill_(b > 0, 1.0),
    "masked_scatter_": lambda a, b: a.masked_scatter_(b > 0, b),
    "addr_": lambda a, b: a.addr_(b[:, 0], b[0]),
    "bernoulli_": lambda a, b: a.bernoulli_(b),
    "a list": lambda a, b: torch._foreach_pow_([a], [b]),
    "squeeze_": lambda a, b: a.squeeze_(5),
    "transpose_": lambda a, b: a.transpose_(0, 5),
    "t_": lambda a, b: a.unsqueeze_(0).t_(),
    "as_strided_": lambda a, b: a.as_strided_((2, 2), (1, 1), -1),
    "out= of another dtype": lambda a, b: torch.add(b, b, out=a.int()),
    "out= of sizes that do not fit": lambda a, b: torch.mm(b, b, out=a),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_an_op_that_is_refused_leaves_the_tensor_as_it_was(sky1: str, refused: Callable[..., Any]) -> None:
    for _ in range(2):  # the second time from what was learned the first time
        local, remote = torch.full((1, 4), 0.5), torch.full((1, 4), 0.5, device=sky1)
        with pytest.raises(Exception) as theirs:
            refused(local, torch.ones(3, 4))
        with warnings.catch_warnings(record=True) as told, pytest.raises(type(theirs.value)) as ours:
            warnings.simplefilter("always")
            refused(remote, torch.ones(3, 4, device=sky1))
            torch.sky.synchronize(sky1)
        # Fake kernels resize, and warn. An outer product is told so by its two vectors, which do not broadcast.
        assert refused is REFUSED["addr_"] or not any("resized" in str(warning.message) for warning in told)
        assert str(ours.value).startswith(str(theirs.value).splitlines()[0])
        assert (remote.shape, remote.stride()) == (local.shape, local.stride())
        assert torch.equal((remote + 1).cpu(), local + 1)
        assert torch.equal(remote.cpu(), local)


RESHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "squeeze_": lambda x: x.unsqueeze_(1).squeeze_(),
    "as_strided_": lambda x: x.as_strided_((2,), (1,), 1),
    "resize_": lambda x: x.resize_(3, 2),
    "resize_as_": lambda x: x.resize_as_(torch.ones(5, device=x.device)),
}


@pytest.mark.parametrize("reshape", RESHAPES.values(), ids=RESHAPES)
def test_ops_that_exist_to_reshape_a_tensor_do_so(sky1: str, reshape: Callable[..., Any]) -> None:
    for _ in range(2):
        local, remote = torch.arange(6.0).view(2, 3), torch.arange(6.0, device=sky1).view(2, 3)
        reshape(local), reshape(remote)
        assert (remote.shape, remote.stride()) == (local.shape, local.stride())
        assert torch.equal((remote + 1).cpu(), local + 1)


@pytest.mark.parametrize("reshape", RESHAPES.values(), ids=RESHAPES)
def test_a_tensor_reshaped_after_a_failure_holds_its_values_in_the_new_shape(
    sky1: str, reshape: Callable[..., Any]
) -> None:
    """The client changes the shape at once; the worker does not run the op, since a write before it failed."""
    for _ in range(2):
        local, remote = torch.arange(6.0).view(2, 3), torch.arange(6.0, device=sky1).view(2, 3)
        reshape(local)
        remote.view(-1).index_add_(0, torch.full((1,), 9, device=sky1), torch.ones(1, device=sky1))
        reshape(remote)
        with pytest.raises(RuntimeError, match="index"):
            remote.cpu()
        assert (remote.shape, remote.stride()) == (local.shape, local.stride())
        assert torch.equal((remote + 1).cpu(), local + 1)


def test_out_that_was_to_be_resized_by_a_failed_op_can_be_used_again(sky1: str) -> None:
    for _ in range(2):
        torch.add(torch.ones(2, device=sky1), 1, out=torch.empty(0, device=sky1))
        failed = torch.ones(2, device=sky1).index_select(0, torch.full((2,), 9, device=sky1))
        out = torch.empty(0, device=sky1)
        torch.add(failed, 1, out=out)
        with pytest.raises(RuntimeError, match="index out of range"):
            out.cpu()
        assert out.cpu().shape == (2,)
        torch.add(torch.ones(2, device=sky1), 1, out=out)
        assert out.tolist() == [2.0, 2.0]


def test_out_of_another_size_is_resized(sky1: str) -> None:
    for size in ((1, 4), (7,), (3, 4), (0,)):
        for _ in range(2):
            local, remote = torch.zeros(size), torch.zeros(size, device=sky1)
            torch.atan2(torch.ones(3, 4), torch.ones(3, 4), out=local)
            torch.atan2(torch.ones(3, 4, device=sky1), torch.ones(3, 4, device=sky1), out=remote)
            assert (remote.shape, remote.stride()) == (local.shape, local.stride())
            torch.testing.assert_close((remote + 1).cpu(), local + 1)


def _faked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops that fake tensors are asked about from now on."""
    asked: list[str] = []
    by_fake = inference._infer_by_fake
    monkeypatch.setattr(inference, "_infer_by_fake", lambda call: [asked.append(call.info.name), by_fake(call)][1])
    return asked


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, number: x * number,
        lambda x, number: number - x,
        lambda x, number: x > number,
        lambda x, number: torch.where(x > 0, x, number),
        lambda x, number: torch.maximum(x, number),
        lambda x, number: x.clone().add_(number),
    ],
)
def test_numbers_in_tensors_of_the_cpu_are_known_to_rules(
    sky1: str, monkeypatch: pytest.MonkeyPatch, compute: Callable[..., torch.Tensor]
) -> None:
    asked = _faked(monkeypatch)
    for dtype in (torch.float32, torch.float64, torch.int64):
        for x in (torch.rand(3, 1, 7), torch.rand(5, 3).t(), torch.ones(3, 4, dtype=torch.int32)):
            number = torch.tensor(2, dtype=dtype)
            if dtype.is_floating_point and not x.is_floating_point():
                continue  # in place it would be refused
            found, expected = compute(x.to(sky1), number), compute(x, number)
            assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
            assert torch.equal(found.cpu(), expected)
    assert not {name for name in asked if not name.endswith("add_.Tensor")}


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 2),
        lambda x: x.unique(),
        lambda x: x.unique(dim=0),
        lambda x: x.unique_consecutive(),
        lambda x: x.unique_consecutive(dim=1),
        lambda x: x.flatten().bincount(),
        lambda x: x[x > 2],
    ],
)
def test_what_values_size_is_asked_of_the_worker_and_of_no_fake_tensor(
    sky1: str, monkeypatch: pytest.MonkeyPatch, compute: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    asked = _faked(monkeypatch)
    for size in (3, 4):
        x = torch.arange(size * 5).remainder(size).view(size, 5)
        assert torch.equal(compute(x.to(sky1)).cpu(), compute(x))
    assert not asked


def test_numbers_that_a_choice_makes_tensors_of_take_the_short_way(sky1: str) -> None:
    x, condition = torch.rand(3, 4, device=sky1), torch.rand(3, 4, device=sky1) > 0.5
    torch.where(condition, x, 0.0)
    before = torch.sky.stats()["cache_hits"]
    result = torch.where(condition, x, 0.0)
    assert torch.sky.stats()["cache_hits"] - before >= 2
    assert type(torch.scalar_tensor(0.0, device=sky1)._sky.meta) is Meta
    assert torch.equal(result.cpu(), torch.where(condition.cpu(), x.cpu(), 0.0))


def _norm_backward(kind: str, x: torch.Tensor, mask: list[bool]) -> Any:
    aten, weight = torch.ops.aten, torch.ones(4, device=x.device)
    if kind == "batch":
        mean, spread = x.mean((0, 2, 3)), x.std((0, 2, 3))
        return aten.native_batch_norm_backward(x, x, weight, mean, spread, mean, spread, True, 1e-5, mask)
    if kind == "batch in evaluation":
        return aten.native_batch_norm_backward(x, x, weight, weight, weight, weight[:0], weight[:0], False, 1e-5, mask)
    if kind == "group":
        mean = x.reshape(2, 2, -1).mean(2)
        return aten.native_group_norm_backward(x, x, mean, mean + 1, weight, 2, 4, 9, 2, mask)
    rows = x.transpose(1, 3).contiguous()
    mean = rows.mean(3, keepdim=True)
    return aten.native_layer_norm_backward(rows, rows, [4], mean, mean + 1, weight, weight, mask)


def _other_backward(kind: str, x: torch.Tensor, mask: list[bool]) -> Any:
    aten = torch.ops.aten
    if kind == "grid":
        return aten.grid_sampler_2d_backward(x, x, x[:, :2].permute(0, 2, 3, 1) / 9, 0, 0, False, mask[:2])
    return aten.convolution_backward(
        x, x, x[:, :, :1, :1].repeat(2, 1, 1, 1), [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask
    )


_KINDS = ["batch", "batch in evaluation", "group", "layer", "grid", "convolution"]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("mask", itertools.product([True, False], repeat=3), ids=str)
def test_gradients_that_nobody_wants_are_none_as_locally(kind: str, mask: tuple[bool, ...], sky1: str) -> None:
    """A first layer's input needs none: whoever infers one all the same fails where the worker gives nothing."""
    backward = _norm_backward if kind not in ("grid", "convolution") else _other_backward
    x = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    expected, found = backward(kind, x, list(mask)), backward(kind, x.to(sky1), list(mask))
    for ours, theirs, wanted in zip(found, expected, mask[: len(found)], strict=True):
        if ours is None:  # with several threads, oneDNN gives locally what nobody wants
            assert theirs is None or not wanted
        else:
            assert ours.stride() == theirs.stride()
            assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
def test_a_network_may_begin_with_a_norm(training: bool, frozen: str | None, sky1: str) -> None:
    def gradients(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm1d(4).train(training).to(device)
        if frozen is not None:
            getattr(norm, frozen).requires_grad_(False)
        norm(torch.randn(3, 4).to(device)).square().sum().backward()
        return [p.grad.cpu() for p in norm.parameters() if p.grad is not None]

    for ours, theirs in zip(gradients(sky1), gradients("cpu"), strict=True):
        assert torch.equal(ours, theirs)


def _in_evaluation(x: torch.Tensor) -> torch.Tensor:
    return torch.batch_norm(x, None, None, x[0, :, 0] * 0, x[0, :, 0] * 0 + 1, False, 0.1, 1e-5, False)


@pytest.mark.parametrize("run", [torch.nn.functional.logsigmoid, _in_evaluation])
def test_what_cuda_notes_for_derivatives_in_another_size_is_asked_of_such_a_worker(
    run: Callable[[torch.Tensor], torch.Tensor], sky1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each look; `tests/conformance/test_cuda_metadata.py` finds the operators."""
    for kind, asked in (("cpu", 0), ("cuda", 1), ("cuda", 0)):
        monkeypatch.setitem(DEVICES.of(sky1).row, "type", kind)
        x = torch.randn(2, 3, 11 + (kind == "cuda")).to(sky1)
        before = torch.sky.stats()["round_trips"]
        result = run(x)
        assert torch.sky.stats()["round_trips"] - before == asked
        assert torch.allclose(result.cpu(), run(x.cpu()))


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.bfloat16, torch.float64)], ids=str)
def test_blocks_that_are_numbers_do_not_change_the_dtype_of_a_diagonal(
    dtypes: tuple[torch.dtype, torch.dtype], sky1: str
) -> None:
    block, number = torch.ones(2, 2, dtype=dtypes[0]), torch.tensor(2.0, dtype=dtypes[1])
    expected, found = torch.block_diag(block, number), torch.block_diag(block.to(sky1), number.to(sky1))
    assert found.dtype == expected.dtype == dtypes[0]
    assert torch.equal(found.cpu(), expected)


_LAYOUTS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda t: t,
    lambda t: t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t,
    lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t[:1] if t.dim() else t,
)


def _each(change: Callable[[torch.Tensor], torch.Tensor], a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return change(a)
    return [_each(change, item) for item in a] if isinstance(a, list | tuple) else a


def _samples(part: int, parts: int) -> Iterator[tuple[Any, Any, list[Any], dict[str, Any]]]:
    for op in op_db[part::parts]:
        for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64):
            if dtype not in op.supported_dtypes("cpu"):
                continue
            for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 2):
                for change in _LAYOUTS:
                    with contextlib.suppress(RuntimeError):
                        yield op, _each(change, sample.input), _each(change, list(sample.args)), sample.kwargs


def _check_meta_tensors(part: int, parts: int, sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each call that comes to fake tensors inferred in both ways, and compare all that is known of the results."""
    seen: set[object] = set()
    wrong: list[str] = []
    compared = 0

    def both(call: BoundCall) -> entries.Entry | None:
        nonlocal compared
        by_fake = inference._run_without_values(call, "cpu")
        key = tuple(call.key)
        if call.info.takes_meta and not call.info.is_view and by_fake is not None and key not in seen:
            seen.add(key)
            by_meta = inference._run_without_values(call, "meta")
            compared += by_meta is not None
            if by_meta is not None and (by_meta.outputs, by_meta.changed) != (by_fake.outputs, by_fake.changed):
                wrong.append(f"{call.info.name} {call.key[1:]}: {by_meta.outputs} is not {by_fake.outputs}")
        return by_fake

    monkeypatch.setattr(inference, "_infer_by_fake", both)
    # Without rules, nearly every call comes there.
    monkeypatch.setattr(inference, "_ask_rule", lambda call: None)
    monkeypatch.setattr("skyproxy.tensor.dispatch.hot_path.learn", lambda *args: None)
    monkeypatch.setattr(DEVICES.of(sky), "remember", lambda key, entry: None)
    for op, value, args, kwargs in _samples(part, parts):
        with contextlib.suppress(Exception):
            place = lambda t: t.to(sky)
            learns = op.supports_autograd and isinstance(value, torch.Tensor) and value.is_floating_point()
            there = _each(place, value)
            result = op(there.requires_grad_() if learns else there, *_each(place, args), **kwargs)
            if learns and isinstance(result, torch.Tensor) and result.requires_grad:
                result.sum().backward()
    for _ in range(1000):  # each tells of one sample that was cut to what the worker refuses
        with contextlib.suppress(Exception):
            torch.sky.synchronize(sky)
            break
    assert not wrong, "\n".join(wrong[:20])
    assert compared > 20


@pytest.mark.parametrize("part", [5, 29])
def test_meta_tensors_tell_what_fake_tensors_tell(part: int, sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_meta_tensors(part, 60, sky, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", [3, 11, 19])
def test_meta_tensors_tell_what_fake_tensors_tell_of_many_operators(
    part: int, sky: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `range(24)` it is the whole operator database, by which the operators were chosen, and ten minutes."""
    _check_meta_tensors(part, 24, sky, monkeypatch)


def test_a_call_whose_form_depends_on_values_takes_no_meta_tensors() -> None:
    for op in (torch.ops.aten.nonzero.default, torch.ops.aten._unique2.default, torch.ops.aten.masked_select.default):
        assert not info_of(op).takes_meta


@pytest.mark.parametrize(
    "mistake",
    [
        lambda device: nn.Linear(4, 3, device=device)(torch.ones(2, 4, device=device).half()),
        lambda device: nn.Linear(4, 3, bias=False, device=device)(torch.ones(2, 2, 4, device=device).double()),
        lambda device: nn.Conv2d(3, 2, 1, device=device).half()(torch.ones(1, 3, 4, 4, device=device)),
        lambda device: torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device).half(),
        lambda device: torch.ones(1, 2, 2, device=device).bmm(torch.ones(1, 2, 2, device=device).long()),
        lambda device: torch.addmm(torch.ones(2, device=device).half(), *[torch.ones(2, 2, device=device)] * 2),
        lambda device: torch.ones(2, device=device) @ torch.ones(2, device=device, dtype=torch.complex64),
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_products_of_two_dtypes_raise_at_their_line_in_the_words_of_the_cpu(
    mode: Callable[[], Any], mistake: Callable[[str], Any], sky1: str
) -> None:
    """Kernels without values let them pass, so that the error came where the program waited next."""
    with mode():
        with pytest.raises(RuntimeError) as local:
            mistake("cpu")
        with pytest.raises(RuntimeError) as remote:
            mistake(sky1)
    assert str(remote.value).split("\n")[0] == str(local.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.repeat(1 << 62),
        lambda x: nn.functional.pad(x, (1 << 62, 1 << 62)),
        lambda x: torch.empty(1 << 62, device=x.device),
        lambda x: nn.functional.interpolate(x[None, None], size=1 << 62),
    ],
    ids=["repeat", "pad", "empty", "interpolate"],
)
def test_sizes_that_no_memory_has_are_refused_as_locally(make: Callable[[torch.Tensor], object], sky1: str) -> None:
    for device in ("cpu", sky1):
        with pytest.raises(RuntimeError, match=r"overflow|negative"):
            make(torch.ones(3, device=device))
    assert torch.ones(1, device=sky1).expand(1 << 62).shape == (1 << 62,)


@pytest.mark.parametrize("backward", [torch._softmax_backward_data, torch._log_softmax_backward_data])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("of_input", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_gradients_of_a_softmax_that_converted_have_the_dtype_that_the_device_gives(
    of_input: torch.dtype, dtype: torch.dtype, backward: Callable[..., torch.Tensor], sky1: str
) -> None:
    def compute(device: str) -> torch.Tensor:
        gradient, output = (torch.full((2, 3), value, dtype=dtype, device=device) for value in (0.5, 0.25))
        return backward(gradient, output, 1, of_input)

    assert tree_differences(compute(sky1), compute("cpu")) == []


@pytest.mark.parametrize("name", ["add_", "copy_", "zero_"])
def test_an_op_that_leaves_its_target_looking_as_it_was_is_inferred_by_its_rule(
    sky1: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Calls that take the careful path, too: there, the empty answer of such a rule was taken for none."""
    monkeypatch.setattr(inference, "_infer_by_fake", lambda call: pytest.fail(f"{call.info.name} ran without values"))
    x = torch.ones(3, 5, device=sky1)
    func = {"add_": torch.ops.aten.add_.Tensor, "copy_": torch.ops.aten.copy_.default}.get(name)
    args = (x, x) if func is not None else (x,)
    entry = inference.infer(BoundCall(info_of(func or torch.ops.aten.zero_.default), args, {}))
    assert entry is not None
    assert [output.tensor for output in entry.outputs] == [0]
    assert not entry.changed


@pytest.mark.parametrize("rows", [(1, 3), (3, 3), (2, 3, 3), (0, 3)], ids=str)
def test_complex_equations_from_the_right_are_solved_and_conjugate_as_locally(rows: tuple[int, ...], sky1: str) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 3, dtype=torch.complex64), torch.randn(rows, dtype=torch.complex64)
    expected = torch.linalg.solve(a, b, left=False)
    for _ in range(2):
        found = torch.linalg.solve(a.to(sky1), b.to(sky1), left=False)
        assert (found.is_conj(), found.stride()) == (expected.is_conj(), expected.stride())
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("first", [(0.0, True), (1.0, None), (0.5, False)])
def test_what_a_formula_hands_on_is_a_copy_for_a_kernel_that_makes_results(
    first: tuple[float, bool | None], sky1: str
) -> None:
    """PyTorch's formula gives its argument where nothing is dropped; so did all later calls of that shape."""
    x = torch.ones(3, 7)
    remote = x.to(sky1)
    for p, train in (first, (1.0, True), (0.0, True), (1.0, None), (1.0, False)):
        local, result = torch.native_dropout(x, p, train), torch.native_dropout(remote, p, train)
        if p in (0.0, 1.0):
            assert torch.equal(result[0].cpu(), local[0])
        result[0].add_(1)
        assert torch.equal(remote.cpu(), x)


def test_rows_that_differ_are_dropped_after_a_call_that_dropped_none(sky1: str) -> None:
    rows = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged, device=sky1)
    found = [torch.nn.functional.dropout(rows, p).values().sum().item() for p in (0.0, 1.0)]
    assert found == [20.0, 0.0]


@pytest.mark.parametrize("operation", [lambda x: x + 1, lambda x: x.uniform_(2, 2), torch.neg, torch.Tensor.exp_])
def test_what_computes_each_element_takes_tensors_of_more_than_64_dimensions(
    operation: Callable[[torch.Tensor], torch.Tensor], sky1: str
) -> None:
    """Fake kernels do not, so the worker is asked what the result looks like."""
    x = torch.ones([1] * 69)
    assert torch.equal(operation(x.to(sky1)).cpu(), operation(x))


def test_what_reduces_more_than_64_dimensions_is_refused_at_its_line(sky1: str) -> None:
    for device in ("cpu", sky1):
        with pytest.raises(RuntimeError, match="only tensors with up to 64 dims are supported"):
            torch.ones([1] * 69, device=device).amax(0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64])
@pytest.mark.parametrize("size", [(), (1,), (1, 5), (5, 5)], ids=str)
def test_a_refused_sum_of_products_leaves_its_target_alone(
    sky1: str, size: tuple[int, ...], dtype: torch.dtype
) -> None:
    """PyTorch's kernel resizes the target before it refuses."""
    target, factors = torch.ones(size, dtype=dtype, device=sky1), torch.ones(2, 5, 5, device=sky1)
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        target.addbmm_(factors, factors, beta=3)
    assert target.shape == size
    assert torch.equal((target + 1).cpu(), torch.full(size, 2, dtype=dtype))
    factors = factors.to(dtype)
    expected = torch.ones(size, dtype=dtype).addbmm_(factors.cpu(), factors.cpu(), beta=3)
    target.addbmm_(factors, factors, beta=3)
    assert target.shape == expected.shape
    assert torch.equal(target.cpu(), expected)
