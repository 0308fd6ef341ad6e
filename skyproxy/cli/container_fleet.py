"""The workers in containers of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

from skyproxy.cli.fleet import EndingOptions, WorkerAccess, WorkerRow, printed_lines
from skyproxy.cli.local_fleet import devices_text
from skyproxy.contexts import Context
from skyproxy.errors import ConnectError
from skyproxy.providers.container_engine import ContainerEngine
from skyproxy.providers.detached_container import (
    container_address,
    container_name,
    container_workers,
    is_suspended,
    replace_token,
    resume_container,
    stop_container,
    suspend_container,
    suspension_text,
)


class ContainerFleet:
    """Workers as containers.

    Attributes:
        provider: "container".
    """

    provider = "container"

    async def rows(self) -> list[WorkerRow]:
        """All of them, by name."""
        found = [await self.row(name) for name in await container_workers()]
        return [row for row in found if row is not None]

    async def row(self, name: str) -> WorkerRow | None:
        """One of them; None where there is none."""
        found = await ContainerEngine.find().inspect(container_name(name))
        if found is None:
            return None
        state = found.get("State", {})
        report: dict[str, Any] = {}
        phase, message, url, hint = "Running", "", None, f"See: skyproxy logs {name}"
        if is_suspended(found):
            phase, message = "Suspended", await suspension_text(name)
            hint = f"Bring it back: skyproxy resume {name}"
        elif not state.get("Running"):
            phase, message = "Lost", f"the container has ended with status {state.get('ExitCode')}"
        else:
            try:
                url, token = await container_address(name)
                report = await asyncio.to_thread(WorkerAccess(url, token).report)
            except ConnectError as error:
                phase, message = "Provisioning", str(error)
        return WorkerRow(
            name=name,
            provider=self.provider,
            where="this machine",
            phase=phase,
            ready=bool(report),
            devices=devices_text(report.get("devices", ())),
            age_seconds=_age_seconds(str(found.get("Created", ""))),
            idle_seconds=report.get("idle_seconds"),
            url=url,
            reason="" if report else phase,
            message=message,
            hint="" if report else hint,
            software=dict(report.get("software", {})),
        )

    async def down(self, name: str, ending: EndingOptions) -> bool:
        """Ends one; whether there was one."""
        return await stop_container(name)

    async def suspend(self, name: str, ending: EndingOptions) -> str:
        """End one when its sessions are saved; return what became of them, in words."""
        return await suspend_container(name)

    async def resume(self, name: str, timeout_seconds: float, say: Callable[[str], None]) -> None:
        """Start one again."""
        await resume_container(name)

    async def rotate_token(self, name: str, *, timeout_seconds: float | None, say: Callable[[str], None]) -> None:
        """Gives one another token; it reads the file anew when somebody comes with a token that it does not know."""
        await replace_token(name)

    async def logs(self, name: str, *, follow: bool, tail: int | None, node: int | None) -> AsyncIterator[str]:
        """The lines it wrote; while it follows, until it ends."""
        arguments = ["logs", *(["--follow"] if follow else []), *(["--tail", str(tail)] if tail is not None else [])]
        process = await asyncio.create_subprocess_exec(
            ContainerEngine.find().executable,
            *(*arguments, container_name(name)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with contextlib.aclosing(printed_lines(process)) as lines:
            async for line in lines:
                yield line

    async def context(self, name: str) -> Context:
        """Return the way to find it again."""
        return Context(name, self.provider)

    async def access(self, name: str) -> WorkerAccess:
        """Its address and token."""
        return WorkerAccess(*await container_address(name))


def _age_seconds(created: str) -> float | None:
    # Nine digits behind the point, where Python reads six.
    try:
        made = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", created))
    except ValueError:
        return None
    return (datetime.now(UTC) - made).total_seconds()
