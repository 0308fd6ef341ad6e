"""The table of global modes: complete, readable, and every value can be put in force."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from skyproxy.errors import ConfigurationError
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.torch_modes import MODES, USUAL, decode, put_in_force, record_of, values_in_force

NO_MODES_OF_A_DEVICE = {
    # What the client alone does: autograd, tracing, functions of its own process.
    "_set_autograd_fallback_mode",
    "_set_backcompat_broadcast_warn",
    "_set_backcompat_keepdim_warn",
    "_set_cached_tensors_enabled",
    "_set_dispatch_mode",
    "_set_dtensor_allow_implicit_replication",
    "_set_fwd_grad_enabled",
    "_set_generator_metaclass",
    "_set_grad_enabled",
    "_set_grad_layout_enforcement_enabled",
    "_set_graph_exec_group",
    "_set_graph_executor_optimize",
    "_set_meta_in_tls_dispatch_include",
    "_set_multithreading_enabled",
    "_set_only_lift_cpu_tensors",
    "_set_override_stale_capture_stream",
    "_set_print_stack_traces_on_fatal_signal",
    "_set_should_use_format_with_string_table",
    "_set_skip_next_torch_function",
    "_set_thread_name",
    "_set_throw_on_mutable_data_ptr",
    "_set_torch_function_state",
    "_set_tracing_state",
    "_set_value_trace",
    "_set_view_replay_enabled",
    "_set_warn_deprecated_on_mutable_data_ptr",
    "_set_warn_on_accumulate_grad_stream_mismatch",
    "_set_worker_pids",
    "_set_worker_signal_handlers",
    # What belongs to one tensor.
    "_set_conj",
    "_set_fake_constant",
    "_set_neg",
    "_set_storage_access_error_msg",
    "_set_storage_data_ptr_access_error_msg",
    "_set_tensor_metadata",
    # Kernels in Python or of other packages, which replace those of this process's own CUDA.
    "_set_native_aot_enabled",
    "_set_native_aot_unconditional_masked",
    "_set_sdp_use_fa4",
    # Memory of the process, which has no effect on results.
    "_set_default_mobile_cpu_allocator",
}
OTHERS: dict[str, Any] = {
    "default_dtype": "float64",
    "deterministic_algorithms": "warn",
    "float32_matmul_precision": "medium",
    "quantized.engine": "qnnpack",
    "sdp.priority_order": (0, 1, 2, 3, 4),
    "cudnn.benchmark_limit": 3,
    "cudnn.depthwise_kernel": "native",
    "cuda.matmul.allow_fp16_reduced_precision_reduction": (False, True),
    "cuda.matmul.allow_bf16_reduced_precision_reduction": (False, False),
    "cuda.preferred_linalg_library": "Magma",
    "cuda.preferred_blas_library": "Cublaslt",
    "cuda.preferred_rocm_fa_library": "AOTriton",
    "cuda.sm_carveout": 4,
}
DEPENDS_ON_THE_MACHINE = ("cuda.preferred_", "cudnn.depthwise_kernel", "cpu.allow_fp16", "quantized.engine")


def other_value(name: str) -> Any:
    """A value of a mode that is not its usual one."""
    if name.startswith("fp32_precision."):
        return "ieee"
    return OTHERS.get(name, not MODES[name].usual)


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    before = values_in_force()
    yield
    put_in_force(before)
    assert values_in_force() == before


def test_every_setter_of_torch_is_a_mode_or_no_matter_of_the_device() -> None:
    setters = {name for name in dir(torch._C) if name.startswith("_set_")}
    known = {name for mode in MODES.values() for name in mode.setters}
    assert setters - known - NO_MODES_OF_A_DEVICE == set()
    assert not known & NO_MODES_OF_A_DEVICE


def test_the_page_of_modes_lists_every_one() -> None:
    page = (Path(__file__).parents[1] / "docs/reference/global-modes.md").read_text(encoding="utf-8")
    travelling = page.partition("## Modes that travel")[2].partition("## ")[0]
    listed = {
        name for row in travelling.splitlines() for cell in row.split("|")[2:3] for name in re.findall("`(.+?)`", cell)
    }
    of_some_builds = {"cudnn.benchmark_limit", "cudnn.depthwise_kernel"}  # with CUDA; from torch 2.12 on
    of_some_builds |= {"cuda.matmul.prefer_cublaslt_grouped_gemm"}  # from torch 2.14 on
    assert listed - of_some_builds == MODES.keys() - of_some_builds


def test_a_process_in_which_nothing_was_set_has_an_empty_record() -> None:
    # Some libraries of this process may have set some; so these values are those of a new one.
    assert record_of({name: mode.usual for name, mode in MODES.items()}) == USUAL


@pytest.mark.parametrize("name", MODES)
def test_each_mode_travels_and_is_put_in_force(name: str) -> None:
    value = other_value(name)
    assert MODES[name].accepts(value)
    record = decode({name: list(value) if isinstance(value, tuple) else value}, cuda=True)
    assert record == ((name, value),)
    values = {**values_in_force(), **dict(record)}
    if name.startswith(DEPENDS_ON_THE_MACHINE):
        refusal = re.escape(f"{name} cannot be {value!r} on this worker")
        try:
            put_in_force(values)
        except ConfigurationError as error:
            refused = str(error)
        else:
            refused = ""
        assert not refused or re.match(refusal, refused)
        return
    put_in_force(values)
    if not MODES[name].of_thread:
        assert MODES[name].read() == value or name == "cudnn.allow_tf32"  # which `fp32_precision` overrules


def test_a_precision_that_was_set_in_the_new_way_is_read_without_the_old_one() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    # PyTorch's own test tools, which any test of this process may have imported, set another mode.
    record = [row for row in record_of(values_in_force()) if row[0] != "warn_always"]
    assert record == [("fp32_precision.cuda.matmul", "tf32")]


def test_the_order_that_pytorch_prefers_by_the_hardware_is_not_the_programs(sky: str) -> None:
    setter, before = torch._C._set_sdp_priority_order, torch._C._get_sdp_priority_order()
    try:
        setter.__wrapped__([3, 1, 2, 0, 4])  # type: ignore[attr-defined]  # as its first attention on Hopper does
        torch.set_float32_matmul_precision("high")
        assert "sdp.priority_order" not in dict(DEVICES.of(sky).modes)
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
            assert dict(DEVICES.of(sky).modes)["sdp.priority_order"][:2] == (0, 1)
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION], set_priority=True):
                assert dict(DEVICES.of(sky).modes)["sdp.priority_order"][0] == 1
        assert "sdp.priority_order" not in dict(DEVICES.of(sky).modes)
    finally:
        torch.set_float32_matmul_precision("highest")
        setter.__wrapped__(before)  # type: ignore[attr-defined]


def test_an_order_that_is_pytorchs_own_here_is_told_where_the_program_asks_for_it(sky: str) -> None:
    with sdpa_kernel(
        [
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.OVERRIDEABLE,
        ],
        set_priority=True,
    ):
        assert dict(DEVICES.of(sky).modes)["sdp.priority_order"] == (1, 2, 0, 3, 4)
    assert "sdp.priority_order" not in dict(DEVICES.of(sky).modes)
