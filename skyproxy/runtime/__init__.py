"""The questions that a function on a worker can ask about where it runs, and the few helpers made for it. No I/O, no
torch.

The same names work in a program that never saw a pool: there they describe a pool of one.
"""

from __future__ import annotations

from skyproxy.runtime.calls import CallContext, current_call, entered_call
from skyproxy.runtime.checkpoints import checkpoint_dir, restart_count
from skyproxy.runtime.instance import InstanceInfo, Peer, instance_info
from skyproxy.runtime.output import silent, stderr, stdout
from skyproxy.runtime.sharding import shard

__all__ = [
    "CallContext",
    "InstanceInfo",
    "Peer",
    "checkpoint_dir",
    "current_call",
    "entered_call",
    "instance_info",
    "restart_count",
    "shard",
    "silent",
    "stderr",
    "stdout",
]
