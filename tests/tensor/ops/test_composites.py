"""Composites without gradients: one op, the same bits, and divided wherever somebody looks at the parts."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from skyproxy.tensor.dispatch import hot_path


def _ops() -> int:
    return int(torch.sky.stats()["ops"])


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_is_one_op_and_gives_the_same_bits(rank: int, has_bias: bool, sky: str) -> None:
    x, weight = torch.randn([2, 3, 5, 8][-rank:]), torch.randn(6, 8)
    bias = torch.randn(6) if has_bias else None
    remote = [None if t is None else t.to(sky) for t in (x, weight, bias)]
    expected = linear(x, weight, bias)
    with torch.no_grad():
        before = _ops()
        result = linear(*remote)
        assert _ops() - before == 1
    assert torch.equal(result.cpu(), expected)
    assert result.stride() == expected.stride()


@pytest.mark.parametrize(
    ("a", "b"), [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 7, 3, 4), (2, 7, 4, 5)), ((4,), (4,)), ((3, 4), (2, 4, 5))]
)
def test_matmul_is_one_op_and_gives_the_same_bits(a: tuple[int, ...], b: tuple[int, ...], sky: str) -> None:
    x, y = torch.randn(a), torch.randn(b)
    there = x.to(sky), y.to(sky)
    with torch.no_grad():
        before = _ops()
        result = there[0] @ there[1]
        assert _ops() - before == 1
    assert torch.equal(result.cpu(), x @ y)
    assert result.stride() == (x @ y).stride()


@pytest.mark.parametrize(
    ("batch", "weight"), [((2, 3, 0), (0, 4)), ((2, 3, 0), (0,)), ((2, 0, 0), (0, 0)), ((0, 3, 0), (0, 4))]
)
def test_a_batch_of_empty_rows_is_multiplied_with_a_weight(
    batch: tuple[int, ...], weight: tuple[int, ...], sky: str
) -> None:
    """PyTorch takes one product of all rows, whose number no `-1` can stand for where they have no elements."""
    with torch.no_grad():
        found, expected = (
            torch.zeros(batch, device=device) @ torch.zeros(weight, device=device, requires_grad=True)
            for device in (sky, "cpu")
        )
    assert found.stride() == expected.stride()
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_that_require_gradients_are_multiplied_as_here(mode: type, sky: str) -> None:
    """The last position of a batch: PyTorch takes one product if the weight requires gradients, and several if not."""
    torch.manual_seed(0)
    states, weight = torch.randn(2, 6, 32), torch.nn.Parameter(torch.randn(99, 32))
    there, remote = states.to(sky), torch.nn.Parameter(weight.detach().to(sky))
    vector, there_too = torch.nn.Parameter(torch.randn(32)), torch.nn.Parameter(torch.zeros(32, device=sky))
    there_too.data.copy_(vector.data)
    pairs: list[tuple[Callable[..., torch.Tensor], list[torch.Tensor], list[torch.Tensor]]] = [
        (lambda x, w, v: linear(x[:, -1:], w), [there, remote, there_too], [states, weight, vector]),
        (
            lambda x, w, v: linear(x.transpose(0, 1), w, x[0, 0].sum().expand(99)),
            [there, remote, there_too],
            [states, weight, vector],
        ),
        (lambda x, w, v: linear(x[:, -1:], w.detach()), [there, remote, there_too], [states, weight, vector]),
        (lambda x, w, v: x[:, ::2] @ w.t(), [there, remote, there_too], [states, weight, vector]),
        (lambda x, w, v: x[:, ::2] @ v, [there, remote, there_too], [states, weight, vector]),
        (lambda x, w, v: w @ x.mT, [there, remote, there_too], [states, weight, vector]),
        (lambda x, w, v: v @ x.mT, [there, remote, there_too], [states, weight, vector]),
    ]
    for compute, ours, theirs in pairs:
        with mode():
            found, expected = compute(*ours), compute(*theirs)
            assert found.is_inference() == expected.is_inference()
            assert found.stride() == expected.stride()
            assert torch.equal(found.cpu(), expected)


def test_nothing_is_divided_where_gradients_could_be_but_no_argument_requires_one(sky: str) -> None:
    x, weight = torch.randn(2, 3, 8), torch.randn(6, 8)
    there = x.to(sky), weight.to(sky)
    before = _ops()
    results = linear(*there), there[0] @ there[0][0].t()
    assert _ops() - before == 4  # two products, a select and a transpose
    assert torch.equal(results[0].cpu(), linear(x, weight))
    assert torch.equal(results[1].cpu(), x @ x[0].t())


def test_tangents_are_those_of_the_parts(sky: str) -> None:
    x, tangent, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(6, 8)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), forward_ad.dual_level():
            dual = forward_ad.make_dual(x.to(sky), tangent.to(sky))
            found = forward_ad.unpack_dual(linear(dual, weight.to(sky))).tangent
            theirs = forward_ad.unpack_dual(linear(forward_ad.make_dual(x, tangent), weight)).tangent
        assert torch.equal(found.cpu(), theirs)


def test_gradients_are_those_of_the_parts(sky: str) -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(6, 8, requires_grad=True), torch.randn(6, requires_grad=True)
    linear(x, weight, bias).square().sum().backward()
    there = [t.detach().to(sky).requires_grad_(t.requires_grad) for t in (x, weight, bias)]
    linear(*there).square().sum().backward()
    for mine, theirs in zip(there, (x, weight, bias), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad.cpu(), theirs.grad)


def test_modes_and_transforms_see_the_parts(sky: str) -> None:
    x, weight = torch.randn(3, 8, device=sky), torch.randn(6, 8, device=sky)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        linear(x, weight)
    assert counter.get_total_flops() == 2 * 3 * 8 * 6
    with torch.no_grad():
        rows = torch.vmap(lambda row: linear(row, weight))(x)
    torch.testing.assert_close(rows.cpu(), linear(x.cpu(), weight.cpu()))


def test_autocast_casts_undivided_ops(sky: str) -> None:
    x, weight = torch.randn(3, 8, device=sky), torch.randn(6, 8, device=sky)
    with torch.no_grad(), torch.autocast("sky", dtype=torch.bfloat16):
        assert linear(x, weight).dtype is torch.bfloat16
        assert (x @ weight.t()).dtype is torch.bfloat16


def test_a_wrong_shape_is_pytorch_s_error(sky: str) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(torch.ones(3, 7, device=sky), torch.ones(6, 8, device=sky))
    with torch.no_grad(), pytest.raises(RuntimeError, match="same device"):
        linear(torch.ones(3, 8), torch.ones(6, 8, device=sky))


@pytest.mark.parametrize(("classes", "count"), [([3], 2), ([-1], 3), ([-2], -1), ([], -1), ([0.5], 2)], ids=str)
def test_one_hot_refuses_what_it_refuses_here(classes: list[float], count: int, sky: str) -> None:
    """For tensors of Python, PyTorch has a form of it that makes zeros of classes that are out of range."""
    local = torch.tensor(classes) if classes else torch.empty(0, dtype=torch.int64)
    with pytest.raises(RuntimeError) as expected:
        torch.nn.functional.one_hot(local, count)
    with pytest.raises(RuntimeError) as got:
        torch.nn.functional.one_hot(local.to(sky), count).cpu()
    assert str(got.value).splitlines()[0] == str(expected.value).splitlines()[0]


@pytest.mark.parametrize(("size", "count"), [((2, 3), 5), ((2, 3), -1), ((), 5), ((0,), 5)], ids=str)
def test_one_hot_is_one_op_and_divided_for_those_who_look_at_the_parts(
    size: tuple[int, ...], count: int, sky: str
) -> None:
    local = torch.randint(0, 5, size)
    remote = local.to(sky)
    expected = torch.nn.functional.one_hot(local, count)
    before = _ops()
    result = torch.nn.functional.one_hot(remote, count)
    assert _ops() - before == 1 or count == -1  # the largest class is asked for
    assert torch.equal(result.cpu(), expected)
    assert result.stride() == expected.stride()
    if size == (2, 3) and count > 0:
        rows = torch.func.vmap(lambda row: torch.nn.functional.one_hot(row, count))(remote)
        assert torch.equal(rows.cpu(), expected)


def test_classes_that_are_no_whole_numbers_are_refused_in_pytorchs_words(sky: str) -> None:
    for device in ("cpu", sky):
        with pytest.raises(RuntimeError, match="index tensor of type LongTensor"):
            torch.nn.functional.one_hot(torch.tensor([float("nan")], device=device))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(2, 2), (2,)], ids=str)
def test_a_product_is_not_written_into_another_dtype(shape: tuple[int, ...], dtype: torch.dtype, sky: str) -> None:
    for device in ("cpu", sky):
        x = torch.ones(shape, device=device)
        with pytest.raises(RuntimeError, match="dtype"):
            torch.matmul(x, x, out=torch.zeros((2, 2) if len(shape) == 2 else (), dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mode", ["plain", "gradients", "no_grad", "inference", "vmap"])
@pytest.mark.parametrize("size", [(2, 3, 6), (1, 3, 6), (3, 6), (2, 1, 6), (0, 3, 6)], ids=str)
def test_pooling_along_one_dimension_is_the_kernel_that_the_cpu_takes(
    sky1: str, size: tuple[int, ...], mode: str, dtype: torch.dtype
) -> None:
    """What nobody differentiates has a kernel of its own there, whose results are row-major and no views."""
    rows = torch.rand(size).mul(9).to(dtype)
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}

    def pool(x: torch.Tensor, device: str, **options: Any) -> tuple[torch.Tensor, ...]:
        with modes.get(mode, contextlib.nullcontext)():
            x = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device).copy_(x)
            x.requires_grad_(mode in ("gradients", "no_grad"))
            if mode == "vmap":
                return (torch.func.vmap(lambda a: F.max_pool1d(a, 2, **options))(x[None]),)
            result = F.max_pool1d(x, 2, **options)
        if mode != "gradients":
            return (result,)
        (gradient,) = torch.autograd.grad(result.sum(), x)
        return result.detach(), gradient

    for x in (rows, rows.transpose(-1, -2).contiguous().transpose(-1, -2), torch.cat([rows, rows], -1)[..., ::2]):
        for options in ({}, {"stride": 1, "padding": 1, "ceil_mode": True}, {"dilation": 2}):
            for ours, theirs in zip(pool(x, sky1, **options), pool(x, "cpu", **options), strict=True):
                assert ours.stride() == theirs.stride()
                assert (ours._base is None) == (theirs._base is None)
                assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dropout_rounds_as_the_cpu_does_with_every_probability(dtype: torch.dtype, sky1: str) -> None:
    """Accelerators scale by a number in float32 what CPUs multiply by one of the tensor's dtype."""
    x = torch.linspace(-3, 3, 96).reshape(2, 3, 4, 4).to(dtype)
    for p in (0.0, 0.1, 0.15, 0.42, 0.5, 0.71, 1.0):
        for layout in (torch.contiguous_format, torch.channels_last):
            found = []
            for device in ("cpu", sky1):
                leaf = x.to(device, memory_format=layout, copy=True).requires_grad_()
                torch.manual_seed(5)
                result = F.dropout(leaf, p)
                (first,) = torch.autograd.grad(result.pow(3).sum(), leaf, create_graph=True)
                first.square().sum().backward()
                with torch.inference_mode():
                    whole = F.dropout(leaf, p)
                found.append([result.detach(), first.detach(), leaf.grad, whole])
                found[-1].append(result.grad_fn and result.grad_fn.name())
            assert found[0].pop() == found[1].pop()
            for expected, remote in zip(*found, strict=True):
                assert remote.stride() == expected.stride()
                assert torch.equal(remote.cpu(), expected), (p, layout)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("rows", [[], [0], [2, 2, 2], [0, 0, 1, 3, 3, 5]])
def test_indices_are_compressed_and_expanded_as_here(rows: list[int], narrow: bool, sky1: str) -> None:
    local = torch.tensor(rows, dtype=torch.int64)
    remote, waits = local.to(sky1), torch.sky.stats()["round_trips"]
    pointers = [torch._convert_indices_from_coo_to_csr(x, 7, out_int32=narrow) for x in (local, remote)]
    pairs = [
        torch._convert_indices_from_csr_to_coo(p.long(), x, out_int32=narrow, transpose=transposed)
        for transposed in (False, True)
        for p, x in zip(pointers, (local, remote), strict=True)
    ]
    assert torch.sky.stats()["round_trips"] == waits
    for expected, found in (pointers, pairs[:2], pairs[2:]):
        assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
        assert torch.equal(found.cpu(), expected)


def test_indices_of_several_matrices_are_expanded_as_here(sky1: str) -> None:
    pointers = torch.tensor([[[0, 1, 3], [0, 2, 3]], [[0, 0, 3], [0, 3, 3]], [[0, 0, 3], [0, 3, 3]]])
    columns = torch.arange(18).reshape(3, 2, 3)
    expected = torch._convert_indices_from_csr_to_coo(pointers, columns)
    assert torch.equal(torch._convert_indices_from_csr_to_coo(pointers.to(sky1), columns.to(sky1)).cpu(), expected)


def test_a_product_of_a_sparse_matrix_is_added_to_nothing(sky: str) -> None:
    sparse, dense = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]]).to_sparse(), torch.arange(6.0).view(3, 2)
    for _ in range(2):
        found = torch.smm(sparse.to(sky), dense.to(sky))
        assert torch.equal(found.to_dense().cpu(), torch.smm(sparse, dense).to_dense())


def test_copies_of_parts_are_not_written_where_gradients_are_wanted(sky1: str) -> None:
    messages = []
    for device in ("cpu", sky1):
        x = torch.ones(2, 3, device=device)
        parts = [torch.zeros(3, device=device, requires_grad=True) for _ in x]
        with pytest.raises(RuntimeError, match="don't support automatic differentiation") as caught:
            torch.unbind_copy(x, out=parts)
        messages.append(str(caught.value))
        with torch.no_grad():
            torch.unbind_copy(x, out=parts)
        assert [part.tolist() for part in parts] == [[1.0] * 3] * 2
    assert messages[0] == messages[1]


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
def test_a_range_into_a_view_of_as_many_elements_keeps_its_shape(sky1: str) -> None:
    ours, theirs = torch.zeros(2, 3, device=sky1), torch.zeros(2, 3)
    into, there = ours.narrow(1, 1, 2), theirs.narrow(1, 1, 2)
    torch.range(0, 3, out=into, device=sky1)
    torch.range(0, 3, out=there)
    assert torch.equal(ours.cpu(), theirs)
    assert into.shape == there.shape


@pytest.mark.parametrize("bias", [torch.float64, torch.int32, torch.complex64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("batch", [(2,), (2, 2), (2, 3, 2)])
def test_a_bias_of_another_dtype_is_added_in_place(
    batch: tuple[int, ...], dtype: torch.dtype, bias: torch.dtype, sky1: str
) -> None:
    """ATen's sum for tensors of classes gave another dtype, where the CPU keeps the input's or raises."""
    found = []
    for device in ("cpu", sky1):
        x = torch.ones(1, *batch[1:], 3, dtype=dtype, device=device).expand(*batch, 3)
        weight = torch.ones(4, 3, dtype=dtype, device=device, requires_grad=dtype.is_floating_point)
        try:
            result = linear(x, weight, torch.ones(4, dtype=bias, device=device))
            found.append(f"{result.dtype} {result.stride()} {result.tolist()}")
        except RuntimeError as error:
            found.append(str(error).partition("\n")[0])
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_composite_conjugates_a_number_of_the_cpu(mode: Callable[[], Any], sky1: str) -> None:
    number, others = torch.tensor(1 + 2j), torch.tensor([3 + 1j, 2 - 5j])
    with mode():
        for x in (number, number.conj(), -number.conj().imag, number.conj().imag + 0j):
            expected = torch.linalg.vecdot(x.to(others.dtype), others)
            for _ in range(2):  # the second call finds what the first one left
                assert torch.linalg.vecdot(x.to(others.dtype), others.to(sky1)).cpu() == expected


_NOTING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "group_norm": lambda x: F.group_norm(x, 2, x.new_ones(4), x.new_zeros(4)),
    "group_norm, bare": lambda x: F.group_norm(x, 4),
    "layer_norm": lambda x: F.layer_norm(x, (6, 6), x.new_ones(6, 6), x.new_zeros(6, 6)),
    "layer_norm, bare": lambda x: F.layer_norm(x, (6,)),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "max_pool2d, ceil": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
}


@pytest.mark.parametrize("name", _NOTING)
def test_what_is_noted_for_derivatives_is_not_made_without_them(
    name: str, sky1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> NoReturn:
        raise AssertionError("an operation has given several tensors")

    monkeypatch.setattr(hot_path, "new_tensors", refuse)
    x = torch.rand(2, 4, 6, 6)
    leaf = x.to(sky1).requires_grad_()
    for _ in range(2):  # a form that was not seen, and one that was
        with torch.no_grad():
            assert torch.equal(_NOTING[name](leaf).cpu(), _NOTING[name](x))
    with pytest.raises(AssertionError, match="several"):
        _NOTING[name](leaf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["plain", "gradients", "no_grad", "inference", "vmap"])
@pytest.mark.parametrize("name", _NOTING)
def test_norms_and_windows_are_the_cpus_in_every_mode(name: str, mode: str, dtype: torch.dtype, sky1: str) -> None:
    call = _NOTING[name]
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    base = torch.rand(2, 4, 6, 6).mul(9).to(dtype)
    others = (base.contiguous(memory_format=torch.channels_last), base.mT)  # of which vmap refuses some, everywhere
    for x in (base, *(() if mode == "vmap" else others)):
        found = []
        for device in ("cpu", sky1):
            with modes.get(mode, contextlib.nullcontext)():
                leaf = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device).copy_(x)
                leaf.requires_grad_(mode in ("gradients", "no_grad"))
                result = torch.func.vmap(call)(leaf[None]) if mode == "vmap" else call(leaf)
            if mode == "gradients":
                result.sum().backward()
            found.append((result.detach().cpu(), result.stride(), result.requires_grad, leaf.grad))
        ours, theirs = found[1], found[0]
        assert torch.equal(ours[0], theirs[0])
        assert ours[1:3] == theirs[1:3]
        assert (ours[3] is None) == (theirs[3] is None)
        if theirs[3] is not None and ours[3] is not None:
            torch.testing.assert_close(ours[3].cpu(), theirs[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize(
    ("size", "stride"),
    [((3, 1, 4), (4, 12, 1)), ((3, 1, 4), (4, 4, 1)), ((1, 3, 4), (1, 1, 3)), ((2, 1, 3, 4), (12, 7, 4, 1))],
)
def test_strides_of_size_one_decide_how_a_batch_is_multiplied(
    size: tuple[int, ...],
    stride: tuple[int, ...],
    mode: Callable[[], Any],
    has_bias: bool,
    dtype: torch.dtype,
    sky: str,
) -> None:
    for seed in range(8):  # the last bit of some
        torch.manual_seed(seed)
        x, weight = torch.randn(size).to(dtype), torch.nn.Parameter(torch.randn(12, 4).to(dtype))
        bias = torch.nn.Parameter(torch.randn(12).to(dtype)) if has_bias else None
        there = [torch.nn.Parameter(t.detach().to(sky)) if t is not None else None for t in (weight, bias)]
        with mode():
            local = torch.empty_strided(size, stride, dtype=dtype).copy_(x)
            remote = torch.empty_strided(size, stride, dtype=dtype, device=sky).copy_(local)
            assert torch.equal(linear(remote, *there).cpu(), linear(local, weight, bias))
            assert torch.equal((remote @ there[0].t()).cpu(), local @ weight.t())


def test_weights_made_in_inference_mode_are_multiplied_as_here(sky: str) -> None:
    x = torch.randn(3, 1, 4).as_strided((3, 1, 4), (4, 12, 1))
    with torch.inference_mode():
        for seed in range(8):
            torch.manual_seed(seed)
            layer = torch.nn.Linear(4, 12, bias=False)
            assert torch.equal(linear(x.to(sky), layer.weight.to(sky).requires_grad_()).cpu(), layer(x))


@pytest.mark.parametrize("stride", [(4, 1, 7), (4, 1, 16), (1, 4, 4), (8, 2, 1)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_norm_of_channels_lies_as_on_the_cpu(mode: Callable[[], Any], stride: tuple[int, ...], sky: str) -> None:
    with mode():
        local, remote = (torch.empty_strided((4, 4, 1), stride, device=place) for place in ("cpu", sky))
        remote.copy_(local.copy_(torch.randn(4, 4, 1)))
        expected, found = F.group_norm(local, 2), F.group_norm(remote, 2)
    assert found.stride() == expected.stride()
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("batch", [1, 2])
def test_layers_of_attention_are_the_cpus(batch: int, mode: Callable[[], Any], learns: bool, sky: str) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        images = torch.randn(batch, 4, 4, 2)
        attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        layer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=seed % 2 == 0)
        for module in (attention.eval().requires_grad_(learns), layer.eval().requires_grad_(learns)):
            found, expected = (
                _attended(copy.deepcopy(module).to(device), images.to(device), mode) for device in (sky, "cpu")
            )
            assert torch.equal(found.cpu(), expected)
            assert found.stride() == expected.stride()


def _attended(module: torch.nn.Module, images: torch.Tensor, mode: Callable[[], Any]) -> torch.Tensor:
    rows = images.flatten(2).transpose(1, 2)
    with mode():
        result = module(rows, rows, rows)[0] if isinstance(module, torch.nn.MultiheadAttention) else module(rows)
    assert isinstance(result, torch.Tensor)
    return result
