"""The process group of PyTorch in a rank's process: joined with a word about who is missing, left, aborted.

Shared by the plugin and by the decorator, so that both together join once.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from skyproxy.runtime.lifecycle import environment, wait_in_slices
from skyproxy.transport.addresses import listen_on_loopback

if TYPE_CHECKING:
    from skyproxy.runtime.instance import InstanceInfo

JOIN_TIMEOUT_SECONDS = 300.0


def variables(info: InstanceInfo) -> dict[str, str | None]:
    """Return the variables that torchrun would set for this process."""
    found: dict[str, str | None] = {
        "MASTER_ADDR": info.head_addr,
        "MASTER_PORT": str(info.head_port),
        "WORLD_SIZE": str(info.world_size),
        "RANK": str(info.rank),
        "LOCAL_RANK": str(info.local_rank),
        "LOCAL_WORLD_SIZE": str(info.procs_per_node),
        "NODE_RANK": str(info.node),
        # As the launcher itself says that the store at MASTER_PORT exists already: `env://` then only connects.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if info.head_addr.startswith("127.") and loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Otherwise gloo takes the interface of the machine's host name, which on laptops is often none that works.
        found["GLOO_SOCKET_IFNAME"] = loopback[0]
    return found


@contextlib.contextmanager
def process_group(
    info: InstanceInfo,
    backend: str | None = None,
    *,
    timeout_seconds: float | None = None,
    join_timeout_seconds: float = JOIN_TIMEOUT_SECONDS,
) -> Iterator[None]:
    """The default process group is there inside the `with` block; nothing happens where it was before.

    Args:
        info: of this process.
        backend: as `torch.distributed` names it; by default nccl where CUDA is available, else gloo.
        timeout_seconds: of collectives; PyTorch's own by default.
        join_timeout_seconds: how long to wait for the other ranks.

    Raises:
        TimeoutError: some ranks did not come; names them and their addresses.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    cuda = torch.cuda.is_available()
    chosen = backend or ("nccl" if cuda else "gloo")
    options: dict[str, Any] = {}
    if timeout_seconds is not None:
        options["timeout"] = timedelta(seconds=timeout_seconds)
    if cuda:
        device = info.local_rank % torch.cuda.device_count()
        torch.cuda.set_device(device)
        if "nccl" in chosen:
            options["device_id"] = torch.device("cuda", device)
    with environment(variables(info)):
        store = _meet(info, join_timeout_seconds)
        try:
            dist.init_process_group(backend=chosen, init_method="env://", **options)
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            del store  # the head's store serves the others until here


def _meet(info: InstanceInfo, timeout_seconds: float) -> object:
    """The store on the head, once all ranks have signed in there."""
    from torch.distributed import DistStoreError

    end = time.monotonic() + timeout_seconds
    where = f"{info.head_addr}:{info.head_port}"
    if info.rank and not wait_in_slices(lambda seconds: _listens(info, seconds), timeout_seconds):
        raise TimeoutError(
            f"rank {info.rank} found nobody at {where}, the address of rank 0, for {timeout_seconds:.0f} s. Either "
            "rank 0 does not run this task, for a function that joins a process group must go to all ranks "
            "(`task() @ pool`), or that port cannot be reached: look at firewalls and policies between the nodes."
        )
    store = store_on_the_head(info, info.head_port, max(1.0, end - time.monotonic()))
    keys = [f"{info.job}/joined/{rank}" for rank in range(info.world_size)]
    store.set(keys[info.rank], str(os.getpid()))

    def all_there(seconds: float) -> bool:
        try:
            store.wait(keys, timedelta(seconds=seconds))
        except DistStoreError:
            return False
        return True

    if not wait_in_slices(all_there, max(0.0, end - time.monotonic())):
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise TimeoutError(
            f"{_name(missing, info)} did not join within {timeout_seconds:.0f} s; the other ranks wait at {where}. "
            "Either the task did not go to all ranks (`task() @ pool` does that), or those processes hang or cannot "
            "reach that address."
        )
    return store


def store_on_the_head(info: InstanceInfo, port: int, timeout_seconds: float) -> Any:
    """The store that rank 0 serves to all ranks. Where they are all on this machine, nobody else can connect to it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    is_head = info.rank == 0
    return TCPStore(
        info.head_addr,
        port,
        is_master=is_head,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
        master_listen_fd=listen_on_loopback(info.head_addr, port) if is_head else None,
    )


def _listens(info: InstanceInfo, seconds: float) -> bool:
    try:
        socket.create_connection((info.head_addr, info.head_port), seconds).close()
    except OSError:
        time.sleep(min(seconds, 0.05))  # refused at once
        return False
    return True


def _name(ranks: list[int], info: InstanceInfo) -> str:
    addresses = {peer.rank: peer.address for peer in info.peers}
    listed = ", ".join(f"{rank} ({addresses.get(rank, 'address unknown')})" for rank in ranks)
    return f"rank{'s' * (len(ranks) != 1)} {listed}"


def abort_process_group() -> None:
    """Ends whatever collectives wait in this process or for it, from any thread: they raise where they were called."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    dist.distributed_c10d._abort_process_group()
    # nccl's collectives have ended by now. Those of gloo end when a peer closes its connections, which it does once
    # nothing refers to the group any more; the traceback of a task that failed in a collective does, until collected.
    gc.collect()
