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


class Compared(TorchDispatchMode):
    """Holds each checked op against its safe form, with the arguments that PyTorch itself gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        result = func(*args, **(kwargs or {}))
        if name in CHECKS:
            self.seen.add(name)
            torch.testing.assert_close(SAFE_FORMS[f"aten::{name}"](*args), result, rtol=0, atol=0, equal_nan=True)
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
    assert compared.seen == {name for name in CHECKS if "sobol" not in name}


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


def test_batch_norm_without_its_statistics_is_refused() -> None:
    with pytest.raises(RuntimeError, match="running_mean"):
        SAFE_FORMS["aten::_batch_norm_no_update"](FLOATS(1, 2, 3), None, None, None, None, 0.1, 1e-5)


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
