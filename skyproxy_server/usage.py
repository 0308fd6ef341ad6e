"""The usage of a device, as whoever watches the worker wants to know it."""

from __future__ import annotations

import importlib.util

import psutil
import torch

from skyproxy_server.inventory import DeviceRow

_CAN_MEASURE_LOAD = importlib.util.find_spec("pynvml") is not None


def usage(row: DeviceRow) -> dict[str, int]:
    """Return what is in use of a device; begins nothing on it.

    Args:
        row: the device, as the inventory describes it.

    Returns:
        "used_memory_bytes": of a CUDA device by everybody, of the CPU by this process; "utilization_percent" of a CUDA
        device where pynvml is installed. Empty for a CUDA device that nobody has used yet: asking would make a context,
        which takes hundreds of megabytes.
    """
    if row["type"] != "cuda":
        return {"used_memory_bytes": int(psutil.Process().memory_info().rss)}
    if not torch.cuda.is_initialized():
        return {}
    free, total = torch.cuda.mem_get_info(row["index"])
    found = {"used_memory_bytes": total - free}
    if _CAN_MEASURE_LOAD:
        found["utilization_percent"] = int(torch.cuda.utilization(row["index"]))
    return found
