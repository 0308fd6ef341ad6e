"""A node: a worker that this process is connected to, as the program sees it."""

from __future__ import annotations

import asyncio
import html
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, SupportsIndex

import torch

from skyproxy.errors import ConfigurationError, ConnectError, SessionLostError
from skyproxy.functions.runner import Runner
from skyproxy.interrupts import raised_by_handler
from skyproxy.jobs.node_jobs import NodeJobs
from skyproxy.loading.node_saving import NodeSaves
from skyproxy.session.local_worker import LocalWorker
from skyproxy.session.moving import NodeMoves
from skyproxy.session.opening import Opener
from skyproxy.session.session import Session
from skyproxy.settings import SETTINGS
from skyproxy.tensor.core.devices import DEVICES, SkyDevice
from skyproxy.transport.base import Transport

OPEN_NODES: list[Node] = []
"""All of this process, in the order in which they came."""


class DeviceInfo(NamedTuple):
    """One row of `skyproxy.devices()`.

    Attributes:
        device: `torch.device("sky", k)`.
        name: what the worker's driver calls it.
        type: "cuda" or "cpu".
        total_memory_bytes: of the device.
        source: how the worker came to be ours.
        alive: whether its session lives.

    Example:
        ```python
        for info in skyproxy.devices():
            print(info.device, info.name, info.alive)
        ```
    """

    device: torch.device
    name: str
    type: str
    total_memory_bytes: int
    source: str
    alive: bool


class Node(NodeSaves, NodeMoves, NodeJobs):
    """A worker that this process is connected to.

    Use it as a context manager, synchronous or not, or call `close`. Whatever still lives when the process ends is
    closed then.

    Attributes:
        url: where the worker listens.
        source: how the worker came to be ours, for people.
        software: versions on the worker: "skyproxy", "python", "torch".

    Example:
        ```python
        with skyproxy.launch_local("cpu") as node:
            x = torch.ones(3, device=node.device("cpu"))
            print(node.run(torch.sum, x).item())
        ```
    """

    def __init__(
        self,
        url: str,
        source: str,
        session: Session,
        worker: LocalWorker | None = None,
        on_close: Callable[[], object] | None = None,
        opener: Opener | None = None,
        *,
        shares_files: bool = False,
        trust_worker: bool = False,
    ) -> None:
        self.url = url
        self.source = source
        self.software = dict(session.welcome.software)
        self._session = session
        self._worker = worker
        self._on_close = on_close
        self._opener = opener
        self._restored = {}
        self._devices: list[SkyDevice] = DEVICES.add(session)
        session.backlogs.device = " and ".join(str(chosen.torch_device) for chosen in self._devices)
        for chosen in self._devices:
            seed = torch.initial_seed()
            session.do("manual_seed", chosen.place, seed if seed < 1 << 63 else seed - (1 << 64))
        # A worker of this very process runs as its user, from its files: there is nothing to keep from it.
        trusted = trust_worker or worker is not None
        connection = opener.open_functions if opener is not None else _no_functions
        self._expect_leave()
        self._runner = Runner(session, self._devices, connection, shares_files=shares_files, trusted=trusted)
        OPEN_NODES.append(self)

    @property
    def devices(self) -> list[torch.device]:
        """The node's devices, as `sky:k`; the preferred one first."""
        return [chosen.torch_device for chosen in self._devices]

    def device(self, name: str = "cuda") -> torch.device:
        """The `sky:k` that stands for a device of the worker.

        Args:
            name: as the worker would say: "cuda", "cuda:1", "cpu".

        Raises:
            ConfigurationError: the worker has no such device.

        Example:
            ```python
            x = torch.ones(3, device=node.device("cpu"))
            ```
        """
        try:
            wanted = torch.device(name)
        except RuntimeError as error:
            if raised_by_handler(error):
                raise
            raise ConfigurationError(f"{name!r} names no device. Use 'cuda', 'cuda:1' or 'cpu'.") from error
        for chosen in self._devices:
            own = chosen.worker_device
            if own.type == wanted.type and (wanted.index or 0) == (own.index or 0):
                return chosen.torch_device
        has = ", ".join(str(chosen.worker_device) for chosen in self._devices)
        raise ConfigurationError(f"this worker has no {name}; it has {has}. Use node.device({has.split(', ')[0]!r}).")

    def synchronize(self) -> None:
        """Waits until the worker has done everything that was recorded.

        Example:
            ```python
            y = torch.ones(3, device=node.device("cpu")) * 2
            node.synchronize()  # now it is computed
            ```
        """
        self._session.synchronize()

    async def synchronize_async(self) -> None:
        """The same, without blocking the event loop.

        Example:
            ```python
            async def main() -> None:
                y = torch.ones(3, device=node.device("cpu")) * 2
                await node.synchronize_async()


            asyncio.run(main())
            ```
        """
        await asyncio.to_thread(self._session.synchronize)

    def _restart_worker(self, stop: threading.Event) -> LocalWorker:
        """Start the embedded worker anew, for the session to go on there; `close` ends this wait.

        Raises:
            WorkerStartError: it did not come up.
            SessionLostError: the node was closed meanwhile.
        """
        assert self._worker is not None
        before, self._worker = self._worker, self._worker.successor(SETTINGS)
        before.stop()
        if stop.is_set():  # asked after the assignment, so that `close` cannot miss it
            self._worker.stop()
            raise SessionLostError("the node was closed")
        self._worker.wait_until_it_listens(SETTINGS.worker_start_timeout_seconds)
        self._session.explain_end = self._worker.explain_end
        return self._worker

    @property
    def alive(self) -> bool:
        """True if the worker is still there."""
        return self._session.lost is None

    @property
    def process_id(self) -> int | None:
        """The process of an embedded worker; None for others."""
        return self._worker.process_id if self._worker is not None else None

    def close(self) -> None:
        """Ends the session, and the worker if it is embedded. Its tensors are gone. Idempotent.

        Example:
            ```python
            node = skyproxy.launch_local("cpu")
            node.close()
            assert not node.alive
            ```
        """
        if self._session.is_foreign:
            return
        self._finish_named()
        self._session.unprotect(waits=False)
        if self._worker is None:
            on_close, self._on_close = self._on_close, None
            try:
                self._session.close("the node was closed")
            finally:
                if on_close is not None:
                    on_close()
        else:
            # The worker first: it is ours alone, and need not finish what it is doing.
            self._session.close("the node was closed", lambda: self._end_worker(keeps_snapshots=True))
            self._end_worker(keeps_snapshots=False)

    def _end_worker(self, *, keeps_snapshots: bool) -> None:
        if self._worker is not None:
            self._worker.stop()
            if not keeps_snapshots:
                self._worker.delete_snapshots()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Node:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def log_tail(self) -> str | None:
        """The end of what an embedded worker wrote to its log; None for others, whose log is not ours.

        Example:
            ```python
            print(node.log_tail())
            ```
        """
        return self._worker.output() if self._worker is not None else None

    def worker_status(self) -> dict[str, Any]:
        """Ask the worker what it does, beside the operations: "worker", "sessions" and "log".

        A token without the scope `admin` is told of its own sessions only.

        Raises:
            ConnectError: the worker does not answer.

        Example:
            ```python
            print(node.worker_status()["worker"])
            ```
        """
        if self._opener is None:
            raise ConnectError("this node was made without a way to ask its worker")
        return self._opener.ask_status()

    def _repr_html_(self) -> str:
        """Return what Jupyter shows; asks the worker nothing."""
        rows = {
            "worker": f"{self.url} ({self.source})",
            "state": "connected" if self.alive else f"lost: {self._session.lost}",
            "software": ", ".join(f"{name} {number}" for name, number in self.software.items()),
        }
        for chosen in self._devices:
            size = int(chosen.row.get("total_memory_bytes", 0)) / (1 << 30)
            rows[f"sky:{chosen.index}"] = f"{chosen.worker_device}, {chosen.row.get('name', '')}, {size:.1f} GiB"
        cells = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in rows.items())
        return f"<table>{cells}</table>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ConfigurationError(
            f"{self!r} is a connection of this program, and cannot be sent to a worker. There, a tensor argument's own "
            "device is the node's; pass tensors of node.device(), or results."
        )

    def __repr__(self) -> str:
        state = "" if self.alive else ", lost"
        devices = ", ".join(f"sky:{d.index}={d.worker_device}" for d in self._devices)
        return f"<Node {self.url} ({self.source}{state}): {devices}>"


def _no_functions() -> Transport:
    raise ConfigurationError("this node was made without a way to open a connection for functions")
