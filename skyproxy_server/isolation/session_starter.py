"""The beginning of a session's process: forked from the template, bounded, given a cgroup and a user of its own."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from skyproxy.errors import ConfigurationError, LimitExceededError
from skyproxy_server.auth import FUNCTIONS, Identity
from skyproxy_server.blobs import BlobStore
from skyproxy_server.control_channel import ChannelClosedError, ControlChannel
from skyproxy_server.inventory import DeviceRow
from skyproxy_server.isolation.cgroups import CgroupBounds, Cgroups
from skyproxy_server.isolation.session_log import SessionLog
from skyproxy_server.isolation.session_user import SessionUser
from skyproxy_server.isolation.session_users import SessionUsers, SessionUsersUnavailableError
from skyproxy_server.isolation.slots import ConnectionSlots, mapped, new_memory
from skyproxy_server.isolation.snapshot_groups import SnapshotGroups
from skyproxy_server.isolation.spawner import Template, TemplateSetup
from skyproxy_server.isolation.supervised_session import FORK_SECONDS, Resume, SupervisedSession
from skyproxy_server.isolation.uploads import UploadDesk

logger = logging.getLogger("skyproxy.server")

_CGROUP_BESIDE_BYTES = 256 << 20
"""The bytes that a session's cgroup may have beyond the session's bound: the kernel's memory for it, and what it copies
of the template's. The process itself is bounded exactly."""


@dataclass(frozen=True, slots=True)
class SessionBounds:
    """Bounds on what one session may use.

    Attributes:
        memory_bytes: private memory in addition to what a new session has; 0: no bound of its own.
        gpu_fraction: the part of each GPU's memory; 0: no bound of its own.
        cpus: processors' time per time, with a cgroup only; 0: as much as there is.
    """

    memory_bytes: int = 0
    gpu_fraction: float = 0.0
    cpus: float = 0.0


@dataclass(frozen=True, slots=True)
class Watchers:
    """Functions that are called for a session.

    Attributes:
        on_begin: once its process is there, before another one is forked.
        on_end: once its process has ended.
        on_message: with what its process says that nobody asked for; returns whether that is known.
    """

    on_begin: Callable[[SupervisedSession], None]
    on_end: Callable[[SupervisedSession], None]
    on_message: Callable[[SupervisedSession, dict[str, object]], bool]


class SessionStarter:
    """The template, and what each session's process is given: its bounds, its cgroup, its user.

    Args:
        setup: what sessions can do.
        bounds: what each may use.
        blobs: where uploads are kept; None keeps none.
        cgroups: where each session's cgroup is made, ours from now on; None makes none.
        users: whom sessions run as, one each; None: as the worker's own user.
        watchers: what is called for each session.

    Attributes:
        forking: held while a process is on its way to us, and known to nobody yet.
    """

    def __init__(
        self,
        setup: TemplateSetup,
        bounds: SessionBounds,
        blobs: BlobStore | None,
        cgroups: Cgroups | None,
        users: SessionUsers | None,
        watchers: Watchers,
    ) -> None:
        self.forking = threading.Lock()
        self._setup = setup
        self._bounds = bounds
        self._blobs = blobs
        self._cgroups = cgroups
        self._users = users
        self._watchers = watchers
        self._template = Template(setup)
        if users is not None:
            users.sweep = self._template.sweep
        self._groups = SnapshotGroups(setup.snapshots)
        self._devices: list[DeviceRow] = []
        self._closing = False

    def start(self, stop: threading.Event | None = None) -> tuple[list[DeviceRow], dict[str, str]]:
        """Get ready to start sessions; the devices and the software that they have.

        Raises:
            ConfigurationError: sessions cannot do what was asked for.
        """
        try:
            with ExitStack() as trial:
                user = trial.enter_context(self._users.trial()) if self._users is not None else None
                found = self._template.start(stop, user)
        except ChannelClosedError as error:
            raise ConfigurationError(f"No session can be started: {error}. See the output above.") from error
        if self._users is not None and not self._users.are_usable(found.get("user_obstacle", "")):
            self._users = None
        self._devices = found["devices"]
        return self._devices, found["software"]

    @property
    def has_users(self) -> bool:
        """True if each session runs as a user of its own."""
        return self._users is not None

    @property
    def template_pid(self) -> int:
        """The process id of the template; 0 where it does not run."""
        return self._template.pid

    def runs_functions(self, client: Identity) -> bool:
        """Return whether sessions of this client run functions."""
        return self._setup.functions and client.may(FUNCTIONS)

    def snapshots(self) -> str:
        """The place of snapshots that sessions can write to; empty for none."""
        return self._setup.snapshots if self._users is None else self._groups.location()

    def start_session(self, identity: str, client: Identity, resume: Resume) -> SupervisedSession:
        """Start a session's process.

        Raises:
            LimitExceededError: none can be started now.
        """
        with self.forking:
            for last in (False, True):
                try:
                    return self._fork(identity, client, resume)
                except SessionUsersUnavailableError as error:
                    logger.warning("session %s could not be started: %s", identity[:8], error)
                    break
                except (ChannelClosedError, TimeoutError, OSError) as error:
                    logger.warning("session %s could not be started: %s", identity[:8], error)
                    if last or self._closing:
                        break
                    with suppress(ChannelClosedError, ConfigurationError):
                        self._template.restart()
        raise LimitExceededError("this worker cannot start a process for another session now; see its log")

    def _fork(self, identity: str, client: Identity, resume: Resume) -> SupervisedSession:
        with ExitStack() as theirs, ExitStack() as ours:
            control, end = ControlChannel.pair()
            ours.callback(control.close)
            theirs.enter_context(end)
            uploads: tuple[ControlChannel, UploadDesk] | None = None
            memory = new_memory()
            theirs.callback(os.close, memory)
            output, written = os.pipe()
            log = SessionLog(identity, output)
            ours.callback(log.close)
            theirs.callback(os.close, written)
            descriptors = [end.fileno(), memory, written]
            if self._blobs is not None:
                channel, end = ControlChannel.pair()
                ours.callback(channel.close)
                theirs.enter_context(end)
                descriptors.append(end.fileno())
                uploads = channel, UploadDesk(self._blobs, identity, client)
            user: SessionUser | None = None
            if self._users is not None:
                user = self._users.claim(identity)
                ours.callback(self._users.release, identity)
                user = self._with_group(user, client)
            memory_bytes = _tighter_bound(self._bounds.memory_bytes, client.bounds.memory_bytes)
            order = {
                "session": identity,
                "supervisor": os.getpid(),
                "devices": self._devices,
                "client": client.to_plain(),
                "functions": self.runs_functions(client),
                "snapshots": self.snapshots(),
                "log_level": self._setup.log_level,
                "memory_bytes": memory_bytes,
                "gpu_fraction": self._bounds.gpu_fraction,
                "blob_bytes": self._blobs.max_bytes if self._blobs is not None else 0,
                "user": user.to_plain() if user is not None else None,
            }
            self._template.fork(order, descriptors)
            slots = ConnectionSlots(mapped(memory))
            theirs.close()  # so that the channel ends where the process does not come up
            first, _ = control.receive(FORK_SECONDS)
            self._put_into_cgroup(identity, int(first["up"]), memory_bytes, ours)
            session = SupervisedSession(
                identity,
                client,
                int(first["up"]),
                control,
                slots,
                uploads,
                self._watchers.on_end,
                self._watchers.on_message,
                resume,
                log,
            )
            ours.pop_all()
        self._template.note_success()
        self._watchers.on_begin(session)
        return session

    def _with_group(self, user: SessionUser, client: Identity) -> SessionUser:
        """Return a user who is in the group of its client's snapshots, too."""
        try:
            group = self._groups.group_of(client.name) if self._groups.location() else None
        except OSError as error:
            logger.warning("a session can keep no snapshots: %s", error)
            return user
        return user if group is None else replace(user, groups=(*user.groups, group))

    def _put_into_cgroup(self, identity: str, pid: int, memory_bytes: int, failing: ExitStack) -> None:
        """Bound what a session's process and its children use together, before it has a byte of its client."""
        if self._cgroups is None:
            return
        failing.callback(self._cgroups.remove, identity)
        if memory_bytes:
            # What is kept of its uploads counts there, too, and what it changes of the template's memory.
            memory_bytes += _CGROUP_BESIDE_BYTES + (self._blobs.max_bytes if self._blobs is not None else 0)
        self._cgroups.add(identity, pid, CgroupBounds(memory_bytes, self._bounds.cpus))

    def clear(self, identity: str) -> None:
        """End and remove what is left of a session whose process has ended."""
        if self._cgroups is not None:
            self._cgroups.remove(identity)
        if self._users is not None:
            self._users.release(identity)

    def refuse_more(self) -> None:
        """Start the template no more; what is forked now is not tried a second time."""
        self._closing = True

    def close(self) -> None:
        """End the template, once all sessions have ended."""
        self._closing = True
        with self.forking:
            self._template.end()
        if self._users is not None:
            self._users.close()
        if self._cgroups is not None:
            self._cgroups.close()


def _tighter_bound(first: int, second: int | None) -> int:
    """The smaller of two bounds, of which 0 and None are none."""
    return min((bound for bound in (first, second) if bound), default=0)
