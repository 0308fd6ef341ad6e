"""Automatic mixed precision: what runs in which precision, the cache of cast weights, GradScaler."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from skyproxy.tensor.torch_api import autocast as module_under_test

LOW = (torch.bfloat16, torch.float16)


def header_names(macro: str) -> list[str]:
    """The ops of a list in ATen/autocast_mode.h, but for those of named tensors, which no remote tensor is."""
    path = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)+.*)", path.read_text(encoding="utf-8"))
    assert body is not None
    names = [".".join(re.findall(r"\w+", group)) for group in re.findall(r"_\(([^()]*)\)", body.group(1))]
    return [name for name in names if "dimname" not in name.lower()]


@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", module_under_test.LOWER_PRECISION),
        ("AT_FORALL_FP32", module_under_test.FULL_PRECISION),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", module_under_test.FULL_PRECISION_RESULT),
        ("AT_FORALL_PROMOTE", module_under_test.PROMOTE),
    ],
)
def test_the_lists_are_those_of_pytorch(macro: str, ours: list[str]) -> None:
    assert sorted(header_names(macro)) == sorted(ours)


def test_the_lists_of_the_cpu_are_those_of_pytorch() -> None:
    has_kernel, every = torch._C._dispatch_has_kernel_for_dispatch_key, set(torch._C._dispatch_get_all_op_names())
    cast = {name.removeprefix("aten::") for name in every if name[:6] == "aten::" and has_kernel(name, "AutocastCPU")}
    lists = (
        module_under_test.LOWER_PRECISION_ON_CPU,
        module_under_test.FULL_PRECISION_ON_CPU,
        module_under_test.PROMOTE_ON_CPU,
    )
    ours = [name for names in lists for name in names]
    # A few of ours come or go with the versions of torch.
    assert {name for name in cast if "dimname" not in name.lower()} == {n for n in ours if f"aten::{n}" in every}
    assert len(ours) == len(set(ours))


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes workers look like workers with CUDA to autocast: casts are recorded here, and any worker runs them."""
    monkeypatch.setattr(module_under_test, "kind_of_worker", lambda values: "cuda")


ON_CPU: dict[str, Callable[[torch.Tensor], Any]] = {
    "matmul": lambda x: x @ x,
    "linear": lambda x: F.linear(x, x),
    "einsum, which consists of a product": lambda x: torch.einsum("ij,jk", x, x),
    "addr, which CUDA casts": lambda x: torch.addr(x, x[0], x[1]),
    "conv2d": lambda x: F.conv2d(x[None, None], x[None, None, :2, :2]),
    "prelu": lambda x: F.prelu(x, x[0, :1]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "exp, which CUDA casts": torch.exp,
    "sum, which CUDA casts": torch.sum,
    "softmax, which CUDA casts": lambda x: x.softmax(-1),
    "layer_norm, which CUDA casts": lambda x: F.layer_norm(x, (4,)),
    "norm, which CUDA casts": lambda x: x.norm(),
    "cumsum, which CUDA casts": lambda x: x.cumsum(0),
    "mse_loss": lambda x: F.mse_loss(x, x.flip(0)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.flip(0)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device=x.device)),
    "binary_cross_entropy, which CUDA refuses": lambda x: F.binary_cross_entropy(x.sigmoid(), x.sigmoid()),
    "prod": torch.prod,
    "quantile": lambda x: x.quantile(0.5),
    "inverse": torch.linalg.inv,
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "trace": torch.trace,
    "pad": lambda x: F.pad(x[None], (1, 1), mode="reflect"),
    "grid_sample": lambda x: F.grid_sample(x[None, None], x.view(1, 2, 4, 2), align_corners=False),
    "cat of two precisions": lambda x: torch.cat([x.float(), x.bfloat16()]),
    "stack of two precisions": lambda x: torch.stack([x.bfloat16(), x.float()]),
    "index_copy of two precisions": lambda x: x.float().index_copy(0, torch.tensor([1], device=x.device), x[:1].half()),
    "dot of two precisions, which CUDA casts": lambda x: torch.dot(x[0].float(), x[1].bfloat16()),
    "module": lambda x: torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0).to(x.device)(x),
}


def _outcome(function: Callable[[torch.Tensor], Any], x: torch.Tensor, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    try:
        with torch.autocast(x.device.type, dtype=dtype):
            return function(x).cpu()
    except RuntimeError as error:
        return str(error).partition("\n")[0][:40]


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_a_worker_on_the_cpu_casts_what_the_cpu_casts(
    name: str, dtype: torch.dtype, given: torch.dtype, sky1: str
) -> None:
    x = torch.linspace(-1, 2, 16).view(4, 4).sin().to(given)
    found, expected = _outcome(ON_CPU[name], x.to(sky1), dtype), _outcome(ON_CPU[name], x, dtype)
    assert type(found) is type(expected)
    if isinstance(expected, str):
        assert found == expected
    else:
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", LOW)
def test_matrix_products_are_computed_in_low_precision(dtype: torch.dtype, sky1: str) -> None:
    x = torch.randn(4, 4, device=sky1)
    with torch.autocast("sky", dtype=dtype):
        results = [
            x @ x,
            F.linear(x, x),
            torch.mm(x, x),
            torch.einsum("ij,jk", x, x),
            F.conv1d(x[None], x[:, :, None]),
            F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
        ]
    assert [r.dtype for r in results] == [dtype] * len(results)
    assert (x @ x).dtype is torch.float32


FULL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "pow": lambda x: x**2,
    "sum": torch.sum,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "norm": lambda x: x.norm(),
    "norm of a dimension": lambda x: x.norm(2, -1),
    "vector_norm": torch.linalg.vector_norm,
    "cumsum": lambda x: x.cumsum(0),
    "mse_loss": lambda x: F.mse_loss(x, x.roll(1)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device=x.device)),
}


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("name", FULL)
def test_delicate_functions_are_computed_in_full_precision(name: str, sky1: str) -> None:
    x = torch.randn(4, 4, dtype=torch.bfloat16)
    with torch.autocast("sky", dtype=torch.bfloat16):
        result = FULL[name](x.to(sky1))
    assert result.dtype is torch.float32
    # cross_entropy asks for log_softmax in the input's dtype, and autocast gives it that.
    assert torch.allclose(result.cpu(), FULL[name](x.float()), atol=1e-2 if name == "cross_entropy" else 1e-5)


@pytest.mark.usefixtures("as_on_cuda")
def test_an_explicit_dtype_wins(sky1: str) -> None:
    x = torch.randn(4, device=sky1, dtype=torch.bfloat16)
    with torch.autocast("sky", dtype=torch.bfloat16):
        assert x.sum(dtype=torch.float64).dtype is torch.float64
        assert x.softmax(-1, dtype=torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.usefixtures("as_on_cuda")
def test_mixed_arguments_are_promoted(sky1: str) -> None:
    low, full = torch.ones(3, device=sky1, dtype=torch.bfloat16), torch.ones(3, device=sky1)
    with torch.autocast("sky", dtype=torch.bfloat16):
        assert torch.atan2(low, full).dtype is torch.float32
        assert torch.dot(low, low).dtype is torch.bfloat16
        with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
            torch.dot(full.half(), low)
        assert torch.atan2(full, full.half()).dtype is torch.float32


def test_double_precision_and_integers_are_left_alone(sky1: str) -> None:
    x = torch.ones(2, 2, device=sky1, dtype=torch.float64)
    with torch.autocast("sky", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.float64
        assert torch.ones(2, device=sky1, dtype=torch.int64).sum().dtype is torch.int64


def test_tensors_of_the_cpu_are_left_alone(sky1: str) -> None:
    x = torch.ones(2, 2)
    with torch.autocast("sky", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.float32


def test_regions_nest_and_end(sky1: str) -> None:
    x = torch.ones(2, 2, device=sky1)
    assert not torch.is_autocast_enabled("sky")
    with torch.autocast("sky", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("sky")
        with torch.autocast("sky", enabled=False):
            assert not torch.is_autocast_enabled("sky")
            assert (x @ x).dtype is torch.float32
        with torch.autocast("sky", dtype=torch.float16):
            assert (x @ x).dtype is torch.float16
        assert (x @ x).dtype is torch.bfloat16
    assert (x @ x).dtype is torch.float32


def casts_of(device: str, region: Callable[[nn.Module, torch.Tensor], Any]) -> int:
    """How many operations a region records."""
    module, x = nn.Linear(4, 4, bias=False).to(device), torch.ones(2, 4, device=device, dtype=torch.bfloat16)
    before = torch.sky.stats()["ops"]  # type: ignore[attr-defined]
    region(module, x)
    return int(torch.sky.stats()["ops"] - before)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["mm", "addmm", "scaled_dot_product_attention"])
def test_gradients_of_what_is_given_twice_are_summed_as_on_the_cpu(name: str, sky1: str) -> None:
    # The sum of three numbers depends on their order, and that of gradients on the order of the casts.
    gradients = []
    for device in ("cpu", sky1):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_() * 1.25
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            result = getattr(torch.ops.aten, name)(*[x] * (2 if name == "mm" else 3)) + x
        gradients += torch.autograd.grad((result * result).sum(), x)
    assert torch.equal(gradients[1].cpu(), gradients[0])


def test_a_weight_is_cast_once_a_region(sky1: str) -> None:
    def several(cache: bool) -> Callable[[nn.Module, torch.Tensor], Any]:
        def region(module: nn.Module, x: torch.Tensor) -> None:
            with torch.autocast("sky", dtype=torch.bfloat16, cache_enabled=cache):
                for _ in range(5):
                    module(x)

        return region

    assert casts_of(sky1, several(False)) - casts_of(sky1, several(True)) == 4
    assert not module_under_test._cache.casts


def test_a_weight_that_changed_is_cast_anew_in_the_next_region(sky1: str) -> None:
    module, x = nn.Linear(2, 2, bias=False).to(sky1), torch.ones(1, 2, device=sky1)
    with torch.autocast("sky", dtype=torch.bfloat16):
        module(x)
    with torch.no_grad():
        module.weight.fill_(3)
    with torch.autocast("sky", dtype=torch.bfloat16):
        assert module(x).tolist() == [[6, 6]]


def test_a_cast_made_without_gradients_is_not_used_with_them(sky1: str) -> None:
    module, x = nn.Linear(2, 2, bias=False).to(sky1), torch.ones(1, 2, device=sky1)
    with torch.autocast("sky", dtype=torch.bfloat16):
        with torch.no_grad():
            module(x)
        module(x).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("dtype", LOW)
def test_a_model_trains_as_it_trains_here(dtype: torch.dtype, sky1: str) -> None:
    def train(device: str) -> list[float]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)).to(device)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        x, y = torch.randn(6, 8).to(device), torch.tensor([0, 1, 2, 3, 0, 1]).to(device)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast(torch.device(device).type, dtype=dtype):
                loss = F.cross_entropy(module(x).float(), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    remote = train(sky1)
    assert remote == train("cpu")
    assert remote[-1] < remote[0]


def test_gradient_checkpointing_recomputes_in_the_same_precision(sky1: str) -> None:
    module, x = nn.Linear(4, 4).to(sky1), torch.randn(2, 4, device=sky1, requires_grad=True)
    seen: list[torch.dtype] = []

    def part(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = module(x)
        seen.append(y.dtype)
        return module(y)  # type: ignore[no-any-return]  # recomputation ends as soon as it has what it needs

    for reentrant in (False, True):
        seen.clear()
        with torch.autocast("sky", dtype=torch.bfloat16):
            y = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=reentrant)
        y.float().sum().backward()
        assert seen == [torch.bfloat16] * 2


def test_functions_of_ones_own_choose_their_precision(sky1: str) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="sky", cast_inputs=torch.float32)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            assert not torch.is_autocast_enabled("sky")
            assert x.dtype is torch.float32
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="sky")
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    x = torch.ones(2, device=sky1, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("sky", dtype=torch.bfloat16):
        y = Twice.apply(x)
    y.sum().backward()
    assert x.grad is not None
    assert (y.dtype, x.grad.dtype, x.grad.tolist()) == (torch.float32, torch.bfloat16, [2, 2])


def test_a_grad_scaler_skips_infinite_steps(sky1: str) -> None:
    parameter = nn.Parameter(torch.ones(2, device=sky1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("sky", init_scale=4.0, growth_interval=1)
    for factor, expected, scale in ((float("inf"), [1, 1], 2.0), (0.5, [0.5, 0.5], 4.0)):
        optimizer.zero_grad()
        scaler.scale((parameter * factor).sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([parameter], 10.0)
        scaler.step(optimizer)
        scaler.update()
        assert parameter.tolist() == expected
        assert scaler.get_scale() == scale
    state = scaler.state_dict()
    scaler.load_state_dict(state)


def test_a_dtype_that_autocast_lacks_disables_it_with_a_warning(sky1: str) -> None:
    x = torch.ones(2, 2, device=sky1)
    with pytest.warns(UserWarning, match="target dtype is not supported"):
        region = torch.autocast("sky", dtype=torch.float64)
    with region:
        assert (x @ x).dtype is torch.float32


@pytest.mark.usefixtures("as_on_cuda")
def test_binary_cross_entropy_is_refused_in_pytorchs_words(sky1: str) -> None:
    x = torch.full((2,), 0.5, device=sky1)
    with torch.autocast("sky", dtype=torch.float16), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(x, x)
    assert F.binary_cross_entropy(x, x).item() == pytest.approx(0.6931, abs=1e-3)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_norms_of_half_precision_give_the_statistics_of_the_worker(
    parameters: torch.dtype, training: bool, sky1: str
) -> None:
    """In which dtype they are depends on the device; PyTorch's fake kernels say it wrongly for mixed ones."""
    torch.manual_seed(0)
    x = torch.randn(4, 6).bfloat16()
    for norm in (torch.nn.BatchNorm1d(6, dtype=parameters), torch.nn.LayerNorm(6, dtype=parameters)):
        expected = norm.train(training)(x)
        found = norm.to(sky1)(x.to(sky1))
        torch.testing.assert_close(found.cpu(), expected, rtol=0.02, atol=0.02)
        torch.sky.synchronize()  # type: ignore[attr-defined]


def _encode(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the layer calls, by itself: from PyTorch 2.15 on, layers do not under the autocast of an accelerator."""
    parameters = list(layer.parameters())
    attention, hidden, norms = parameters[:4], parameters[4:8], parameters[8:]
    with torch.no_grad():
        return torch._transformer_encoder_layer_fwd(x, 8, 2, *attention, False, False, 1e-5, *norms, *hidden)


INSIDE: dict[str, Callable[[torch.Tensor, nn.Module], torch.Tensor]] = {
    "affine_grid": lambda x, layer: F.affine_grid(x[:, :2, :3], [2, 1, 3, 4], align_corners=False),
    "affine_grid of volumes": lambda x, layer: F.affine_grid(x[:, :3, :4], [2, 1, 3, 4, 2], align_corners=True),
    "grid_sample": lambda x, layer: F.grid_sample(x[:, None], F.affine_grid(x[:, :2, :3], [2, 1, 3, 4])),
    "bilinear": lambda x, layer: F.bilinear(x[0], x[1], x.reshape(1, 8, 8)),
    "an encoder's layer that is fused": lambda x, layer: _encode(layer, x),
}


@pytest.mark.filterwarnings("ignore:Default grid_sample and affine_grid behavior")
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", INSIDE)
def test_what_kernels_call_inside_is_cast_too(name: str, dtype: torch.dtype, sky1: str) -> None:
    torch.manual_seed(0)
    layer, numbers = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 4, 8)

    def run(device: str) -> list[torch.Tensor]:
        x = numbers.to(device).requires_grad_()
        with torch.autocast(torch.device(device).type, dtype):
            result = INSIDE[name](x, layer.to(device))
            again = INSIDE[name](x, layer)  # from what was learned the first time
        assert torch.equal(result, again)
        if not result.requires_grad:
            return [result.detach()]
        return [result.detach(), *torch.autograd.grad(result.float().square().sum(), [x])]

    for ours, theirs in zip(run(sky1), run("cpu"), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("name", ["affine_grid", "bilinear"])
def test_nothing_is_cast_inside_without_autocast_or_where_it_is_switched_off(name: str, sky1: str) -> None:
    x, layer = torch.randn(2, 4, 8), nn.Identity()
    expected = INSIDE[name](x, layer)
    with torch.autocast("sky", torch.bfloat16):
        INSIDE[name](x.to(sky1), layer)
        with torch.autocast("sky", enabled=False):
            assert torch.equal(INSIDE[name](x.to(sky1), layer).cpu(), expected)
    assert torch.equal(INSIDE[name](x.to(sky1), layer).cpu(), expected)


COMPOSITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "tensordot": lambda x: torch.tensordot(x, x.T, 1),
    "inner": lambda x: torch.inner(x, x),
    "multi_dot": lambda x: torch.linalg.multi_dot([x, x.T, x]),
    "matrix_power": lambda x: torch.linalg.matrix_power(x @ x.T, 3),
    "cov": torch.cov,
    "bilinear": lambda x: F.bilinear(x[:1], x[1:2], x.reshape(1, 8, 8)),
    "convolution with padding": lambda x: F.conv1d(x[None], x[:, :, None], padding="same"),
    "interpolate": lambda x: F.interpolate(x[None].bfloat16(), scale_factor=2),
    "cross_entropy": lambda x: F.cross_entropy(x.bfloat16(), torch.arange(8, device=x.device)),
    "pairwise_distance": lambda x: F.pairwise_distance(x.bfloat16(), x.flip(0).bfloat16()),
    "lstm": lambda x: nn.LSTM(8, 4, device=x.device).requires_grad_(False)(x)[0].fill_(0),
    "gru_cell": lambda x: torch.gru_cell(x, x[:, :8], x.repeat(3, 1), x.repeat(3, 1)),
    "attention": lambda x: nn.functional.multi_head_attention_forward(
        x[:, None], x[:, None], x[:, None], 8, 2, x.repeat(3, 1), None, None, None, False, 0.0, x, None
    )[0],
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_parts_of_composites_are_cast_in_inference_mode(name: str, sky1: str) -> None:
    torch.manual_seed(0)
    numbers = torch.randn(8, 8)

    def run(device: str, mode: Any) -> torch.Tensor:
        x = numbers.to(device)
        with mode(), torch.autocast(torch.device(device).type, torch.bfloat16):
            result: torch.Tensor = COMPOSITES[name](x)
        return result.cpu()

    for mode in (torch.inference_mode, torch.no_grad):
        found, expected = run(sky1, mode), run("cpu", mode)
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)
    with torch.inference_mode():
        of_inference = numbers.to(sky1)
    with torch.no_grad(), torch.autocast("sky", torch.bfloat16):
        assert torch.equal(COMPOSITES[name](of_inference).cpu(), expected)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("size", [(3, 3), (2, 3), (2, 3, 2)])
def test_a_pseudo_inverse_is_multiplied_in_low_precision(size: tuple[int, ...], mode: Any, sky1: str) -> None:
    found = []
    for device in ("cpu", sky1):
        x = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
        with torch.autocast(x.device.type, torch.bfloat16), mode():
            result = torch.linalg.pinv(x)
        assert result.dtype is torch.bfloat16
        found.append((result.tolist(), type(result.grad_fn)))
    assert found[0] == found[1]


@pytest.mark.parametrize("first", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("second", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_weight_that_changes_in_a_region_is_used_as_on_the_cpu(first: Any, second: Any, sky1: str) -> None:
    """Casts are kept for the region, whether gradients were wanted or not, and in inference mode none is."""
    found = []
    for device in ("cpu", sky1):
        module, x = nn.Linear(2, 2, bias=False).to(device), torch.ones(1, 2, device=device)
        nn.init.ones_(module.weight)
        with torch.autocast(x.device.type, torch.bfloat16):
            for mode in (first, second, first):
                with mode():
                    result = module(x)
                found.append((result.tolist(), result.requires_grad))
                with torch.no_grad():
                    module.weight.add_(1)
    half = len(found) // 2
    assert found[:half] == found[half:]


def test_the_autocast_of_the_cpu_casts_nothing_remote(sky: str) -> None:
    """Nor its stand-ins, on which is inferred what a call gives that nobody has made before."""
    x, y = torch.randn(11, device=sky), torch.randn(5, 11, 7, device=sky)
    with torch.autocast("cpu"):
        assert (x @ y).dtype is torch.float32
        assert (x[:0].view(0, 0) @ y[0, :0]).dtype is torch.float32
    assert torch.equal((x @ y).cpu(), x.cpu() @ y.cpu())
