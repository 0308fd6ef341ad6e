"""Checks before kernels that trust their arguments: what is right passes unchanged, what is not never gets there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from skyproxy_server.kernel_checks import CHECKS
from skyproxy_server.op_overrides import CPU_OVERRIDES
from skyproxy_server.safe_forms import SAFE_FORMS

FLOATS, SIX = torch.ones, torch.ones(6)


COMPOSITES = {
    "embedding_backward",
    "embedding_sparse_backward",
    "gather_backward",
    "_gather_sparse_backward",
    "histogramdd",
    "thnn_conv2d",
    "fused_moving_avg_obs_fake_quant",
    "grid_sampler",
    "scaled_dot_product_attention",
    "_weight_norm",
    "_scaled_dot_product_attention_math",
}
"""PyTorch divides them before anybody sees them."""


class Compared(TorchDispatchMode):
    """Holds each checked op against its safe form, with the arguments that PyTorch itself gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]  # some are changed in place
        result = func(*args, **(kwargs or {}))
        if name in CHECKS:
            self.seen.add(name)
            again = SAFE_FORMS[func.name()](*copies, **(kwargs or {}))
            torch.testing.assert_close(again, result, rtol=0, atol=0, equal_nan=True)
        return result


def backward_of(result: torch.Tensor) -> None:
    result.backward(torch.rand_like(result))


def leaf(*shape: int) -> torch.Tensor:
    return torch.rand(shape, requires_grad=True)


def test_what_pytorch_itself_asks_for_passes_unchanged() -> None:
    with Compared() as compared:
        for reduction in ("none", "mean", "sum"):
            labels = torch.tensor([0, -100, 3])
            backward_of(F.nll_loss(leaf(3, 4), labels, reduction=reduction, weight=torch.rand(4)))
            backward_of(F.nll_loss(leaf(4), torch.tensor(2), reduction=reduction))
            backward_of(F.cross_entropy(leaf(2, 4, 3, 3), torch.randint(4, (2, 3, 3)), reduction=reduction))
            many = torch.tensor([[0, 2, -1, 1], [-1, 0, 0, 0]])
            backward_of(F.multilabel_margin_loss(leaf(2, 4), many, reduction=reduction))
        backward_of(F.layer_norm(leaf(2, 3, 4), (3, 4), leaf(3, 4), leaf(3, 4)))
        backward_of(F.layer_norm(leaf(2, 3, 4), (4,)))
        backward_of(F.group_norm(leaf(2, 4, 3, 3), 2, leaf(4), leaf(4)))
        backward_of(F.pdist(leaf(6, 3)))
        backward_of(F.pad(leaf(3, 9), (8, 8), mode="reflect"))
        backward_of(F.pad(leaf(1, 3, 4, 5), (1, 2, 3, 0), mode="reflect"))
        backward_of(F.pad(leaf(2, 3, 5, 5, 5), (1, 2, 3, 4, 0, -1), mode="reflect"))
        backward_of(F.pad(leaf(3, 4), (8, -1), mode="replicate"))
        backward_of(F.pad(leaf(1, 3, 4, 5), (1, 2, -3, 9), mode="replicate"))
        backward_of(F.pad(leaf(2, 3, 5, 5, 5), (1, 2, 3, 4, 0, -1), mode="replicate"))
        for reduce in ("sum", "amax"):
            matrix = torch.eye(5).to_sparse_csr().requires_grad_()
            backward_of(torch.sparse.mm(matrix, leaf(5, 3), reduce))
        torch._transform_bias_rescale_qkv(torch.rand(2, 3, 24), torch.rand(24), 4)
        ask_as_layers_do()
        ask_directly()
    apart = ("sobol", "random", "_fused_a", "_fused_sgd")
    assert compared.seen == {name for name in CHECKS if not any(part in name for part in apart)} - COMPOSITES


def test_fused_steps_of_pytorchs_optimizers_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    for kind, options in (
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.Adagrad, {}),
    ):
        packet = f"_fused_{kind.__name__.lower()}_"
        op = getattr(torch, packet)

        def checked(*args: Any, op: Any = op, packet: str = packet, **kwargs: Any) -> Any:
            names = [argument.name for argument in getattr(torch.ops.aten, packet).default._schema.arguments]
            CHECKS[packet](dict(zip(names, args, strict=False)) | kwargs)
            seen.append(packet)
            return op(*args, **kwargs)

        monkeypatch.setattr(torch, packet, checked)
        parameters = [leaf(3, 4), leaf(2, 3, 4, 5).detach().to(memory_format=torch.channels_last).requires_grad_()]
        optimizer = kind(parameters, lr=0.1, fused=True, **options)  # type: ignore[arg-type]
        for _ in range(2):
            sum(parameter.square().sum() for parameter in parameters).backward()  # type: ignore[union-attr]
            optimizer.step()
    assert set(seen) == {"_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"}


def ask_as_layers_do() -> None:
    backward_of(F.softmax(leaf(3, 4), 1))
    backward_of(F.log_softmax(leaf(3, 4), 0))
    backward_of(torch._masked_softmax(leaf(2, 2, 3, 3), torch.zeros(2, 2, 3, 3, dtype=torch.bool), -1, 2))
    backward_of(F.grid_sample(leaf(1, 2, 4, 4), leaf(1, 3, 3, 2), align_corners=False))
    backward_of(F.grid_sample(leaf(1, 2, 4, 4, 4), leaf(1, 3, 3, 3, 3), align_corners=True))
    for dim in (0, 1):
        backward_of(torch._weight_norm(leaf(3, 4), leaf(3, 1) if dim == 0 else leaf(1, 4), dim))
    for sizes, dim in (((8, 3), 0), ((2, 9), -1), ((), 0)):
        backward_of(leaf(*sizes).unfold(dim, 1 if not sizes else 3, 2))
    torch.histogram(torch.rand(9), 4)
    torch.histogram(torch.rand(9), torch.arange(4.0))
    torch.histogramdd(torch.rand(9, 2), [3, 4])


def ask_directly() -> None:
    aten = torch.ops.aten
    aten.range.step(0, 5, 2)
    aten._fused_sdp_choice(torch.rand(1, 4, 3, 8), torch.rand(1, 2, 3, 8), torch.rand(1, 2, 3, 8), enable_gqa=True)
    for dtype in (torch.float32, torch.complex64):
        aten._compute_linear_combination(torch.rand(3, 2, 2, dtype=dtype), torch.rand(4, 3, dtype=dtype))
    for dtype in (torch.float32, torch.complex64):
        numbers = torch.rand(3, 4, dtype=dtype)
        aten._logcumsumexp(numbers, 1)
        aten._logcumsumexp.out(numbers, 0, out=torch.empty(3, 4, dtype=dtype))
    aten._grid_sampler_2d_cpu_fallback(torch.rand(1, 2, 4, 4), torch.rand(1, 3, 3, 2), 0, 0, False)
    for by_frequency in (False, True):
        aten.embedding_dense_backward(torch.rand(3, 2), torch.tensor([0, 4, 1]), 5, 4, by_frequency)
    aten._cholesky_solve_helper(torch.rand(2, 3, 2), torch.eye(3).expand(2, 3, 3).clone(), True)
    aten.sparse_coo_tensor.size([2, 3])
    aten._sparse_coo_tensor_with_dims(1, 1, [2, 3], layout=torch.sparse_coo)
    torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.rand(2), (3,))
    images, weight = torch.rand(1, 2, 5, 5), torch.rand(3, 2, 3, 3)
    result = aten._slow_conv2d_forward(images, weight, [3, 3], None, [1, 1], [0, 0])
    aten._slow_conv2d_backward.output_mask(result, images, weight, [3, 3], [1, 1], [0, 0], [True, True, False])
    offsets = torch.tensor([0, 2, 2, 5])
    padded = aten._jagged_to_padded_dense_forward(torch.rand(5, 3), [offsets], [4], 0.5)
    aten._padded_dense_to_jagged_forward(padded, [offsets], 5)
    aten._nested_compute_contiguous_strides_offsets(torch.tensor([[2, 3], [4, 3]]))
    on = torch.ones(1, dtype=torch.int64)
    for rows, count in ((False, 1), (True, 2)):
        rest = torch.ones(count), torch.ones(count), torch.ones(count), torch.ones(count, dtype=torch.int32)
        aten._fused_moving_avg_obs_fq_helper_functional(torch.rand(2, 3), on, on, *rest, 0.1, 0, 255, 0, rows)
        aten._fused_moving_avg_obs_fq_helper(torch.rand(2, 3), on, on, *rest, 0.1, 0, 255, 0, rows)


def test_sequences_of_sobol_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw() -> list[torch.Tensor]:
        drawn = []
        for dimension, scramble in ((1, False), (3, True), (21, True)):
            engine = torch.quasirandom.SobolEngine(dimension, scramble=scramble, seed=3)
            drawn += [engine.draw(5), engine.fast_forward(7).draw(3), engine.reset().draw(1)]
        return drawn

    alone = draw()
    called: set[str] = set()

    def watched(name: str) -> Any:
        def call(*arguments: Any, **given: Any) -> Any:
            called.add(name)
            return SAFE_FORMS[f"aten::{name}"](*arguments, **given)

        return call

    names = {name for name in CHECKS if "sobol" in name}
    for name in names:
        monkeypatch.setattr(torch, name, watched(name))
    assert all(map(torch.equal, draw(), alone))
    assert called == names


PAIR = {"grad_output": FLOATS(2, 3), "output": FLOATS(2, 3)}
NORMS = {
    "grad_w": FLOATS(2, 3),
    "saved_v": FLOATS(2, 3),
    "saved_g": FLOATS(2, 1),
    "saved_norms": FLOATS(2, 1),
    "dim": 0,
}
EMPTY_NORMS = dict.fromkeys(("saved_g", "saved_norms"), FLOATS(0, 1))
WINDOWS = {"grad_in": FLOATS(2, 2, 3), "input_sizes": [2, 6], "dim": 1, "size": 3, "step": 2}
CONVOLUTION = {
    "self": FLOATS(1, 2, 5, 5),
    "weight": FLOATS(3, 2, 3, 3),
    "kernel_size": [3, 3],
    "stride": [1, 1],
    "padding": [0, 0],
}
ONE = FLOATS(1)
OBSERVERS = {
    "self": FLOATS(2, 3),
    "observer_on": ONE,
    "fake_quant_on": ONE,
    "running_min": ONE,
    "running_max": ONE,
    "scale": ONE,
    "zero_point": ONE,
    "ch_axis": 0,
    "per_row_fake_quant": False,
}
STATE = torch.zeros(3, 30, dtype=torch.int64)
LAYER = {"grad_out": FLOATS(2, 3), "input": FLOATS(2, 3), "normalized_shape": [3], "mean": FLOATS(2), "rstd": FLOATS(2)}
LABELS = torch.zeros(3, dtype=torch.int64)
LIKELIHOODS = {
    "grad_output": torch.ones(()),
    "self": FLOATS(3, 4),
    "target": LABELS,
    "weight": None,
    "reduction": 1,
    "ignore_index": -100,
    "total_weight": torch.ones(()),
}
MARGINS = {
    "grad_output": torch.ones(()),
    "self": FLOATS(3, 4),
    "target": LABELS.new_zeros(3, 4),
    "reduction": 1,
    "is_target": FLOATS(3, 4),
}


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("multilabel_margin_loss_backward", MARGINS, {"grad_output": FLOATS(0)}),
        ("multilabel_margin_loss_backward", MARGINS, {"is_target": FLOATS(4)}),
        ("nll_loss_backward", LIKELIHOODS, {"total_weight": FLOATS(0)}),
        ("nll_loss2d_backward", LIKELIHOODS, {"grad_output": FLOATS(0)}),
        ("nll_loss_backward", LIKELIHOODS, {"weight": FLOATS(3)}),
        ("nll_loss_backward", LIKELIHOODS, {"target": LABELS[:2]}),
        ("native_layer_norm_backward", LAYER, {"rstd": FLOATS(1, 1, 0)}),
        ("native_layer_norm_backward", LAYER, {"weight": FLOATS(2)}),
        ("native_layer_norm_backward", LAYER, {"normalized_shape": [2, 2, 3]}),
        ("_pdist_backward", {"grad": SIX, "self": FLOATS(4, 2), "p": 2.0, "pdist": SIX}, {"grad": FLOATS(0)}),
        ("_pdist_backward", {"grad": SIX, "self": FLOATS(4, 2), "p": 2.0, "pdist": SIX}, {"self": FLOATS(2, 3, 4)}),
        (
            "reflection_pad1d_backward",
            {"grad_output": FLOATS(2, 5), "self": FLOATS(2, 3), "padding": [1, 1]},
            {"padding": [3, 1]},
        ),
        (
            "reflection_pad2d_backward",
            {"grad_output": FLOATS(1, 2, 2), "self": FLOATS(1, 2, 2), "padding": [0] * 4},
            {"padding": []},
        ),
        (
            "_sobol_engine_scramble_",
            {"self": STATE, "ltm": torch.zeros(3, 30, 30, dtype=torch.int64), "dimension": 3},
            {"ltm": torch.tensor(0)},
        ),
        ("_sobol_engine_initialize_state_", {"self": STATE, "dimension": 3}, {"dimension": 4}),
        (
            "_sobol_engine_ff_",
            {"self": STATE[:, 0], "n": 1, "sobolstate": STATE, "dimension": 3, "num_generated": 0},
            {"num_generated": (1 << 30) - 1},
        ),
        (
            "_transform_bias_rescale_qkv",
            {"qkv": FLOATS(2, 3, 6), "qkv_bias": FLOATS(6), "num_heads": 2},
            {"num_heads": 0},
        ),
        ("_log_softmax_backward_data", PAIR, {"output": FLOATS(1, 3)}),
        ("_softmax_backward_data", PAIR, {"grad_output": FLOATS(2, 3).double()}),
        ("grid_sampler_2d", {"interpolation_mode": 0, "padding_mode": 0}, {"padding_mode": 64}),
        ("_weight_norm_interface", {"v": FLOATS(2, 3, 4), "g": FLOATS(2), "dim": 0}, {"dim": 1}),
        ("_weight_norm_interface", {"v": FLOATS(2, 3), "g": FLOATS(2), "dim": 0}, {"g": FLOATS(2, 3)}),
        ("_weight_norm", {"v": FLOATS(2, 3), "g": FLOATS(2), "dim": 0}, {"g": FLOATS(0)}),
        ("_weight_norm", {"v": FLOATS(2, 3, 4), "g": FLOATS(1, 3, 1), "dim": 1}, {"dim": 2}),
        ("_weight_norm_interface_backward", NORMS, dict.fromkeys(("grad_w", "saved_v"), FLOATS(0, 3)) | EMPTY_NORMS),
        ("_logcumsumexp", {"self": SIX, "out": SIX}, {"out": SIX.bool()}),
        ("_compute_linear_combination", {"input": FLOATS(3, 2), "coefficients": FLOATS(4, 3)}, {"input": FLOATS(2, 2)}),
        (
            "_compute_linear_combination",
            {"input": FLOATS(3, 2), "coefficients": FLOATS(4, 3)},
            {"input": FLOATS(3, 2).byte()},
        ),
        ("random_", {"self": SIX, "from": (1 << 63) - 2}, {"from": (1 << 63) - 1}),
        ("_fused_sgd_", {"self": [SIX], "grads": [SIX], "momentum_buffer_list": []}, {"grads": [FLOATS(2, 0)]}),
        ("_fused_sgd_", {"self": [SIX], "grads": [SIX], "momentum_buffer_list": []}, {"grads": []}),
        ("_fused_sgd_", {"self": [SIX], "grads": [SIX], "momentum_buffer_list": []}, {"momentum": 0.9}),
        ("_fused_sgd", {"self": [SIX], "grads": [SIX], "momentum": 0}, {"grads": [FLOATS(1).expand(6)]}),
        ("_fused_sgd", {"self": [SIX], "grads": [SIX], "momentum": 0}, {"out": []}),
        ("_fused_adam_", {"self": [SIX], "grads": [SIX], "exp_avgs": [SIX]}, {"exp_avgs": [FLOATS(1)]}),
        ("_fused_adam_", {"self": [SIX], "grads": [SIX], "max_exp_avg_sqs": []}, {"amsgrad": True}),
        ("_fused_adam_", {"self": [SIX], "grads": [SIX], "state_steps": [FLOATS(1)]}, {"state_steps": [FLOATS(0)]}),
        ("_fused_adagrad_", {"self": [SIX], "grads": [SIX], "state_sums": [SIX]}, {"state_sums": [SIX.double()]}),
        ("arange", {"start": 0, "end": (1 << 63) - 2, "step": 0}, {"step": -1}),
        ("arange", {"start": 9e300, "end": -9e300, "step": -1e300}, {"dtype": torch.int64}),
        ("range", {"start": 0.0, "end": 5, "out": LABELS}, {"start": -float(1 << 63)}),
        ("embedding_dense_backward", {"indices": LABELS, "num_weights": 3}, {"num_weights": 0}),
        ("_cholesky_solve_helper", {"self": FLOATS(3, 2), "A": FLOATS(3, 3)}, {"A": FLOATS(3, 2)}),
        ("_cholesky_solve_helper", {"self": FLOATS(2, 3, 2), "A": FLOATS(2, 3, 3)}, {"A": FLOATS(3, 3)}),
        ("sparse_coo_tensor", {"size": [2, 3]}, {"size": [0, 1 << 62, 0, -(1 << 63), 1 << 62]}),
        ("_sparse_coo_tensor_with_dims", {"size": [1 << 40, 0]}, {"size": [1 << 40, 1 << 40, 0]}),
        ("unfold_backward", WINDOWS, {"grad_in": FLOATS(1, 1, 1)}),
        ("unfold_backward", WINDOWS, {"step": 0}),
        ("unfold_backward", WINDOWS, {"dim": 2}),
        ("histogram", {"bins": 10}, {"bins": (1 << 63) - 1}),
        ("_histogramdd_from_bin_cts", {"bins": [10, 20]}, {"bins": [1 << 30, 1 << 30]}),
        ("_slow_conv2d_forward", CONVOLUTION, {"kernel_size": []}),
        ("_slow_conv2d_forward", CONVOLUTION, {"weight": FLOATS(3, 2, 3, 3).char()}),
        ("fused_moving_avg_obs_fake_quant", OBSERVERS, {"ch_axis": -(1 << 31), "per_row_fake_quant": True}),
        ("fused_moving_avg_obs_fake_quant", OBSERVERS, {"scale": FLOATS(7)}),
        ("_nested_compute_contiguous_strides_offsets", {"nested_size": LABELS.view(1, 3)}, {"nested_size": LABELS}),
        ("_padded_dense_to_jagged_forward", {"offsets": [LABELS]}, {"offsets": [LABELS + 1]}),
        (
            "_jagged_to_padded_dense_forward",
            {"values": SIX, "offsets": [torch.tensor([0, 6])]},
            {"offsets": [torch.tensor([0, 7])]},
        ),
    ],
)
def test_arguments_that_end_a_process_are_refused(name: str, right: dict[str, Any], wrong: dict[str, Any]) -> None:
    CHECKS[name](dict(right))
    with pytest.raises(RuntimeError):
        CHECKS[name]({**right, **wrong})


def test_indices_are_clamped_and_what_is_ignored_stays() -> None:
    given = {**LIKELIHOODS, "target": torch.tensor([9, -100, -7])}
    CHECKS["nll_loss_backward"](given)
    assert given["target"].tolist() == [3, -100, 0]
    given = {**MARGINS, "self": FLOATS(1, 4), "target": torch.tensor([[9, -7, -1, 2]]), "is_target": FLOATS(1, 4)}
    CHECKS["multilabel_margin_loss_backward"](given)
    assert given["target"].tolist() == [[3, -1, -1, 2]]


def test_the_gradient_of_windows_may_be_broadcast_beside_them() -> None:
    CHECKS["unfold_backward"]({**WINDOWS, "grad_in": FLOATS(1, 2, 3)})


_EYE, _TEN = torch.eye(2), torch.ones(10, 3)


@pytest.mark.parametrize("pivots", [[0, 1], [3, 1], [1, -1]])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("aten::lu_unpack", lambda pivots: (_EYE, pivots)),
        ("aten::linalg_lu_solve", lambda pivots: (_EYE, pivots, _EYE)),
        ("aten::lu_solve", lambda pivots: (_EYE, _EYE, pivots)),
    ],
)
def test_pivots_that_the_kernel_refuses_are_refused_in_its_words(name: str, arguments: Any, pivots: list[int]) -> None:
    given = arguments(torch.tensor(pivots, dtype=torch.int32))
    with pytest.raises(RuntimeError) as expected:
        getattr(torch.ops.aten, name.removeprefix("aten::")).default(*given)
    with pytest.raises(RuntimeError) as found:
        SAFE_FORMS[name](*given)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("name", ["_embedding_bag", "_embedding_bag_forward_only"])
@pytest.mark.parametrize("with_end", [False, True])
def test_bags_that_end_behind_the_indices_are_refused_in_the_kernels_words(name: str, with_end: bool) -> None:
    given = (_TEN, torch.tensor([0, 1]), torch.tensor([0, 5]), False, 0, False, None, with_end)
    with pytest.raises(RuntimeError) as expected:
        getattr(torch.ops.aten, name).default(*given)
    with pytest.raises(RuntimeError) as found:
        SAFE_FORMS[f"aten::{name}"](*given)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_bags_that_begin_before_the_last_one_are_refused(mode: int) -> None:
    form = SAFE_FORMS["aten::_embedding_bag"]
    form(_TEN, torch.tensor([0, 1]), torch.tensor([0, 1, 1, 2]), False, mode)
    with pytest.raises(RuntimeError, match="Expected i < index_size to be true"):
        form(_TEN, torch.tensor([0, 1]), torch.tensor([0, 2, 1]), False, mode)


def test_batch_norm_without_its_statistics_is_refused() -> None:
    with pytest.raises(RuntimeError, match="running_mean"):
        SAFE_FORMS["aten::_batch_norm_no_update"](FLOATS(1, 2, 3), None, None, None, None, 0.1, 1e-5)
    legit = SAFE_FORMS["aten::_native_batch_norm_legit.no_stats"]
    with pytest.raises(RuntimeError, match="running_mean"):
        legit(FLOATS(1, 2, 3), None, None, False, 0.1, 1e-5)
    assert legit(FLOATS(1, 2, 3), None, None, True, 0.1, 1e-5)[0].shape == (1, 2, 3)


def test_an_op_that_is_replaced_on_the_cpu_is_checked_there_too() -> None:
    replaced = {"aten::mkldnn_rnn_layer", "aten::_sparse_mm_reduce_impl_backward"}
    assert CPU_OVERRIDES.keys() & SAFE_FORMS.keys() == replaced
    matrix, places = torch.eye(5).to_sparse_csr(), torch.arange(5).view(5, 1).expand(5, 3)
    product = CPU_OVERRIDES["aten::_sparse_mm_reduce_impl_backward"]
    both = [True, True]
    assert product(matrix, FLOATS(5, 3), FLOATS(5, 3), "amin", places + (1 << 40), both)[1].sum() == 0
    with pytest.raises(RuntimeError, match="arg_out has the product's shape"):
        product(matrix, FLOATS(5, 3), FLOATS(5, 3), "amin", places[:2], both)
    with pytest.raises(RuntimeError, match="the gradient has the product's shape"):
        product(matrix, FLOATS(2, 3), FLOATS(5, 3), "sum", places, both)
    hidden = FLOATS(2, 6)
    weights = FLOATS(1, 1), FLOATS(24, 6), FLOATS(24), FLOATS(24)  # the first should be (24, 4)
    with pytest.raises(RuntimeError, match="weight0 has"):
        CPU_OVERRIDES["aten::mkldnn_rnn_layer"](
            FLOATS(3, 2, 4), *weights, hidden, hidden, False, [], 2, 6, 1, True, False, False, True
        )


def test_indices_of_an_embedding_stay_inside_its_rows() -> None:
    given: dict[str, Any] = {"indices": torch.tensor([0, 2, 1 << 40, -7]), "num_weights": 3}
    CHECKS["embedding_dense_backward"](given)
    assert given["indices"].tolist() == [0, 2, 2, 0]


@pytest.mark.parametrize("name", ["triu", "tril"])
@pytest.mark.parametrize("size", [(4, 4), (2, 3, 4, 4), (5, 3)], ids=str)
def test_a_triangle_is_written_wherever_it_shall_be(name: str, size: tuple[int, ...]) -> None:
    tensor, form = torch.rand(size), SAFE_FORMS[f"aten::{name}.out"]
    expected = getattr(torch, name)(tensor, 1)
    for out in (torch.empty(size), torch.empty(size[::-1]).permute(*range(len(size))[::-1]), torch.empty(0)):
        assert form(tensor, 1, out=out) is out
        assert torch.equal(out, expected)
    assert torch.equal(form(tensor, 1, out=tensor), expected)
    assert torch.equal(tensor, expected)


@pytest.mark.parametrize("name", ["_fused_sdp_choice", "_scaled_dot_product_attention_math"])
@pytest.mark.parametrize("sizes", [((1, 2, 3, 4), (1, 0, 3, 4)), ((0, 0, 0, 0), (0, 0, 0, 0))], ids=str)
def test_heads_that_nobody_has_cannot_be_shared(name: str, sizes: tuple[tuple[int, ...], ...]) -> None:
    """PyTorch divides by their number, which ends the process."""
    query, key = (torch.zeros(size) for size in sizes)
    with pytest.raises(RuntimeError, match="no head to share"):
        SAFE_FORMS[f"aten::{name}"](query, key, key, enable_gqa=True)


@pytest.mark.parametrize("sizes", [((), (1,)), ((1,), ()), ((), ())])
def test_one_row_of_margins_has_a_dimension_or_none(sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    tensor, target = (torch.zeros(size) for size in sizes)
    given = {**MARGINS, "self": tensor, "target": target.long(), "is_target": target}
    CHECKS["multilabel_margin_loss_backward"](given)
    with pytest.raises(RuntimeError, match="do not match"):
        CHECKS["multilabel_margin_loss_backward"]({**given, "self": FLOATS(4)})


@pytest.mark.parametrize("indices", [[[0, 99]], [[-1, 0]], [[0, 1 << 40]]])
def test_however_sparse_tensors_are_made_their_indices_are_within_their_sizes(indices: list[list[int]]) -> None:
    parts = torch.tensor(indices), torch.ones(2)
    layout = {"layout": torch.sparse_coo}
    with pytest.raises(RuntimeError, match="index"):
        SAFE_FORMS["aten::sparse_coo_tensor.indices_size"](*parts, [3], **layout)
    with pytest.raises(RuntimeError, match="index"):
        SAFE_FORMS["aten::_sparse_coo_tensor_with_dims_and_tensors"](1, 0, [3], *parts, **layout)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ([3, 0, 1, 1], [1]),
        ([0, 1, 1, 1], [7]),
        ([0, 1, 1, 1], [-1]),
        ([0, 1, 1, 2], [1]),
        ([0, 1], [1]),
        ([0, 2, 2, 1 << 40], [1, 0]),
        ([0, 2, 2, 3], [2, 0, 9]),  # in another order, and outside
        ([0, 2, 1, 3], [2, 0, 1]),
    ],
)
@pytest.mark.parametrize("name", ["csr_tensor.crow_col_value_size", "csc_tensor.ccol_row_value_size"])
def test_compressed_tensors_have_indices_within_their_sizes(name: str, outer: list[int], inner: list[int]) -> None:
    with pytest.raises(RuntimeError):
        SAFE_FORMS[f"aten::sparse_{name}"](torch.tensor(outer), torch.tensor(inner), torch.ones(len(inner)), [3, 3])


def test_compressed_tensors_may_have_their_indices_in_another_order() -> None:
    make = SAFE_FORMS["aten::sparse_compressed_tensor.comp_plain_value_size"]
    rows = make(
        torch.tensor([0, 2, 2]), torch.tensor([2, 0]), torch.tensor([1.0, 2.0]), [2, 3], layout=torch.sparse_csr
    )
    blocks = make(torch.tensor([0, 2]), torch.tensor([1, 0]), torch.ones(2, 1, 2), [1, 4], layout=torch.sparse_bsr)
    assert rows.to_dense().tolist() == [[2, 0, 1], [0, 0, 0]]
    assert blocks.to_dense().tolist() == [[1, 1, 1, 1]]
