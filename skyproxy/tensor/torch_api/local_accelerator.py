"""Lets this machine's own GPU compute gradients beside `sky`.

PyTorch's C++ knows one accelerator a process, and takes an out-of-tree device for it as soon as that has a name. From
then on its autograd engine finds no streams for nodes of the machine's own GPU and ends each backward there with an
internal assertion (pytorch/pytorch#161129). Nothing takes a name back. What C++ asks is a byte in libc10,
`c10::is_privateuse1_backend_registered()`; here it is found by that function's code, believed only if it changed when
the device got its name, and cleared while the GPU has its turn.

While it is cleared, C++ calls our device "privateuseone", in every thread. So backward on `sky` and on the GPU take
turns among threads, and a thread should not use `sky` otherwise while another one runs backward on the GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import struct
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from skyproxy import patching
from skyproxy.interrupts import shielded

_TURN_SECONDS = 600.0
"""The longest wait of a thread for the others' backward passes of the other kind."""
_SYMBOLS = {"win32": "?is_privateuse1_backend_registered@c10@@YA_NXZ"}
_USUAL_SYMBOL = "_ZN3c1033is_privateuse1_backend_registeredEv"
_LIBRARIES = {"win32": "c10.dll", "darwin": "libc10.dylib"}
_CODE_BYTES = 32
_ASSERTION = "opt_ready_stream && opt_parent_stream"
_TESTS = "tests/tensor/torch_api/test_local_accelerator.py"


def loaded_byte(code: bytes, at: int, machine: str) -> int | None:
    """Return the address of the byte that a function loads first, from its machine code.

    Args:
        code: the function's first bytes.
        at: their address.
        machine: the processor, as `platform.machine()` says it.

    Returns:
        None where the code is of no known form.
    """
    if machine.lower() in ("x86_64", "amd64"):
        start = code.removeprefix(b"\xf3\x0f\x1e\xfa")  # endbr64
        if start[:3] != b"\x0f\xb6\x05":  # movzx eax, byte ptr [rip + offset]
            return None
        (offset,) = struct.unpack_from("<i", start, 3)
        return at + len(code) - len(start) + 7 + int(offset)
    if machine.lower() in ("aarch64", "arm64"):
        return _loaded_byte_on_arm(struct.unpack(f"<{len(code) // 4}I", code[: len(code) // 4 * 4]), at)
    return None


def _loaded_byte_on_arm(words: tuple[int, ...], at: int) -> int | None:
    """The same for AArch64: `adrp`, then `add` and `ldarb`, or `ldrb` with an offset."""
    if words[0] & 0xFFFFFF3F == 0xD503241F:  # bti
        words, at = words[1:], at + 4
    page_of, load = words[0], words[1]
    if page_of & 0x9F000000 != 0x90000000:
        return None
    register = page_of & 31
    pages = (page_of >> 5 & 0x7FFFF) << 2 | page_of >> 29 & 3
    page = (at & ~0xFFF) + ((pages - (1 << 21) if pages >> 20 else pages) << 12)
    offset = load >> 10 & 0xFFF
    if load & 0xFFC00000 == 0x39400000 and load >> 5 & 31 == register:  # ldrb
        return page + offset
    if load & 0xFFC00000 != 0x91000000 or load >> 5 & 31 != register:  # add
        return None
    loads, base = words[2], load & 31
    acquires = loads & 0xFFFFFC00 in (0x08DFFC00, 0x38BFC000, 0x39400000)  # ldarb, ldaprb, ldrb
    return page + offset if acquires and loads >> 5 & 31 == base else None


def _find() -> ctypes.c_uint8 | None:
    """The byte, or None where this torch, system or processor is of no known form."""
    library = Path(torch.__file__).parent / "lib" / _LIBRARIES.get(sys.platform, "libc10.so")
    try:
        function = getattr(ctypes.CDLL(str(library)), _SYMBOLS.get(sys.platform, _USUAL_SYMBOL))
    except (OSError, AttributeError):
        return None
    at = ctypes.cast(function, ctypes.c_void_p).value
    if at is None:
        return None
    found = loaded_byte(ctypes.string_at(at, _CODE_BYTES), at, platform.machine())
    return None if found is None else ctypes.c_uint8.from_address(found)


class Turns:
    """The turns of being the accelerator: those of `sky`, and those of this machine's own one.

    Backward passes of one kind run at once, those of the other wait. A pass inside another of the same thread (a hook
    that calls backward) never waits.

    Args:
        flag: the byte; None where it was not found, and nothing can be done.
    """

    def __init__(self, flag: ctypes.c_uint8 | None = None) -> None:
        self.flag = flag
        self._changed = threading.Condition()
        self._running = {"local": 0, "sky": 0}
        self._mine = threading.local()

    @contextlib.contextmanager
    def take(self, kind: str) -> Iterator[None]:
        """Make "local" or "sky" the accelerator inside the block.

        Raises:
            RuntimeError: other threads' passes of the other kind did not end within ten minutes.
        """
        if self.flag is None:
            yield
            return
        kinds: list[str] = vars(self._mine).setdefault("kinds", [])
        depth = len(kinds)
        try:
            while not self._try_to_begin(kind, kinds):
                self._wait(kind)
            yield
        finally:
            self._end(kinds, depth)

    def _wait(self, kind: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_free_for(kind), _TURN_SECONDS):
                raise RuntimeError(
                    f"backward on {'sky' if kind == 'local' else 'the GPU of this machine'} in another thread did not "
                    f"end within {_TURN_SECONDS:.0f} s, and PyTorch's engine runs either that or this"
                )

    @shielded
    def _try_to_begin(self, kind: str, kinds: list[str]) -> bool:
        with self._changed:
            if not kinds and not self._is_free_for(kind):
                return False
            kinds.append(kind)
            self._running[kind] += 1
            self._put_in_force(kind)
            return True

    @shielded
    def _end(self, kinds: list[str], depth: int) -> None:
        """End what this thread has begun beyond a depth, if it came to that."""
        with self._changed:
            while len(kinds) > depth:
                self._running[kinds.pop()] -= 1
            self._put_in_force(kinds[-1] if kinds else "local" if self._running["local"] else "sky")
            self._changed.notify_all()

    def _put_in_force(self, kind: str) -> None:
        assert self.flag is not None
        self.flag.value = kind == "sky"

    def _is_free_for(self, kind: str) -> bool:
        return not self._running["sky" if kind == "local" else "local"]


TURNS = Turns()
_local_type: str | None = None
"""Of this machine's own accelerator: "cuda", "mps" or "xpu"; None where it has none."""


def find_flag() -> None:
    """Look for the byte, which must be clear: the device has no name yet."""
    global _local_type
    local: torch.device | None = torch._C._accelerator_getAccelerator()
    if local is None or TURNS.flag is not None:
        return
    _local_type = local.type
    flag = _find()
    TURNS.flag = flag if flag is not None and flag.value == 0 else None


def confirm_flag() -> None:
    """Believe in the byte only if it is set now that the device has its name."""
    if TURNS.flag is not None and TURNS.flag.value != 1:
        TURNS.flag = None


def _is_local(device: torch.device) -> bool | None:
    """Tell whether a device is this machine's own accelerator; None for the CPU, to which neither is one.

    Not by the name of ours, which is another one during somebody else's turn.
    """
    return None if device.type in ("cpu", "meta") else device.type == _local_type


def _is_in_use() -> bool:
    """Return whether this machine's own accelerator may have tensors; asking does not begin to use it."""
    asked = getattr(torch.get_device_module(_local_type), "is_initialized", None)
    return asked is None or bool(asked())


def _kind_of(outputs: Iterable[object]) -> str | None:
    """Return whose turn a backward pass from these needs to be: "local", "sky" or nobody's.

    Args:
        outputs: tensors and gradient edges. Of those on the CPU the graph is followed to the first node elsewhere, as
            long as the GPU is in use: else `sky` has no need of a turn.
    """
    nodes: list[object] = []
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            nodes.append(output.node)  # type: ignore[attr-defined]  # a GradientEdge
        elif (local := _is_local(output.device)) is not None:
            return "local" if local else "sky"
        else:
            nodes.append(output.grad_fn)
    if not _is_in_use():
        return None
    seen = set(nodes)
    while nodes:
        node: Any = nodes.pop()
        if node is None:
            continue
        for metadata in node._input_metadata:
            if (local := _is_local(metadata.device)) is not None:
                return "local" if local else "sky"
        further = {edge[0] for edge in node.next_functions} - seen
        seen |= further
        nodes += further
    return None


class EngineInTurns:
    """PyTorch's autograd engine, to which the device of what it differentiates is the accelerator."""

    __slots__ = ("_engine",)

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def run_backward(self, outputs: tuple[object, ...], *args: object, **kwargs: object) -> object:
        """Run a backward pass, as the engine does.

        Raises:
            RuntimeError: its graph has tensors both of `sky` and of this machine's own GPU.
        """
        kind = _kind_of(outputs)
        with TURNS.take(kind) if kind is not None else contextlib.nullcontext():
            try:
                return self._engine.run_backward(outputs, *args, **kwargs)
            except RuntimeError as error:
                if _ASSERTION not in str(error):
                    raise
                _refuse(error)

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


def _refuse(error: RuntimeError) -> NoReturn:
    """Say what the engine's assertion means."""
    text = (
        f"backward came to tensors of both sky and {_local_type}, and PyTorch's engine runs with one accelerator. "
        "Cut the graph where they meet: y = x.detach().requires_grad_(); ...; loss.backward(); x.backward(y.grad)."
    )
    if TURNS.flag is None:
        text = (
            f"PyTorch {torch.__version__} cannot run backward on {_local_type} in a process that has imported skyproxy "
            "(pytorch/pytorch#161129). Use sky for it, or a process that does not import skyproxy."
        )
    raise RuntimeError(text) from error


def install() -> None:
    """Let this machine's own GPU have its turn, if it has one; after the device has its name."""
    variable = torch.autograd.variable.Variable  # type: ignore[attr-defined]
    if _local_type is None or isinstance(variable._execution_engine, EngineInTurns):  # it stays
        return
    patching.replace(
        variable,
        "_execution_engine",
        EngineInTurns(variable._execution_engine),
        why="beside a device with a name, the engine fails on this machine's own GPU",
        test=f"{_TESTS}::test_backward_on_the_machines_own_gpu_is_what_it_was",
        stays="in C++, the name of the device makes it the accelerator of this machine, used or not; and a name stays",
    )
