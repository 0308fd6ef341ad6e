"""Protection of this program's sessions against the end of their workers: `skyproxy.protect(every="5min")`."""

from __future__ import annotations

import math
import re
import secrets
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from skyproxy import nodes
from skyproxy.errors import ConfigurationError
from skyproxy.node import Node
from skyproxy.session.batch_log import BatchLog
from skyproxy.session.successor import NewWorker, Successor
from skyproxy.units import duration_seconds

_MINUTES = re.compile(r"(?<=\d)min(?![a-z])")

_step_counters: weakref.WeakSet[Protected] = weakref.WeakSet()
_hook: Any = None


class Protected:
    """The sessions that one call of `protect` protects.

    Use it as a context manager, or call `stop`; otherwise they are protected for as long as they live.

    Attributes:
        nodes: whose sessions they are.

    Example:
        ```python
        with skyproxy.protect(every="90s") as protected:
            model = torch.nn.Linear(8, 8).to("sky:0")
            print(protected.snapshots, protected.recoveries)
        ```
    """

    def __init__(self, chosen: Sequence[Node], every_seconds: float, every_steps: int) -> None:
        self.nodes = list(chosen)
        self.every_seconds, self.every_steps = every_seconds, every_steps

    @property
    def recoveries(self) -> int:
        """The number of times that another worker went on."""
        return sum(node._session.protection.recoveries for node in self.nodes if node._session.protection is not None)

    @property
    def snapshots(self) -> int:
        """The number of snapshots that are durable so far."""
        return sum(node._session.protection.snapshots for node in self.nodes if node._session.protection is not None)

    def snapshot(self) -> list[dict[str, Any]]:
        """Take a snapshot of each session now, and wait until it is durable.

        Returns:
            For each: "snapshot", its name; "sequence"; "bytes", its size; "written_bytes", what had not been written.

        Raises:
            RemoteError: a worker refused; the snapshot before is as good as it was.
            SessionLostError: a session is over.

        Example:
            ```python
            with skyproxy.protect(node=node) as protected:
                for snapshot in protected.snapshot():
                    print(snapshot["snapshot"], snapshot["bytes"])
            ```
        """
        return [node._session.protection.snapshot() for node in self.nodes if node._session.protection is not None]

    def stop(self) -> None:
        """Protect no longer, and delete the snapshots; idempotent.

        Example:
            ```python
            protected = skyproxy.protect(node=node)
            protected.stop()
            ```
        """
        _step_counters.discard(self)
        for node in self.nodes:
            node._session.unprotect()

    def __enter__(self) -> Protected:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def protect(
    every: float | str | None = None,
    *,
    steps: int | None = None,
    node: Node | None = None,
    new_worker: NewWorker | None = None,
) -> Protected:
    """Have the program go on where a worker ends: another one restores the last snapshot and does the rest again.

    The first snapshot is taken before this returns. Later ones are taken while the program goes on.

    Args:
        every: the time between two snapshots: "5min", "90s", or seconds; five minutes by default.
        steps: the optimizer steps between two, in place of a time or beside it.
        node: whose session; by default those of all nodes, and where there is none, that of what "sky:0" begins.
        new_worker: gives the address of a worker that takes the place of one that is gone, or its address and token.
            It must see the same volume for snapshots. It is asked when nothing listens at the old address, or when
            that has not answered for SKYPROXY_TAKEOVER_SECONDS. By default an embedded worker is started anew, and any
            other is waited for at its old address, for SKYPROXY_RECONNECT_SECONDS.

    Raises:
        ConfigurationError: a worker keeps no snapshots, or an argument cannot be.
        RemoteError: a worker cannot take a snapshot now.
        SessionLostError: a session is over.

    Example:
        ```python
        skyproxy.protect(every="5min")
        model = torch.nn.Linear(8, 8).to("sky:0")  # whatever becomes of the worker
        ```
    """
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ConfigurationError(f"steps={steps!r} is not a number of optimizer steps, such as 100.")
    if every is None:
        every_seconds = math.inf if steps is not None else 300.0
    else:
        every_seconds = duration_seconds(_MINUTES.sub("m", every) if isinstance(every, str) else every, "every")
    chosen = [node] if node is not None else [each for each in nodes.list_nodes() if each.alive]
    if not chosen:
        nodes.start_default()
        chosen = [each for each in nodes.list_nodes() if each.alive]
    result = Protected([], every_seconds, steps or 0)
    try:
        for each in chosen:
            _protect(each, result, new_worker)
            result.nodes.append(each)
    except BaseException:
        result.stop()
        raise
    if steps is not None:
        _count_steps(result)
    return result


def _protect(node: Node, policy: Protected, new_worker: NewWorker | None) -> None:
    session, opener = node._session, node._opener
    session.check()
    if opener is None or not session.welcome.limits.get("snapshots"):
        raise ConfigurationError(
            f"the worker at {node.url} keeps no snapshots. Start it with --snapshots FOLDER, on a volume that outlives "
            "it."
        )
    settings = session.settings
    log = BatchLog(settings.max_log_bytes, settings.max_frame_bytes)
    successor = Successor(node, new_worker)
    with session.protecting:
        session.wait_until_awake()
        before = session.protection
        if before is not None and not before.is_passing:
            raise ConfigurationError("this session is protected already. End that first: protected.stop()")
        session.unprotect()  # what only a suspension needed
        session.protect(log, secrets.token_hex(16), successor, policy.every_seconds, policy.every_steps)
    made = session.protection
    if new_worker is not None and made is not None:
        made.patience_seconds = settings.takeover_seconds


def _count_steps(protected: Protected) -> None:
    """Have the protection hear of every step of an optimizer."""
    global _hook
    _step_counters.add(protected)
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_on_step)


def _on_step(*_: object) -> None:
    global _hook
    for protected in list(_step_counters):
        for node in protected.nodes:
            if node._session.protection is not None:
                node._session.protection.on_step()
    if not _step_counters and _hook is not None:
        _hook.remove()
        _hook = None
