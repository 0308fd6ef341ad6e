"""The workers on this machine that outlive the command which started them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime

from skyproxy.cli.fleet import LONGEST_LINE, EndingOptions, WorkerAccess, WorkerRow, not_found
from skyproxy.cli.output import bytes_text
from skyproxy.contexts import Context, write_private
from skyproxy.errors import ConnectError
from skyproxy.providers.detached import (
    DetachedWorker,
    find,
    list_detached,
    local_address,
    resume_detached,
    suspend_detached,
)

_POLL_SECONDS = 0.2
_MOST_NAME = 128


class LocalFleet:
    """Workers as processes of this machine.

    Attributes:
        provider: "local".
    """

    provider = "local"

    async def rows(self) -> list[WorkerRow]:
        """All of them, by name."""
        return list(await asyncio.gather(*(asyncio.to_thread(_row, worker) for worker in list_detached())))

    async def row(self, name: str) -> WorkerRow | None:
        """One of them; None where there is none."""
        worker = find(name)
        return await asyncio.to_thread(_row, worker) if worker is not None else None

    async def down(self, name: str, ending: EndingOptions) -> bool:
        """Ends one; whether there was one."""
        worker = find(name)
        if worker is None:
            return False
        await asyncio.to_thread(worker.stop)
        return True

    async def suspend(self, name: str, ending: EndingOptions) -> str:
        """Ends one when its sessions are saved; what became of them, in words."""
        worker = await asyncio.to_thread(suspend_detached, name)
        return worker.suspension_text()

    async def resume(self, name: str, timeout_seconds: float, say: Callable[[str], None]) -> None:
        """Starts one again."""
        await asyncio.to_thread(resume_detached, name)

    async def rotate_token(self, name: str, *, timeout_seconds: float | None, say: Callable[[str], None]) -> None:
        """Gives one another token; it reads the file anew when somebody comes with a token that it does not know."""
        worker = find(name)
        if worker is None:
            raise not_found(name, self.provider)
        write_private(worker.folder / "token", secrets.token_urlsafe(32) + "\n")

    async def logs(self, name: str, *, follow: bool, tail: int | None, node: int | None) -> AsyncIterator[str]:
        """The lines it wrote; while it follows, until the worker ends."""
        worker = find(name)
        if worker is None or not worker.log.exists():
            return
        with worker.log.open(encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
            for line in lines if tail is None else lines[len(lines) - min(tail, len(lines)) :]:
                yield line
            rest = ""
            while follow:
                alive = worker.alive
                rest += file.read()
                *lines, rest = rest.split("\n")
                for line in lines:
                    yield line
                if len(rest) > LONGEST_LINE:
                    yield rest
                    rest = ""
                if not alive:
                    return
                await asyncio.sleep(_POLL_SECONDS)

    async def context(self, name: str) -> Context:
        """Return the way to find it again."""
        return Context(name, self.provider)

    async def access(self, name: str) -> WorkerAccess:
        """Its address and token."""
        return WorkerAccess(*local_address(name))


def _row(worker: DetachedWorker) -> WorkerRow:
    age = (datetime.now(UTC) - datetime.fromisoformat(worker.started)).total_seconds()
    alive, url = worker.alive, worker.url
    phase, message, hint = "Running", "", ""
    report = {}
    if worker.is_suspended:
        phase, message = "Suspended", worker.suspension_text()
        hint = f"Bring it back: skyproxy resume {worker.name}"
    elif not alive:
        last = worker.log_tail().rpartition("\n")[2]
        phase, message = (
            "Lost",
            f"the process {worker.process_id} has ended" + (f"; its last output: {last}" if last else ""),
        )
        hint = f"See why: skyproxy logs {worker.name}. Start it again: skyproxy up {worker.name} --provider local"
    elif url is None:
        phase, message = "Provisioning", "it is not listening yet"
    else:
        try:
            report = WorkerAccess(url, worker.token()).report()
        except ConnectError as error:
            phase, message = "Failed", str(error)
    return WorkerRow(
        name=worker.name,
        provider="local",
        where="this machine",
        phase=phase,
        ready=bool(report),
        devices=devices_text(report.get("devices", ())),
        age_seconds=age,
        idle_seconds=report.get("idle_seconds"),
        url=url,
        reason="" if report else phase,
        message=message,
        hint=hint,
        software=dict(report.get("software", {})),
    )


def devices_text(devices: object) -> str:
    """A worker's devices in words: "2 x NVIDIA H200 (139.8 GiB), cpu"."""
    counts: dict[str, int] = {}
    for row in devices if isinstance(devices, list | tuple) else ():
        memory = bytes_text(row.get("total_memory_bytes"))
        name = str(row.get("name", row["type"]))[:_MOST_NAME]
        text = f"{name} ({memory})" if row["type"] != "cpu" else "cpu"
        counts[text] = counts.get(text, 0) + 1
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())
