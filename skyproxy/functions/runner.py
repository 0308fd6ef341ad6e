"""A node's methods that run functions: the thin layer between its methods and the channel."""

from __future__ import annotations

import asyncio
import concurrent.futures
import numbers
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import cloudpickle

from skyproxy import telemetry
from skyproxy.errors import ConfigurationError
from skyproxy.functions.adoption import Adopter
from skyproxy.functions.call import Call, OnOutput
from skyproxy.functions.channel import FunctionChannel
from skyproxy.functions.payload import Payload
from skyproxy.functions.payload_file import PassedPayload, PayloadFile
from skyproxy.functions.project_sync import ProjectSync
from skyproxy.functions.questions import pass_on
from skyproxy.functions.waiting_calls import WAITING_CALLS
from skyproxy.payloads.pickling import PICKLE, PLAIN
from skyproxy.protocol import commands
from skyproxy.runtime.project_code import OWN_PACKAGES
from skyproxy.session.session import Session
from skyproxy.tensor.core.devices import SkyDevice
from skyproxy.transport.base import Transport

if TYPE_CHECKING:
    from skyproxy.tensor.core.remote_tensor import RemoteTensor

Results = Literal["remote", "value"]


class SentContext:
    """The context that goes beside many calls, pickled once."""

    def __init__(self, context: Mapping[str, object]) -> None:
        self.content: bytes = cloudpickle.dumps(dict(context))


class Runner:
    """Runs functions on the worker of one session.

    Args:
        session: the session.
        devices: its devices.
        open_connection: makes a functions connection for it.
        shares_files: whether the worker sees this program's folders under the same paths.
        trusted: whether the worker may send pickles, which run code of its choice here.
    """

    def __init__(
        self,
        session: Session,
        devices: Sequence[SkyDevice],
        open_connection: Callable[[], Transport],
        *,
        shares_files: bool = False,
        trusted: bool = False,
    ) -> None:
        self.trusted = trusted
        self.shares_files = shares_files
        self.session = session
        self.devices = devices
        self._channel = FunctionChannel(session, open_connection)
        self._project = ProjectSync(self._run_own, session.settings, shares_files=shares_files)

    @property
    def is_busy(self) -> bool:
        """True if calls are under way."""
        return self._channel.is_busy

    def submit(
        self,
        payload: Payload,
        *,
        on_output: OnOutput | None = None,
        timeout: float | None = None,
        name: str | None = None,
        results: Results = "remote",
        context: Mapping[str, object] | SentContext | None = None,
        trust_worker: bool | None = None,
        isolate: bool = False,
        debug: bool | None = None,
        quiet: bool = False,
        begun: list[Call] | None = None,
        file: PayloadFile | PassedPayload | None = None,
    ) -> Call:
        """Begins a call; see `Node.submit_payload`.

        Args:
            file: the payload, for a worker that can read it there, or that it was passed on to.
            quiet: whether nobody asks when the function begins, and the worker need not say so.
            begun: gets the call before it is sent, for whoever is interrupted before this returns.
        """
        self._check()
        if isolate and not self._can_isolate:
            raise ConfigurationError(
                "isolate=True: this worker cannot give functions processes of their own. That needs Linux on the "
                "worker, and a worker of this version. Leave isolate out, and the function runs in the worker's own."
            )
        if results not in ("remote", "value"):
            raise ConfigurationError(f'results={results!r} is neither "remote" nor "value".')
        given: object = timeout
        if timeout is not None and (not isinstance(given, numbers.Real) or not timeout > 0):
            raise ConfigurationError(f"timeout={timeout!r} is not a positive number of seconds. None waits forever.")
        payload.check(self.session, platform.python_version())
        self._project.update(hurry=self._channel.is_busy)
        trusted = self.trusted if trust_worker is None else trust_worker
        span = telemetry.begin(
            "skyproxy.function", function=name or payload.name, session=self.session.welcome.session[:8]
        )
        try:
            call = self._begin(
                payload, on_output, timeout, name, results, context, trusted, isolate, debug, quiet, begun, file
            )
        except BaseException as error:
            telemetry.end(span, type(error).__name__)
            raise
        if span is not None:
            call.add_done_callback(lambda done: telemetry.end(span, done.failure))
        return call

    @property
    def _can_isolate(self) -> bool:
        return bool(self.session.welcome.limits.get("isolates"))

    def isolates(self, fn: Callable[..., object], asked: bool | None = None) -> bool:
        """Return whether a call gets a process of its own on the worker.

        Args:
            fn: the function. Those of this package keep models and other state in the worker's own process.
            asked: what its caller wants; None leaves it to the settings, where the worker can do it.
        """
        if asked is not None:
            return asked
        return self.session.settings.isolate and self._can_isolate and not _is_ours(fn)

    def debugs(self, fn: Callable[..., object], asked: bool | None = None) -> bool:
        """Return whether the breakpoints of a call wait; `asked` is as for `isolates`."""
        return (self.session.settings.debug and not _is_ours(fn)) if asked is None else asked

    @property
    def reads_files(self) -> bool:
        """True if the worker is on this machine and takes payloads from files; see `PayloadFile`."""
        return self.shares_files and bool(self.session.welcome.limits.get("payload_files"))

    @property
    def passes_payloads(self) -> bool:
        """True if the worker gets payloads from others, and passes them on; see `skyproxy.relays`."""
        limits = self.session.welcome.limits
        return bool(limits.get("functions") and limits.get("passes_payloads")) and self.session.settings.pass_broadcasts

    @property
    def is_new(self) -> bool:
        """True if the worker has not been told of the program's modules."""
        return self._project.is_new

    def _run_own(self, function: Callable[..., object], *args: object) -> object:
        """Run a function of this package on the worker, which needs nothing of the program for it."""
        return self._begin(Payload.of(function, args), None, None, None, "value", None, self.trusted).result()

    def _begin(
        self,
        payload: Payload,
        on_output: OnOutput | None,
        timeout: float | None,
        name: str | None,
        results: Results,
        context: Mapping[str, object] | SentContext | None,
        trusted: bool,
        isolate: bool = False,
        debug: bool | None = False,
        quiet: bool = False,
        begun: list[Call] | None = None,
        file: PayloadFile | PassedPayload | None = None,
    ) -> Call:
        call = self._call(name or payload.name, payload.tensors, on_output, trusted)
        call.payload = payload
        call.file = file if self.reads_files or isinstance(file, PassedPayload) else None
        call.task = {
            "name": call.name,
            "results": results,
            "wants": PICKLE if trusted else PLAIN,
            "context": self._context_bytes(context),
            "timeout": None if timeout is None else float(timeout),
            **payload.tables,
        }
        if self.session.settings.debug if debug is None else debug:
            call.task["debug"] = float(self.session.settings.breakpoint_seconds)
        if isolate:
            call.task["isolate"] = True
        if quiet and payload.is_small:
            call.task["quiet"] = True
        self._channel.open()  # before anything is recorded, so that nothing waits there for a call that never comes
        recorder = self.session.recorder
        recorder.hidden_writes += 1
        if not payload.tensors and not isolate and self._is_at_rest():
            call.task["bound"] = True
        else:
            # Without tensors too: the function begins after everything recorded before it, a new seed for example.
            slots = [tensor._sky.slot for tensor in payload.tensors]
            recorder.append(commands.DO, "bind_call", [call.id, slots, *([True] if isolate else [])])
            recorder.flush()
        if begun is not None:
            begun.append(call)
        self._channel.start(call)
        return call

    def _is_at_rest(self) -> bool:
        """Return whether the worker has done all that was recorded, so that a call need not wait for its turn there."""
        session = self.session
        if session.protection is not None or not session.welcome.limits.get("direct_calls"):
            return False
        recorder = session.recorder
        return not recorder.unsent and not recorder.has_dropped and recorder.is_all_executed

    def _context_bytes(self, context: Mapping[str, object] | SentContext | None) -> bytes:
        if isinstance(context, SentContext):
            return context.content
        return cloudpickle.dumps(dict(context)) if context else b""

    def reattach(self, identity: str, on_output: OnOutput | None = None) -> Call:
        """A call that was begun before; see `Node.reattach`."""
        self._check()
        known = self._channel.find(identity)
        if known is not None:
            return known
        call = self._call("the call", [], on_output, self.trusted, identity)
        self._channel.attach(call)
        return call

    def _call(
        self,
        name: str,
        tensors: Sequence[RemoteTensor],
        on_output: OnOutput | None,
        trusted: bool,
        identity: str | None = None,
    ) -> Call:
        identity = identity or os.urandom(16).hex()
        adopter = Adopter(identity, self.session, self.devices, tensors, trusted)
        call = Call(identity, name, self._channel, adopter, on_output)
        call.on_wait = partial(WAITING_CALLS.note, self)
        call.on_question = partial(pass_on, self)
        return call

    def _check(self) -> None:
        self.session.check()
        if not self.session.welcome.limits.get("functions"):
            raise ConfigurationError(
                "this worker runs no functions for this client: it was started with --no-functions, or the token does "
                "not allow them (scope 'functions'). Tensor operations work; for functions, start the worker without "
                "that option and use a token that has the scope."
            )

    def _submit_plainly(
        self,
        fn: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        begun: list[Call] | None = None,
    ) -> Call:
        payload = Payload.of(fn, args, kwargs)
        return self.submit(payload, isolate=self.isolates(fn), debug=self.debugs(fn), begun=begun)

    def run(self, fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Runs a function and waits; see `Node.run`."""
        begun: list[Call] = []
        try:
            return self._submit_plainly(fn, args, kwargs, begun).result()
        except BaseException:
            for call in begun:
                call.cancel()  # Ctrl-C, perhaps before `submit` returned; nothing to do where the call has ended
            raise
        finally:
            call = None  # type: ignore[assignment]  # the traceback of an error holds this frame, and the call the error
            begun.clear()

    async def execute(self, fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Runs a function and waits without blocking the event loop; see `Node.execute`."""
        begun: concurrent.futures.Future[Call] = concurrent.futures.Future()

        def begin() -> None:
            if begun.set_running_or_notify_cancel():
                try:
                    begun.set_result(self._submit_plainly(fn, args, kwargs))
                except BaseException as error:
                    begun.set_exception(error)

        try:
            await asyncio.to_thread(begin)
        except asyncio.CancelledError:
            if not begun.cancel():
                begun.add_done_callback(_cancel_begun)  # the thread cannot be stopped, but its call can
            raise
        return await begun.result()


def _is_ours(fn: Callable[..., object]) -> bool:
    return str(getattr(fn, "__module__", "")).partition(".")[0] in OWN_PACKAGES


def _cancel_begun(begun: concurrent.futures.Future[Call]) -> None:
    if begun.exception() is None:
        begun.result().cancel()
