"""The workers that others run, as far as contexts of ours lead to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from skyproxy.cli.fleet import EndingOptions, WorkerAccess, WorkerRow
from skyproxy.cli.local_fleet import devices_text
from skyproxy.contexts import Context, ContextStore, remote_address
from skyproxy.errors import ConfigurationError, ConnectError


class RemoteFleet:
    """Workers at urls.

    Attributes:
        provider: "remote".
    """

    provider = "remote"

    async def rows(self) -> list[WorkerRow]:
        """All that a context leads to, by name."""
        store = ContextStore()
        contexts = (store.get(name) for name in store.names())
        names = [context.name for context in contexts if context is not None and context.provider == self.provider]
        return [row for row in await asyncio.gather(*map(self.row, names)) if row is not None]

    async def row(self, name: str) -> WorkerRow | None:
        """One of them, as it says itself; None where no context leads to it."""
        context = ContextStore().get(name)
        if context is None or context.provider != self.provider:
            return None
        message, report = "", {}
        try:
            report = await asyncio.to_thread(access_of_url(context).report)
        except ConnectError as error:
            message = str(error)
        return WorkerRow(
            name=name,
            provider=self.provider,
            where="elsewhere",
            phase="Running" if report else "Lost",
            ready=bool(report),
            devices=devices_text(report.get("devices", ())),
            idle_seconds=report.get("idle_seconds"),
            url=context.options.get("url"),
            reason="" if report else "Lost",
            message=message,
            hint="" if report else f"Ask who runs it; or forget it: skyproxy context remove {name}",
            software=dict(report.get("software", {})),
        )

    async def down(self, name: str, ending: EndingOptions) -> bool:
        """Refuses: whoever started it ends it."""
        raise ConfigurationError(
            f"{name} was not started by skyproxy up, so it cannot be shut down from here. "
            f"To forget it: skyproxy context remove {name}"
        )

    async def suspend(self, name: str, ending: EndingOptions) -> str:
        """Refuse to: who started it is not known."""
        raise self._refusal(name)

    async def resume(self, name: str, timeout_seconds: float, say: Callable[[str], None]) -> None:
        """Refuse to, likewise."""
        raise self._refusal(name)

    def _refusal(self, name: str) -> ConfigurationError:
        return ConfigurationError(
            f"{name} is a worker at a saved address, and skyproxy suspends workers that skyproxy up has started. One "
            "that was started with --snapshots FOLDER saves its sessions there when it gets a SIGTERM; they go on when "
            "it is started again at the same address."
        )

    async def rotate_token(self, name: str, *, timeout_seconds: float | None, say: Callable[[str], None]) -> None:
        """Refuses: whoever started it says what its token is."""
        raise ConfigurationError(
            f"{name} was not started by skyproxy up, so its token cannot be replaced from here. Save another one: "
            "skyproxy connect URL"
        )

    async def logs(self, name: str, *, follow: bool, tail: int | None, node: int | None) -> AsyncIterator[str]:
        """Refuses: its log is where it runs."""
        for line in self._no_log(name):
            yield line

    def _no_log(self, name: str) -> list[str]:
        raise ConfigurationError(f"{name} runs elsewhere, and its log can be read only there.")

    async def context(self, name: str) -> Context:
        """The one that leads to it."""
        context = ContextStore().get(name)
        assert context is not None
        return context

    async def access(self, name: str) -> WorkerAccess:
        """Its address and token."""
        return access_of_url(await self.context(name))


def access_of_url(context: Context) -> WorkerAccess:
    """A way to the worker of a context that holds a url.

    Raises:
        ConfigurationError: its token or certificate cannot be read.
    """
    there = remote_address(context)
    return WorkerAccess(there.url, there.token, there.certificate, there.server_name)
