"""Attention on remote tensors: for every number of dimensions what PyTorch computes for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from skyproxy.tensor.core.torch_private import choose_attention
from skyproxy.tensor.ops import attention as attention_module

SHAPES = [(5, 8), (3, 5, 8), (1, 5, 8), (2, 3, 5, 8), (2, 2, 3, 5, 8)]
MASKS = ["none", "two dimensions", "all dimensions", "numbers", "causal"]


def attend(device: str, shape: tuple[int, ...], mask: str, gradients: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator).to(device).requires_grad_(gradients) for _ in range(3))
    arguments: dict[str, Any] = {"is_causal": mask == "causal"}
    if mask == "two dimensions":
        arguments["attn_mask"] = torch.ones(5, 5, dtype=torch.bool).tril().to(device)
    elif mask == "all dimensions":
        arguments["attn_mask"] = torch.ones(*shape[:-1], 5, dtype=torch.bool).tril().to(device)
    elif mask == "numbers":
        arguments["attn_mask"] = torch.randn(5, 5, generator=generator).to(device)
    result = scaled_dot_product_attention(q, k, v, **arguments)
    if gradients:
        result.sum().backward()
    return [result.detach(), *(each.grad for each in (q, k, v) if gradients)]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape)}d")
def test_any_number_of_dimensions_gives_the_bits_of_the_cpu(
    shape: tuple[int, ...], mask: str, gradients: bool, sky1: str
) -> None:
    for ours, theirs in zip(attend(sky1, shape, mask, gradients), attend("cpu", shape, mask, gradients), strict=True):
        assert torch.equal(ours.cpu(), theirs)
        assert ours.stride() == theirs.stride()


Attention = Callable[..., torch.Tensor]


def loss(attention: Attention) -> Callable[..., torch.Tensor]:
    return lambda *inputs: attention(*inputs).square().sum()


def pullback(attention: Attention, *inputs: torch.Tensor) -> list[Any]:
    value, pull = vjp(attention, *inputs)
    return [value, *pull(value)]


DERIVATIVES: dict[str, Callable[..., Any]] = {
    "grad": lambda attention, q, k, v: grad(loss(attention), (0, 1, 2))(q, k, v),
    "vjp": pullback,
    "jacrev": lambda attention, q, k, v: [jacrev(attention)(q, k, v)],
    "gradients of samples": lambda attention, q, k, v: vmap(
        grad(loss(lambda *one: attention(*(t[None] for t in one))), (0, 1, 2))
    )(q, k, v),
}


@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize("mask", ["none", "bool", "numbers", "causal"])
def test_function_transforms_give_the_bits_of_the_cpu(mask: str, name: str, sky1: str) -> None:
    def run(device: str) -> Any:
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(2, 3, 5, 8, generator=generator).to(device) for _ in range(3)]
        options: dict[str, Any] = {"is_causal": True} if mask == "causal" else {}
        if mask in ("bool", "numbers"):
            numbers = torch.randn(5, 5, generator=generator).to(device)
            options = {"attn_mask": numbers if mask == "numbers" else numbers > -1}
        return DERIVATIVES[name](lambda *qkv: scaled_dot_product_attention(*qkv, **options), *inputs)

    for ours, theirs in zip(run(sky1), run("cpu"), strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_transform_is_compiled(dynamic: bool, sky1: str) -> None:
    gradient = grad(loss(lambda x: scaled_dot_product_attention(x, x, x)))
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(gradient, backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(compiled(x.to(sky1)).cpu(), gradient(x))


FORMULAS: dict[str, Callable[..., Any]] = {
    "tangents": lambda attention, x, m: jvp(lambda y: attention(y, y, y, m), (x,), (x,))[1],
    "second derivatives": lambda attention, x, m: grad(loss(grad(loss(lambda y: attention(y, x, x, m)))))(x),
    "the hessian": lambda attention, x, m: hessian(loss(lambda y: attention(y, x, x, m)))(x),
    "gradients of a mask": lambda attention, x, m: grad(loss(lambda y: attention(x, x, x, y)))(m),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_what_fused_kernels_lack_comes_from_the_math_form(name: str, sky1: str) -> None:
    def run(device: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        x, mask = (torch.randn(size, generator=generator).to(device) for size in ((1, 2, 5, 4), (5, 5)))
        result: torch.Tensor = FORMULAS[name](scaled_dot_product_attention, x, mask)
        return result.cpu()

    with sdpa_kernel(SDPBackend.MATH):
        expected = run("cpu")
    torch.testing.assert_close(run(sky1), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape)}d")
def test_inference_mode_gives_the_same(shape: tuple[int, ...], sky1: str) -> None:
    with torch.inference_mode():
        (ours,), (theirs,) = (attend(device, shape, "none", False) for device in (sky1, "cpu"))
    assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("batch", [(), (2,)], ids=["3d", "4d"])
def test_grouped_queries_give_the_bits_of_the_cpu(batch: tuple[int, ...], sky1: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*batch, heads, 5, 8, generator=generator) for heads in (6, 2, 2))
    theirs = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    ours = scaled_dot_product_attention(q.to(sky1), k.to(sky1), v.to(sky1), enable_gqa=True)
    assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("why", ["dropout", "a mask with gradients", "fewer queries", "empty"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape)}d")
def test_the_math_form_is_a_view_where_that_of_the_cpu_is(shape: tuple[int, ...], why: str, sky1: str) -> None:
    """From 2.15 on, PyTorch makes four dimensions of three, and views three in the result."""

    def run(device: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        sizes = (*shape[:-1], 0) if why == "empty" else shape
        q, k, v = (torch.randn(sizes, generator=generator).to(device) for _ in range(3))
        arguments: dict[str, Any] = {}
        if why == "dropout":
            torch.manual_seed(0)
            arguments["dropout_p"] = 0.5
        elif why == "a mask with gradients":
            arguments["attn_mask"] = torch.randn(*shape[:-1], 5, generator=generator).to(device).requires_grad_()
        elif why == "fewer queries" and len(shape) > 2:
            q = q[..., :1, :, :]
        return scaled_dot_product_attention(q, k, v, **arguments)

    ours, theirs = run(sky1), run("cpu")
    assert torch.equal(ours.cpu(), theirs)
    assert (ours.shape, ours.stride(), ours._is_view()) == (theirs.shape, theirs.stride(), theirs._is_view())
    if theirs._is_view() and theirs._base is not None:
        assert ours._base is not None
        assert ours._base.shape == theirs._base.shape


@pytest.mark.parametrize("shapes", [((), (), ()), ((1,), (1,), (1,)), ((1, 1), (1, 1), (1,))], ids=str)
def test_fewer_than_two_dimensions_are_refused_in_pytorchs_words(
    shapes: tuple[tuple[int, ...], ...], sky1: str
) -> None:
    for device in ("cpu", sky1):
        with pytest.raises(RuntimeError, match="at least 2 dimensional"):
            scaled_dot_product_attention(*(torch.ones(shape, device=device) for shape in shapes))


def test_mixed_dtypes_are_refused_in_pytorchs_words(sky1: str) -> None:
    for device in ("cpu", sky1):
        x = torch.ones(1, 1, device=device)
        with pytest.raises(RuntimeError, match="to have the same dtype"):
            scaled_dot_product_attention(x, x, x.double())


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("learns", [False, True], ids=["", "with gradients"])
@pytest.mark.parametrize(
    ("query", "key", "width"),
    [
        ((2, 0, 3, 4), (2, 0, 3, 4), 4),
        ((0, 2, 3, 4), (0, 2, 5, 4), 4),
        ((2, 2, 0, 4), (2, 2, 5, 4), 6),
        ((2, 2, 3, 4), (2, 2, 0, 4), 4),
        ((2, 2, 3, 4), (2, 2, 3, 4), 0),
        ((2, 2, 3, 0), (2, 2, 5, 0), 6),
        ((3, 4), (0, 4), 4),
        ((1, 2, 3, 4), (0, 2, 3, 4), 4),
        ((1, 3, 4), (0, 2, 3, 4), 4),
        ((0, 3, 4), (3, 3, 4), 4),
        ((0, 2, 3, 4), (3, 2, 3, 4), 4),
        ((3, 4), (3, 0), 4),
    ],
    ids=str,
)
def test_attention_of_nothing_or_to_nothing_is_that_of_the_cpu(
    query: tuple[int, ...], key: tuple[int, ...], width: int, learns: bool, causal: bool, sky1: str
) -> None:
    if len(query) == 4 and query[1] == 0 and torch.__version__ < "2.12":
        pytest.skip("without heads, this version's kernel ends the process")

    def run(device: str, mask: bool) -> Any:
        sizes = query, key, (*key[:-1], width)
        q, k, v = (torch.ones(size, device=device, requires_grad=learns) for size in sizes)
        seen = torch.zeros(query[-2], key[-2], device=device) if mask else None
        try:
            result = scaled_dot_product_attention(q, k, v, seen, is_causal=causal)
            grads = torch.autograd.grad(result.sum(), (q, k, v)) if learns else ()
            return result.stride(), [x.detach().tolist() for x in (result, *grads)]
        except RuntimeError as error:
            return str(error).splitlines()[0]

    for mask in (False, True):
        assert run(sky1, mask) == run("cpu", mask)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_part_on_the_cpu_is_refused_in_pytorchs_words(place: int, sky1: str) -> None:
    parts = [torch.ones(1, 1, 2, 2, device="cpu" if number == place else sky1) for number in range(3)]
    with pytest.raises(RuntimeError, match="to have the same device type"):
        scaled_dot_product_attention(*parts)


LENGTHS = [(1, 1), (1, 7), (7, 1), (7, 7), (7, 9), (64, 513)]
BACKENDS = [[SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION], [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]]
KINDS = [(torch.float32, 0.0), (torch.float64, 0.0), (torch.bfloat16, 0.0), (torch.float32, 0.1), (torch.int64, 0.0)]


def outcome(choose: Callable[..., Any], *arguments: object) -> int | str:
    try:
        return int(choose(*arguments))
    except RuntimeError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore")  # of why a kernel is not there
@pytest.mark.parametrize("backends", BACKENDS, ids=str)
@pytest.mark.parametrize(("dtype", "dropout"), KINDS, ids=str)
def test_what_is_chosen_at_once_is_what_pytorch_chooses_for_these_very_sizes(
    dtype: torch.dtype, dropout: float, backends: list[SDPBackend], sky: str
) -> None:
    with sdpa_kernel(backends):
        enabled = SDPBackend.MATH in backends, SDPBackend.FLASH_ATTENTION in backends
        for length, key_length in LENGTHS:
            for batch, heads, width in ((1, 1, 1), (2, 3, 1), (1, 7, 7), (9, 1, 80), (3, 12, 300)):
                for transposed, causal in ((False, False), (True, True)):
                    sizes = [(batch, heads, n, width) for n in (length, key_length, key_length)]
                    if transposed:
                        made = [torch.empty(b, n, h, e, dtype=dtype).transpose(1, 2) for b, h, n, e in sizes]
                    else:
                        made = [torch.empty(size, dtype=dtype) for size in sizes]
                    looks = [torch.empty_like(t, device=sky) for t in made]
                    ours = outcome(attention_module._choose_at_once, *looks, dropout, causal, enabled)
                    assert ours == outcome(choose_attention, *made, None, dropout, causal)


def test_a_length_that_never_came_before_asks_pytorch_nothing(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys = torch.ones(1, 2, 1, 8, device=sky), torch.ones(1, 2, 300, 8, device=sky)
    scaled_dot_product_attention(query, keys[:, :, :290], keys[:, :, :290])
    monkeypatch.setattr(attention_module, "choose_attention", None)
    for length in range(291, 300):
        found = scaled_dot_product_attention(query, keys[:, :, :length], keys[:, :, :length]).sum().item()
        assert found == pytest.approx(16)


USUAL = (2, 3, 5, 8)
UNUSUAL: dict[str, Callable[[str], list[torch.Tensor]]] = {
    "other heads": lambda device: [torch.empty(n, device=device) for n in (USUAL, (2, 1, 5, 8), (2, 1, 5, 8))],
    "other width": lambda device: [torch.empty(n, device=device) for n in (USUAL, USUAL, (2, 3, 5, 4))],
    "nothing": lambda device: [torch.empty(n, device=device) for n in (USUAL, (2, 3, 0, 8), (2, 3, 0, 8))],
    "columns": lambda device: [torch.empty(2, 3, 8, 5, device=device).mT, *2 * [torch.empty(USUAL, device=device)]],
    "two dtypes": lambda device: [torch.empty(USUAL, device=device).double(), *2 * [torch.empty(USUAL, device=device)]],
    "three dimensions": lambda device: [torch.empty(3, 5, 8, device=device)] * 3,
    "the CPU's": lambda device: [torch.empty(USUAL, device=device), *2 * [torch.empty(USUAL)]],
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_inputs_are_not_chosen_for_at_once(kind: str, sky: str) -> None:
    assert attention_module._choose_at_once(*UNUSUAL[kind](sky), 0.0, False, (True, True)) is None
