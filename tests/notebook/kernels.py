"""A real Jupyter kernel in a process of its own, as a notebook's front end sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jupyter_client.manager import KernelManager

from tests.integration.programs import environment

TIMEOUT_SECONDS = 100


@dataclass
class Outcome:
    """What became of a cell.

    Attributes:
        status: "ok" or "error".
        error: the exception's class and text; of the last one that was shown.
        errors: how many were shown.
        traceback: as shown, with its colours.
        printed: by stream: "stdout", "stderr".
        result: the forms of the last line's value.
        displays: each form shown otherwise, first or in place of an earlier one.
    """

    status: str = ""
    error: tuple[str, str] = ("", "")
    errors: int = 0
    traceback: str = ""
    printed: dict[str, str] = field(default_factory=lambda: {"stdout": "", "stderr": ""})
    result: dict[str, str] = field(default_factory=dict)
    displays: list[dict[str, str]] = field(default_factory=list)


class Kernel:
    """A kernel with its front end's connection; a context manager."""

    def __init__(self, **extra: str) -> None:
        """Args:
        extra: variables of its environment.
        """
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(env=environment(**extra))
        self._connect()

    def _connect(self) -> None:
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=TIMEOUT_SECONDS)

    def run(
        self,
        code: str,
        on_print: Callable[[str], object] = lambda text: None,
        on_display: Callable[[str], object] = lambda text: None,
    ) -> Outcome:
        """Runs a cell to its end.

        Args:
            code: the cell.
            on_print: called with whatever it prints, as it comes.
            on_display: called with the plain text of whatever else it shows, likewise.
        """
        outcome = Outcome()

        def take(message: dict[str, Any]) -> None:
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "stream":
                outcome.printed[content["name"]] += content["text"]
                on_print(content["text"])
            elif kind == "execute_result":
                outcome.result = content["data"]
            elif kind in ("display_data", "update_display_data"):
                outcome.displays.append(content["data"])
                on_display(content["data"].get("text/plain", ""))
            elif kind == "error":
                outcome.errors += 1
                outcome.error = content["ename"], content["evalue"]
                outcome.traceback = "\n".join(content["traceback"])

        reply = self._client.execute_interactive(code, output_hook=take, timeout=TIMEOUT_SECONDS, stop_on_error=False)
        outcome.status = reply["content"]["status"]
        return outcome

    def succeed(self, code: str) -> Outcome:
        """Runs a cell that must end well."""
        outcome = self.run(code)
        assert outcome.status == "ok", f"{outcome.traceback}\n{outcome.printed}"
        return outcome

    def value(self, expression: str) -> str:
        """The text of an expression's value."""
        return self.succeed(expression).result["text/plain"]

    def interrupt(self) -> None:
        """What the stop button does."""
        self._manager.interrupt_kernel()

    def restart(self) -> None:
        """What the restart button does."""
        self._client.stop_channels()
        self._manager.restart_kernel(now=True)
        self._connect()

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
