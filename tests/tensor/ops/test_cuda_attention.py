"""Attention of a CUDA worker: which ops are sent. Its kernels are played by functions on a worker with a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import skyproxy
from skyproxy.node import Node
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.ops import cuda_attention


def play_cuda() -> None:
    """On the worker: kernels of CUDA for its CPU, that compute what they should by the math form."""
    import torch

    aten = torch.ops.aten
    state = torch._C  # a place that outlives this call
    if getattr(state, "_skyproxy_played", None) is not None:
        return
    library = torch.library.Library("aten", "IMPL")
    played: dict[str, Any] = {"choice": 1, "asked": 0, "whole": 0, "calls": []}

    def math(q: Any, k: Any, v: Any, bias: Any, causal: bool, scale: Any) -> Any:
        return aten._scaled_dot_product_attention_math(q, k, v, bias, 0.0, causal, scale=scale)[0]

    def sums(q: Any, k: Any, scale: Any) -> Any:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return torch.logsumexp(q.float() @ k.float().mT * scale, -1)

    def gradients(grad: Any, q: Any, k: Any, v: Any, bias: Any, causal: bool, scale: Any) -> list[Any]:
        # Written out: a worker has no autograd.
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        scores = q @ k.mT * scale + (0 if bias is None else bias)
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        weights = scores.softmax(-1)
        of_weights = grad @ v.mT
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
        return [of_scores @ k * scale, of_scores.mT @ q * scale, weights.mT @ grad, of_scores]

    def choice(q: Any, k: Any, v: Any, mask: Any = None, p: float = 0.0, causal: bool = False, **kwargs: Any) -> int:
        played["asked"] += 1
        return int(played["choice"])

    def flash(q: Any, k: Any, v: Any, p: float = 0.0, causal: bool = False, debug: bool = False, *, scale: Any = None):  # type: ignore[no-untyped-def]
        assert q.shape[-1] % 8 == 0
        played["calls"].append("flash")
        seed = torch.zeros(2, dtype=torch.uint64)
        result = math(q, k, v, None, causal, scale)
        return result, sums(q, k, scale), None, None, q.shape[2], k.shape[2], seed, seed.new_zeros(()), q.new_empty(0)

    def flash_backward(  # type: ignore[no-untyped-def]
        grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, p, causal, seed, offset, *, scale=None
    ):
        assert cum_q is None
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        return tuple(gradients(grad, q, k, v, None, causal, scale)[:3])

    def efficient(q, k, v, bias, with_sums, p=0.0, causal=False, *, scale=None):  # type: ignore[no-untyped-def]
        played["calls"].append("efficient")
        if bias is not None:
            assert bias.stride(-2) % 16 == 0 or bias.stride(-2) == 0
        seed = torch.zeros((), dtype=torch.int64)
        # As the kernel has it: room for whole blocks of 32 rows, and none where no backward follows.
        rows = torch.nn.functional.pad(sums(q, k, scale), (0, -q.shape[2] % 32))
        return math(q, k, v, bias, causal, scale), rows if with_sums else rows[..., :0].clone(), seed, seed.clone()

    def efficient_backward(grad, q, k, v, bias, out, lse, seed, offset, p, wanted, causal=False, *, scale=None):  # type: ignore[no-untyped-def]
        found = gradients(grad, q, k, v, bias, causal, scale)
        return (*found[:3], found[3] if wanted[3] else None)

    library.impl("_fused_sdp_choice", choice, "CPU")
    library.impl("_scaled_dot_product_flash_attention", flash, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CPU")
    library.impl("_scaled_dot_product_efficient_attention", efficient, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward, "CPU")
    played["library"] = library
    state._skyproxy_played = played  # type: ignore[attr-defined]


def told(**changes: Any) -> dict[str, Any]:
    """On the worker: what was asked of it so far; changes what it will choose."""
    import torch

    played = torch._C._skyproxy_played  # type: ignore[attr-defined]
    found = {name: list(value) if isinstance(value, list) else value for name, value in played.items()}
    found.pop("library")
    played.update(changes)
    return found


@pytest.fixture
def node(sky: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A worker of the test's own; what it plays ends with its process."""
    with skyproxy.launch_local("cpu") as made:
        made.run(play_cuda)
        device = DEVICES.of(made.devices[0])
        # Only the choice of kernels looks at this; tensors are placed where the worker has a device.
        monkeypatch.setitem(device.row, "type", "cuda")
        monkeypatch.setitem(device.row, "compute_capability", [9, 0])
        yield made


def inputs_of(size: int = 16, length: int = 8) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, length, size) for _ in range(3)]


def results(device: Any, inputs: list[torch.Tensor], mask: torch.Tensor | None, **options: Any) -> list[torch.Tensor]:
    placed = [x.clone().to(device).requires_grad_() for x in inputs]
    found = F.scaled_dot_product_attention(*placed, mask if mask is None else mask.to(device), **options)
    found.square().sum().backward()
    return [found.detach().cpu(), *(x.grad.cpu() for x in placed)]


@pytest.mark.parametrize("size", [16, 13])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_flash_attention_is_sent_by_its_name_and_differentiated(node: Node, size: int, options: dict[str, Any]) -> None:
    inputs = inputs_of(size)
    ours = results(node.devices[0], inputs, None, **options)
    torch.testing.assert_close(ours, results("cpu", inputs, None, **options), rtol=1e-4, atol=1e-5)
    assert node.run(told)["calls"] == ["flash"]


@pytest.mark.parametrize("columns", [8, 16])
def test_a_mask_goes_to_the_memory_efficient_kernel_in_aligned_rows(node: Node, columns: int) -> None:
    node.run(told, choice=cuda_attention.EFFICIENT)
    inputs = inputs_of(length=columns)
    for mask in (torch.randn(columns, columns), torch.rand(2, 1, columns, columns) > 0.3):
        ours = results(node.devices[0], inputs, mask)
        torch.testing.assert_close(ours, results("cpu", inputs, mask), rtol=1e-4, atol=1e-5)
    assert node.run(told)["calls"] == ["efficient"] * 2


def test_the_worker_is_asked_once_for_tensors_that_look_alike(node: Node) -> None:
    for _ in range(3):
        results(node.devices[0], inputs_of(), None)
    assert node.run(told)["asked"] == 1
    results(node.devices[0], inputs_of(length=9), None)
    assert node.run(told)["asked"] == 2


def test_without_gradients_the_op_is_sent_whole_and_nothing_is_asked(node: Node) -> None:
    inputs = inputs_of()
    placed = [x.to(node.devices[0]) for x in inputs]
    want = F.scaled_dot_product_attention(*inputs)
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            before = torch.sky.stats()
            found = F.scaled_dot_product_attention(*placed)
            after = torch.sky.stats()
            assert (after["round_trips"], after["ops"]) == (before["round_trips"], before["ops"] + 1)
            torch.testing.assert_close(found.cpu(), want, rtol=1e-4, atol=1e-5)
    played = node.run(told)
    assert (played["asked"], played["calls"]) == (0, [])


def test_math_is_math_and_none_is_an_error(node: Node) -> None:
    node.run(told, choice=cuda_attention.MATH)
    torch.testing.assert_close(results(node.devices[0], inputs_of(), None), results("cpu", inputs_of(), None))
    assert node.run(told, choice=cuda_attention.NONE)["calls"] == []
    with pytest.raises(RuntimeError, match="No viable backend"):
        results(node.devices[0], inputs_of(length=5), None)


@pytest.mark.parametrize(
    ("choice", "size", "dropout", "capability", "expected"),
    [
        (cuda_attention.FLASH, 256, 0.0, [9, 0], cuda_attention.FLASH),
        (cuda_attention.FLASH, 208, 0.0, [8, 6], cuda_attention.MATH),
        (cuda_attention.FLASH, 256, 0.0, [8, 9], cuda_attention.FLASH),
        (cuda_attention.FLASH, 256, 0.1, [8, 9], cuda_attention.MATH),
        (cuda_attention.CUDNN, 128, 0.0, [9, 0], cuda_attention.CUDNN),
        (cuda_attention.CUDNN, 256, 0.0, [9, 0], cuda_attention.MATH),
    ],
)
def test_a_kernel_without_a_backward_is_not_taken_for_training(
    node: Node, choice: int, size: int, dropout: float, capability: list[int], expected: int
) -> None:
    node.run(told, choice=choice)
    device = DEVICES.of(node.devices[0])
    device.row["compute_capability"] = capability
    tensors = [x.to(node.devices[0]) for x in inputs_of(size)]
    looks = [*(t._sky.meta for t in tensors), None]
    for needs_grad, wanted in ((True, expected), (False, choice)):
        found = cuda_attention.choose(device, tensors, looks, dropout, False, False, needs_grad)
        assert found == wanted
