"""What `make upstream` lets a remote device do otherwise than the CPU: patterns of tests, each with its reason.

A pattern whose tests ran and did not differ fails the run, so no line outlives its reason.
"""

from __future__ import annotations

_FP16 = "accelerate allows fp16 on the devices of a list of its own"
_DEVICES = "accelerate compares with a list of devices of its own"
_PROGRAM = "starts a program of its own, which does not import skyproxy"
_CPU_ONLY = "the test is for the CPU only, says its decorator"

DIFFERENCES: dict[str, dict[str, str]] = {
    "timm": {
        "tests/test_models.py::test_model_forward_torchscript[*": "the test leaves its input on the CPU",
    },
    "peft": {},
    "accelerate": {
        "*::AcceleratorTester::test_accelerator_can_be_reinstantiated": _DEVICES,
        "*::AcceleratorTester::test_can_unwrap_model": "asks for cpu=True, which ACCELERATE_TORCH_DEVICE overrides",
        "*::AcceleratorTester::test_can_unwrap_model_fp16": _FP16,
        "*::AcceleratorTester::test_prepare_model_8bit_cpu_offload_raises_valueerror_not_typeerror": (
            "ACCELERATE_TORCH_DEVICE has a number, for which another error comes first"
        ),
        "*::BigModelingTester::test_cpu_offload_with_hook": _DEVICES,
        "*::KwargsHandlerTester::test_autocast_kwargs": _FP16,
        "*::KwargsHandlerTester::test_grad_scaler_kwargs": _FP16,
        "*::OptimizerTester::test_accelerated_optimizer_step_was_skipped": _FP16,
        "tests/test_state_checkpointing.py::*::test_map_location": _PROGRAM,
        "*::CPUOptimizerTester::*": _CPU_ONLY,
        "*::SchedulerTester::*": _CPU_ONLY,
    },
}
