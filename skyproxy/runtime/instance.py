"""The position of this process in its pool."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skyproxy.errors import ConfigurationError
from skyproxy.runtime.calls import current_call

POOL_VARIABLE = "COMPUTE_POOL"
"""The environment variable that carries the topology to a worker, and to the processes that it starts."""

LOCAL_HEAD_PORT = 29500
"""The port at which a process outside any pool would meet its peers; torchrun's default."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One process of the pool.

    Attributes:
        rank: among all processes.
        node: the machine it runs on, from 0.
        address: where the other nodes reach it: a host name or an IP address, without a port.

    Example:
        ```python
        for peer in skyproxy.instance_info().peers:
            print(peer.rank, peer.node, peer.address)
        ```
    """

    rank: int
    node: int
    address: str


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """The position of this process among those of its pool.

    Attributes:
        node: the machine, from 0 to total_nodes - 1.
        total_nodes: machines in the pool.
        head_addr: the address of node 0 as the others see it.
        head_port: a port on node 0 that was free when the job began; another one for every job.
        accelerators: GPUs on this node; 0 on a node that has none.
        peers: every process of the pool in the order of ranks, this one included.
        rank: this process, from 0 to world_size - 1.
        world_size: processes in the pool: total_nodes * procs_per_node.
        local_rank: this process among those of its node.
        procs_per_node: processes on each node.
        job: names the pool and its generation; empty outside a pool.

    Example:
        ```python
        info = skyproxy.instance_info()
        print(f"rank {info.rank} of {info.world_size} on node {info.node}")
        ```
    """

    node: int = 0
    total_nodes: int = 1
    head_addr: str = "127.0.0.1"
    head_port: int = LOCAL_HEAD_PORT
    accelerators: int = 0
    peers: tuple[Peer, ...] = (Peer(0, 0, "127.0.0.1"),)
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    procs_per_node: int = 1
    job: str = ""

    @property
    def is_head(self) -> bool:
        """True if this is the process that speaks for the pool: rank 0, on node 0."""
        return self.rank == 0

    def to_json(self) -> str:
        """The text for the variable COMPUTE_POOL; `from_mapping(json.loads(text))` is its inverse."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> InstanceInfo:
        """The info that a mapping of the fields' names describes; names that are missing follow from the others.

        Raises:
            ConfigurationError: the values contradict each other, or are of another kind.
        """
        try:
            node = int(values.get("node", 0))
            procs = int(values.get("procs_per_node", 1))
            total = int(values.get("total_nodes", 1))
            local = int(values.get("local_rank", 0))
            info = cls(
                node=node,
                total_nodes=total,
                head_addr=str(values.get("head_addr", "127.0.0.1")),
                head_port=int(values.get("head_port", LOCAL_HEAD_PORT)),
                accelerators=int(values.get("accelerators", 0)),
                peers=tuple(Peer(int(p["rank"]), int(p["node"]), str(p["address"])) for p in values.get("peers", ())),
                rank=int(values.get("rank", node * procs + local)),
                world_size=int(values.get("world_size", total * procs)),
                local_rank=local,
                procs_per_node=procs,
                job=str(values.get("job", "")),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(f"this does not describe a pool: {values!r} ({error!r}).") from error
        if not (0 <= info.node < info.total_nodes and 0 <= info.rank < info.world_size and info.local_rank >= 0):
            raise ConfigurationError(
                f"node {info.node} of {info.total_nodes}, rank {info.rank} of {info.world_size}, local rank "
                f"{info.local_rank}: these contradict each other. Numbers begin with 0."
            )
        return info


def instance_info() -> InstanceInfo:
    """Tell where this code runs: in a call of a pool, in a worker of one, or in neither.

    The call's own word goes first, because a worker can serve several pools; then the variable COMPUTE_POOL, then what
    torchrun tells its processes; outside all of these the answer describes a pool of one.

    Raises:
        ConfigurationError: COMPUTE_POOL is set to something else.

    Example:
        ```python
        if skyproxy.instance_info().rank == 0:
            print("this is the head, or no pool at all")
        ```
    """
    call = current_call()
    if call is not None:
        pool = call.values.get("pool")
        if isinstance(pool, InstanceInfo):
            return pool
        if pool is not None:
            return InstanceInfo.from_mapping(pool)
    text = os.environ.get(POOL_VARIABLE)
    if not text:
        return _place_under_torchrun(os.environ) or InstanceInfo(accelerators=count_accelerators())
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(
            f"{POOL_VARIABLE}={text!r} is not JSON. Pools set this variable; unset it outside of one."
        ) from error
    return InstanceInfo.from_mapping(values)


def _place_under_torchrun(environ: Mapping[str, str]) -> InstanceInfo | None:
    """The place of a process that torchrun has started, as its variables say; None for others.

    It tells no addresses but the head's, so that there are no peers.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    try:
        return InstanceInfo(
            node=int(environ["GROUP_RANK"]),
            total_nodes=int(environ["GROUP_WORLD_SIZE"]),
            head_addr=environ["MASTER_ADDR"],
            head_port=int(environ["MASTER_PORT"]),
            accelerators=count_accelerators(),
            peers=(),
            rank=int(environ["RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            local_rank=int(environ["LOCAL_RANK"]),
            procs_per_node=int(environ["LOCAL_WORLD_SIZE"]),
            job=environ["TORCHELASTIC_RUN_ID"],
        )
    except (KeyError, ValueError):
        return None  # another launcher's, that uses the name only


def count_accelerators() -> int:
    """The CUDA devices that this process can see, without loading torch or touching a device."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda"):
        return int(torch.cuda.device_count())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        present = len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0
    if visible is None:
        return present
    # CUDA itself stops at the first number that names no device, -1 being the usual one.
    chosen = [part.strip() for part in visible.split(",") if part.strip()]
    for position, part in enumerate(chosen):
        if part.lstrip("-").isdigit() and not 0 <= int(part) < present:
            return position
    return min(len(chosen), present)
