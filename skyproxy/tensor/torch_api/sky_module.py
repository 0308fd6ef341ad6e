"""`torch.sky`: what users ask of `torch.cuda`, answered for remote devices."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from typing import Any, NamedTuple

import torch

from skyproxy.interrupts import shielded
from skyproxy.session.backlog import Backlog
from skyproxy.session.session import Session
from skyproxy.tensor.core.devices import DEVICES, SkyDevice, index_in
from skyproxy.tensor.core.generators import KeptRandomState, as_seed, bytes_of_state
from skyproxy.tensor.core.remote_tensor import RemoteTensor as RemoteTensor

DeviceLike = torch.device | str | int | None


def is_available() -> bool:
    """True: with nothing configured, an embedded worker serves `sky:0`."""
    return True


_initialized = True
"""The flag in which `torch.utils.checkpoint` looks whether the device has random states to keep."""


def is_initialized() -> bool:
    """Return whether any `sky` device exists yet."""
    return bool(DEVICES.existing())


def init() -> None:
    """Makes sure that `sky:0` exists."""
    DEVICES.at(0)


def _is_in_bad_fork() -> bool:
    """Return whether this process was forked from one that has sessions: they belong to the parent."""
    return any(device.session.is_foreign for device in DEVICES.existing())


def device_count() -> int:
    """Count the `sky` devices; connects to the default worker if there is none yet."""
    DEVICES.at(0)
    return len(DEVICES.existing())


def current_device() -> int:
    """The index that `torch.device("sky")` without a number means to this thread; each begins with 0."""
    return DEVICES.current


def set_device(device: DeviceLike) -> None:
    """Makes `device` the one that "sky" without a number means to this thread. A negative index changes nothing."""
    index = index_in(device)
    if index is not None and index >= 0:
        DEVICES.current = index


class device(contextlib.ContextDecorator):
    """Makes a device the current one inside a `with` block.

    Args:
        device: what to make current; None or a negative index changes nothing.
    """

    def __init__(self, device: torch.device | str | int | None) -> None:
        self.idx = index_in(device)
        self.prev_idx = -1

    @shielded
    def __enter__(self) -> None:
        self.prev_idx = DEVICES.current
        set_device(self.idx)

    @shielded
    def __exit__(self, *exc_info: object) -> None:
        set_device(self.prev_idx)


class device_of(device):
    """Makes the device of a tensor the current one inside a `with` block; other tensors change nothing."""

    def __init__(self, obj: torch.Tensor) -> None:
        super().__init__(obj.device.index if obj.device.type == "sky" else -1)


def _sessions() -> list[Session]:
    return list({id(device.session): device.session for device in DEVICES.alive()}.values())


def synchronize(device: DeviceLike = None) -> None:
    """Waits until the worker has done everything that was recorded.

    Raises:
        RemoteError: an operation failed and its error was not seen yet.
        SessionLostError: the worker is gone.
    """
    if DEVICES.existing():
        DEVICES.of(device).session.synchronize()


def queue(device: DeviceLike = None) -> Backlog:
    """Return what a worker has still to do for this program; asks it past its operations, so that nothing is waited
    for.

    Printed, it is a line: "sky:0 is working: 1,240 operations queued, running aten::mm from Cell In[3], line 4".

    Returns:
        `operations`: recorded and not begun; `running`: what runs now; `line`: what recorded that; `is_working`.
    """
    return DEVICES.of(device).session.backlog()


def cancel(device: DeviceLike = None) -> None:
    """Has workers drop the operations of this program that they have not begun; does not wait.

    What those would have made raises `CancelledOperationError`; tensors that they would have changed keep their values,
    and raise that error once. Everything else stays as it is. An interrupt that ends a wait does the same.

    Args:
        device: of which worker; by default of all.
    """
    for session in _sessions() if device is None else [DEVICES.of(device).session]:
        session.cancelling.cancel()


# --- what a device is ------------------------------------------------------------------------------------------------


class DeviceProperties(NamedTuple):
    """The description that a worker gives of one of its devices.

    Attributes:
        name: as the worker's driver names it.
        type: "cuda" or "cpu".
        total_memory: bytes.
        major, minor: compute capability; zeros on the CPU.
        multi_processor_count: streaming multiprocessors; on the CPU, 0.
    """

    name: str
    type: str
    total_memory: int
    major: int
    minor: int
    multi_processor_count: int


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """Name, memory and capability of a device; costs nothing, the worker told when it was connected."""
    row = DEVICES.of(device).row
    major, minor = row.get("compute_capability") or (0, 0)
    return DeviceProperties(
        row.get("name", row["type"]),
        row["type"],
        int(row.get("total_memory_bytes", 0)),
        int(major),
        int(minor),
        int(row.get("multiprocessors", 0)),
    )


def get_device_name(device: DeviceLike = None) -> str:
    """The name of the device behind `sky:k`."""
    return get_device_properties(device).name


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    """Major and minor compute capability; (0, 0) on the CPU."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that autocast accepts."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return whether the device computes in bfloat16."""
    properties = get_device_properties()
    return properties.type == "cpu" or including_emulation or properties.major >= 8


def is_tf32_supported() -> bool:
    """Return whether the device multiplies in TF32."""
    properties = get_device_properties()
    return properties.type == "cuda" and properties.major >= 8


def can_device_access_peer(device: DeviceLike, peer_device: DeviceLike) -> bool:
    """Return False: what goes from one device to another goes through this program."""
    for index in (device, peer_device):
        DEVICES.of(index)
    return False


# --- memory ----------------------------------------------------------------------------------------------------------


def _memory(device: DeviceLike) -> dict[str, int]:
    chosen = _device_without_the_dead(device)
    row: dict[str, int] = chosen.session.call("memory_stats", chosen.place)
    return row


def _device_without_the_dead(device: DeviceLike) -> SkyDevice:
    """The device, after it was told of the tensors that died: a batch tells it behind its commands."""
    chosen = DEVICES.of(device)
    chosen.session.recorder.flush()
    return chosen


def memory_allocated(device: DeviceLike = None) -> int:
    """Bytes that tensors take on the device. On a CPU worker: those of this session."""
    return _memory(device)["allocated"]


def max_memory_allocated(device: DeviceLike = None) -> int:
    """The most bytes that tensors took so far; on a CPU worker, as seen at the times somebody asked."""
    return _memory(device)["max_allocated"]


def memory_reserved(device: DeviceLike = None) -> int:
    """Bytes that the device's allocator holds."""
    return _memory(device)["reserved"]


def max_memory_reserved(device: DeviceLike = None) -> int:
    """The most bytes that the device's allocator held so far."""
    return _memory(device)["max_reserved"]


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Starts the two maxima anew."""
    chosen = _device_without_the_dead(device)
    chosen.session.do("reset_peak_memory", chosen.place)


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    """Nothing to do: workers count what is and what was at most, and add nothing up."""
    DEVICES.of(device)


def reset_max_memory_allocated(device: DeviceLike = None) -> None:
    """Starts both maxima anew, as the function of `torch.cuda` with this name does."""
    reset_peak_memory_stats(device)


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Free and total bytes of the device's memory."""
    row = _memory(device)
    return row["free"], row["total"]


_OF_CUDA = {"allocated": "allocated", "active": "allocated", "reserved": "reserved"}
"""Name in the worker's answer of each thing that `torch.cuda` has numbers of bytes of."""


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    """All of the above in one dict, for one round trip; also under the names of `torch.cuda`, as far as workers know.

    On a CPU worker, no allocation is tried twice and none is refused by an allocator: these two numbers are zero.
    """
    row = _memory(device)
    found = dict(row)
    for kind, ours in _OF_CUDA.items():
        found |= {f"{kind}_bytes.all.current": row[ours], f"{kind}_bytes.all.peak": row[f"max_{ours}"]}
    if DEVICES.of(device).row["type"] == "cpu":
        found |= {"num_alloc_retries": 0, "num_ooms": 0}
    return found


def memory_stats_as_nested_dict(device: DeviceLike = None) -> dict[str, object]:
    """The same in the shape of its namesake in `torch.cuda`, from which `torch.accelerator` makes its own."""
    row = _memory(device)
    return {
        f"{kind}_bytes": {"all": {"current": row[ours], "peak": row[f"max_{ours}"]}} for kind, ours in _OF_CUDA.items()
    }


def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    """A table for people."""
    chosen = _device_without_the_dead(device)
    return str(chosen.session.call("memory_summary", chosen.place))


def empty_cache() -> None:
    """Gives unused memory back on every worker."""
    for session in _sessions():
        session.do("empty_cache")


def ipc_collect() -> None:
    """Nothing to do: memory of workers is never shared with other processes of this machine."""


# --- random numbers --------------------------------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    """Seeds the current device; in order with the operations around it, without waiting."""
    _seed(DEVICES.at(None), seed)


def manual_seed_all(seed: int) -> None:
    """Seeds every device; `torch.manual_seed` calls it. Devices that come later start from `torch.initial_seed()`."""
    for chosen in DEVICES.alive():
        _seed(chosen, seed)


def _seed(chosen: SkyDevice, seed: int) -> None:
    chosen.change_random_state("manual_seed", chosen.place, as_seed(seed))


def seed() -> None:
    """Seeds the current device with a random number."""
    manual_seed(int.from_bytes(os.urandom(7), "little"))


def seed_all() -> None:
    """Seeds every device with one random number."""
    manual_seed_all(int.from_bytes(os.urandom(7), "little"))


def initial_seed() -> int:
    """The seed that the current device was last given."""
    chosen = DEVICES.at(None)
    return int(chosen.session.call("initial_seed", chosen.place))


_ONLY_PUT_BACK = frozenset({"torch.random", "torch.utils.checkpoint"})
"""Modules of PyTorch that take states of generators to put them back, and never look at them."""


def get_rng_state(device: DeviceLike = "sky") -> torch.Tensor:
    """The state of a device's generator, as a ByteTensor on the CPU; it waits.

    Not for PyTorch's own checkpoints and `fork_rng`: they would wait for each block of a network, in every step. What
    they get stays on the worker until they put it back.
    """
    chosen = DEVICES.of(device)
    captured = chosen.recorder is not chosen.session.recorder
    if sys._getframe(1).f_globals.get("__name__") in _ONLY_PUT_BACK and not captured:
        return KeptRandomState(chosen)  # type: ignore[return-value]
    state = chosen.session.call("random_state", chosen.place)
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices' generators."""
    return [get_rng_state(chosen.index) for chosen in DEVICES.existing()]


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = "sky") -> None:
    """Replaces the state of a device's generator."""
    chosen = DEVICES.of(device)
    if isinstance(new_state, KeptRandomState):
        new_state.restore(chosen)
        return
    chosen.change_random_state("set_random_state", chosen.place, bytes_of_state(new_state))


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Replaces the states of all devices' generators."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# --- what goes over the wire -----------------------------------------------------------------------------------------


def stats() -> dict[str, int]:
    """Count what this process recorded and sent so far, over all workers.

    Returns:
        ops: operations recorded.
        batches: batches of them sent.
        bytes_sent, bytes_received: on all connections.
        bytes_saved: of uploads that the workers had already, and that did not travel.
        round_trips: waits for an answer. Each costs at least the network's delay; see `skyproxy.debug_syncs`.
        cache_hits, cache_misses: look-ups of what an op's results look like.
        handles: values held on the workers.
    """
    sessions = {id(chosen.session): chosen.session for chosen in DEVICES.existing()}.values()
    ops = sum(session.recorder.ops for session in sessions)
    misses = sum(chosen.misses for chosen in DEVICES.existing())
    return {
        "ops": ops,
        "batches": sum(session.recorder.batches for session in sessions),
        "bytes_sent": sum(session.bytes_sent for session in sessions),
        "bytes_received": sum(session.bytes_received for session in sessions),
        "bytes_saved": sum(session.bytes_saved for session in sessions),
        "round_trips": sum(session.round_trips for session in sessions),
        "cache_hits": max(0, ops - misses),
        "cache_misses": misses,
        "handles": sum(session.recorder.live_slots for session in sessions),
    }


def modes_in_force(device: DeviceLike = None) -> dict[str, Any]:
    """PyTorch's global modes as a device's worker works under them for this process. Waits."""
    modes: dict[str, Any] = DEVICES.of(device).session.call("modes_in_force")
    return modes


def _lazy_call(function: Any) -> None:
    function()


MODULE = types.ModuleType("torch.sky", __doc__)
MODULE.__dict__.update(
    {
        name: value
        for name, value in globals().items()
        if getattr(value, "__module__", "") in (__name__, "torch.sky") or name in ("DeviceLike", "_initialized")
    }
)
