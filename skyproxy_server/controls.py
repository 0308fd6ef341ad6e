"""Requests that a client can make beside tensor operations: one small function each, found by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from skyproxy import torch_codec, torch_modes
from skyproxy.errors import ProtocolError
from skyproxy_server.allocator import give_back_memory
from skyproxy_server.failures import PoisonedError
from skyproxy_server.foreign_memory import clear_from
from skyproxy_server.inventory import DeviceRow
from skyproxy_server.profiling import WorkerProfile
from skyproxy_server.random_state import set_state
from skyproxy_server.session_state import SessionState

CONTROLS: dict[str, Callable[..., object]] = {}

_F = TypeVar("_F", bound=Callable[..., object])


def _control(function: _F) -> _F:
    CONTROLS[function.__name__] = function
    return function


def _place(device: list[object]) -> tuple[str, int | None]:
    """Return the type and the number of a device that a client names.

    Raises:
        ProtocolError: it is not named by these two.
    """
    kind, index = device if len(device) == 2 else (None, None)
    if not isinstance(kind, str) or not (index is None or isinstance(index, int)):
        raise ProtocolError(f"a device is named by its type and its number, not by {device!r:.100}")
    return kind, index


def _wait_for(devices: list[DeviceRow]) -> None:
    for row in devices:
        if row["type"] == "cuda":
            torch.cuda.synchronize(row["index"])


@_control
def synchronize(session: SessionState) -> None:
    """Everything before this is done; the first failure that nobody was told of is raised."""
    session.values.gates.wait_for_transfers()
    _wait_for(session.devices)
    if session.reports.unreported:
        raise PoisonedError(session.reports.unreported[0])


@_control
def end_cancellation(session: SessionState, number: int) -> dict[str, object]:
    """End a cancellation: what follows is run."""
    return session.cancellation.meet(number)


@_control
def stats(session: SessionState) -> dict[str, int]:
    """Return what the session holds and did."""
    tensors = [value for value in session.values.slots.values() if isinstance(value, torch.Tensor)]
    storages: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return {"handles": len(session.values.slots) - 1, "bytes": sum(storages.values())}


@_control
def blob_stats(session: SessionState) -> dict[str, int] | None:
    """Return what this worker keeps of uploads, all sessions of a token together; None where it keeps nothing."""
    return session.transfers.blob_stats()


@_control
def item(session: SessionState, slot: int) -> float | int | bool:
    """The one number of a value."""
    number: float | int | bool = session.values.get(slot).item()
    return number


@_control
def numbers(session: SessionState, slot: int, others: list[int]) -> list[float | int | bool | None]:
    """The one number of a value, and of each other value that simply is one; None in the place of those that are not.

    Nobody asked for the others yet: what is wrong with one of them is told when somebody does.
    """
    first, values = item(session, slot), session.values
    if values.gates.any_storage or values.not_replayed:
        return [first, *[None] * len(others)]
    return [first, *(_plain_number(values.slots.get(other)) for other in others)]


def _plain_number(value: object) -> float | int | bool | None:
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.numel() != 1:
        return None
    number = None if value.is_complex() or value.is_quantized else value.item()
    return number


@_control
def equal(session: SessionState, first: int, second: int) -> bool:
    """`torch.equal` of two values."""
    return torch.equal(session.values.get(first), session.values.get(second))


@_control
def take_apart(session: SessionState, slot: int, slots: list[int]) -> None:
    """Each value of a list gets a slot of its own."""
    for target, value in zip(slots, session.values.get(slot), strict=True):
        session.values.slots[target] = value


@_control
def copy_to_device(session: SessionState, slot: int, source: int, device: list[object]) -> None:
    """A copy of a value on another device of this worker."""
    session.values.slots[slot] = session.values.get(source).to(session.devices.find(device), copy=True)


@_control
def set_modes(session: SessionState, fields: dict[str, object]) -> None:
    """Put the session's global modes of PyTorch in force, from the next command on."""
    session.modes.switch(torch_modes.decode(fields, cuda=session.devices.has_cuda))


@_control
def modes_in_force(session: SessionState) -> dict[str, object]:
    """PyTorch's global modes as this session's commands find them, by name."""
    return {**torch_modes.values_in_force(), **dict(session.modes.record)}


# --- random numbers --------------------------------------------------------------------------------------------------


@_control
def manual_seed(session: SessionState, device: list[object], seed: int) -> None:
    """Seeds a device's default generator."""
    with session.random.exclusive():
        session.random.generator(*_place(device)).manual_seed(seed)


@_control
def random_state(session: SessionState, device: list[object]) -> bytes:
    """The state of a device's default generator."""
    with session.random.exclusive():
        return bytes(session.random.generator(*_place(device)).get_state().tolist())


@_control
def set_random_state(session: SessionState, device: list[object], state: bytes) -> None:
    """Replaces the state of a device's default generator."""
    with session.random.exclusive():
        set_state(session.random.generator(*_place(device)), _state(state))


@_control
def keep_random_state(session: SessionState, slot: int, device: list[object]) -> None:
    """A generator of the client's own, in the state of a device's default one."""
    kept = session.values.slots[slot] = torch.Generator(session.devices.find(device))
    with session.random.exclusive():
        kept.set_state(session.random.generator(*_place(device)).get_state())


@_control
def restore_random_state(session: SessionState, slot: int, device: list[object]) -> None:
    """A device's default generator gets the state of one of the client's own."""
    with session.random.exclusive():
        session.random.generator(*_place(device)).set_state(session.values.get(slot).get_state())


@_control
def initial_seed(session: SessionState, device: list[object]) -> int:
    """The seed that a device's default generator was last given."""
    with session.random.exclusive():
        return session.random.generator(*_place(device)).initial_seed()


@_control
def new_generator(session: SessionState, slot: int, device: list[object]) -> None:
    """A generator of the client's own."""
    session.values.slots[slot] = torch.Generator(session.devices.find(device))


@_control
def seed_generator(session: SessionState, slot: int, seed: int) -> None:
    """Seed a generator."""
    session.values.get(slot).manual_seed(seed)


@_control
def generator_state(session: SessionState, slot: int) -> bytes:
    """Return the state of a generator."""
    return bytes(session.values.get(slot).get_state().tolist())


@_control
def set_generator_state(session: SessionState, slot: int, state: bytes) -> None:
    """Set the state of a generator."""
    set_state(session.values.get(slot), _state(state))


@_control
def generator_seed(session: SessionState, slot: int) -> int:
    """The seed that a generator of the client's own was last given."""
    return int(session.values.get(slot).initial_seed())


@_control
def copy_generator_state(session: SessionState, slot: int, source: int) -> None:
    """Give a generator another one's state."""
    session.values.get(slot).set_state(session.values.get(source).get_state())


def _state(state: object) -> torch.Tensor:
    if not isinstance(state, bytes):  # of a number, so many zeros would be made
        raise ProtocolError(f"the state of a random generator is bytes, not {type(state).__name__}")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


# --- derivatives -----------------------------------------------------------------------------------------------------


_WITH_AUTOGRAD = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
"""The dispatch keys of a thread as it begins. Those of sessions run below autograd's."""


class Graph:
    """The part of autograd's graph that is kept of one op that was run for a client: its leaves and its results."""

    def __init__(self, leaves: list[torch.Tensor], results: list[object]) -> None:
        self.leaves = leaves
        self.results = results


@_control
def differentiated(session: SessionState, slot: int, leaves: list[int], command: list[Any]) -> None:
    """Run one op on nested tensors with autograd; `slot` keeps its graph, for the values in the slots `leaves`."""
    signature = session.ops.signatures.get(command[0]) if command else None
    if signature is None or signature.hides_writes or signature.written_slots(command, 0):
        raise ProtocolError("only an op that changes nothing is differentiated")
    values = {read: session.values.get(read) for read in signature.input_slots(command, 0)}
    parts = {leaf: values[leaf].detach().requires_grad_() for leaf in leaves}
    scope: dict[int, object] = {0: None, **values, **parts}
    # The client can write to what it sees of an op's inputs and results; backward would follow indices of its choice.
    own = torch.autograd.graph.saved_tensors_hooks(_own_copy, _identity)
    with torch._C._ForceDispatchKeyGuard(*_WITH_AUTOGRAD), torch.enable_grad(), own:
        signature.handler(scope, command, 0)
    if not _has_nested([*values.values(), *(scope[output] for output in signature.output_slots(command, 0))]):
        raise ProtocolError("only an op on nested tensors is differentiated")
    results: list[object] = []
    for output in signature.output_slots(command, 0):
        made = scope[output]
        results += made if isinstance(made, list | tuple) else [made]
        session.values.slots[output] = [_detach(m) for m in made] if isinstance(made, list | tuple) else _detach(made)
    session.values.slots[slot] = Graph([parts[leaf] for leaf in leaves], results)


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _has_nested(values: list[object]) -> bool:
    flat = (item for value in values for item in (value if isinstance(value, list | tuple) else [value]))
    return any(isinstance(item, torch.Tensor) and item.is_nested for item in flat)


def _detach(value: object) -> object:
    return value.detach() if isinstance(value, torch.Tensor) else value


@_control
def differentiate(session: SessionState, slot: int, gradients: list[int], wanted: list[int], slots: list[int]) -> None:
    """The gradients of a graph's leaves, by their numbers, from those of its results; slot 0 is none."""
    graph = session.values.get(slot)
    if not isinstance(graph, Graph) or len(gradients) != len(graph.results):
        raise ProtocolError(f"slot {slot} holds no graph of {len(gradients)} results")
    pairs = [
        (result, session.values.get(gradient))
        for result, gradient in zip(graph.results, gradients, strict=True)
        if gradient and isinstance(result, torch.Tensor) and result.requires_grad
    ]
    leaves = [graph.leaves[number] for number in wanted]
    found: list[object] = [None] * len(leaves)
    if pairs:
        roots, weights = zip(*pairs, strict=True)
        with torch._C._ForceDispatchKeyGuard(*_WITH_AUTOGRAD):
            found = list(torch.autograd.grad(roots, leaves, weights, retain_graph=True, allow_unused=True))
    for target, gradient in zip(slots, found, strict=True):
        session.values.slots[target] = gradient


# --- storages --------------------------------------------------------------------------------------------------------


@_control
def set_storage(session: SessionState, slot: int, source: int, offset: int, size: list[int], stride: list[int]) -> None:
    """`Tensor.set_` with the storage of another slot's tensor."""
    # The source's memory moves where it must grow, so nobody may be reading it.
    target, base = (session.values.get(place, writes=True, sizes=False) for place in (slot, source))
    former = base.untyped_storage().nbytes()
    target.set_(base.untyped_storage(), offset, size, stride)
    clear_from(target, former)


@_control
def view_storage(
    session: SessionState, slot: int, source: int, dtype: str, offset: int, size: list[int], stride: list[int]
) -> None:
    """A new tensor on the storage of another slot's tensor, which moves where it must grow."""
    base = session.values.get(source, writes=True, sizes=False)
    fresh = torch.empty(0, dtype=torch_codec.DTYPES[dtype], device=base.device)
    former = base.untyped_storage().nbytes()
    session.values.slots[slot] = fresh.set_(base.untyped_storage(), offset, size, stride)
    clear_from(fresh, former)


@_control
def resize_storage(session: SessionState, slot: int, byte_count: int) -> None:
    """Gives a tensor's storage another size. What it gains is zeros; what it loses may be somebody else's at once."""
    if type(byte_count) is not int or not 0 <= byte_count < 1 << 62:
        raise ProtocolError(f"a storage cannot have {byte_count!r:.40} bytes")
    tensor = session.values.get(slot, writes=True, sizes=False)
    storage = tensor.untyped_storage()
    former = storage.nbytes()
    storage.resize_(byte_count)
    clear_from(tensor, former)
    session.values.gates.note_resize(tensor, former)


@_control
def storage_bytes(session: SessionState, slot: int) -> int:
    """Return the size of a tensor's storage."""
    return int(session.values.get(slot, sizes=False).untyped_storage().nbytes())


# --- memory ----------------------------------------------------------------------------------------------------------


@_control
def memory_stats(session: SessionState, device: list[object]) -> dict[str, int]:
    """Bytes in use on a device. On a CPU worker: those of this session's tensors, and the machine's memory."""
    kind, index = _place(device)
    if kind == "cuda":
        free, total = torch.cuda.mem_get_info(index)
        return {
            "allocated": torch.cuda.memory_allocated(index),
            "max_allocated": torch.cuda.max_memory_allocated(index),
            "reserved": torch.cuda.memory_reserved(index),
            "max_reserved": torch.cuda.max_memory_reserved(index),
            "free": free,
            "total": total,
        }
    held = stats(session)["bytes"]
    session.max_bytes = max(session.max_bytes, held)
    free, total = _host_memory()
    return {
        "allocated": held,
        "max_allocated": session.max_bytes,
        "reserved": held,
        "max_reserved": session.max_bytes,
        "free": free,
        "total": total,
    }


@_control
def memory_summary(session: SessionState, device: list[object]) -> str:
    """Return a table of a device's memory, for people."""
    kind, index = _place(device)
    if kind == "cuda":
        return torch.cuda.memory_summary(index)
    row = memory_stats(session, device)
    return "\n".join(f"{name:<14}{value / (1 << 20):>14.1f} MiB" for name, value in row.items())


@_control
def reset_peak_memory(session: SessionState, device: list[object]) -> None:
    """Count the peak of used memory from now on."""
    kind, index = _place(device)
    session.max_bytes = stats(session)["bytes"]
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats(index)


@_control
def empty_cache(session: SessionState) -> None:
    """Give unused memory back to the devices and to the system."""
    if session.devices.has_cuda:
        torch.cuda.empty_cache()
    give_back_memory()


def _host_memory() -> tuple[int, int]:
    """Free and total bytes of the machine's memory; zeros where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            table = {name: int(rest.split()[0]) << 10 for name, rest in (line.split(":", 1) for line in lines)}
        return table["MemAvailable"], table["MemTotal"]
    except (OSError, KeyError, ValueError, IndexError):
        return 0, 0


# --- events and streams ----------------------------------------------------------------------------------------------


class HostEvent(float):
    """A point in the order of execution on the CPU: the time of `time.perf_counter`."""


@_control
def record_event(session: SessionState, slot: int, device: list[object], timing: bool) -> None:
    """A point in the order of execution. On CUDA a real event, on the CPU the clock."""
    kind, index = _place(device)
    if kind == "cuda":
        with torch.cuda.device(index):
            event = torch.cuda.Event(enable_timing=timing)
            event.record()
        session.values.slots[slot] = event
    else:
        session.values.slots[slot] = HostEvent(time.perf_counter())


@_control
def wait_event(session: SessionState, slot: int) -> None:
    """Wait for an event; on the CPU, it has come already."""
    event = session.values.get(slot)
    if not isinstance(event, float):
        event.synchronize()


@_control
def query_event(session: SessionState, slot: int) -> bool:
    """Return whether an event has come."""
    event = session.values.get(slot)
    return True if isinstance(event, float) else bool(event.query())


@_control
def elapsed_milliseconds(session: SessionState, start: int, end: int) -> float:
    """Return the time between two events."""
    first, last = session.values.get(start), session.values.get(end)
    if isinstance(first, float) and isinstance(last, float):
        return (last - first) * 1e3
    if isinstance(first, float) or isinstance(last, float):
        raise ProtocolError("events of different devices have no common clock")
    last.synchronize()
    return float(first.elapsed_time(last))


# --- profiles --------------------------------------------------------------------------------------------------------


@_control
def clock(session: SessionState) -> int:
    """The time here, in nanoseconds, on the clock that profiles use."""
    return time.time_ns()


@_control
def profile_start(session: SessionState, shapes: bool, stacks: bool) -> None:
    """From the next batch on, everything that the session runs is recorded; stacks are the client's own part."""
    if session.profile is not None:
        raise RuntimeError("this session is already being profiled")
    session.profile = WorkerProfile(session.devices, session.reports, shapes=shapes)


@_control
def profile_stop(session: SessionState, slot: int) -> int:
    """Ends that; the slot gets the profile as bytes, and the answer is their number."""
    if session.profile is None:
        raise RuntimeError("this session is not being profiled")
    profile, session.profile = session.profile, None
    data = profile.stop()
    session.values.slots[slot] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return len(data)


@_control
def device_properties(session: SessionState, device: list[object]) -> dict[str, object]:
    """Return the inventory's row of a device."""
    kind, index = _place(device)
    row = next(r for r in session.devices if r["type"] == kind and (r["index"] or 0) == (index or 0))
    return dict(row)
