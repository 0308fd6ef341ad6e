"""Ops that are answered, divided or asked for, rather than simply recorded."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from skyproxy.errors import UnsupportedOpError
from tests.conformance.twins import Twins, tree_differences


def _same(compute: Callable[..., Any], device: str, *arguments: Any) -> None:
    ours, theirs = (compute(*Twins(place).of(arguments)) for place in (device, "cpu"))
    assert tree_differences(ours, theirs) == []


@pytest.mark.parametrize("transform", [torch.fft.fftn, torch.fft.ifftn])
def test_a_fourier_transform_over_no_dimension_is_a_complex_copy(sky1: str, transform: Callable[..., Any]) -> None:
    x = torch.randn(3, 4)
    assert torch.equal(transform(x.to(sky1), dim=()).cpu(), transform(x, dim=()))


def test_splitting_at_places_in_a_tensor(sky1: str) -> None:
    x = torch.arange(12.0).view(6, 2)
    _same(lambda a: torch.tensor_split(a, torch.tensor([1, 4])), sky1, x)
    _same(torch.tensor_split, sky1, x, torch.tensor([1, 4]))
    _same(torch.tensor_split, sky1, x, torch.tensor(4))
    _same(lambda a, n: torch.tensor_split(a, n, dim=1), sky1, x, torch.tensor([1]))


@pytest.mark.parametrize("places", [torch.tensor([1.0]), torch.tensor(1.0), torch.tensor([[1]])])
def test_splitting_at_wrong_places_is_refused_in_pytorchs_words(sky1: str, places: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="tensor_split expected") as local:
        torch.tensor_split(torch.ones(4), places)
    with pytest.raises(RuntimeError) as raised:
        torch.tensor_split(torch.ones(4, device=sky1), places.to(sky1))
    assert str(raised.value) == str(local.value)


def test_results_whose_size_depends_on_values(sky1: str) -> None:
    x = torch.tensor([3, 0, 1, 3, 0, 7])
    for function in (torch.nonzero, torch.unique, torch.bincount, torch.argwhere, lambda a: a[a > 0]):
        _same(function, sky1, x)
        _same(function, sky1, x + 1)
    _same(lambda a: torch.unique(a, return_inverse=True, return_counts=True), sky1, x)
    _same(lambda a: torch.repeat_interleave(a, a), sky1, x)


def test_outputs_that_are_resized_have_the_strides_of_the_kernel(sky1: str) -> None:
    matrix = torch.eye(3) * 2 + torch.arange(9.0).view(3, 3)

    def solve(a: torch.Tensor, out: torch.Tensor) -> Any:
        return torch.linalg.inv(a, out=out), out, out + 1

    for _ in range(2):  # the second time from what was learned
        _same(solve, sky1, matrix, torch.empty(0))
        _same(solve, sky1, matrix, torch.ones(3, 3))


def test_the_out_form_of_composites_fills_it(sky1: str) -> None:
    a, b = torch.arange(24.0).view(2, 3, 4), torch.arange(20.0).view(4, 5)
    _same(lambda x, y, out: (torch.matmul(x, y, out=out), out), sky1, a, b, torch.ones(2, 3, 5))
    _same(lambda x, out: (torch.linalg.matrix_rank(x, out=out), out), sky1, b, torch.tensor(7))


_PRODUCTS = {
    "matrices": ((5, 10), (10, 5)),
    "a vector and a matrix": ((10,), (10, 5)),
    "a matrix and a vector": ((5, 10), (10,)),
    "rows of a batch": ((3, 5, 10), (10, 6)),
    "rows of a batch and a vector": ((2, 3, 5, 10), (10,)),
    "a matrix and a batch": ((4, 10), (3, 10, 6)),
    "batches": ((2, 1, 5, 10), (3, 10, 5)),
    "a vector and a batch": ((10,), (3, 10, 5)),
    "nothing": ((0, 5, 10), (10, 6)),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("layout", ["row-major", "turned", "with gaps"])
@pytest.mark.parametrize("name", _PRODUCTS)
def test_a_product_is_rounded_as_the_strides_of_its_out_say(name: str, layout: str, sky1: str) -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        a, b = (torch.randn(size, dtype=dtype) for size in _PRODUCTS[name])
        if layout == "turned" and a.dim() > 1:
            a = a.mT.contiguous().mT
        elif layout == "with gaps":
            a = torch.stack([a, a], -1)[..., 0]
        size = torch.matmul(a, b).shape
        for make in (
            lambda device: torch.ones((*size, 2), dtype=dtype, device=device)[..., 0],  # noqa: B023
            lambda device: torch.ones((*size[:-1], 2 * size[-1]), dtype=dtype, device=device)[..., ::2],  # noqa: B023
            lambda device: torch.empty(0, dtype=dtype, device=device),  # noqa: B023
        ):
            theirs, ours = make("cpu"), make(sky1)
            try:
                torch.matmul(a, b, out=theirs)
            except RuntimeError:  # into a copy of another shape
                continue
            assert torch.matmul(Twins(sky1).of(a), b.to(sky1), out=ours) is ours
            assert ours.stride() == theirs.stride()
            assert torch.equal(ours.cpu(), theirs)


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@pytest.mark.parametrize("bounds", [(0, 1), (0, 1, 0.3), (5, -1, -2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_the_out_form_of_range_resizes_and_fills_it(bounds: tuple[float, ...], dtype: torch.dtype, sky1: str) -> None:
    ours, theirs = torch.empty(0, dtype=dtype, device=sky1), torch.empty(0, dtype=dtype)
    if dtype is torch.int64:
        bounds = tuple(number if number == int(number) else 1 for number in bounds)
    assert torch.range(*bounds, out=ours, device=sky1) is ours
    assert torch.equal(ours.cpu(), torch.range(*bounds, out=theirs))


def test_the_out_form_refuses_what_pytorch_refuses(sky1: str) -> None:
    a = torch.ones(2, 2, device=sky1)
    with pytest.raises(RuntimeError, match=r"Expected out tensor to have dtype"):
        torch.matmul(a, a, out=torch.ones(2, 2, dtype=torch.int64, device=sky1))


@pytest.mark.parametrize(
    "product", [lambda x, z: torch.matmul(x, x, out=z), lambda x, z: torch.matrix_power(x, 2, out=z)]
)
@pytest.mark.parametrize("written", [False, True])
def test_the_out_form_is_not_differentiated(product: Any, written: bool, sky1: str) -> None:
    messages = []
    for device in ("cpu", sky1):
        x = torch.full((2, 2), 2.0, device=device, requires_grad=not written)
        out = torch.zeros(2, 2, device=device, requires_grad=written)
        with pytest.raises(RuntimeError, match="don't support automatic differentiation") as caught:
            product(x, out)
        messages.append(str(caught.value))
        with torch.no_grad():
            assert product(x, out).tolist() == [[8.0, 8.0]] * 2
    assert messages[0] == messages[1]


def test_two_names_of_the_same_memory_are_told_from_two_alike(sky1: str) -> None:
    a = torch.ones(3, device=sky1)
    assert a.is_set_to(a.view(3))
    assert not a.is_set_to(a.clone())
    assert not a.is_set_to(a[:2])


def test_scalars_of_foreach_ops_may_lie_on_the_cpu(sky1: str) -> None:
    tensors = [torch.arange(4.0), torch.ones(2, 2)]
    scalars = torch.tensor([2.0, 0.5])

    def update(a: Any, b: Any, c: Any) -> Any:
        torch._foreach_addcdiv_(a, b, c, scalars)
        return a, torch._foreach_addcmul(a, b, c, scalars * 3)

    _same(update, sky1, tensors, [t + 1 for t in tensors], [t + 2 for t in tensors])


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_packed_sequences_train_as_on_the_cpu(kind: str, batch_first: bool, sky1: str) -> None:
    torch.manual_seed(1)
    original = getattr(torch.nn, kind)(3, 4, batch_first=batch_first, bidirectional=True)
    padded = torch.randn(5, 4, 3) if not batch_first else torch.randn(4, 5, 3)
    lengths = torch.tensor([5, 2, 4, 1])

    def train(device: str, enforce_sorted: bool) -> Any:
        model = copy.deepcopy(original).to(device)
        x = padded.to(device).requires_grad_()
        packed = pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=enforce_sorted)
        result, _ = model(packed)
        unpacked, sizes = pad_packed_sequence(result, batch_first=batch_first)
        unpacked.square().sum().backward()
        assert torch.equal(sizes, lengths)
        return unpacked.detach(), x.grad, [p.grad for p in model.parameters()]

    assert tree_differences(train(sky1, False), train("cpu", False), memory=False) == []


def test_batch_sizes_of_packed_sequences_stay_on_the_cpu(sky1: str) -> None:
    packed = pack_padded_sequence(torch.ones(3, 2, 4, device=sky1), torch.tensor([3, 1]))
    assert packed.data.device == torch.device(sky1)
    assert packed.batch_sizes.device.type == "cpu"
    assert packed.batch_sizes.tolist() == [2, 1, 1]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64])
@pytest.mark.parametrize("indices", [torch.int32, torch.int64])
def test_bags_train_whatever_integers_say_what_is_in_them(
    indices: torch.dtype, offsets: torch.dtype, mode: str, sky1: str
) -> None:
    def compute(device: str) -> Any:
        rows = torch.arange(12.0).view(4, 3).to(device).requires_grad_()
        shares = torch.tensor([1.0, 2, 3], device=device).requires_grad_() if mode == "sum" else None
        places = torch.tensor([0, 2, 1], dtype=indices, device=device)
        begins = torch.tensor([0, 2], dtype=offsets, device=device)
        bags = torch.nn.functional.embedding_bag(places, rows, begins, mode=mode, per_sample_weights=shares)
        bags.square().sum().backward()
        return bags.detach(), rows.grad, None if shares is None else shares.grad

    assert tree_differences(compute(sky1), compute("cpu"), memory=False) == []


def test_embeddings_with_sparse_gradients_train(sky1: str) -> None:
    torch.manual_seed(0)
    original = torch.nn.Embedding(6, 3, sparse=True)

    def train(device: str) -> torch.Tensor:
        model = copy.deepcopy(original).to(device)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([1, 4, 1], device=device)).square().sum().backward()
            assert model.weight.grad.layout is torch.sparse_coo
            optimizer.step()
        return model.weight.detach()

    assert tree_differences(train(sky1), train("cpu")) == []


def test_traced_programs_compute_the_same(sky1: str) -> None:
    x = torch.linspace(-1, 1, 6, device=sky1)
    graph = make_fx(lambda a: (a.tanh() * 2).sum())(x)
    y = x + 1
    torch.testing.assert_close(graph(y).cpu(), (y.cpu().tanh() * 2).sum())


def test_a_change_by_an_op_that_workers_refuse_is_told_to_whoever_reads(sky1: str) -> None:
    for change in (
        lambda x, y: torch.ops.aten._add_relu_.Scalar(x, 2),
        lambda x, y: torch.ops.aten._add_relu_.Tensor(x, y),
        lambda x, y: torch.ops.aten._mkldnn_transpose_(x, 0, 0),
    ):
        x, y = torch.zeros(2, device=sky1), torch.ones(2, device=sky1)
        change(x, y)
        assert y.tolist() == [1.0, 1.0]
        with pytest.raises(UnsupportedOpError, match="list of allowed operations"):
            x.cpu()
        assert x.tolist() == [0.0, 0.0]  # as after any other change that failed


def test_quantized_tensors_are_refused_in_words(sky1: str) -> None:
    x = torch.ones(3, device=sky1)
    with pytest.raises(UnsupportedOpError, match="quantized"):
        torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)
    with pytest.raises(UnsupportedOpError, match="quantized"):
        torch.quantize_per_tensor(x.cpu(), 0.1, 0, torch.quint8).to(sky1)
    assert (x + 1).tolist() == [2.0] * 3


def test_sizes_that_depend_on_values_are_never_remembered(sky1: str) -> None:
    full, poor = torch.tensor([[1.0, 0], [0, 1], [1, 1]]), torch.ones(3, 2)
    right = torch.tensor([[1.0], [2], [4]])
    for matrix in (full, poor, full):
        _same(lambda a, b: tuple(torch.linalg.lstsq(a, b, driver="gelsd")), sky1, matrix, right)
    for mask in ([True, False, True], [True, True, True], [False, False, False]):
        _same(
            lambda a, m, out: torch.masked_select(a, m, out=out), sky1, right[:, 0], torch.tensor(mask), torch.empty(0)
        )


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda x: x @ torch.ones(5, 5, device=x.device), RuntimeError),
        (lambda x: x.view(7), RuntimeError),
        (lambda x: x[5], IndexError),
        (lambda x: torch.cat([x, torch.ones(3, device=x.device)]), RuntimeError),
        (lambda x: torch.linalg.cholesky(-x @ x.t() - torch.eye(2, device=x.device)), torch.linalg.LinAlgError),
    ],
)
def test_what_the_cpu_refuses_is_refused_at_the_same_line(call: Any, kind: type[Exception], sky1: str) -> None:
    with pytest.raises(kind):
        call(torch.ones(2, 3))
    x = torch.ones(2, 3, device=sky1)
    with pytest.raises(kind):
        call(x)
    torch.sky.synchronize()  # type: ignore[attr-defined]
    assert (x + 1).sum().item() == 12.0


@pytest.mark.parametrize("name", ["inv_ex", "cholesky_ex", "lu_factor_ex", "solve_ex", "ldl_factor_ex"])
def test_a_factorization_that_is_told_to_check_raises_where_it_is_called(name: str, sky1: str) -> None:
    def factorize(x: torch.Tensor) -> Any:
        return getattr(torch.linalg, name)(*(x, x) if name == "solve_ex" else (x,), check_errors=True)

    whole = torch.eye(3)
    _same(lambda x: tuple(factorize(x)), sky1, whole)
    for _ in range(2):  # what looks like it went well before, the first time
        with pytest.raises(RuntimeError) as local:
            factorize(whole * 0)
        with pytest.raises(type(local.value)):
            factorize(whole.to(sky1) * 0)
    torch.sky.synchronize()  # type: ignore[attr-defined]


def test_pinning_belongs_to_the_cpu(sky1: str) -> None:
    x = torch.ones(2, device=sky1)
    assert not x.is_pinned()
    with pytest.raises(RuntimeError, match="cannot pin"):
        x.pin_memory()


@pytest.mark.parametrize("function", [torch.nn.functional.silu, torch.nn.functional.mish])
def test_gradients_come_from_the_kernel_and_not_from_a_formula(function: Any, sky1: str) -> None:
    """PyTorch has a formula for devices in general that differs from the kernels in the last bit."""
    torch.manual_seed(0)
    values = torch.randn(1000)
    gradients = []
    for device in ("cpu", sky1):
        x = values.clone().to(device).requires_grad_()
        before = torch.sky.stats()["ops"]  # type: ignore[attr-defined]
        function(x).backward(torch.ones(1000, device=device))
        assert device == "cpu" or torch.sky.stats()["ops"] - before <= 4  # type: ignore[attr-defined]
        assert x.grad is not None
        gradients.append(x.grad.cpu())
    assert torch.equal(*gradients)


def test_integers_are_counted_as_an_accelerator_counts_them(sky1: str) -> None:
    """Libraries that are not on the CPU count integers (experts of a mixture); the CPU's kernel does not."""
    experts = torch.tensor([0, 2, 2, 1, 5], dtype=torch.int32, device=sky1)
    before = torch.sky.stats()["round_trips"]  # type: ignore[attr-defined]
    counts = torch.histc(experts, bins=4, min=0, max=3)
    assert counts.dtype is torch.int32
    assert torch.sky.stats()["round_trips"] == before  # type: ignore[attr-defined]
    assert counts.tolist() == [1, 1, 2, 0]


INDICES = {
    "sorted": [[0, 1], [1, 0]],
    "outside": [[0, 9], [1, 0]],
    "unsorted": [[1, 0], [0, 1]],
    "repeated": [[0, 0], [1, 1]],
}


@pytest.mark.parametrize("coalesced", [None, True, False])
@pytest.mark.parametrize("indices", INDICES)
def test_sparse_arguments_are_checked_as_on_the_cpu(indices: str, coalesced: bool | None, sky: str) -> None:
    def construct(device: str) -> torch.Tensor:
        where, values = torch.tensor(INDICES[indices], device=device), torch.tensor([2.0, 3.0], device=device)
        torch._validate_sparse_coo_tensor_args(where, values, (2, 2), coalesced)
        return torch.sparse_coo_tensor(where, values, (2, 2), is_coalesced=coalesced, check_invariants=True)

    try:
        expected = construct("cpu")
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            construct(sky)
        return
    found = construct(sky)
    assert found.is_coalesced() == expected.is_coalesced()
    assert torch.equal(found.to_dense().cpu(), expected.to_dense())


_LENGTHS: dict[str, Callable[[torch.Tensor, torch.Tensor, str], Any]] = {
    "both on the CPU": lambda a, b, d: (a, b),
    "of int32": lambda a, b, d: (a.int(), b.int()),
    "both on the device": lambda a, b, d: (a.to(d), b.to(d)),
    "one on each": lambda a, b, d: (a, b.to(d)),
    "lists": lambda a, b, d: (a.tolist(), b.tolist()),
}


@pytest.mark.parametrize("lengths", _LENGTHS.values(), ids=_LENGTHS)
@pytest.mark.parametrize(
    "options", [{}, {"zero_infinity": True}, {"reduction": "none"}, {"reduction": "sum", "blank": 4}]
)
@pytest.mark.parametrize("targets_on", ["device", "cpu"])
def test_ctc_loss_with_lengths_wherever_they_are(
    sky1: str, lengths: Callable[..., Any], options: dict[str, Any], targets_on: str
) -> None:
    if targets_on == "cpu" and lengths in (_LENGTHS["both on the device"], _LENGTHS["lists"]):
        pytest.skip("targets on the CPU go with lengths on the CPU")
    scores = torch.randn(8, 2, 5, generator=torch.Generator().manual_seed(0)).log_softmax(2)
    targets, given = torch.tensor([[1, 2, 3], [1, 1, 3]]), (torch.tensor([2, 7]), torch.tensor([3, 2]))

    def compute(device: str) -> Any:
        x = scores.to(device).requires_grad_()
        places = targets.to(device if targets_on == "device" else "cpu")
        loss = torch.nn.functional.ctc_loss(x, places, *lengths(*given, device), **options)
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        with torch.inference_mode():
            again = torch.nn.functional.ctc_loss(x, places, *lengths(*given, device), **options)
        return loss.detach(), gradient, again.clone()

    for ours, theirs in zip(compute(sky1), compute("cpu"), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)


def test_ctc_loss_of_one_sequence_and_of_joined_targets(sky1: str) -> None:
    scores = torch.randn(8, 2, 5, generator=torch.Generator().manual_seed(0)).log_softmax(2)
    joined = torch.tensor([1, 2, 3, 1, 1])
    _same(
        lambda x, y: torch.nn.functional.ctc_loss(x, y, torch.tensor([8, 7]), torch.tensor([3, 2])),
        sky1,
        scores,
        joined,
    )
    _same(
        lambda x, y: torch.nn.functional.ctc_loss(x, y, torch.tensor(8), torch.tensor(2)),
        sky1,
        scores[:, 0],
        joined[:2],
    )


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.tensor([8, 9]), "Expected input_lengths to have value at most 8"),
        (torch.tensor([8]), "input_lengths must be of size batch_size"),
        (torch.tensor([8.0, 7.0]), "input_lengths must be integral"),
    ],
)
def test_ctc_loss_refuses_lengths_in_pytorchs_words(sky1: str, lengths: torch.Tensor, message: str) -> None:
    for place in ("cpu", sky1):
        scores, targets = torch.zeros(8, 2, 5, device=place), torch.ones(2, 3, dtype=torch.long, device=place)
        with pytest.raises(RuntimeError, match=message):
            torch.nn.functional.ctc_loss(scores, targets, lengths, torch.tensor([3, 2]))


def test_compressed_indices_are_checked_as_by_the_cpu(sky1: str) -> None:
    rows, columns = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
    torch._validate_compressed_sparse_indices(True, rows.to(sky1), columns.to(sky1), 2, 2, 2)
    with pytest.raises(RuntimeError, match="crow_indices"):
        torch._validate_compressed_sparse_indices(True, (rows + 1).to(sky1), columns.to(sky1), 2, 2, 2)


def test_references_in_python_and_their_primitives_work(sky1: str) -> None:
    x = torch.arange(6.0).view(2, 3)
    _same(lambda a: (torch._refs.sum(a, 0), torch._refs.softmax(a, 1), torch._refs.add(a, a, alpha=2)), sky1, x)
    _same(
        lambda a: torch._prims.convert_element_type(torch._prims.broadcast_in_dim(a, (2, 2, 3), (1, 2)), torch.int64),
        sky1,
        x,
    )


@pytest.mark.parametrize("axis", [0, -1])
def test_segments_count_from_either_end(axis: int, sky1: str) -> None:
    lengths = torch.tensor([1, 3])

    def reduce(data: torch.Tensor, lengths: torch.Tensor) -> Any:
        data = data.clone().requires_grad_()
        reduced = torch.segment_reduce(data, "mean", lengths=lengths, axis=axis)
        reduced.sum().backward()
        return reduced, data.grad

    _same(reduce, sky1, torch.arange(4.0), lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool], ids=str)
def test_a_tensor_that_is_not_quantized_is_dequantized_as_on_the_cpu(dtype: torch.dtype, sky: str) -> None:
    here = torch.ones(2, 3, dtype=dtype).t()
    there = here.to(sky)
    made = there.dequantize()
    assert (made.dtype, made.stride()) == (torch.float32, here.dequantize().stride())
    assert torch.equal(made.cpu(), here.dequantize())
    assert (made is there) == (here.dequantize() is here)


def test_real_coefficients_combine_complex_tensors(sky: str) -> None:
    tensors, coefficients = torch.randn(4, 3, dtype=torch.complex64), torch.randn(2, 4)
    there = tensors.to(sky)
    found = torch._compute_linear_combination(there, coefficients.to(sky))
    assert torch.equal(found.cpu(), torch._compute_linear_combination(tensors, coefficients))
    with pytest.raises(RuntimeError, match="another dtype"):
        torch._compute_linear_combination(there, coefficients.to(sky).double()).cpu()


@pytest.mark.parametrize("values", [torch.linalg.svdvals, torch.linalg.eigvalsh, torch.linalg.eigvals])
def test_values_of_a_matrix_are_differentiated_by_an_outer_transform(
    sky1: str, values: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """The inner transform sees a tensor that requires no gradient."""

    def change(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        of_y = torch.func.jvp(lambda b: values(torch.diag_embed(x) + 1).abs() * b, (y,), (y,))[1]
        return of_y.sum()

    x, y = torch.tensor([0.3, 0.5, 0.9]), torch.tensor([1.0, 2.0, -1.0])
    ours = torch.func.grad(change)(x.to(sky1), y.to(sky1))
    assert torch.equal(ours.cpu(), torch.func.grad(change)(x, y))
