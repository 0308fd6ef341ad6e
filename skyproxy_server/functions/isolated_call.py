"""A call that runs in a process of its own, seen from the worker: it passes the call on, and what comes back.

Nothing that comes back is believed: it is data of a known form, never a pickle. A process that says anything else, or
ends, ends its call and nothing besides.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import msgpack
import torch

from skyproxy import torch_codec, torch_modes
from skyproxy.errors import FunctionCrashedError, ProtocolError
from skyproxy.payloads.pickling import Pickled
from skyproxy.runtime.breakpoints import DEBUGGERS, Place, known_place
from skyproxy.runtime.distant_debugger import DistantDebugger
from skyproxy.runtime.project_code import PROJECT_CODE
from skyproxy.settings import Settings
from skyproxy_server.control_channel import ChannelClosedError, ControlChannel
from skyproxy_server.endings import ProcessEnding
from skyproxy_server.functions.events import Events
from skyproxy_server.functions.known_functions import KnownFunction
from skyproxy_server.functions.lent_tensors import LentTensors, tensor_in
from skyproxy_server.functions.memory_files import bytes_of, read_into, write_pieces
from skyproxy_server.functions.nursery import Fledgling, Nursery
from skyproxy_server.inventory import DeviceRow

Said = dict[str, Any]
"""A task, or the words of a process."""
_STOP_SECONDS = 2.0
"""The time that a function has to clean up when its caller gives it up; then its process is killed."""
_POLL_SECONDS = 0.25
_FILES_AT_ONCE = 4
_TAIL_LINES, _TAIL_CHARACTERS = 20, 2000
_NO_NEWS = "Extension modules:"
"""The last line of what Python's fault handler says, which is long."""
_PIPE_BYTES = 1 << 16
_MALFORMED = (ProtocolError, msgpack.UnpackException, LookupError, TypeError, ValueError, OSError, RuntimeError)
"""Errors of reading what a process said."""


class Caller(Protocol):
    """The call, as far as it is used here; see `call.FunctionCall`."""

    identity: str
    session: str
    name: str
    events: Events

    def has_run(self) -> None: ...

    def print_from_process(self, stream: str, text: str) -> None: ...

    def tell_wait(self, place: Place) -> None: ...

    def wait_for_room(self) -> bool: ...


class Loan(Protocol):
    """The loan of the session to one call: its tensors, and its random numbers."""

    tensors: LentTensors

    def random_states(self) -> list[list[object]]: ...

    def take_random_states(self, states: object) -> None: ...


class IsolatedCall:
    """One call in a process of its own.

    Args:
        nursery: makes the process.
        devices: the worker's, as announced.
        settings: bounds of what comes back.
        loan: what the call gets of the session.
    """

    def __init__(self, nursery: Nursery, devices: list[DeviceRow], settings: Settings, loan: Loan) -> None:
        self._nursery = nursery
        self._devices = devices
        self._settings = settings
        self._loan = loan
        self._process: Fledgling | None = None
        self._lock = threading.Lock()
        self._stopped_at: float | None = None
        self._tail = ""
        self._ended = False
        self._debugger: DistantDebugger | None = None
        self._begin_again: Callable[[], None] | None = None

    def stop(self) -> None:
        """The caller has given the call up: it may clean up for a moment. From any thread."""
        with self._lock:
            if self._stopped_at is None:
                self._stopped_at = time.monotonic()
                if self._process is not None:
                    _ask_to_stop(self._process)

    def run(self, call: Caller, task: Said, pieces: Sequence[Any], function: KnownFunction | None) -> None:
        """Run the call to its end.

        Raises:
            FunctionCrashedError: its process ended before it.
            Exception: it could not begin.
        """
        process = self._nursery.take(call.session)
        try:
            with self._lock:
                self._process = process
                if self._stopped_at is not None:
                    return
            try:
                if task.get("debug") is not None:
                    self._debugger = DistantDebugger(call.identity, partial(_tell_debugger, process))
                    DEBUGGERS.add(self._debugger)
                send = partial(self._send, process.channel, call, task, pieces, function)
                send()
                self._begin_again = send
                self._relay(process, call)
            except ChannelClosedError:
                self._drain(process, call)
                if not self._ended and self._stopped_at is None:
                    raise self._crash(process, call) from None
            finally:
                if self._debugger is not None:
                    DEBUGGERS.end(self._debugger)
                with self._lock:
                    self._process = None
        finally:
            process.kill()
            process.ending()  # before what it has borrowed is taken back
            self._nursery.give_back(process)
            self._loan.tensors.release()

    # --- there -------------------------------------------------------------------------------------------------------

    def _send(
        self,
        channel: ControlChannel,
        call: Caller,
        task: Said,
        pieces: Sequence[Any],
        function: KnownFunction | None,
    ) -> None:
        storages, rows, files = self._loan.tensors.describe()
        start = {
            "identity": call.identity,
            "session": call.session,
            "devices": self._devices,
            "task": {**task, "timeout": None, "isolate": False, "debug": task.get("debug")},
            "sizes": [bytes_of(piece).nbytes for piece in pieces],
            "function": function.content if function is not None else None,
            "lent": (storages, rows),
            "random": self._loan.random_states(),
            "gpu_fractions": gpu_fractions(self._devices),
            "modes": torch_modes.values_in_force(),
            "threads": torch.get_num_threads(),
            "environment": {name: value for name, value in os.environ.items() if name != "SKYPROXY_TOKEN"},
            "folder": os.getcwd(),
            "path": list(sys.path),
            "folders": PROJECT_CODE.places(call.session),
        }
        head = pickle.dumps(start, protocol=5)
        file = write_pieces([head, *pieces])
        try:
            channel.send({"head": len(head), "files": len(files)}, [file])
        finally:
            os.close(file)
        for first in range(0, len(files), _FILES_AT_ONCE):
            channel.send({}, files[first : first + _FILES_AT_ONCE])

    # --- back --------------------------------------------------------------------------------------------------------

    def _relay(self, process: Fledgling, call: Caller) -> None:
        """Pass on what comes, until the call has ended.

        Raises:
            ChannelClosedError: the process has ended, or what it said was not what a process says.
        """
        poll = select.poll()
        for source in (process.channel.fileno(), process.out, process.err):
            poll.register(source, select.POLLIN)
        while not self._ended:
            for descriptor, _ in poll.poll(_POLL_SECONDS * 1000):
                if descriptor == process.channel.fileno():
                    self._on_message(process, call)
                elif not self._pass_output(process, call, descriptor):
                    poll.unregister(descriptor)
            if self._stopped_at is not None and time.monotonic() - self._stopped_at > _STOP_SECONDS:
                raise ChannelClosedError("it did not stop in time")
        self._drain(process, call)

    def _on_message(self, process: Fledgling, call: Caller) -> None:
        message, files = process.channel.receive()
        begin_again, self._begin_again = self._begin_again, None
        if begin_again is not None and message.get("kind") == "refused" and not files:
            self._loan.tensors.lend_copies(str(message.get("why")))
            begin_again()
            return
        try:
            if self._stopped_at is None:
                self._take(process, call, message, files)
        except _MALFORMED as error:
            self._tail += f"\n(its process sent what cannot be: {error})"
            process.kill()  # it does not end by itself
            raise ChannelClosedError(str(error)) from error
        finally:
            for file in files:
                os.close(file)

    def _take(self, process: Fledgling, call: Caller, message: Said, files: list[int]) -> None:
        kind = message["kind"]
        if kind == "output":
            stream, text = message["stream"], message["text"]
            if stream not in ("stdout", "stderr") or type(text) is not str:
                raise ProtocolError("output of an unknown form")
            if "waits" in message:
                call.tell_wait(known_place(message["waits"]))
            else:
                self._print(call, stream, text)
            return
        if kind == "debugger" and self._debugger is not None:
            self._debugger.hear(message["said"])
            return
        if kind not in ("stream", "item", "result", "error"):
            raise ProtocolError(f"an event of kind {kind!r:.40}")
        head, pieces = self._read_message(files[0], message["head"])
        value = head["value"]
        if type(value) is not dict:
            raise ProtocolError("an event without a value")
        if "changed" in value:
            value["changed"] = self._loan.tensors.take_back(value["changed"])
        kept = self._kept_tensors(head, pieces)
        pickled = Pickled(pieces[: head["count"]], [], [], []) if head["count"] else None
        if kind in ("result", "error"):
            self._loan.take_random_states(head["random"])
            self._drain(process, call)
            self._ended = True
            call.has_run()
        if kind != "item" or call.wait_for_room():
            call.events.add(kind, value, pickled, kept)
        process.channel.send({"ack": message["number"]}, wait=False)

    def _read_message(self, file: int, head_bytes: object) -> tuple[Said, list[Any]]:
        size, most = os.fstat(file).st_size, self._settings.max_payload_bytes
        if type(head_bytes) is not int or not 0 < head_bytes <= size or size > most:
            raise ProtocolError(f"an event of {size:,} bytes")
        packed = bytearray(head_bytes)
        read_into(file, 0, memoryview(packed))
        head = msgpack.unpackb(packed, raw=False, strict_map_key=False)
        sizes, offset = head["sizes"], head_bytes
        if not all(type(one) is int and one >= 0 for one in sizes) or head_bytes + sum(sizes) != size:
            raise ProtocolError("an event whose pieces are not as long as it says")
        if type(head["count"]) is not int or not 0 <= head["count"] <= len(sizes):
            raise ProtocolError("an event with another number of pieces than it says")
        pieces: list[Any] = []
        for index, one in enumerate(sizes):
            is_tensor = index >= head["count"]
            piece = torch.empty(one, dtype=torch.uint8) if is_tensor else bytearray(one)
            read_into(file, offset, bytes_of(piece))
            pieces.append(piece)
            offset += one
        return head, pieces

    def _kept_tensors(self, head: Said, pieces: list[Any]) -> list[torch.Tensor]:
        """The tensors of an event that stay on the worker: in memory of its own, or in that of arguments."""
        storages = [self._storage(kind, value, head["count"], pieces) for kind, value in head.get("storages", ())]
        return [
            tensor_in(storages[number], torch_codec.decode_description(described))
            for number, described in head.get("kept", ())
        ]

    def _storage(self, kind: object, value: Any, first: int, pieces: list[Any]) -> torch.UntypedStorage:
        if kind == "argument":
            return self._loan.tensors.storage(value)
        if kind == "piece" and type(value) is int and first <= value < len(pieces):
            return pieces[value].untyped_storage()  # type: ignore[no-any-return]
        if kind == "empty" and type(value) is int:
            return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", value)).untyped_storage()
        if kind == "cuda":
            return copy_of_lent(value)
        if kind == "copy":
            number, index = value
            if type(number) is int and type(index) is int and first <= number < len(pieces):
                own = torch.empty(pieces[number].nbytes, dtype=torch.uint8, device=torch.device("cuda", index))
                return own.copy_(pieces[number]).untyped_storage()
        raise ProtocolError(f"a storage of kind {kind!r:.40}")

    # --- what it prints ----------------------------------------------------------------------------------------------

    def _print(self, call: Caller, stream: str, text: str) -> None:
        self._tail = (self._tail + text)[-2 * _TAIL_CHARACTERS :]
        call.print_from_process(stream, text)

    def _pass_output(self, process: Fledgling, call: Caller, descriptor: int) -> int:
        """Pass on what was written to a file of the process; return how many bytes, 0 where no more come."""
        try:
            data = os.read(descriptor, _PIPE_BYTES)
        except BlockingIOError:
            return 1
        if data:
            self._print(call, "stdout" if descriptor == process.out else "stderr", data.decode("utf-8", "replace"))
        return len(data)

    def _drain(self, process: Fledgling, call: Caller) -> None:
        """Pass on what is there already; processes that the function has started may hold the files open."""
        for descriptor in (process.out, process.err):
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            left = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)  # what comes meanwhile may come without end
            while left > 0 and poll.poll(0) and (count := self._pass_output(process, call, descriptor)):
                left -= count

    def _crash(self, process: Fledgling, call: Caller) -> FunctionCrashedError:
        ending = process.ending()
        self._drain(process, call)
        lines = [line for line in self._tail.splitlines() if line and not line.startswith(_NO_NEWS)]
        text = "\n".join(lines[-_TAIL_LINES:])[-_TAIL_CHARACTERS:]
        last = f" Its last output was:\n{text}" if text else " It had printed nothing."
        return FunctionCrashedError(
            f"the process of {call.name} {_explain_ending(ending)} before the function had ended. The session and its "
            f"tensors are as the function left them.{last}"
        )


def _explain_ending(ending: ProcessEnding) -> str:
    advice = ""
    if ending.signal_number == 9:
        advice = " (most often, memory ran out)"
    return ending.description + advice


def _tell_debugger(process: Fledgling, message: Said) -> None:
    try:
        process.channel.send({"debug": message}, wait=False)
    except ChannelClosedError as error:
        raise ConnectionError(str(error)) from error


def _ask_to_stop(process: Fledgling) -> None:
    try:
        process.channel.send({"cancel": "the caller gave it up"}, wait=False)
    except ChannelClosedError:
        process.kill()


def gpu_fractions(devices: Sequence[DeviceRow]) -> list[tuple[int, float]]:
    """Return how much of each GPU this process may take, by the GPU's number; nothing where it uses none."""
    indices = [row["index"] for row in devices if row["type"] == "cuda"] if torch.cuda.is_initialized() else []
    return [(index, torch.cuda.get_per_process_memory_fraction(index)) for index in indices]


def copy_of_lent(handle: Sequence[Any]) -> torch.UntypedStorage:
    """Copy memory of a GPU that a function's process has lent: it is gone with that process."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.cuda.device(int(handle[0])))
        lent = torch.UntypedStorage._new_shared_cuda(*handle)
        own = torch.empty(lent.nbytes(), dtype=torch.uint8, device=lent.device).untyped_storage()
        own.copy_(lent)
        torch.cuda.synchronize(lent.device)
    return own
