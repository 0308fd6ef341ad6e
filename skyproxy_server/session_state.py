"""The parts of one session on a worker, as controls find them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from skyproxy.protocol.messages import Message
from skyproxy.settings import Settings
from skyproxy_server.allocator import give_back_memory
from skyproxy_server.cancelling import Cancellation
from skyproxy_server.devices import WorkerDevices
from skyproxy_server.global_modes import SessionModes
from skyproxy_server.graphs import Graphs
from skyproxy_server.inventory import DeviceRow
from skyproxy_server.op_table import OpTable
from skyproxy_server.profiling import WorkerProfile
from skyproxy_server.random_state import RandomState
from skyproxy_server.reports import Reports
from skyproxy_server.transfers import Transfers
from skyproxy_server.values import Values
from skyproxy_server.verification import Verification

if TYPE_CHECKING:
    from skyproxy_server.functions.registry import Calls
    from skyproxy_server.named_sessions import NamedSession, NamedValueRequests
    from skyproxy_server.saved_sessions import SavedSession

T = TypeVar("T")


class SnapshotsOut(Protocol):
    """Snapshots that a client copies from here."""

    def header(self, name: str, number: str, offset: int) -> dict[str, object]:
        """Open one, and return a part of its document."""

    def piece(self, digest: bytes) -> bytes:
        """Return a piece of it."""


class SnapshotsIn(Protocol):
    """Snapshots that a client copies to this place."""

    def begin(self, name: str, piece_count: int, hash_name: str) -> None:
        """Begin one, whose pieces have their names by a hash."""

    def piece(self, content: bytes) -> bytes:
        """Take a piece; return its hash."""

    def header(self, part: bytes, is_last: bool) -> str:
        """Take a part of its document; with the last one, return its name."""


class SnapshotRequests(Protocol):
    """The answers to what a session asks about its snapshots; see `snapshots.requests`.

    Attributes:
        copies_out, copies_in: the copies that a client makes of them, and brings.
    """

    @property
    def copies_out(self) -> SnapshotsOut: ...

    @property
    def copies_in(self) -> SnapshotsIn: ...

    def save(self, state: SessionState, name: str, slots: list[int] | None, names: bytes, wish: str) -> object:
        """Write what the session is now; what the client is told of it, or a `Deferred` that will tell it."""

    def load(self, state: SessionState, name: str, number: str) -> dict[str, object]:
        """Make the empty session what a snapshot says; tell the client of it."""

    def open_values(self, state: SessionState, name: str, number: str) -> dict[str, object]:
        """Read the tensors of a snapshot beside what the session holds; tell the client of them."""

    def saved_sessions(self) -> list[SavedSession]:
        """Return what is saved of named sessions, the newest of each name."""

    def saved_session(self, name: str) -> SavedSession | None:
        """Return what is saved of one named session; None where nothing is."""

    def delete_saved(self, name: str) -> bool:
        """Delete all that is saved of a named session; return whether there was anything."""

    def read_named(self, state: SessionState, place: str) -> NamedSession:
        """Read a named session that was saved."""

    def adopt_values(self, pairs: list[list[int]]) -> None:
        """Make tensors that were read the session's own."""

    def rows(self, name: str) -> list[dict[str, object]]:
        """Return a row for each snapshot; of one name, or of all."""

    def delete(self, name: str, number: str) -> bool:
        """Delete a snapshot, or, without a number, all of a name; return whether there was one."""

    def ask_volume(self, what: str, work: Callable[[Callable[[], object]], T]) -> T:
        """Do something on the volume, which says that it goes on."""

    def end(self) -> None:
        """The session is over."""


class SessionState:
    """The state of a session. Its parts do the work.

    Attributes:
        devices: the worker's devices, as announced to the client.
        reports: what the client is told.
        modes: the session's own global modes of PyTorch.
        random: its own random state.
        values: what its slots hold.
        ops: what runs each command.
        graphs: captured streams of commands.
        verification: what holds ops against what the client believes of them.
        cancellation: which commands are dropped.
        transfers: large tensors that come and go.
        profile: what watches the session, else None.
        max_bytes: the most that its values took, as far as it was asked for.
        identity: the name of the session; empty in tests.
        calls: the functions of this worker; None where it runs none.
        names: the named sessions of this worker; None where there are none.
        snapshots: where its snapshots lie; None where the worker keeps none.
        streams: the CUDA streams that the ops run on, one a device.
    """

    def __init__(
        self, devices: list[DeviceRow], send: Callable[[Message], None], transfers: Transfers, settings: Settings
    ) -> None:
        self.devices = WorkerDevices(devices)
        self.reports = Reports(send)
        self.modes = SessionModes()
        self.random = RandomState(self.devices)
        self.values = Values(self.reports, self.idle)
        self.ops = OpTable(
            self.reports,
            self.random,
            self.values.gates,
            on_cpu=self.devices.on_cpu,
            max_signatures=settings.max_signatures,
        )
        self.graphs = Graphs(self.values, self.ops, self.reports, self.modes, self.random, self.devices)
        self.verification = Verification(self.ops, self.values, self.modes)
        self.cancellation = Cancellation(self.values, self.reports)
        self.transfers = transfers
        self.profile: WorkerProfile | None = None
        self.max_bytes = 0
        self.identity = ""
        self.calls: Calls | None = None
        self.names: NamedValueRequests | None = None
        self.snapshots: SnapshotRequests | None = None
        self.streams: list[torch.cuda.Stream] = []

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Keep nothing from other sessions during the block, in which this one waits for its client."""
        with self.random.lend(), self.modes.idle():
            yield

    def end(self) -> None:
        """Forget all of it."""
        if self.profile is not None:
            profile, self.profile = self.profile, None
            profile.abandon()
        if self.snapshots is not None:
            self.snapshots.end()
        self.graphs.end()
        self.values.forget()
        self.random.forget()
        give_back_memory()
