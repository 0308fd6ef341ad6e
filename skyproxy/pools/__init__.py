"""Pools: workers that are provisioned together, and functions that run on them.

A decorated function makes calls, an operator says where they run, and a `Compute` is where. Nothing here loads torch
before a pool starts.
"""

from __future__ import annotations

from skyproxy.pools.actors import Actor, ActorGroup, actor
from skyproxy.pools.call_options import Retry
from skyproxy.pools.cluster import Cluster
from skyproxy.pools.futures import PoolFuture
from skyproxy.pools.growth import Nodes
from skyproxy.pools.pending import PendingCompute, PendingGroup, gather
from skyproxy.pools.pool import Compute, ComputePool
from skyproxy.pools.provisioned import compute
from skyproxy.pools.remote_function import RemoteFunction, function

__all__ = [
    "Actor",
    "ActorGroup",
    "Cluster",
    "Compute",
    "ComputePool",
    "Nodes",
    "PendingCompute",
    "PendingGroup",
    "PoolFuture",
    "RemoteFunction",
    "Retry",
    "actor",
    "compute",
    "function",
    "gather",
]
