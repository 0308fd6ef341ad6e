"""The process of one function: it runs the call as a worker would, and tells its worker what that tells its caller."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import pickle
import random
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import msgpack
import torch

from skyproxy import torch_codec, torch_modes
from skyproxy.errors import SessionLostError
from skyproxy.payloads.pieces import flat_size
from skyproxy.payloads.tensors import memory_for
from skyproxy.protocol.messages import Buffer
from skyproxy.runtime import child_processes
from skyproxy.runtime.distant_debugger import DebuggedProcess
from skyproxy.runtime.project_code import PROJECT_CODE
from skyproxy.settings import SETTINGS
from skyproxy_server import limits
from skyproxy_server.activity import Activity
from skyproxy_server.control_channel import ChannelClosedError, ControlChannel
from skyproxy_server.functions import output, terminal
from skyproxy_server.functions.call import FunctionCall
from skyproxy_server.functions.events import OutgoingEvent
from skyproxy_server.functions.known_functions import KnownFunction
from skyproxy_server.functions.lent_tensors import Borrowed, check_lendable, handle_of, kind_of
from skyproxy_server.functions.memory_files import bytes_of, read_into, write_pieces
from skyproxy_server.gates import storage_key

Start = dict[str, Any]
"""The words of the worker for a call: the task, what is lent, and the state that this process is to have."""
LAST = ("result", "error")


class IsolatedFunction:
    """The one call of this process.

    Args:
        channel: to the worker.
        start: what the worker says of the call.
        files: the memory of its arguments.
        can_share: whether the worker and this process can share memory of a GPU, as far as is known.

    Raises:
        RuntimeError: what the worker shares of a GPU cannot be opened.
    """

    def __init__(self, channel: ControlChannel, start: Start, files: Sequence[int], can_share: bool = True) -> None:
        self._channel = channel
        self._can_share = can_share
        storages, rows = start["lent"]
        self._borrowed = Borrowed(storages, rows, files)
        self._lent_to_worker: dict[int, list[torch.UntypedStorage]] = {}
        self._cancelled = self._told_end = False
        self._debugged: DebuggedProcess | None = None
        # The worker takes items one by one, and holds as many as may wait.
        settings = dataclasses.replace(SETTINGS, max_waiting_items=1)
        self._call = FunctionCall(
            start["identity"],
            start["session"],
            start["devices"],
            settings,
            Activity(),
            settle=wait_for_gpus,
            check_kept=check_lendable,
        )
        self._call.events.attach(self, 0)

    def run(self, task: Start, pieces: Sequence[object], function: KnownFunction | None) -> NoReturn:
        """Run it, and do what the worker says meanwhile."""
        self._call.bind(self._borrowed.tensors, ())
        self._call.start(task, pieces, lambda begins: None, self._on_end, function)
        try:
            while True:
                message, _ = self._channel.receive()
                if "cancel" in message:
                    self._cancelled = True
                    self._call.interrupt(InterruptedError(message["cancel"]))
                    if not self._call.running:
                        break
                elif "debug" in message:
                    self._debug(message["debug"])
                elif "ack" in message:
                    self._lent_to_worker.pop(message["ack"], None)
                    self._call.events.take(message["ack"])
                    self._call.events.ack(0, message["ack"])
                else:
                    break
        except ChannelClosedError:
            pass
        end(0)

    def _debug(self, message: Start) -> None:
        """Pass on what whoever looks at this function says."""
        debugger = self._call.debugger
        if debugger is not None:
            self._debugged = self._debugged or DebuggedProcess(debugger, self._say)
            self._debugged.hear(message)

    def _say(self, said: list[object]) -> None:
        try:
            self._channel.send({"kind": "debugger", "said": said})
        except ChannelClosedError as error:
            raise ConnectionError(str(error)) from error

    def _on_end(self) -> None:
        if self._cancelled or not self._told_end:
            if not self._cancelled and (error := sys.exception()) is not None:
                traceback.print_exception(error, file=sys.__stderr__)  # this process ends before its thread would
            end(1)

    def send_event(self, call: str, event: OutgoingEvent) -> None:
        """Tell the worker; as `Listener`."""
        if self._cancelled:
            return
        try:
            if event.kind == "output":
                self._channel.send({"kind": "output", **event.value})
                self._call.events.ack(event.number, 0)
            elif event.kind != "started":
                self._send_values(event)
                self._told_end = event.kind in LAST
        except (ChannelClosedError, OSError) as error:
            os.write(2, f"what the function has made cannot be passed on: {error}\n".encode())
            raise SessionLostError(str(error)) from error
        except Exception as error:
            # The call has ended as far as its thread knows, so nobody else says why nothing came of it.
            os.write(2, f"what the function has made cannot be passed on:\n{traceback.format_exc()}".encode())
            raise SessionLostError(str(error)) from error

    def _send_values(self, event: OutgoingEvent) -> None:
        if event.kind == "error":
            with contextlib.suppress(RuntimeError):  # perhaps the very error that is told here: it stays with a context
                wait_for_gpus()  # for what the function has changed until then
        self._borrowed.give_back(event.value.get("changed", ()))
        pieces: list[Buffer | torch.Tensor] = list(event.pieces or ())
        head: dict[str, object] = {"value": event.value, "count": len(pieces)}
        if event.kept:
            head["storages"], head["kept"] = self._lend(event, pieces)
        if event.kind in LAST:
            head["random"] = generator_states()
        head["sizes"] = [flat_size(bytes_of(piece)) for piece in pieces]
        packed = msgpack.packb(head, use_bin_type=True)
        file = write_pieces([packed, *pieces])
        try:
            self._channel.send({"kind": event.kind, "number": event.number, "head": len(packed)}, [file])
        finally:
            os.close(file)

    def _lend(
        self, event: OutgoingEvent, pieces: list[Buffer | torch.Tensor]
    ) -> tuple[list[list[object]], list[list[object]]]:
        """Describe the tensors of an event, so that the worker makes the same."""
        storages: list[list[object]] = []
        numbers: dict[int | None, int] = {}
        kept: list[list[object]] = []
        for tensor in event.kept:
            key = storage_key(tensor)
            if key not in numbers:
                numbers[key] = len(storages)
                storages.append(self._lend_storage(tensor, event.number, pieces))
            kept.append([numbers[key], torch_codec.encode_description(torch_codec.describe(tensor))])
        return storages, kept

    def _lend_storage(self, tensor: torch.Tensor, number: int, pieces: list[Buffer | torch.Tensor]) -> list[object]:
        argument = self._borrowed.number_of(tensor)
        if argument is not None:
            return ["argument", argument]
        storage = tensor.untyped_storage()
        if kind_of(storage) == "cuda":
            if not storage.nbytes():
                return ["empty", storage.device.index]
            if self._can_share:
                with contextlib.suppress(RuntimeError):
                    handle = handle_of(storage)
                    self._lent_to_worker.setdefault(number, []).append(storage)
                    return ["cuda", handle]
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8)
            copy.untyped_storage().copy_(storage)
            pieces.append(copy)
            return ["copy", [len(pieces) - 1, storage.device.index]]
        pieces.append(torch.empty(0, dtype=torch.uint8).set_(storage))
        return ["piece", len(pieces) - 1]


def end(status: int) -> NoReturn:
    """End this process, without a word to what it was forked from; what was printed is written first."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    os._exit(status)


def bound_gpus(fractions: Sequence[tuple[int, float]]) -> None:
    """Let this process take no more of each GPU than its session may, from its first use of CUDA on.

    Args:
        fractions: numbers of GPUs, each with the part of its memory that PyTorch's allocator may take.
    """

    def bound() -> None:
        for index, fraction in fractions:
            torch.cuda.set_per_process_memory_fraction(fraction, index)

    if any(fraction < 1 for _, fraction in fractions):
        torch.cuda._lazy_call(bound)


def wait_for_gpus() -> None:
    """Wait for all that this process computes on GPUs: the worker's streams know nothing of ours.

    Raises:
        RuntimeError: it failed, as a whole context does once an index was out of bounds.
    """
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            # Asked of another GPU, it would begin to use that.
            if torch._C._cuda_hasPrimaryContext(index):  # type: ignore[attr-defined,unused-ignore]
                torch.cuda.synchronize(index)


def generator_states() -> list[list[object]]:
    """The states of the default generators of this process: kind, number, state."""
    states: list[list[object]] = [["cpu", 0, torch.get_rng_state().numpy().tobytes()]]
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # a context that has failed tells nothing
            for index in range(torch.cuda.device_count()):
                states.append(["cuda", index, torch.cuda.get_rng_state(index).numpy().tobytes()])
    return states


def put_generator_states(states: Sequence[Sequence[Any]]) -> None:
    """Set the default generators of this process; those of GPUs when they are first used."""
    for kind, index, state in states:
        value = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        if kind == "cpu":
            torch.set_rng_state(value)
        else:
            torch.cuda.set_rng_state(value, index)  # waits for the first use of CUDA by itself


def main(control: int, out: int, err: int) -> NoReturn:
    """Be the process of a function, from the fork to its end; it waits for its call first."""
    for descriptor, target in ((out, 1), (err, 2)):  # first: what goes wrong from here on, the caller can read
        os.dup2(descriptor, target)
        os.close(descriptor)
    limits.end_with(os.getppid())
    limits.adopt_orphans()
    limits.set_name("skyproxy-func")
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    channel = ControlChannel(socket.socket(fileno=control))
    start, pieces, files = _receive_start(channel)
    _settle(start)
    try:
        isolated = IsolatedFunction(channel, start, files)
    except (RuntimeError, AssertionError) as error:
        if all(kind != "cuda" for kind, _ in start["lent"][0]):
            raise
        # A driver may refuse to share memory, in a virtual machine say. The worker begins again, with copies.
        channel.send({"kind": "refused", "why": str(error)})
        start, pieces, files = _receive_start(channel)
        isolated = IsolatedFunction(channel, start, files, can_share=False)
    content = start["function"]
    function = KnownFunction(content, None) if content is not None else None
    isolated.run(start["task"], pieces, function)


def _receive_start(channel: ControlChannel) -> tuple[Start, list[object], list[int]]:
    """Return what the worker says of the call, its payload, and the memory of its arguments; end if it says nothing."""
    try:
        message, descriptors = channel.receive()
        files: list[int] = []
        while len(files) < message["files"]:
            files += channel.receive()[1]
    except ChannelClosedError:
        os._exit(0)
    return *_read_start(descriptors[0], message["head"]), files


def _read_start(file: int, head_bytes: int) -> tuple[Start, list[object]]:
    head = bytearray(head_bytes)
    read_into(file, 0, memoryview(head))
    start: Start = pickle.loads(head)  # written by the worker, which trusts us less than we trust it
    allocate = memory_for(start["task"], len(start["sizes"]))
    pieces: list[object] = []
    offset = head_bytes
    for index, size in enumerate(start["sizes"]):
        piece, view = allocate(index, size)
        read_into(file, offset, view)
        pieces.append(piece)
        offset += size
    os.close(file)
    return start, pieces


def _settle(start: Start) -> None:
    """Make this process what the worker's own is for a function."""
    if dict(os.environ) != start["environment"]:
        os.environ.clear()
        os.environ.update(start["environment"])
    os.chdir(start["folder"])
    random.seed()
    # Not by way of numpy, which imports it for whoever asks; what is imported later seeds itself.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch.set_num_threads(start["threads"])
    torch_modes.put_in_force(start["modes"])
    put_generator_states(start["random"])
    bound_gpus(start["gpu_fractions"])
    sys.path[:] = start["path"]
    PROJECT_CODE.use(start["session"], start["folders"])
    output.install()
    child_processes.install()
    terminal.install()
    faulthandler.enable(2, all_threads=False)
    threading.current_thread().name = "skyproxy-function"
