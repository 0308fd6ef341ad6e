"""Every public name of PyTorch's other devices is in `torch.sky`, or stands here with the reason why it is not."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

MODULES = ("cuda", "xpu", "mps", "mtia", "cpu", "accelerator")
_DRIVER = "the driver's API, which is the worker's"
_PLAIN = "a private matter of that module, which only happens to have no underscore"
_MACHINE = "PyTorch's own device of this machine, by another way of that device"
_POOLS = "pools of memory are the worker's allocator's, and no program of this side chooses among them"
_KERNELS = "source of kernels in that device's language; torch.sky.graph and torch.compile are there"
_ONE_FACE = "torch.accelerator itself, which asks torch.sky under other names"
_GRAPH_HOOKS = (
    "register_graph_capture_start_hook",
    "register_graph_capture_end_hook",
    "register_graph_instantiate_hook",
    "register_graph_replay_start_hook",
    "register_graph_replay_end_hook",
    "register_graph_destroy_hook",
)
LEFT_OUT = {
    **dict.fromkeys(
        ("CudaError", "DeferredCudaCallError", "DeferredMtiaCallError", "check_error", "cudaStatus"), _DRIVER
    ),
    **dict.fromkeys(("CUDAPluggableAllocator", "XPUPluggableAllocator", "MemPool", "use_mem_pool"), _POOLS),
    "caching_allocator_disabled": _POOLS,
    **dict.fromkeys(("ExternalStream", "GreenContext", "green_contexts"), "streams of other libraries in this process"),
    **dict.fromkeys(("jiterator", "compile_shader", "load_metallib"), _KERNELS),
    "nccl": "collectives of one process; torch.distributed has those of several",
    "tunable": "choices of the worker's libraries",
    "gds": "files that the driver reads; those are the worker's",
    "sparse": "an empty module",
    "profiler": "tools of that device that watch a process; torch.profiler and skyproxy's own profile watch workers",
    **dict.fromkeys(("export_dot", "export_graph_data", "graph_annotations"), "files of CUDA's about a captured graph"),
    **dict.fromkeys(_GRAPH_HOOKS, "hooks of graphs that this process's own CUDA captures"),
    **dict.fromkeys(("XPUGraph", "MTIAGraph", "mtia_graph"), "another device's name for torch.sky.Graph"),
    **dict.fromkeys(("attach_out_of_memory_observer", "record_memory_history", "snapshot"), "records of allocations"),
    "event": _PLAIN,
    "get_capabilities": _MACHINE,
    "amp_definitely_not_available": "it tells whether a build has CUDA",
    **dict.fromkeys(("Graph", "current_accelerator", "empty_host_cache", "get_memory_info"), _ONE_FACE),
    **dict.fromkeys(("current_device_idx", "current_device_index", "device_index"), _ONE_FACE),
    **dict.fromkeys(("set_device_idx", "set_device_index"), _ONE_FACE),
}


def _public_names() -> Iterator[tuple[str, str, str]]:
    """The module, the part of it or "", and a public name there."""
    for device in MODULES:
        module = getattr(torch, device)
        home = f"torch.{device}"
        parts = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, types.ModuleType) and value.__name__.startswith(home) and not name.startswith("_")
        }
        for name in {*getattr(module, "__all__", ()), *vars(module)}:
            own = name in getattr(module, "__all__", ()) or str(getattr(module, name).__class__.__module__) == home
            made_there = str(getattr(getattr(module, name), "__module__", "")).startswith(home)
            if not name.startswith("_") and name not in parts and (own or made_there):
                yield device, "", name
        for part, value in parts.items():
            yield device, "", part
            if hasattr(torch.sky, part):
                yield from ((device, part, name) for name in getattr(value, "__all__", ()))


def test_names_of_other_devices_are_there_or_left_out_for_a_reason(sky: str) -> None:
    found = list(_public_names())
    missing = {name for _, part, name in found if not hasattr(getattr(torch.sky, part) if part else torch.sky, name)}
    assert missing == LEFT_OUT.keys() & {name for _, _, name in found}  # each version has some that others lack


QUERIES: dict[str, tuple[Callable[[], object], Callable[[Any], bool]]] = {
    "memory of anybody": (lambda: torch.sky.device_memory_used(), lambda used: used > 0),
    "memory by the names of MPS": (lambda: torch.sky.current_allocated_memory(), lambda used: used >= 1024),
    "the allocator's by the names of MPS": (lambda: torch.sky.driver_allocated_memory(), lambda used: used >= 1024),
    "all memory": (lambda: torch.sky.recommended_max_memory(), lambda total: total == torch.sky.mem_get_info()[1]),
    "architectures": (lambda: torch.sky.get_arch_list(), lambda found: found == []),
    "flags": (lambda: torch.sky.get_gencode_flags(), lambda found: found == ""),
    "the allocator": (lambda: torch.sky.get_allocator_backend(), lambda found: found == "native"),
    "the limit": (lambda: torch.sky.get_per_process_memory_fraction(), lambda found: found == 1.0),
    "pinned memory": (lambda: torch.sky.memory.host_memory_stats(), lambda found: found == {}),
    "priorities": (lambda: torch.sky.Stream.priority_range(), lambda found: found == (0, 0)),
}


@pytest.mark.parametrize("name", QUERIES)
def test_questions_have_answers(name: str, sky: str) -> None:
    kept = torch.zeros(256, device=sky)
    ask, holds = QUERIES[name]
    assert holds(ask())
    del kept


def test_memory_has_the_names_of_cuda(sky: str) -> None:
    kept = torch.zeros(256, device=sky)
    found = torch.sky.memory_stats()
    assert found["allocated_bytes.all.current"] == found["active_bytes.all.current"] == found["allocated"] >= 1024
    assert found["reserved_bytes.all.peak"] >= found["allocated_bytes.all.current"]
    assert found["num_ooms"] == found["num_alloc_retries"] == 0
    nested = torch.sky.memory_stats_as_nested_dict()
    flat = {f"{kind}.{pool}.{at}" for kind, pools in nested.items() for pool, row in pools.items() for at in row}
    assert flat <= found.keys()
    assert torch.accelerator.memory_stats()["active_bytes.all.current"] >= 1024
    del kept


@pytest.mark.parametrize(
    ("old", "new"), [("memory_cached", "memory_reserved"), ("max_memory_cached", "max_memory_reserved")]
)
def test_old_names_warn_at_their_line(old: str, new: str, sky: str) -> None:
    with pytest.warns(FutureWarning, match=new) as given:
        assert getattr(torch.sky, old)() == getattr(torch.sky, new)()
    assert given[0].filename == __file__


def test_a_limit_of_memory_is_checked_and_warns_that_it_limits_nothing(sky: str) -> None:
    with pytest.raises(ValueError, match="Allowed range"):
        torch.sky.set_per_process_memory_fraction(1.5)
    with pytest.raises(TypeError, match="must be `float`"):
        torch.sky.set_per_process_memory_fraction(1)
    with pytest.warns(UserWarning, match="limits nothing") as given:
        torch.sky.set_per_process_memory_fraction(0.5, sky)
    assert given[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.sky.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("name", ["caching_allocator_alloc", "current_blas_handle", "memory_snapshot", "utilization"])
def test_what_has_no_meaning_says_so(name: str, sky: str) -> None:
    with pytest.raises(NotImplementedError, match=f"torch.sky.{name} is not there: "):
        getattr(torch.sky, name)(0)


@pytest.mark.parametrize("name", ["_dump_snapshot", "_record_memory_history", "_snapshot"])
def test_a_recipe_for_snapshots_of_memory_is_told_that_there_are_none(name: str, sky: str) -> None:
    assert hasattr(torch.cuda.memory, name)
    with pytest.raises(NotImplementedError, match="keep no record of single allocations"):
        getattr(torch.sky.memory, name)()


def test_ranges_are_seen_by_profiles(sky: str) -> None:
    nvtx = torch.sky.nvtx
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert (nvtx.range_push("outer"), nvtx.range_push("inner")) == (0, 1)
        assert (nvtx.range_pop(), nvtx.range_pop(), nvtx.range_pop()) == (1, 0, -1)
        with nvtx.range("step {}", 3):
            nvtx.mark("here")
        nvtx.range_end(nvtx.range_start("apart"))
    assert {"outer", "inner", "step 3", "here", "apart"} <= {event.name for event in profile.events()}
