"""The workers of one provider, in the same shape for every command."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from skyproxy.cli.exit_codes import NotFoundError
from skyproxy.contexts import Context, ContextStore
from skyproxy.transport.worker_report import ask_worker

_PIECE_BYTES = 1 << 16
LONGEST_LINE = 1 << 20
"""Of a log; a line that is longer comes in parts."""


@dataclass(frozen=True)
class WorkerRow:
    """A worker as `list` and `status` show it; the fields are the keys of `--json`.

    Attributes:
        name: of the worker.
        provider: who runs it.
        where: a namespace and a kubeconfig's context, or "this machine".
        phase: Pending, Queued, Provisioning, Running, Suspended, Failed, Expired or Terminating; Lost for a process
            that is gone.
        ready: whether it takes clients.
        nodes: how many.
        devices: what it offers, in words; empty where it does not say.
        age_seconds: since it was made.
        idle_seconds: for how long nothing was done on it; None where it does not say.
        url: where it listens, as its surroundings see it.
        reason: one word for why it is not ready.
        message: the cause, for people.
        hint: what to do about it.
        queue: the one that it was sent to, of Kueue's; empty for none.
        events: the latest warnings.
        software: versions on the worker.
    """

    name: str
    provider: str
    where: str
    phase: str
    ready: bool
    nodes: int = 1
    devices: str = ""
    age_seconds: float | None = None
    idle_seconds: float | None = None
    url: str | None = None
    reason: str = ""
    message: str = ""
    hint: str = ""
    queue: str = ""
    events: tuple[str, ...] = ()
    software: dict[str, str] = field(default_factory=dict)

    @property
    def row(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class WorkerAccess:
    """A way to speak to a worker from here; `close` when done."""

    url: str
    token: str = field(repr=False)
    certificate: str | None = None
    server_name: str | None = None
    via: str = "direct"
    release: Any = None

    def close(self) -> None:
        """Ends what it goes through; idempotent."""
        if self.release is not None:
            self.release()

    def report(self, path: str = "/activity") -> dict[str, Any]:
        """Return the worker's report on itself.

        Args:
            path: "/status" for what the web view shows.

        Raises:
            ConnectError: it does not answer.
        """
        return ask_worker(self.url, self.token, path, certificate=self.certificate, server_name=self.server_name)


@dataclass(frozen=True)
class EndingOptions:
    """The manner in which a worker is to end; what is on this machine ends at once in any case.

    Attributes:
        wait: until it is gone.
        timeout_seconds: for how long.
        force: takes away what does not end by itself.
        keep_environment: leaves what was installed on a host.
        say: told what is being waited for.
    """

    wait: bool = True
    timeout_seconds: float = 300.0
    force: bool = False
    keep_environment: bool = False
    say: Callable[[str], None] = lambda _: None


class Fleet(Protocol):
    """The workers of one provider."""

    @property
    def provider(self) -> str:
        """Its name."""

    async def rows(self) -> list[WorkerRow]:
        """All of them, by name."""

    async def row(self, name: str) -> WorkerRow | None:
        """One of them, in all detail; None where there is none."""

    async def down(self, name: str, ending: EndingOptions) -> bool:
        """Ends one; whether there was one."""

    async def suspend(self, name: str, ending: EndingOptions) -> str:
        """End one when its sessions are saved; what became of them, in words.

        Raises:
            ConfigurationError: it cannot be suspended.
        """

    async def resume(self, name: str, timeout_seconds: float, say: Callable[[str], None]) -> None:
        """Start one again that was suspended, and wait until it takes clients.

        Raises:
            ConfigurationError: it cannot be.
            WorkerStartError: it did not come up.
        """

    async def rotate_token(self, name: str, *, timeout_seconds: float | None, say: Callable[[str], None]) -> None:
        """Gives a worker another token; waits until it accepts it, unless there is no time for that.

        Raises:
            ConfigurationError: its token is not ours to change.
        """

    def logs(self, name: str, *, follow: bool, tail: int | None, node: int | None) -> AsyncIterator[str]:
        """The lines it wrote."""

    async def context(self, name: str) -> Context:
        """Return the way to find it again."""

    async def access(self, name: str) -> WorkerAccess:
        """A way to it; blocks no loop.

        Raises:
            ConnectError: it cannot be reached.
        """


_PLACES = {
    "local": "on this machine",
    "container": "in a container of this machine",
    "ssh": "over ssh",
    "kubernetes": "in the cluster",
    "remote": "at a saved address",
}


def not_found(name: str, *providers: str, unasked: Mapping[str, str] | None = None) -> NotFoundError:
    """Return the error for a worker that is not there.

    Args:
        name: as it was given.
        providers: who was asked.
        unasked: who could not be, and why.
    """
    close = difflib.get_close_matches(name, ContextStore().names(), n=1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    asked = "".join(f" {word}{_PLACES[kind]}" for word, kind in zip(["", *["or "] * len(providers)], providers))
    problems = "".join(f" What is {_PLACES[kind]} could not be asked: {why}." for kind, why in (unasked or {}).items())
    return NotFoundError(f"there is no worker {name!r}{asked}.{problems}{meant} See: skyproxy list")


async def printed_lines(process: asyncio.subprocess.Process, given: bytes = b"") -> AsyncGenerator[str, None]:
    """Yield the lines that a process writes to its output, until it ends. End it where the caller stops before.

    A line without an end comes in parts.

    Args:
        process: its output is a pipe; its input too, where something is given.
        given: what it reads first.
    """
    assert process.stdout is not None
    try:
        if given:
            assert process.stdin is not None
            process.stdin.write(given)
            await process.stdin.drain()
        rest = b""
        while piece := await process.stdout.read(_PIECE_BYTES):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")
            if len(rest) > LONGEST_LINE:
                yield rest.decode(errors="replace")
                rest = b""
        if rest:
            yield rest.decode(errors="replace")
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def last_bytes(stream: asyncio.StreamReader, most: int = 1 << 14) -> bytes:
    """Read a stream to its end, so that who writes it never waits, and return the last bytes of it."""
    kept = b""
    while piece := await stream.read(_PIECE_BYTES):
        kept = (kept + piece)[-most:]
    return kept
