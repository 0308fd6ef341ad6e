"""The devices that this worker offers."""

from __future__ import annotations

import os
import platform
from types import ModuleType
from typing import NotRequired, TypedDict

from skyproxy.errors import ConfigurationError, visible

CHOICES = ("auto", "cuda", "cpu")


class DeviceRow(TypedDict):
    """One device of a worker, as it announces it.

    Attributes:
        type: "cuda" or "cpu".
        index: the number that PyTorch gives it.
        name: for people.
        total_memory_bytes: 0 where the system does not tell.
        compute_capability: major and minor, of CUDA.
        multiprocessors: how many, of CUDA.
        uuid: of CUDA, where torch tells it.
        threads: how many PyTorch computes with, of the CPU.
        cudnn: whether PyTorch computes with cuDNN there.
        onednn_lstm: the dtypes in which PyTorch may compute an LSTM with oneDNN, of the CPU.
    """

    type: str
    index: int
    name: str
    total_memory_bytes: int
    compute_capability: NotRequired[list[int]]
    multiprocessors: NotRequired[int]
    uuid: NotRequired[str]
    threads: NotRequired[int]
    cudnn: NotRequired[bool]
    onednn_lstm: NotRequired[list[str]]


def inventory(choice: str) -> list[DeviceRow]:
    """The devices of this machine, the preferred one first.

    Args:
        choice: "cpu", "cuda", or "auto" for CUDA devices, if there are any, followed by the CPU.

    Returns:
        A row a device.

    Raises:
        ConfigurationError: the choice is none, or CUDA was asked for and is not to be had.
    """
    if choice not in CHOICES:
        raise ConfigurationError(f"No device choice {choice!r}. Use one of: {', '.join(CHOICES)}.")
    import torch  # late: `--help` and a wrong argument must not wait for it

    rows: list[DeviceRow] = []
    if choice != "cpu":
        rows += [_cuda_row(torch, index) for index in range(torch.cuda.device_count())]
        if choice == "cuda" and not rows:
            reason = (
                "this torch was built without CUDA"
                if torch.version.cuda is None and torch.version.hip is None
                else "torch sees no CUDA device"
            )
            raise ConfigurationError(
                f"--device cuda was asked for, but {reason} (torch {torch.__version__}). "
                "Check nvidia-smi and the installed torch, or use --device auto."
            )
    if choice != "cuda":
        rows.append(_cpu_row(torch))
    return rows


def _cuda_row(torch: ModuleType, index: int) -> DeviceRow:
    properties = torch.cuda.get_device_properties(index)
    row: DeviceRow = {
        "type": "cuda",
        "index": index,
        "name": visible(properties.name),  # a driver's and a processor's words: clients refuse control characters
        "total_memory_bytes": properties.total_memory,
        "compute_capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
    }
    if torch.version.hip is None and torch.backends.cudnn.is_available():
        row["cudnn"] = True
    if hasattr(properties, "uuid"):
        row["uuid"] = str(properties.uuid)
    return row


def _cpu_row(torch: ModuleType) -> DeviceRow:
    return {
        "type": "cpu",
        "index": 0,
        "name": visible(platform.processor() or platform.machine() or "cpu"),
        "total_memory_bytes": _host_memory_bytes(),
        "threads": torch.get_num_threads(),
        "onednn_lstm": _onednn_lstm_dtypes(torch),
    }


def _onednn_lstm_dtypes(torch: ModuleType) -> list[str]:
    """The dtypes in which PyTorch may compute an LSTM with oneDNN: by what this torch has, and this processor."""
    if not torch.backends.mkldnn.is_available():
        return []
    supported = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}
    checks = {name: getattr(torch.ops.mkldnn, check, None) for name, check in supported.items()}
    return ["float32", *(name for name, check in checks.items() if check is not None and check())]


def _host_memory_bytes() -> int:
    """The machine's memory; 0 where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
