"""PyTorch's global modes hold for remote tensors too, from the very point of the program where they stand."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import deterministic

import skyproxy
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.dispatch.memoized_calls import memoized
from skyproxy.torch_modes import MODES, put_in_force, record_of, values_in_force

EXPRESSIONS: dict[str, Callable[[str], torch.Tensor]] = {
    "zeros": lambda device: torch.zeros(3, device=device),
    "full": lambda device: torch.full((2, 2), 0.1, device=device),
    "full of integers": lambda device: torch.full((2,), 3, device=device),
    "arange": lambda device: torch.arange(0, 1, 0.1, device=device),
    "linspace": lambda device: torch.linspace(0, 1, 5, device=device),
    "division of integers": lambda device: torch.arange(1, 7, device=device) / 3,
    "integers times a fraction": lambda device: torch.arange(5, device=device) * 0.1,
    "root of integers": lambda device: torch.arange(5, device=device).sqrt(),
    "mean of booleans": lambda device: torch.tensor([1.1, 2.2], device=device) + 0.3,
    "complex": lambda device: torch.arange(3, device=device) * 1j,
    "layer": lambda device: sum(
        p.sum() * 0 + p.new_ones(()) for p in torch.nn.Linear(2, 3, device=device).parameters()
    ),
}
DTYPES = (torch.float64, torch.bfloat16, torch.float32)


MATRIX = torch.linspace(-1, 1, 300 * 300).view(300, 300)
cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
Setter = Callable[[], object]


def _set(owner: Any, name: str, value: Any) -> Setter:
    return lambda: setattr(owner, name, value)


SETTERS: dict[str, tuple[Setter, dict[str, Any]]] = {
    "set_default_dtype": (lambda: torch.set_default_dtype(torch.float64), {"default_dtype": "float64"}),
    "use_deterministic_algorithms": (
        lambda: torch.use_deterministic_algorithms(True),
        {"deterministic_algorithms": "error"},
    ),
    "use_deterministic_algorithms, warn_only": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        {"deterministic_algorithms": "warn"},
    ),
    "set_deterministic_debug_mode": (
        lambda: torch.set_deterministic_debug_mode("warn"),
        {"deterministic_algorithms": "warn"},
    ),
    "fill_uninitialized_memory": (
        _set(deterministic, "fill_uninitialized_memory", False),
        {"deterministic.fill_uninitialized_memory": False},
    ),
    "set_flush_denormal": (lambda: torch.set_flush_denormal(True), {"flush_denormal": True}),
    "set_warn_always": (lambda: torch.set_warn_always(True), {"warn_always": True}),
    "check_sparse_tensor_invariants": (
        torch.sparse.check_sparse_tensor_invariants.enable,
        {"sparse.check_sparse_tensor_invariants": True},
    ),
    "set_float32_matmul_precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        {
            "float32_matmul_precision": "medium",
            "fp32_precision.cuda.matmul": "tf32",
            "fp32_precision.mkldnn.matmul": "bf16",
        },
    ),
    "cuda.matmul.allow_tf32": (_set(cuda.matmul, "allow_tf32", True), {"fp32_precision.cuda.matmul": "tf32"}),
    "cuda.matmul.fp32_precision": (_set(cuda.matmul, "fp32_precision", "tf32"), {"fp32_precision.cuda.matmul": "tf32"}),
    "cudnn.allow_tf32": (
        _set(cudnn, "allow_tf32", False),
        {"cudnn.allow_tf32": False, "fp32_precision.cuda.conv": "none", "fp32_precision.cuda.rnn": "none"},
    ),
    "cudnn.conv.fp32_precision": (_set(cudnn.conv, "fp32_precision", "ieee"), {"fp32_precision.cuda.conv": "ieee"}),
    "mkldnn.matmul.fp32_precision": (
        _set(mkldnn.matmul, "fp32_precision", "bf16"),
        {"fp32_precision.mkldnn.matmul": "bf16"},
    ),
    "backends.fp32_precision": (
        _set(torch.backends, "fp32_precision", "tf32"),
        {"fp32_precision.generic.all": "tf32", "fp32_precision.mkldnn.conv": "tf32"},
    ),
    "mkldnn.enabled": (_set(mkldnn, "enabled", False), {"mkldnn.enabled": False}),
    "mkldnn.deterministic": (_set(mkldnn, "deterministic", True), {"mkldnn.deterministic": True}),
    "nnpack.set_flags": (lambda: torch.backends.nnpack.set_flags(False), {"nnpack.enabled": False}),
    "quantized.engine": (_set(torch.backends.quantized, "engine", "onednn"), {"quantized.engine": "onednn"}),
    "enable_flash_sdp": (lambda: cuda.enable_flash_sdp(False), {"sdp.flash": False}),
    "enable_math_sdp": (lambda: cuda.enable_math_sdp(False), {"sdp.math": False}),
    "enable_mem_efficient_sdp": (lambda: cuda.enable_mem_efficient_sdp(False), {"sdp.mem_efficient": False}),
    "enable_cudnn_sdp": (lambda: cuda.enable_cudnn_sdp(False), {"sdp.cudnn": False}),
    "allow_fp16_bf16_reduction_math_sdp": (
        lambda: cuda.allow_fp16_bf16_reduction_math_sdp(True),
        {"sdp.allow_fp16_bf16_reduction_math": True},
    ),
    "cudnn.enabled": (_set(cudnn, "enabled", False), {"cudnn.enabled": False}),
    "cudnn.benchmark": (_set(cudnn, "benchmark", True), {"cudnn.benchmark": True}),
    "cudnn.deterministic": (_set(cudnn, "deterministic", True), {"cudnn.deterministic": True}),
    "cudnn.set_flags": (
        lambda: cudnn.set_flags(_enabled=False, _benchmark=True),
        {"cudnn.enabled": False, "cudnn.benchmark": True},
    ),
    "cuda.matmul.allow_fp16_reduced_precision_reduction": (
        _set(cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
        {"cuda.matmul.allow_fp16_reduced_precision_reduction": (False, True)},
    ),
    "cuda.matmul.allow_fp16_accumulation": (
        _set(cuda.matmul, "allow_fp16_accumulation", True),
        {"cuda.matmul.allow_fp16_accumulation": True},
    ),
    "miopen.immediate": (_set(torch.backends.miopen, "immediate", True), {"miopen.immediate": True}),
}
"""By what a program writes: how it sets a mode, and some of the modes that the worker must have afterwards."""


@pytest.fixture(autouse=True)
def usual(sky_devices: tuple[str, str], _settable_flags: None) -> Iterator[None]:
    before = values_in_force()
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(False)
    put_in_force(before)
    for device in DEVICES.alive():
        assert device.modes == record_of(before)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("name", SETTERS)
def test_a_mode_is_in_force_on_every_worker_once_it_is_set(name: str, sky: str, sky1: str) -> None:
    setter, expected = SETTERS[name]
    setter()
    told = dict(DEVICES.of(sky).modes)
    for mode, value in expected.items():
        assert told.get(mode, MODES[mode].usual) == value
        for device in (sky, sky1):
            found = torch.sky.modes_in_force(device)[mode]
            if not MODES[mode].cuda_only:  # which a worker without CUDA leaves alone
                assert found == value


def test_a_mode_that_is_not_reset_to_another_value_tells_nothing(sky: str) -> None:
    torch.sky.synchronize(sky)
    torch.set_float32_matmul_precision("highest")
    recorded = list(DEVICES.of(sky).recorder.stream)
    torch.backends.cudnn.benchmark = False
    mkldnn.set_flags(_enabled=True)
    assert DEVICES.of(sky).recorder.stream == recorded


def test_lower_precision_gives_what_it_gives_here(sky: str) -> None:
    remote = MATRIX.to(sky)
    for precision in ("highest", "medium", "highest"):
        torch.set_float32_matmul_precision(precision)
        assert torch.equal((remote @ remote).cpu(), MATRIX @ MATRIX)


def test_each_operation_has_the_modes_of_its_place_in_the_program(sky: str) -> None:
    remote = MATRIX.to(sky)
    results, expected = [], []
    for precision in ("none", "bf16", "none", "bf16"):
        mkldnn.matmul.fp32_precision = precision
        results.append(remote @ remote)
        expected.append(MATRIX @ MATRIX)
    mkldnn.matmul.fp32_precision = "none"
    assert all(torch.equal(a.cpu(), b) for a, b in zip(results, expected, strict=True))


def test_memory_that_nobody_wrote_is_filled_where_determinism_asks_for_it(sky: str) -> None:
    torch.use_deterministic_algorithms(True)
    like = torch.ones(2, 3, device=sky)
    for made in (
        torch.empty(4, device=sky),
        torch.empty(4, dtype=torch.int32, device=sky),
        torch.empty_like(like),
        like.new_empty(5),
        torch.empty_strided((2, 2), (1, 2), device=sky),
        torch.ones(2, device=sky).resize_(6)[2:],
        torch.empty_permuted((2, 3), (1, 0), device=sky),
    ):
        filled = made.isnan() if made.is_floating_point() else made == torch.iinfo(made.dtype).max
        assert bool(filled.all())


def test_an_operation_without_a_deterministic_form_is_refused_as_here(sky: str) -> None:
    torch.use_deterministic_algorithms(True)
    where = torch.tensor([1, 1], device=sky)
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        torch.zeros(4, device=sky).put_(where, torch.ones(2, device=sky)).sum().item()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.zeros(4, device=sky).put_(where, torch.ones(2, device=sky)).sum().item() == 1


def test_denormal_numbers_are_flushed_where_the_program_says_so(sky: str) -> None:
    def flushed() -> float:
        return float((torch.full((100_000,), 1e-39, device=sky) * 1.0 == 0).float().mean())

    assert flushed() == 0
    torch.set_flush_denormal(True)
    assert flushed() == 1
    torch.set_flush_denormal(False)
    assert flushed() == 0


def test_denormal_numbers_are_flushed_where_the_program_said_so_before_there_was_a_device() -> None:
    source = (
        "import torch\ntorch.set_flush_denormal(True)\nimport skyproxy\n"
        "x = torch.full((64,), 1e-39)\n"
        "assert torch.equal((x.to('sky') * 1.0).cpu().view(torch.int32), (x * 1.0).view(torch.int32))\n"
        "assert torch.sky.modes_in_force('sky')['flush_denormal']\n"
        "torch.set_flush_denormal(False)\n"
        "assert torch.equal((x.to('sky') * 1.0).cpu().view(torch.int32), (x * 1.0).view(torch.int32))\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)


@pytest.mark.filterwarnings("ignore:Flash attention kernel not used")
@pytest.mark.parametrize("gradients", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_attention_is_computed_by_a_kernel_that_the_program_allows(
    sky: str, gradients: Callable[[], contextlib.AbstractContextManager[Any]]
) -> None:
    chosen = ([SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION], [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
    none = ([SDPBackend.EFFICIENT_ATTENTION], [SDPBackend.CUDNN_ATTENTION])
    with gradients():
        x = torch.linspace(-1, 1, 2 * 4 * 8 * 16).view(2, 4, 8, 16).sin()
        remote = x.to(sky)
        for kinds in (*chosen, *chosen):
            with sdpa_kernel(kinds):
                found = F.scaled_dot_product_attention(remote, remote, remote)
                assert torch.equal(found.cpu(), F.scaled_dot_product_attention(x, x, x))
        for kinds in none:
            with sdpa_kernel(kinds), pytest.raises(RuntimeError, match="No viable backend"):
                F.scaled_dot_product_attention(remote, remote, remote)
        mask = torch.zeros(8, 8, device=sky, requires_grad=True)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
            F.scaled_dot_product_attention(remote, remote, remote, attn_mask=mask)


def test_a_function_transform_that_has_the_math_form_only_refuses_to_do_without(sky: str) -> None:
    x = torch.ones(1, 1, 4, 8, device=sky)
    curvature = torch.func.hessian(lambda t: F.scaled_dot_product_attention(t, t, t).sum())
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="sky devices compute attention in"):
        curvature(x)


def test_compiled_attention_is_computed_by_a_kernel_that_the_program_allows(sky: str) -> None:
    x = torch.linspace(-1, 1, 2 * 4 * 8 * 16).view(2, 4, 8, 16).sin()

    def attend(t: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(t, t, t)

    compiled = torch.compile(attend, backend="sky", options={"worker": "eager"})
    assert torch.equal(compiled(x.to(sky)).cpu(), attend(x))
    assert not torch.equal(attend(x), F.scaled_dot_product_attention(x, x, x))


def test_a_compiled_function_runs_under_the_modes_of_its_call(sky: str) -> None:
    remote = MATRIX.to(sky)
    compiled = torch.compile(lambda t: t @ t, backend="sky", options={"worker": "eager"})
    for precision in ("none", "bf16", "none"):
        mkldnn.matmul.fp32_precision = precision
        assert torch.equal(compiled(remote).cpu(), MATRIX @ MATRIX)


def _set_precision(lower: bool) -> None:
    mkldnn.matmul.fp32_precision = "bf16" if lower else "none"


@pytest.mark.parametrize(
    ("switch", "operation"),
    [
        pytest.param(_set_precision, lambda t: t @ t, id="precision"),
        # Looked up when it is called, for the first device replaces it.
        pytest.param(lambda on: torch.set_flush_denormal(on), lambda t: t * 1e-39, id="denormal numbers"),
    ],
)
def test_a_graph_is_replayed_under_the_modes_of_its_capture(
    switch: Callable[[bool], object], operation: Callable[[torch.Tensor], torch.Tensor], sky: str
) -> None:
    remote = MATRIX.to(sky)
    switch(False)  # whatever was before
    exact = operation(MATRIX)
    switch(True)
    rough = operation(MATRIX)
    switch(False)  # comparing flushes, too
    if switch is _set_precision and torch.equal(rough, exact):
        pytest.skip("this processor has no instructions for products in bfloat16")
    assert not torch.equal(rough, exact)
    switch(True)
    _ = operation(remote)
    graph = torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        first = operation(remote)
        switch(False)
        second = operation(remote)
    assert torch.equal(operation(remote).cpu(), exact)  # what was set inside counts after the capture, too
    for lower in (False, True):
        switch(lower)
        graph.replay()
        replayed, expected = operation(remote), operation(MATRIX)
        found = [each.cpu() for each in (first, second, replayed)]
        switch(False)
        for ours, theirs in zip(found, (rough, exact, expected), strict=True):
            assert torch.equal(ours, theirs)


def test_a_capture_that_is_given_up_leaves_the_modes_that_were_set_in_it(sky: str) -> None:
    graph = torch.sky.SkyGraph()
    with contextlib.suppress(KeyError), torch.sky.graph(graph):
        mkldnn.enabled = False
        raise KeyError
    assert torch.sky.modes_in_force(sky)["mkldnn.enabled"] is False


def test_a_capture_of_nothing_but_modes_is_no_part_of_a_graph(sky: str, sky1: str) -> None:
    graph = torch.sky.SkyGraph()
    remote = torch.ones(3, device=sky)
    with torch.sky.graph(graph):
        mkldnn.enabled = False
        result = remote + 1
    mkldnn.enabled = True
    graph.replay()
    assert result.tolist() == [2, 2, 2]
    assert torch.sky.graph_report(sky1)["graphs"] == 0
    assert torch.sky.modes_in_force(sky1)["mkldnn.enabled"] is True


def test_threads_that_set_modes_at_once_leave_the_worker_with_the_last_ones(sky: str) -> None:
    def toggle() -> None:
        for value in (False, True) * 50:
            mkldnn.enabled = value

    threads = [threading.Thread(target=toggle) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert torch.sky.modes_in_force(sky)["mkldnn.enabled"] is mkldnn.enabled


def test_the_number_of_threads_is_a_matter_of_each_machine(sky: str) -> None:
    before, modes = torch.get_num_threads(), DEVICES.of(sky).modes
    torch.set_num_threads(before + 1)
    try:
        assert DEVICES.of(sky).modes == modes
        assert torch.sky.modes_in_force(sky).keys() == MODES.keys()
    finally:
        torch.set_num_threads(before)


def test_anomaly_mode_finds_the_function_that_gave_nan(sky: str) -> None:
    x = torch.tensor([-1.0], device=sky, requires_grad=True)
    with (
        pytest.warns(UserWarning, match="Anomaly Detection"),
        torch.autograd.detect_anomaly(),
        pytest.warns(UserWarning, match="Error detected in SqrtBackward0"),
        pytest.raises(RuntimeError, match="SqrtBackward0' returned nan values"),
    ):
        x.sqrt().sum().backward()


def test_fast_paths_and_contraction_orders_that_are_chosen_here_count(sky: str) -> None:
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval().to(sky)
    x, y = torch.ones(1, 3, 8, device=sky), torch.ones(8, 4, device=sky)
    fast, inner = torch.backends.mha.get_fastpath_enabled(), torch.backends.opt_einsum.enabled
    torch.backends.mha.set_fastpath_enabled(False)
    torch.backends.opt_einsum.enabled = False
    try:
        with torch.no_grad():
            assert layer(x, x, x, need_weights=False)[0].shape == (1, 3, 8)
        assert torch.einsum("bsd,de->bse", x, y).sum().item() == 96
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.backends.opt_einsum.enabled = inner


# --- the default dtype -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_dtype_gives_what_it_gives_here(name: str, sky: str, sky1: str) -> None:
    for dtype in (*DTYPES, *DTYPES):
        torch.set_default_dtype(dtype)
        for device in (sky, sky1):
            found, expected = EXPRESSIONS[name](device), EXPRESSIONS[name]("cpu")
            assert found.dtype is expected.dtype
            assert torch.equal(found.cpu(), expected)
    torch.sky.synchronize(sky)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:.*Complex:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.full((2,), 1j, device=device),
        lambda device: torch.arange(3, device=device) * 1j,
        lambda device: torch.arange(3, device=device) + 1j,
        lambda device: torch.linspace(0, 1j, 3, device=device),
        lambda device: torch.arange(3, device=device) / 1j,
        lambda device: torch.ones(3, dtype=torch.float32, device=device) * 1j,
    ],
)
def test_complex_numbers_under_half_precision_are_what_they_are_here(
    make: Callable[[str], torch.Tensor], dtype: torch.dtype, sky: str
) -> None:
    torch.set_default_dtype(dtype)
    try:
        expected = make("cpu")
    except (NotImplementedError, RuntimeError) as error:
        with pytest.raises(type(error)):
            make(sky).cpu()
        return
    found = make(sky)
    assert found.dtype is expected.dtype
    assert torch.equal(torch.view_as_real(found.cpu()), torch.view_as_real(expected))


def test_what_was_recorded_before_keeps_the_dtype_before(sky: str) -> None:
    numbers = torch.arange(1, 4).to(sky)
    before = numbers / 3
    torch.set_default_dtype(torch.float64)
    after = numbers / 3
    assert (before.dtype, after.dtype) == (torch.float32, torch.float64)
    assert torch.equal(before.cpu(), torch.arange(1, 4).float() / 3)
    assert torch.equal(after.cpu(), torch.arange(1, 4) / 3)


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_the_default_tensor_type_counts_too(sky: str) -> None:
    torch.set_default_tensor_type(torch.DoubleTensor)
    assert torch.ones(2, device=sky).dtype is torch.float64


def test_a_worker_that_comes_later_has_it(sky: str) -> None:
    torch.set_default_dtype(torch.float64)
    node = skyproxy.launch_local("cpu")
    try:
        device = node.devices[0]
        found = torch.arange(1, 4, device=device) / 3
        assert torch.equal(found.cpu(), torch.arange(1, 4) / 3)
    finally:
        node.close()


def a_third_and_one(x: torch.Tensor) -> torch.Tensor:
    return x / 3 + 1


def test_a_noted_function_has_recipes_for_each(sky: str) -> None:
    function = memoized(a_third_and_one, __name__.partition(".")[0], takes_module=False)
    numbers = torch.arange(4).to(sky)
    with torch.no_grad():
        for dtype in DTYPES:
            torch.set_default_dtype(dtype)
            for _ in range(6):
                found, expected = function(numbers), torch.arange(4) / 3 + 1
                assert found.dtype is expected.dtype
                assert torch.equal(found.cpu(), expected)


def test_a_lost_worker_does_not_keep_the_program_from_setting_it(sky: str) -> None:
    node = skyproxy.launch_local("cpu")
    node.close()
    torch.set_default_dtype(torch.float64)
    assert torch.ones(1, device=sky).dtype is torch.float64


def test_modes_that_a_function_leaves_on_a_worker_are_for_its_functions_alone() -> None:
    def set_modes() -> None:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.backends.mkldnn.enabled = False

    def look() -> tuple[object, ...]:
        return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled

    with skyproxy.launch_local("cpu") as node:
        before = torch.sky.modes_in_force(device := node.device("cpu"))
        node.run(set_modes)
        assert torch.sky.modes_in_force(device) == before
        for _ in range(20):
            torch.set_default_dtype(torch.bfloat16)
            assert torch.ones(3, device=device).cpu().dtype is torch.bfloat16
            torch.set_default_dtype(torch.float32)
            assert node.run(look) == (torch.float64, True, False)
        assert torch.arange(3, device=device).sqrt().cpu().dtype is torch.float32
