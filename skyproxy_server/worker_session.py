"""The sessions of a worker: who they are, their threads, their end."""

from __future__ import annotations

import contextlib
import itertools
import logging
import platform
import secrets
import threading
from typing import Any

import torch

from skyproxy.errors import LimitExceededError, ProtocolError, SessionLostError
from skyproxy.protocol.messages import Ack, Batch, Goodbye, Hello
from skyproxy.settings import SETTINGS, Settings
from skyproxy.transport.base import Transport
from skyproxy_server.executor import Executor
from skyproxy_server.transfers import Transfers

logger = logging.getLogger("skyproxy.server")

_ACK_EVERY_BATCHES = 16
_ACK_DELAY_SECONDS = 0.002


def software() -> dict[str, str]:
    """What this side runs on."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("skyproxy")
    except PackageNotFoundError:
        own = "unknown"
    return {"skyproxy": own, "python": platform.python_version(), "torch": torch.__version__}


class WorkerSession:
    """One client's session: its values, and the thread that executes."""

    def __init__(self, transport: Transport, devices: list[dict[str, Any]], settings: Settings) -> None:
        self.identity = secrets.token_hex(16)
        self._transport = transport
        self._transfers = Transfers(settings.chunk_bytes)
        self._executor = Executor(devices, transport.send, self._transfers, settings)
        self._executing = 0

    def run(self) -> None:
        """Reads and executes until the client leaves. Runs on the connection's thread."""
        transport, executor = self._transport, self._executor
        unacked = last = 0
        # Below autograd and its bookkeeping: ops run as fast as in inference mode, but give ordinary tensors.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            try:
                while True:
                    try:
                        message = transport.recv(_ACK_DELAY_SECONDS if unacked else None)
                    except TimeoutError:
                        transport.send(Ack(last))  # type: ignore[arg-type]
                        unacked = 0
                        continue
                    if isinstance(message, Batch):
                        if message.sequence <= last:
                            continue  # sent again after an interrupt; it was executed already
                        self._executing = 1
                        executor.run(message)
                        self._executing = 0
                        last = message.sequence
                        unacked += 1
                        if unacked >= _ACK_EVERY_BATCHES:
                            transport.send(Ack(last))  # type: ignore[arg-type]
                            unacked = 0
                    elif isinstance(message, Goodbye):
                        return
            except SessionLostError:
                return
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
        sender = threading.Thread(
            target=self._transfers.send, args=(transport,), name=f"skyproxy-bulk-{self.identity[:8]}", daemon=True
        )
        sender.start()
        try:
            self._transfers.receive(transport, lambda: {"executing": self._executing})
        except SessionLostError:
            pass
        except ProtocolError as error:
            logger.warning("bulk connection of session %s ended: %s", self.identity[:8], error)
            transport.close("protocol", str(error))
        finally:
            self._transfers.end()
            sender.join(5.0)

    def end(self) -> None:
        """Forgets every value."""
        self._transfers.end()
        self._executor.end()

    def close(self, code_name: str, reason: str) -> None:
        """Ends the session from another thread."""
        self._transport.close(code_name, reason)


class WorkerHost:
    """All sessions of this process."""

    def __init__(self, devices: list[dict[str, Any]], settings: Settings = SETTINGS) -> None:
        self._devices = devices
        self._settings = settings
        self._sessions: dict[str, WorkerSession] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
