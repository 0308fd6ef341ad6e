"""What a client can ask of a worker beside tensor operations: one small function each, found by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from skyproxy import torch_codec, torch_modes
from skyproxy.errors import ProtocolError
from skyproxy_server.allocator import give_back_memory
from skyproxy_server.failures import PoisonedError
from skyproxy_server.foreign_memory import clear_from
from skyproxy_server.profiling import WorkerProfile

if TYPE_CHECKING:
    from skyproxy_server.executor import Executor

CONTROLS: dict[str, Callable[..., Any]] = {}


def _control(function: Callable[..., Any]) -> Callable[..., Any]:
    CONTROLS[function.__name__] = function
    return function


def _wait_for(devices: list[dict[str, Any]]) -> None:
    for row in devices:
        if row["type"] == "cuda":
            torch.cuda.synchronize(row["index"])


@_control
def synchronize(executor: Executor) -> None:
    """Everything before this is done; the first failure that nobody was told of is raised."""
    executor.gates.wait_for_transfers()
    _wait_for(executor.devices)
    if executor.unseen:
        raise PoisonedError(executor.unseen[0])


@_control
def stats(executor: Executor) -> dict[str, int]:
    """What the session holds and did."""
    tensors = [value for value in executor.values.values() if isinstance(value, torch.Tensor)]
    storages: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return {"handles": len(executor.values) - 1, "bytes": sum(storages.values())}


@_control
def blob_stats(executor: Executor) -> dict[str, int] | None:
    """What this worker keeps of uploads, all sessions together; None where it keeps nothing."""
    return executor.blobs.stats() if executor.blobs is not None else None


@_control
def item(executor: Executor, slot: int) -> float | int | bool:
    """The one number of a value."""
    number: float | int | bool = executor.value(slot).item()
    return number


@_control
def equal(executor: Executor, first: int, second: int) -> bool:
    """`torch.equal` of two values."""
    return torch.equal(executor.value(first), executor.value(second))


@_control
def take_apart(executor: Executor, slot: int, slots: list[int]) -> None:
    """Each value of a list gets a slot of its own."""
    for target, value in zip(slots, executor.value(slot), strict=True):
        executor.values[target] = value


@_control
def copy_to_device(executor: Executor, slot: int, source: int, device: list[Any]) -> None:
    """A copy of a value on another device of this worker."""
    executor.values[slot] = executor.value(source).to(executor.device_of(device), copy=True)


@_control
def set_modes(executor: Executor, fields: dict[str, Any]) -> None:
    """Put the session's global modes of PyTorch in force, from the next command on."""
    executor.modes.switch(torch_modes.decode(fields, cuda=executor.has_cuda))


@_control
def modes_in_force(executor: Executor) -> dict[str, Any]:
    """PyTorch's global modes as this session's commands find them, by name."""
    return {**torch_modes.values_in_force(), **dict(executor.modes.record)}


# --- random numbers --------------------------------------------------------------------------------------------------


@_control
def manual_seed(executor: Executor, device: list[Any], seed: int) -> None:
    """Seeds a device's default generator."""
    with executor.random.exclusive():
        executor.random.generator(*device).manual_seed(seed)


@_control
def random_state(executor: Executor, device: list[Any]) -> bytes:
    """The state of a device's default generator."""
    with executor.random.exclusive():
        return bytes(executor.random.generator(*device).get_state().tolist())


@_control
def set_random_state(executor: Executor, device: list[Any], state: bytes) -> None:
    """Replaces the state of a device's default generator."""
    with executor.random.exclusive():
        executor.random.generator(*device).set_state(_state(state))


@_control
def keep_random_state(executor: Executor, slot: int, device: list[Any]) -> None:
    """A generator of the client's own, in the state of a device's default one."""
    kept = executor.values[slot] = torch.Generator(executor.device_of(device))
    with executor.random.exclusive():
        kept.set_state(executor.random.generator(*device).get_state())


@_control
def restore_random_state(executor: Executor, slot: int, device: list[Any]) -> None:
    """A device's default generator gets the state of one of the client's own."""
    with executor.random.exclusive():
        executor.random.generator(*device).set_state(executor.value(slot).get_state())


@_control
def initial_seed(executor: Executor, device: list[Any]) -> int:
    """The seed that a device's default generator was last given."""
    with executor.random.exclusive():
        return executor.random.generator(*device).initial_seed()


@_control
def new_generator(executor: Executor, slot: int, device: list[Any]) -> None:
    """A generator of the client's own."""
    executor.values[slot] = torch.Generator(executor.device_of(device))


@_control
def seed_generator(executor: Executor, slot: int, seed: int) -> None:
    executor.value(slot).manual_seed(seed)


@_control
def generator_state(executor: Executor, slot: int) -> bytes:
    return bytes(executor.value(slot).get_state().tolist())


@_control
def set_generator_state(executor: Executor, slot: int, state: bytes) -> None:
    executor.value(slot).set_state(_state(state))


@_control
def generator_seed(executor: Executor, slot: int) -> int:
    """The seed that a generator of the client's own was last given."""
    return int(executor.value(slot).initial_seed())


@_control
def copy_generator_state(executor: Executor, slot: int, source: int) -> None:
    executor.value(slot).set_state(executor.value(source).get_state())


def _state(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


# --- derivatives -----------------------------------------------------------------------------------------------------


_WITH_AUTOGRAD = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
"""The dispatch keys of a thread as it begins. Those of sessions run below autograd's."""


class Graph:
    """What autograd keeps of one op that was run for a client: its leaves and its results."""

    def __init__(self, leaves: list[torch.Tensor], results: list[Any]) -> None:
        self.leaves = leaves
        self.results = results


@_control
def differentiated(executor: Executor, slot: int, leaves: list[int], command: list[Any]) -> None:
    """Run one op with autograd; `slot` keeps its graph, with respect to the values in the slots `leaves`."""
    signature = executor.signatures.get(command[0]) if command else None
    if signature is None or signature.written_slots(command, 0):
        raise ProtocolError("only an op that changes nothing is differentiated")
    values = {read: executor.value(read) for read in signature.input_slots(command, 0)}
    parts = {leaf: values[leaf].detach().requires_grad_() for leaf in leaves}
    scope: dict[int, Any] = {0: None, **values, **parts}
    with torch._C._ForceDispatchKeyGuard(*_WITH_AUTOGRAD), torch.enable_grad():
        signature.handler(scope, command, 0)
    results: list[Any] = []
    for output in signature.output_slots(command, 0):
        made = scope[output]
        results += made if isinstance(made, list | tuple) else [made]
        executor.values[output] = [_detached(m) for m in made] if isinstance(made, list | tuple) else _detached(made)
    executor.values[slot] = Graph([parts[leaf] for leaf in leaves], results)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


@_control
def differentiate(executor: Executor, slot: int, gradients: list[int], wanted: list[int], slots: list[int]) -> None:
    """The gradients of a graph's leaves, by their numbers, from those of its results; slot 0 is none."""
    graph = executor.value(slot)
    if not isinstance(graph, Graph) or len(gradients) != len(graph.results):
        raise ProtocolError(f"slot {slot} holds no graph of {len(gradients)} results")
    pairs = [
        (result, executor.value(gradient))
        for result, gradient in zip(graph.results, gradients, strict=True)
        if gradient and isinstance(result, torch.Tensor) and result.requires_grad
    ]
    leaves = [graph.leaves[number] for number in wanted]
    found: list[Any] = [None] * len(leaves)
    if pairs:
        roots, weights = zip(*pairs, strict=True)
        with torch._C._ForceDispatchKeyGuard(*_WITH_AUTOGRAD):
            found = list(torch.autograd.grad(roots, leaves, weights, retain_graph=True, allow_unused=True))
    for target, gradient in zip(slots, found, strict=True):
        executor.values[target] = gradient


# --- storages --------------------------------------------------------------------------------------------------------


@_control
def set_storage(executor: Executor, slot: int, source: int, offset: int, size: list[int], stride: list[int]) -> None:
    """`Tensor.set_` with the storage of another slot's tensor."""
    target, base = executor.value(slot, writes=True, sizes=False), executor.value(source, sizes=False)
    former = base.untyped_storage().nbytes()
    target.set_(base.untyped_storage(), offset, size, stride)
    clear_from(target, former)


@_control
def view_storage(
    executor: Executor, slot: int, source: int, dtype: str, offset: int, size: list[int], stride: list[int]
) -> None:
    """A new tensor on the storage of another slot's tensor."""
    base = executor.value(source, sizes=False)
    fresh = torch.empty(0, dtype=torch_codec.DTYPES[dtype], device=base.device)
    former = base.untyped_storage().nbytes()
    executor.values[slot] = fresh.set_(base.untyped_storage(), offset, size, stride)
    clear_from(fresh, former)


@_control
def resize_storage(executor: Executor, slot: int, byte_count: int) -> None:
    """Gives a tensor's storage another size. What it gains is zeros; what it loses may be somebody else's at once."""
    if type(byte_count) is not int or not 0 <= byte_count < 1 << 62:
        raise ProtocolError(f"a storage cannot have {byte_count!r:.40} bytes")
    tensor = executor.value(slot, writes=True, sizes=False)
    storage = tensor.untyped_storage()
    former = storage.nbytes()
    storage.resize_(byte_count)
    clear_from(tensor, former)
    executor.gates.resized(tensor, former)


@_control
def storage_bytes(executor: Executor, slot: int) -> int:
    return int(executor.value(slot, sizes=False).untyped_storage().nbytes())


# --- memory ----------------------------------------------------------------------------------------------------------


@_control
def memory_stats(executor: Executor, device: list[Any]) -> dict[str, int]:
    """Bytes in use on a device. On a CPU worker: those of this session's tensors, and the machine's memory."""
    kind, index = device
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
    held = stats(executor)["bytes"]
    executor.max_bytes = max(executor.max_bytes, held)
    free, total = _host_memory()
    return {
        "allocated": held,
        "max_allocated": executor.max_bytes,
        "reserved": held,
        "max_reserved": executor.max_bytes,
        "free": free,
        "total": total,
    }


@_control
def memory_summary(executor: Executor, device: list[Any]) -> str:
    kind, index = device
    if kind == "cuda":
        return torch.cuda.memory_summary(index)
    row = memory_stats(executor, device)
    return "\n".join(f"{name:<14}{value / (1 << 20):>14.1f} MiB" for name, value in row.items())


@_control
def reset_peak_memory(executor: Executor, device: list[Any]) -> None:
    kind, index = device
    executor.max_bytes = stats(executor)["bytes"]
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats(index)


@_control
def empty_cache(executor: Executor) -> None:
    if any(row["type"] == "cuda" for row in executor.devices):
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


@_control
def record_event(executor: Executor, slot: int, device: list[Any], timing: bool) -> None:
    """A point in the order of execution. On CUDA a real event, on the CPU the clock."""
    kind, index = device
    if kind == "cuda":
        with torch.cuda.device(index):
            event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
            event.record()
        executor.values[slot] = event
    else:
        executor.values[slot] = time.perf_counter()


@_control
def wait_event(executor: Executor, slot: int) -> None:
    event = executor.value(slot)
    if not isinstance(event, float):
        event.synchronize()


@_control
def query_event(executor: Executor, slot: int) -> bool:
    event = executor.value(slot)
    return True if isinstance(event, float) else bool(event.query())


@_control
def elapsed_milliseconds(executor: Executor, start: int, end: int) -> float:
    first, last = executor.value(start), executor.value(end)
    if isinstance(first, float) and isinstance(last, float):
        return (last - first) * 1e3
    if isinstance(first, float) or isinstance(last, float):
        raise ProtocolError("events of different devices have no common clock")
    last.synchronize()
    return float(first.elapsed_time(last))


# --- profiles --------------------------------------------------------------------------------------------------------


@_control
def clock(executor: Executor) -> int:
    """The time here, in nanoseconds, on the clock that profiles use."""
    return time.time_ns()


@_control
def profile_start(executor: Executor, shapes: bool, stacks: bool) -> None:
    """From the next batch on, everything that the session runs is recorded."""
    if executor.profile is not None:
        raise RuntimeError("this session is being profiled already")
    executor.profile = WorkerProfile(executor, shapes=shapes, stacks=stacks)


@_control
def profile_stop(executor: Executor, slot: int) -> int:
    """Ends that; the slot gets the profile as bytes, and the answer is their number."""
    if executor.profile is None:
        raise RuntimeError("this session is not being profiled")
    data = executor.profile.stop()
    executor.values[slot] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return len(data)


@_control
def device_properties(executor: Executor, device: list[Any]) -> dict[str, Any]:
    kind, index = device
    row = next(r for r in executor.devices if r["type"] == kind and (r["index"] or 0) == (index or 0))
    return dict(row)
