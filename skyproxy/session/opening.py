"""The connections to one worker: how they are opened, and with what token and whose certificate."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable
from typing import Any

from skyproxy.errors import ConnectError, SkyproxyError
from skyproxy.protocol.messages import FUNCTIONS, OPERATIONS, Hello, Welcome
from skyproxy.protocol.versions import SUPPORTED
from skyproxy.session.restoring import NewSession
from skyproxy.settings import Settings
from skyproxy.torch_versions import software
from skyproxy.transport.base import Transport
from skyproxy.transport.shared_threads import SharedThreads
from skyproxy.transport.trust import client_context

Renew = Callable[[], tuple[str, str | None]]
CheckWay = Callable[[], object]


class Opener:
    """Opens connections to a worker, for one session of it at a time.

    Attributes:
        url: where it listens.
        token: what it wants to hear.
        welcome: what it said when the session was opened.
    """

    welcome: Welcome

    def __init__(
        self,
        url: str,
        token: str,
        torch_version: str,
        settings: Settings,
        *,
        ssl_context: ssl.SSLContext | None = None,
        server_name: str | None = None,
        insecure: bool = False,
        renew: Renew | None = None,
        check_way: CheckWay | None = None,
        grace_seconds: int = 0,
        threads: SharedThreads | None = None,
    ) -> None:
        """Make the opener of one session's connections.

        Args:
            url, token: the worker.
            torch_version: ours.
            settings: limits.
            ssl_context: whom to trust.
            server_name: the name in the worker's certificate, where it is not the url's host.
            insecure: whether the token may travel without encryption.
            renew: gives the token and the certificate anew, for a session that has outlived them.
            check_way: raises ConnectError while what the connections go through, a tunnel, is away: that nobody listens
                on this side of it says nothing about the worker.
            grace_seconds: how long the worker should keep a session whose connection breaks.
            threads: those of several sessions, in place of some for this alone.
        """
        self.url, self.token = url, token
        self.grace_seconds = grace_seconds
        self._torch_version = torch_version
        self._settings = settings
        self._ssl_context = ssl_context
        self._server_name = server_name
        self._insecure = insecure
        self._renew = renew
        self._check_way = check_way
        self.threads = threads

    def open_session(self, *, may_renew: bool = False) -> NewSession:
        """Open a session, which is this opener's from now on.

        Args:
            may_renew: whether to ask for the token anew where this one is refused.

        Raises:
            ConnectError: nobody answers there, or not a worker, or it refuses.
        """
        operations, welcome = self._open(OPERATIONS, "", may_renew=may_renew)
        try:
            bulk, _ = self._open("bulk", welcome.session)
        except BaseException:
            operations.close()
            raise
        self.welcome = welcome
        return NewSession(operations, bulk, welcome, self._settings.silence_seconds)

    def open_functions(self) -> Transport:
        """Open a functions connection of the session."""
        return self._open(FUNCTIONS, self.welcome.session)[0]

    def open_apart(self, role: str, timeout_seconds: float | None = None) -> Transport:
        """Open a connection that belongs to no session: for jobs; in no more than so many seconds for each step."""
        return self._open(role, "", timeout_seconds=timeout_seconds)[0]

    def reopen(self, role: str, received: int) -> tuple[Transport, Welcome]:
        """Open a connection of the session in place of one that broke; see `reconnecting.Reopen`."""
        welcome = self.welcome
        try:
            return self._open(role, welcome.session, welcome.secret, received if role == OPERATIONS else 0)
        except ConnectError:
            raise
        except (SkyproxyError, OSError) as problem:  # of `renew`, which asks others
            raise ConnectError(str(problem)) from problem

    def become(self, other: Opener) -> None:
        """Open what comes next as another one would: the session has moved to its worker."""
        self.__dict__.update(other.__dict__)

    def copy(self) -> Opener:
        """Return one that opens connections of the same session."""
        made = object.__new__(Opener)
        made.become(self)
        return made

    def end_session(self, received: int) -> None:
        """End the session on a worker that keeps it without a connection, as far as that worker can be reached.

        Args:
            received: the answers that came.
        """
        if self.grace_seconds and self.welcome.secret:
            with contextlib.suppress(SkyproxyError, OSError):
                self.reopen(OPERATIONS, received)[0].close()

    def use(self, url: str, token: str | None = None, check_way: CheckWay | None = None) -> None:
        """Open the next session on another worker, by another way."""
        self.url, self.token, self._check_way = url, token or self.token, check_way

    def trust(self, ssl_context: ssl.SSLContext | None, server_name: str | None, *, insecure: bool) -> None:
        """Trust this for further connections; what is None, or false, stays as it is."""
        self._ssl_context = ssl_context or self._ssl_context
        self._server_name = server_name or self._server_name
        self._insecure = insecure or self._insecure

    def renew_by(self, renew: Renew) -> None:
        """Ask this for the token and the certificate from now on, where they are refused."""
        self._renew = renew

    def ask_status(self) -> dict[str, Any]:
        """Ask the worker what it does, beside the operations.

        Raises:
            ConnectError: it does not answer.
        """
        from skyproxy.transport.worker_report import ask_worker

        try:
            return ask_worker(
                self.url, self.token, "/status", ssl_context=self._ssl_context, server_name=self._server_name
            )
        except ConnectError:
            if self._renew is None:
                raise
            self.token, self._ssl_context = self._renew_credentials(self._renew)
            return ask_worker(
                self.url, self.token, "/status", ssl_context=self._ssl_context, server_name=self._server_name
            )

    def _open(
        self,
        role: str,
        session: str,
        secret: bytes = b"",
        received: int = 0,
        *,
        may_renew: bool = True,
        timeout_seconds: float | None = None,
    ) -> tuple[Transport, Welcome]:
        hello = Hello(
            list(SUPPORTED), role, session, software(self._torch_version), self.grace_seconds, secret, received
        )
        if self._check_way is not None:
            self._check_way()
        try:
            return self._connect(hello, self.token, self._ssl_context, timeout_seconds)
        except ConnectError:
            if self._renew is None or not may_renew:
                raise
            fresh, trusted = self._renew_credentials(self._renew)
            opened = self._connect(hello, fresh, trusted, timeout_seconds)
            self.token, self._ssl_context = fresh, trusted
            return opened

    def _renew_credentials(self, renew: Renew) -> tuple[str, ssl.SSLContext | None]:
        """The token and whom to trust, asked for again: a session lasts longer than a token or a certificate may."""
        fresh, certificate = renew()
        return fresh, client_context(certificate) if certificate is not None else self._ssl_context

    def _connect(
        self, hello: Hello, token: str, ssl_context: ssl.SSLContext | None, timeout_seconds: float | None
    ) -> tuple[Transport, Welcome]:
        from skyproxy.transport.websocket import connect_websocket

        return connect_websocket(
            self.url,
            token,
            hello,
            settings=self._settings,
            ssl_context=ssl_context,
            server_name=self._server_name,
            insecure=self._insecure,
            threads=self.threads,
            timeout_seconds=timeout_seconds,
        )
