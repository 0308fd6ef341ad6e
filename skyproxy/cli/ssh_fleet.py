"""The workers on hosts that ssh reaches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

from skyproxy.cli.fleet import EndingOptions, WorkerAccess, WorkerRow, last_bytes, not_found, printed_lines
from skyproxy.cli.local_fleet import devices_text
from skyproxy.contexts import Context
from skyproxy.errors import ConnectError, SkyproxyError, WorkerStartError, visible
from skyproxy.providers.ssh import SshWorker, find, list_workers
from skyproxy.providers.ssh_connection import failure, remote_program
from skyproxy.transport.worker_report import checked_report


class SshFleet:
    """Workers on hosts.

    Attributes:
        provider: "ssh".
    """

    provider = "ssh"

    async def rows(self) -> list[WorkerRow]:
        """All of them, by name."""
        return list(await asyncio.gather(*(asyncio.to_thread(_row, worker) for worker in list_workers())))

    async def row(self, name: str) -> WorkerRow | None:
        """One of them; None where there is none."""
        worker = find(name)
        return await asyncio.to_thread(_row, worker) if worker is not None else None

    async def down(self, name: str, ending: EndingOptions) -> bool:
        """End one; return whether there was one."""
        worker = find(name)
        if worker is None:
            return False
        try:
            await asyncio.to_thread(worker.stop, keep_environment=ending.keep_environment)
        except (ConnectError, WorkerStartError) as error:
            if not ending.force:
                raise ConnectError(f"{error}\nTo forget the worker, with what is left on the host: --force") from error
            worker.forget()
        return True

    async def suspend(self, name: str, ending: EndingOptions) -> str:
        """End one when its sessions are saved; return what became of them, in words."""
        return await asyncio.to_thread(_require_worker(name).suspend, ending.timeout_seconds)

    async def resume(self, name: str, timeout_seconds: float, say: Callable[[str], None]) -> None:
        """Start one again."""
        await asyncio.to_thread(_require_worker(name).resume)

    async def rotate_token(self, name: str, *, timeout_seconds: float | None, say: Callable[[str], None]) -> None:
        """Give one another token; it reads the file anew when somebody comes with a token that it does not know."""
        await asyncio.to_thread(_require_worker(name).rotate_token)

    async def logs(self, name: str, *, follow: bool, tail: int | None, node: int | None) -> AsyncIterator[str]:
        """The lines it wrote; while it follows, until the worker ends."""
        worker = _require_worker(name)
        request = {"operation": "logs", "name": worker.remote_name, "follow": follow, "tail": tail}
        command, given = remote_program(worker.target, worker.python, request)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        telling = asyncio.create_task(last_bytes(process.stderr))
        try:
            async with contextlib.aclosing(printed_lines(process, given)) as lines:
                async for line in lines:
                    yield line
            if process.returncode:
                told = (await telling).decode(errors="replace")
                raise failure(worker.target, worker.python, process.returncode, told)
        finally:
            telling.cancel()

    async def context(self, name: str) -> Context:
        """Return the way to find it again."""
        return Context(name, self.provider)

    async def access(self, name: str) -> WorkerAccess:
        """A tunnel to it."""
        tunnel, token = await asyncio.to_thread(_require_worker(name).open)
        return WorkerAccess(tunnel.url, token, via="ssh", release=tunnel.close)


def _require_worker(name: str) -> SshWorker:
    worker = find(name)
    if worker is None:
        raise not_found(name, SshFleet.provider)
    return worker


def _row(worker: SshWorker) -> WorkerRow:
    age = (datetime.now(UTC) - datetime.fromisoformat(worker.started)).total_seconds()
    found: dict[str, Any] = {}
    phase, message, hint = "Running", "", ""
    try:
        found = worker.ask("status")
    except SkyproxyError as error:
        phase, message, hint = (
            "Unreachable",
            str(error),
            "It may still be running; try again when the host can be reached.",
        )
    report: dict[str, Any] = {}
    if found.get("alive") and "report" in found:
        try:
            report = checked_report(found["report"])
        except ValueError as error:
            found["problem"] = str(error)
    if found and not found["alive"] and not found["there"]:
        phase, message = "Provisioning", "nothing of it is there: an `up` is installing it, or has failed"
        hint = f"Start it: skyproxy up {worker.url} --name {worker.name}. Forget it: skyproxy down {worker.name}"
    elif found and found.get("suspended") is not None:
        phase, message = "Suspended", visible(str(found["suspended"]))
        hint = f"Bring it back: skyproxy resume {worker.name}"
    elif found and not found["alive"]:
        last = visible(str(found.get("log", "")).rpartition("\n")[2])
        phase, message = "Lost", "its process has ended" + (f"; its last output: {last}" if last else "")
        hint = f"See why: skyproxy logs {worker.name}. Start it again: skyproxy up {worker.url} --name {worker.name}"
    elif found and not report:
        phase, message = "Failed", visible(str(found.get("problem", "it does not answer")))
    return WorkerRow(
        name=worker.name,
        provider="ssh",
        where=worker.target.shown,
        phase=phase,
        ready=bool(report),
        devices=devices_text(report.get("devices", ())),
        age_seconds=age,
        idle_seconds=report.get("idle_seconds"),
        url=worker.url,
        reason="" if report else phase,
        message=message,
        hint=hint,
        software=report.get("software", {}),
    )
