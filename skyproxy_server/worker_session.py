"""One session of a worker: who it is, its threads, its end."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.protocol.connection import State
from skyproxy.protocol.messages import Ack, Failure, Pong, RequestId, Sequence
from skyproxy.settings import Settings
from skyproxy.transport.base import Transport
from skyproxy_server import audit
from skyproxy_server.activity import Activity
from skyproxy_server.auth import OWNER, client_of
from skyproxy_server.blobs import UploadStore
from skyproxy_server.cuda_staging import own_streams
from skyproxy_server.executor import Executor
from skyproxy_server.functions.connection import FunctionsConnection
from skyproxy_server.functions.registry import Calls
from skyproxy_server.inventory import DeviceRow
from skyproxy_server.lasting import LastingTransport
from skyproxy_server.leaving import LEAVING, EndNotice
from skyproxy_server.lost_context import CONTEXT, ContextLostError
from skyproxy_server.named_batches import NamedBatches
from skyproxy_server.named_sessions import NamedSessions, NamedValueRequests
from skyproxy_server.session_report import (
    MemoryGauge,
    call_rows,
    failure_rows,
    queued_operations,
    running_op,
    running_place,
)
from skyproxy_server.silence import has_hung_up
from skyproxy_server.snapshots.requests import SessionSnapshots
from skyproxy_server.transfers import Transfers

logger = logging.getLogger("skyproxy.server")

_ACK_EVERY_BATCHES = 16
_ACK_DELAY_SECONDS = 0.002


_WITHOUT_A_MARK = 1 << 62
"""More than any mark's number: what is dropped up to this one is dropped for good."""


class WorkerSession:
    """One client's session: its values, and the thread that executes.

    Attributes:
        client: whose it is.
        lasting: its operations connection, where that may be replaced; else None.
        calls: where its functions run; None for a client that may run none.
    """

    def __init__(
        self,
        transport: Transport,
        devices: list[DeviceRow],
        settings: Settings,
        activity: Activity,
        blobs: UploadStore | None = None,
        calls: Calls | None = None,
        identity: str = "",
        grace_seconds: float = 0.0,
        on_detach: Callable[[], object] = lambda: None,
        secret: bytes = b"",
        make_room: Callable[[WorkerSession], bool] = lambda session: False,
        on_context_lost: Callable[[WorkerSession, str], object] = lambda session, words: None,
    ) -> None:
        self.identity = identity or secrets.token_hex(16)
        self.client = client_of(transport)
        self.lasting: LastingTransport | None = None
        if grace_seconds > 0:
            most = settings.max_kept_answer_bytes
            self.lasting = LastingTransport(transport, grace_seconds, most, on_detach, secret)
        self._transport = transport = self.lasting or transport
        self._activity = activity
        self._transfers = Transfers(
            settings.chunk_bytes,
            moved=activity.touch,
            blobs=blobs,
            user=self.identity,
            owner="" if self.client.name == OWNER.name else self.client.name,
            most_blob_bytes=self.client.bounds.blob_bytes,
        )
        self._transfers.lasting = self.lasting is not None
        self._transfers.has_left, self._transfers.on_deserted = self.has_left, self._cut_bulk
        self._executor = Executor(devices, transport.send, self._transfers, settings)
        self._executor.state.identity, self._executor.state.calls = self.identity, calls
        self._executor.make_room = lambda: make_room(self)
        self._on_context_lost = on_context_lost
        self._transfers.on_device_failure = CONTEXT.note
        self._transfers.on_cancel_operations = self._executor.state.cancellation.ask
        self.calls = calls
        self._leave = EndNotice()
        self._transfers.on_load = self._leave.on_load
        self._over = threading.Event()
        self._farewell = "the session ended"
        self._executing = 0
        self._settings = settings
        self._has_jumped = False
        self._thread_id: int | None = None
        self._began_at = time.monotonic()
        self._memory = MemoryGauge()
        self._bulk: Transport | None = None
        self._lost_bulk_at: float | None = None
        self._bulk_running = threading.Lock()
        self._taking_bulk = threading.Lock()
        self._functions: FunctionsConnection | None = None
        self._ended = False

    @property
    def executing(self) -> bool:
        """True if a batch is being executed now."""
        return bool(self._executing)

    @property
    def is_detached(self) -> bool:
        """True if it has no operations connection now, and is kept for a while."""
        return self.lasting is not None and self.lasting.detached_at is not None

    @property
    def deserted_seconds(self) -> float | None:
        """The time for which its client is not heard; None while it is.

        While operations run, nobody reads their connection, and so nobody sees its end behind all that is queued. The
        bulk connection is always read: of a program that was killed, it is the one that ends at once.
        """
        since = [self._lost_bulk_at, self.lasting.detached_at if self.lasting is not None else None]
        return max((time.monotonic() - at for at in since if at is not None), default=None)

    @property
    def heard(self) -> int | None:
        """The bytes that have come from its client; None where that may not come back, or has no connection now."""
        if self.lasting is None or not self.lasting.secret or self.is_detached:
            return None
        return self._transport.bytes_received + (0 if self._bulk is None else self._bulk.bytes_received)

    def ask(self) -> None:
        """Have the client's side of the connections answer, if it is there."""
        self._transport.keep_alive()
        if self._bulk is not None:
            self._bulk.keep_alive()

    def give_up(self) -> None:
        """Cut the connections of a client that says nothing: its session waits for it as for any other."""
        if self.lasting is None:
            return
        self._cut_bulk()
        self.lasting.give_up_link()

    def _cut_bulk(self) -> None:
        if self._bulk is not None:
            self._bulk.cut()

    def has_left(self) -> bool:
        """Return whether its client is gone and cannot come back, which who executes does not see."""
        return self.lasting.is_over if self.lasting is not None else has_hung_up(self._transport)

    @property
    def commands_done(self) -> int:
        """The number of commands that were executed, up to the latest whole batch."""
        return self._executor.commands_done

    def row(self) -> dict[str, object]:
        """Return what the web view shows of it; reads counters, and never waits for the session."""
        state, now = self._executor.state, time.monotonic()
        links = [link for link in (self._transport, self._bulk) if link is not None]
        place = running_place(self._thread_id) if self._executing else None
        return {
            "session": self.identity[:8],
            "client": self.client.name,
            "address": self.client.address,
            "seconds": round(now - self._began_at, 1),
            "state": "detached" if self.is_detached else "running" if self._executing else "idle",
            "running": running_op(state, place),
            "queued_operations": queued_operations(state, place),
            "queued_bytes": sum(link.bytes_unread for link in links),
            "commands": self.commands_done,
            "tensors": len(state.values.slots) - 1,
            "tensor_bytes": self._memory.read(state.values.slots),
            "bytes_received": sum(link.bytes_received for link in links),
            "bytes_sent": sum(link.bytes_sent for link in links),
            "is_profiled": state.profile is not None,
            "calls": call_rows(self.calls.running_names(self.identity), now) if self.calls is not None else [],
            "failures": failure_rows(state.reports.recent),
        }

    def knows(self, secret: bytes) -> bool:
        """Return whether this is the secret of a session that may be taken up, in a time that tells nothing of it."""
        own = self.lasting.secret if self.lasting is not None else b""
        return hmac.compare_digest(own, secret) and bool(own)

    def take_bulk(self, transport: Transport, secret: bytes = b"") -> bool:
        """Attach the bulk connection; return False if one is attached, and the secret does not allow another."""
        with self._taking_bulk:
            before = self._bulk
            if before is not None and not (self.knows(secret) and before.cut()):
                return False
            self._bulk = transport
            return True

    def use_names(self, store: NamedSessions) -> None:
        """Let the client put values where they outlive this session."""
        self._executor.state.names = NamedValueRequests(store, self.client.name, self)

    def use_snapshots(self, root: Path | str) -> None:
        """Let the client save what the session is in a place of the worker's."""
        self._executor.state.snapshots = SessionSnapshots(
            root, self.client.name, self._jump, self._settings, self.client.bounds.snapshot_bytes
        )

    def _jump(self, sequence: int) -> None:
        self._transport.connection.jump_to(sequence)
        self._has_jumped = True

    def announce_leaving(self, seconds: float) -> bool:
        """Tell the client that the worker ends after so many seconds; return whether it can be told."""
        bulk = self._bulk
        if bulk is None or self.is_detached or self._executor.state.snapshots is None:
            return False
        self._leave.ask()
        bulk.post(Pong(0, {**self._load(), LEAVING: max(int(seconds * 1000), 1)}))
        return True

    @property
    def is_leaving(self) -> bool:
        """True if the client was told that the worker ends, and is to be waited for."""
        return self._leave.is_awaited and not self.is_detached

    def take_away(self, reason: str, timeout_seconds: float) -> bool:
        """End the session, and tell its client why; what is not begun is dropped. Return whether it is over in time."""
        self._farewell = reason  # of whichever connection the client reads first
        # Whoever waits for its end would wait for all that is queued, whose results nobody sees any more.
        self._executor.state.cancellation.ask(_WITHOUT_A_MARK)
        self._transport.close("done", reason)
        return self._over.wait(timeout_seconds)

    def break_off(self, reason: str) -> None:
        """Tell the client that the session is lost with its process, which ends; values are not touched any more."""
        self._farewell = reason
        self._transport.close("crashed", reason)

    def expire(self, reason: str, timeout_seconds: float = 0.0) -> bool:
        """End the session if it has no connection; return whether it is over in time."""
        if self.lasting is None or not self.is_detached:
            return False
        audit.note(self.client, "ended", reason=reason, session=self.identity[:8])
        self.lasting.expire()
        return self._over.wait(timeout_seconds)

    def take_functions(self, connection: FunctionsConnection) -> None:
        """From now on this is the session's functions connection; the one before, if any, is over."""
        before, self._functions = self._functions, connection
        if before is not None:
            before.close()
        if self._ended:  # after the assignment, so that `end` cannot miss it
            connection.close()

    def bind_call(self, call: str) -> None:
        """A call without tensor arguments may begin, for its client knows that every operation before it was done.

        On the thread of the functions connection, which so need not wait for this one.
        """
        state = self._executor.state
        state.random.take_over()
        if self.calls is not None:
            self.calls.bind(self.identity, call, [], state.streams)

    def run(self) -> None:
        """Reads and executes until the client leaves. Runs on the connection's thread."""
        self._thread_id = threading.get_ident()
        try:
            self._run()
        except RuntimeError as error:  # a device has no stream for it, or does not even let go of its streams
            CONTEXT.note(error)
            if not self._ended:
                logger.exception("session %s cannot begin", self.identity[:8])
                self._transport.close("protocol", f"internal error on the worker: {error!r:.500}")
                self.end()

    def _run(self) -> None:
        transport, executor, state = self._transport, self._executor, self._executor.state
        named = NamedBatches()
        unacked = last = 0
        # Below autograd and its bookkeeping: ops run as fast as in inference mode, but give ordinary tensors.
        with torch._C._AutoDispatchBelowADInplaceOrView(), own_streams(state.devices) as state.streams:
            try:
                while True:
                    try:
                        message = transport.recv(_ACK_DELAY_SECONDS if unacked else None)
                    except TimeoutError:
                        transport.send(Ack(Sequence(last)))
                        unacked = 0
                        continue
                    batch = named.resolve(message)
                    if batch is not None:
                        self._executing = 1
                        with state.modes:
                            if state.profile is None:
                                executor.run(batch)
                            else:
                                with state.profile.batch(batch.sequence):
                                    executor.run(batch)
                        self._executing = 0
                        self._activity.touch()
                        last = batch.sequence
                        unacked += 1
                        if self._has_jumped:  # the client counts from elsewhere, and knows that this one is done
                            self._has_jumped, unacked = False, 0
                        if unacked >= _ACK_EVERY_BATCHES:
                            transport.send(Ack(Sequence(last)))
                            unacked = 0
            except SessionLostError:
                return
            except ContextLostError as lost:
                with contextlib.suppress(SessionLostError):
                    # Before the goodbye: the client knows which line recorded the command as long as it lives.
                    state.reports.send(Failure(RequestId(0), {**lost.failed.record, "type": "ContextLostError"}))
                self._on_context_lost(self, lost.words)
            except ProtocolError as error:
                logger.warning("session %s ended: %s", self.identity[:8], error)
                transport.close("protocol", str(error))
            except Exception as error:
                logger.exception("session %s ended by an internal error", self.identity[:8])
                transport.close("protocol", f"internal error on the worker: {error!r:.500}")
            finally:
                self.end()

    def run_bulk(self, transport: Transport) -> None:
        """Moves the session's large tensors. Runs on the bulk connection's thread, and one more for sending."""
        with self._bulk_running:  # the one before was cut, and its threads are about to end
            self._run_bulk(transport)

    def _load(self) -> dict[str, int]:
        place = running_place(self._thread_id) if self._executing else None
        position = place[1] if place is not None else -1
        return {"executing": self._executing, "sequence": self._executor.state.reports.sequence, "position": position}

    def _run_bulk(self, transport: Transport) -> None:
        sender = threading.Thread(
            target=self._transfers.sender(transport), name=f"skyproxy-bulk-{self.identity[:8]}", daemon=True
        )
        sender.start()
        is_over = True
        self._lost_bulk_at = None
        try:
            self._transfers.receive(transport, self._load)
        except SessionLostError:
            if transport.connection.state is not State.ENDED:  # without a goodbye
                self._lost_bulk_at = time.monotonic()
            is_over = self.lasting is None or transport.was_closed or transport.connection.state is State.ENDED
        except ProtocolError as error:
            logger.warning("bulk connection of session %s ended: %s", self.identity[:8], error)
            transport.close("protocol", str(error))
        finally:
            if is_over:
                self._transfers.end()
            else:
                transport.cut()
                self._transfers.detach()
            sender.join(5.0)
            if is_over:
                self._transport.close("done", "the bulk connection ended")

    def end(self) -> None:
        """Forgets every value. The session's calls go on for a while."""
        self._ended = True
        if self.calls is not None:
            self.calls.session_ended(self.identity)
        self._transfers.end()
        if not CONTEXT.is_lost:  # else what frees memory of a device aborts the process
            self._executor.end()
        if self._bulk is not None:
            self._bulk.close("crashed" if CONTEXT.is_lost else "done", self._farewell)
        if self._functions is not None:
            self._functions.close()
        self._over.set()
