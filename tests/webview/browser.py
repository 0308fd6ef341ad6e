"""A headless Chromium, spoken to by its DevTools protocol over the WebSocket library that we have anyway."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from websockets.sync.client import connect

from tests.integration.programs import wait_for

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    "--headless",
    "--no-sandbox",  # as root, and in containers; it reads our own pages only
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
    "--window-size=1240,1000",
)
_SECONDS = 60.0


class Browser:
    """A browser with a profile of its own; it ends with the block."""

    def __init__(self) -> None:
        assert BROWSER is not None
        self._folder = tempfile.TemporaryDirectory(prefix="skyproxy-chromium-", ignore_cleanup_errors=True)
        profile = Path(self._folder.name)
        # Files, not pipes: nobody need read them for the browser to go on.
        self._log = (profile / "log").open("wb")
        self._process = subprocess.Popen(
            [BROWSER, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        port_file = profile / "DevToolsActivePort"

        def port() -> str | None:
            assert self._process.poll() is None, (profile / "log").read_text(errors="replace")
            lines = port_file.read_text().splitlines() if port_file.exists() else []
            return lines[0] if len(lines) == 2 else None

        try:
            self._port = wait_for(port, "the browser listens", _SECONDS)
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def page(self, url: str) -> Iterator[Page]:
        """A fresh tab at a url."""
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:
            where = json.load(response)["webSocketDebuggerUrl"]
        with connect(where, max_size=None, open_timeout=_SECONDS, compression=None) as socket:
            page = Page(socket)
            page.command("Page.enable")
            page.command("Page.navigate", url=url)
            yield page

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the session is the browser's own
        self._process.wait(_SECONDS)
        self._log.close()
        self._folder.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Page:
    """A tab."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The browser's answer to a command of its protocol."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(_SECONDS))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def value(self, expression: str) -> Any:
        """What an expression gives in the page."""
        answer = self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, allowUnsafeEvalBlockedByCSP=False
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, identity: str) -> str:
        """The text of an element as a reader sees it."""
        return str(self.value(f"(document.getElementById({identity!r}) || {{}}).innerText || ''"))

    def wait_for_text(self, identity: str, text: str) -> None:
        """Wait until an element shows a text."""
        wait_for(lambda: text in self.text(identity), f"{identity} shows {text!r}", _SECONDS)

    def screenshot(self, path: Path, height: int = 1000) -> None:
        """Write what is seen as a PNG."""
        self.command("Emulation.setDeviceMetricsOverride", width=1160, height=height, deviceScaleFactor=1, mobile=False)
        data = self.command("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))
