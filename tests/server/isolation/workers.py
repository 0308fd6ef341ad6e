"""Workers with session processes, as programs of their own, and what their clients do to them."""

from __future__ import annotations

import contextlib
import json
import ssl
import sys
import urllib.request
from pathlib import Path

import skyproxy
from skyproxy.errors import AuthenticationError
from tests.integration.programs import start_worker, wait_for

TOKEN = "a-token-that-nobody-should-see-anywhere"


class Worker:
    """A worker's program, with a process for each session unless the arguments say otherwise.

    Attributes:
        tokens: the folder of its tokens, of which `TOKEN` is one.
    """

    def __init__(self, folder: Path, *arguments: str, python: str = sys.executable, **extra: str) -> None:
        self.tokens, self._port_file, self.log_file = folder / "tokens", folder / "port", folder / "log"
        self.tokens.mkdir()
        token = self.tokens / "owner"
        token.write_text(TOKEN, encoding="ascii")
        token.chmod(0o600)
        kind = [] if "--sessions-in-process" in arguments else ["--session-processes"]
        self._tls = "--tls-cert" in arguments
        with self.log_file.open("wb") as log:
            self.process = start_worker(
                self.tokens,
                log,
                *kind,
                "--port-file",
                str(self._port_file),
                *arguments,
                python=python,
                **extra,
            )
        try:
            self.port = int(wait_for(self._written_port, "the worker listens", 100))
        except BaseException:
            self.end()
            raise

    def _written_port(self) -> str | None:
        assert self.process.poll() is None, self.log
        return self._port_file.read_text() if self._port_file.exists() else None

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def url(self) -> str:
        return f"{'wss' if self._tls else 'ws'}://127.0.0.1:{self.port}"

    def connect(self, context: ssl.SSLContext | None = None, token: str = TOKEN) -> skyproxy.Node:
        return skyproxy.connect(self.url, token=token, ssl_context=context)

    def knows(self, token: str) -> bool:
        """Tell whether it takes connections with a token; it looks for new ones now and then."""
        try:
            self.connect(token=token).close()
        except AuthenticationError:
            return False
        return True

    def get(self, path: str) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.read().decode()

    def activity(self) -> dict[str, object]:
        return json.loads(self.get("/activity"))

    def children(self) -> set[int]:
        """The processes of the worker: the template and the sessions'."""
        found: set[int] = set()
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                found |= set(map(int, (task / "children").read_text().split()))
        return found

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()


def hold_the_interpreter() -> None:
    """Compute for hours in C code that does not let go of the interpreter's lock."""
    pow(7, 10**9)
