"""PyTorch's global modes that change what operations do: the one table of them, for the client and for the worker.

A mode travels as its name and a plain value. What is not in a record is as PyTorch has it from the start, so nearly
every session's record is empty.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from skyproxy.errors import ConfigurationError, ProtocolError
from skyproxy.torch_codec import DTYPE_NAMES, DTYPES

Record = tuple[tuple[str, object], ...]
"""Modes by name, in the table's order, each with a value that is not its usual one."""

USUAL: Record = ()

FP32_PRECISION_CELLS = (
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)
"""The places of `fp32_precision`: a library, and a kind of operation."""

_DETERMINISM = ("off", "warn", "error")
_ENGINES_BY_PREFERENCE = ("x86", "onednn", "qnnpack")


class Mode(NamedTuple):
    """One global mode.

    Attributes:
        name: its name on the wire, and in errors.
        usual: the value that PyTorch starts with; None where it chooses one by the hardware.
        accepts: whether a value from a peer is one that the mode can have.
        read: gives the value in force in this process; None where another mode overrules it.
        write: puts a value in force.
        setters: the functions of `torch._C` that change it, perhaps among others.
        cuda_only: whether only kernels of CUDA look at it.
        of_thread: whether each thread has its own.
    """

    name: str
    usual: object
    accepts: Callable[[object], bool]
    read: Callable[[], object]
    write: Callable[[Any], object]
    setters: tuple[str, ...]
    cuda_only: bool = False
    of_thread: bool = False


class _FlushDenormal:
    """The mode that the program asked for last: PyTorch tells nobody whether denormal numbers are flushed to zero."""

    value = False


def set_flush_denormal(value: bool) -> None:
    """Makes the calling thread flush denormal numbers to zero, or not.

    Raises:
        ConfigurationError: this machine's processor cannot.
    """
    if value:
        # A thread of PyTorch that starts while this one flushes would flush forever. So all are started before.
        torch.zeros(torch.get_num_threads() << 15)
    if not torch.set_flush_denormal(value) and value:
        raise ConfigurationError("this machine's processor cannot flush denormal numbers to zero")


def note_flush_denormal(value: bool) -> None:
    """Remembers what the program asked of `torch.set_flush_denormal`."""
    _FlushDenormal.value = value


def flushes_denormal() -> bool:
    """Return whether the calling thread flushes denormal numbers to zero, of which PyTorch tells nobody."""
    return sys.float_info.min * 0.5 == 0


class _AttentionOrder:
    """The order of attention's kernels that somebody asked for, or None: PyTorch's own choice is in force, which its
    first attention in a process makes by the hardware. And that choice, while it is not in force.
    """

    asked: tuple[int, ...] | None = None
    own: tuple[int, ...] = ()


_ORDERS_OF_PYTORCH = ((1, 2, 0, 3, 4), (3, 1, 2, 0, 4))
"""Orders that PyTorch itself chooses: flash attention first, and on Hopper cuDNN's."""


def attention_order() -> tuple[int, ...]:
    """Return the order of attention's kernels in force in this process, whoever chose it."""
    return tuple(torch._C._get_sdp_priority_order())


def note_attention_order(before: tuple[int, ...]) -> None:
    """Remember what the program has just set as order of attention's kernels.

    `sdpa_kernel` puts back what it found: that is PyTorch's own choice again.

    Args:
        before: the order that was in force.
    """
    order = attention_order()
    if _AttentionOrder.asked is None:
        _AttentionOrder.own, _AttentionOrder.asked = before, order
    else:
        _AttentionOrder.asked = None if order == _AttentionOrder.own else order


def note_earlier_attention_order() -> None:
    """Remember an order that the program has set before anybody noted what it sets."""
    order = attention_order()
    if _AttentionOrder.asked is None and order not in _ORDERS_OF_PYTORCH:
        _AttentionOrder.own, _AttentionOrder.asked = _ORDERS_OF_PYTORCH[0], order


def _set_attention_order(value: tuple[int, ...] | None) -> None:
    if _AttentionOrder.asked is None:
        if value is None:
            return
        if torch.cuda.is_initialized():
            # The first choice of a process puts the hardware's order in force, over any other.
            query = torch.empty(1, 1, 1, 8, dtype=torch.float16, device="cuda")
            torch._fused_sdp_choice(query, query, query)
        _AttentionOrder.own = attention_order()
    torch._C._set_sdp_priority_order(list(_AttentionOrder.own if value is None else value))
    _AttentionOrder.asked = value


def _is_bool(value: object) -> bool:
    return type(value) is bool


def _choice_of(*choices: object) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and value in choices


def _is_whole_number(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _two_bools(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(type(item) is bool for item in value)


def _backend_order(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) <= 16
        and all(map(_is_whole_number, value))
        and len(set(value)) > 0
    )


def _torch_function(name: str) -> Callable[..., Any]:
    """A function of `torch._C`, looked up with each call: a client replaces some of them."""
    return lambda *args: getattr(torch._C, name)(*args)


def _plain_mode(
    name: str,
    getter: str,
    setter: str,
    usual: object,
    accepts: Callable[[object], bool] = _is_bool,
    *,
    cuda: bool = False,
) -> Mode | None:
    """A mode with one getter and one setter in `torch._C`; None where this torch does not have it."""
    if not hasattr(torch._C, getter) or not hasattr(torch._C, setter):
        return None
    read, write = _torch_function(getter), _torch_function(setter)
    return Mode(name, usual, accepts, read, write, (setter,), cuda)


def _pair(name: str, getter: str, setter: str) -> Mode | None:
    """Two flags with one setter: whether a reduced precision is allowed, and whether it is when a sum is split."""
    if not hasattr(torch._C, getter):
        return None
    read, write = _torch_function(getter), _torch_function(setter)
    if isinstance(read(), bool):  # before splitting had a flag of its own
        return Mode(name, (True, True), _two_bools, lambda: (read(), True), lambda v: write(v[0]), (setter,), True)
    return Mode(name, (True, True), _two_bools, lambda: tuple(read()), lambda v: write(*v), (setter,), True)


def _library(name: str, getter: str, setter: str, kinds: str, usual: str | None = None) -> Mode | None:
    """Return the mode of a preference among libraries."""
    kind = getattr(torch._C, kinds, None)
    if kind is None or not hasattr(torch._C, getter):
        return None
    read, write, known = _torch_function(getter), _torch_function(setter), kind.__members__
    # Older versions of torch have no default to ask for: what is in force now is it, unless the program came first.
    teller = getter.replace("preferred", "default")
    default = usual or _torch_function(teller if hasattr(torch._C, teller) else getter)().name
    return Mode(name, default, _choice_of(*known), lambda: read().name, lambda v: write(known[v]), (setter,), True)


def _cell(library: str, kind: str) -> Mode:
    """One place of `fp32_precision`; what is read there is what counts there, wherever it was set."""
    read, write = _torch_function("_get_fp32_precision_getter"), _torch_function("_set_fp32_precision_setter")
    return Mode(
        f"fp32_precision.{library}.{kind}",
        "tf32" if (library, kind) in (("cuda", "conv"), ("cuda", "rnn")) else "none",
        _choice_of("none", "ieee", "tf32", "bf16"),
        lambda: read(library, kind),
        lambda value: write(library, kind, value),
        (
            "_set_fp32_precision_setter",
            "_set_float32_matmul_precision",
            "_set_cublas_allow_tf32",
            "_set_cudnn_allow_tf32",
            "_set_onednn_allow_tf32",
        ),
        library == "cuda",
    )


def _read_unless_overruled(getter: str) -> Callable[[], object]:
    """Reads a mode that `fp32_precision` may overrule: then PyTorch's getter raises, and there is nothing to tell."""

    def read() -> object:
        try:
            return getattr(torch._C, getter)()
        except RuntimeError:
            return None

    return read


def _read_determinism() -> str:
    if not torch._C._get_deterministic_algorithms():
        return "off"
    return "warn" if torch._C._get_deterministic_algorithms_warn_only() else "error"


def _engines() -> Mode:
    known = list(torch.backends.quantized.supported_engines)
    usual = next((name for name in _ENGINES_BY_PREFERENCE if name in known), "none")

    def write(name: str) -> None:
        torch.backends.quantized.engine = name

    every = _choice_of("none", "fbgemm", "qnnpack", "onednn", "x86")
    return Mode("quantized.engine", usual, every, lambda: torch.backends.quantized.engine, write, ("_set_qengine",))


def _table() -> Iterable[Mode | None]:
    yield Mode(
        "default_dtype",
        "float32",
        lambda value: isinstance(value, str) and value in DTYPES and DTYPES[value].is_floating_point,
        lambda: DTYPE_NAMES[torch.get_default_dtype()],
        lambda value: torch.set_default_dtype(DTYPES[value]),
        ("_set_default_dtype", "_set_default_tensor_type"),
    )
    yield Mode(
        "deterministic_algorithms",
        "off",
        _choice_of(*_DETERMINISM),
        _read_determinism,
        lambda value: torch._C._set_deterministic_algorithms(value != "off", warn_only=value == "warn"),
        ("_set_deterministic_algorithms",),
    )
    fill = "deterministic_fill_uninitialized_memory"
    yield _plain_mode("deterministic.fill_uninitialized_memory", f"_get_{fill}", f"_set_{fill}", True)
    yield Mode(
        "flush_denormal",
        False,
        _is_bool,
        lambda: _FlushDenormal.value,
        set_flush_denormal,
        ("set_flush_denormal",),
        of_thread=True,
    )
    yield _plain_mode("warn_always", "_get_warnAlways", "_set_warnAlways", False)
    sparse = "check_sparse_tensor_invariants"
    yield _plain_mode("sparse.check_sparse_tensor_invariants", f"_{sparse}", f"_set_{sparse}", False)
    # Before the places of `fp32_precision`, which it changes.
    yield Mode(
        "float32_matmul_precision",
        "highest",
        _choice_of("highest", "high", "medium"),
        _read_unless_overruled("_get_float32_matmul_precision"),
        _torch_function("_set_float32_matmul_precision"),
        ("_set_float32_matmul_precision", "_set_cublas_allow_tf32", "_set_fp32_precision_setter"),
    )
    yield Mode(
        "cudnn.allow_tf32",
        True,
        _is_bool,
        _read_unless_overruled("_get_cudnn_allow_tf32"),
        _torch_function("_set_cudnn_allow_tf32"),
        ("_set_cudnn_allow_tf32", "_set_fp32_precision_setter"),
        True,
    )
    for library, kind in FP32_PRECISION_CELLS:
        yield _cell(library, kind)
    half = "cpu_allow_fp16_reduced_precision_reduction"
    yield _plain_mode("cpu.allow_fp16_reduced_precision_reduction", f"_get_{half}", f"_set_{half}", False)
    yield _plain_mode("mkldnn.enabled", "_get_mkldnn_enabled", "_set_mkldnn_enabled", True)
    yield _plain_mode("mkldnn.deterministic", "_get_mkldnn_deterministic", "_set_mkldnn_deterministic", False)
    yield _plain_mode("nnpack.enabled", "_get_nnpack_enabled", "_set_nnpack_enabled", True)
    yield _engines()
    for name, cuda in (("flash", False), ("math", False), ("mem_efficient", True), ("cudnn", True)):
        yield _plain_mode(f"sdp.{name}", f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}", True, cuda=cuda)
    yield _plain_mode("sdp.overrideable", "_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable", True, cuda=True)
    yield _plain_mode("sdp.fa3", "_get_fa3_sdp_enabled", "_set_sdp_use_fa3", False, cuda=True)
    math = "math_sdp_allow_fp16_bf16_reduction"
    yield _plain_mode("sdp.allow_fp16_bf16_reduction_math", f"_get_{math}", f"_set_{math}", False)
    yield Mode(
        "sdp.priority_order",
        None,
        _backend_order,
        lambda: _AttentionOrder.asked,
        _set_attention_order,
        ("_set_sdp_priority_order",),
        True,
    )
    yield _plain_mode("cudnn.enabled", "_get_cudnn_enabled", "_set_cudnn_enabled", True, cuda=True)
    yield _plain_mode("cudnn.benchmark", "_get_cudnn_benchmark", "_set_cudnn_benchmark", False, cuda=True)
    limit = "cudnn_benchmark_limit"
    yield _plain_mode(
        "cudnn.benchmark_limit", f"_cuda_get_{limit}", f"_cuda_set_{limit}", 10, _is_whole_number, cuda=True
    )
    yield _plain_mode("cudnn.deterministic", "_get_cudnn_deterministic", "_set_cudnn_deterministic", False, cuda=True)
    kernel = "cudnn_depthwise_kernel"
    short = lambda value: isinstance(value, str) and len(value) < 32  # noqa: E731
    yield _plain_mode("cudnn.depthwise_kernel", f"_get_{kernel}", f"_set_{kernel}", "auto", short, cuda=True)
    for name in ("fp16", "bf16"):
        what = f"cublas_allow_{name}_reduced_precision_reduction"
        yield _pair(f"cuda.matmul.allow_{name}_reduced_precision_reduction", f"_get_{what}", f"_set_{what}")
    what = "cublas_allow_fp16_accumulation"
    yield _plain_mode("cuda.matmul.allow_fp16_accumulation", f"_get_{what}", f"_set_{what}", False, cuda=True)
    what = "cublaslt_prefer_grouped_gemm"
    yield _plain_mode("cuda.matmul.prefer_cublaslt_grouped_gemm", f"_get_{what}", f"_set_{what}", False, cuda=True)
    what = "linalg_preferred_backend"
    yield _library("cuda.preferred_linalg_library", f"_get_{what}", f"_set_{what}", "_LinalgBackend", "Default")
    what = "blas_preferred_backend"
    yield _library("cuda.preferred_blas_library", f"_get_{what}", f"_set_{what}", "_BlasBackend")
    what = "rocm_fa_preferred_backend"
    yield _library("cuda.preferred_rocm_fa_library", f"_get_{what}", f"_set_{what}", "_ROCmFABackend", "Default")
    yield _plain_mode(
        "cuda.sm_carveout",
        "_get_sm_carveout_experimental",
        "_set_sm_carveout_experimental",
        None,
        lambda value: value is None or _is_whole_number(value),
        cuda=True,
    )
    yield _plain_mode("miopen.immediate", "_get_miopen_immediate", "_set_miopen_immediate", False, cuda=True)


MODES: dict[str, Mode] = {mode.name: mode for mode in _table() if mode is not None}
"""All modes that travel, by name, in the order in which they must be put in force."""


def values_in_force() -> dict[str, object]:
    """The values of all modes in this process."""
    return {name: mode.read() for name, mode in MODES.items()}


def put_in_force(values: Mapping[str, object], now: Mapping[str, object] | None = None) -> None:
    """Puts the values of all modes in force that are not, but for those that each thread has for itself.

    Args:
        values: by name, of all modes.
        now: the values in force, where they have just been read.

    Raises:
        ConfigurationError: this torch, or this machine, refuses one of them; the others are in force.
    """
    refused: ConfigurationError | None = None
    for name, mode in MODES.items():
        value = mode.usual if values[name] is None else values[name]  # one that was overruled, with what overrules it
        if not mode.of_thread and (mode.read() if now is None else now[name]) != value:
            now = None  # one mode may change others
            try:
                mode.write(value)
            except Exception as error:
                refused = refused or ConfigurationError(f"{name} cannot be {value!r} on this worker: {error}")
    if refused is not None:
        raise refused


def record_of(values: Mapping[str, object]) -> Record:
    """The modes whose values are not the usual ones."""
    return tuple((name, values[name]) for name, mode in MODES.items() if values[name] not in (mode.usual, None))


def decode(fields: object, *, cuda: bool) -> Record:
    """A record from the wire.

    Args:
        fields: a dict of modes by name, as a peer sent it.
        cuda: whether anybody here looks at modes of CUDA; they are dropped otherwise.

    Raises:
        ProtocolError: it is malformed.
        ConfigurationError: it names a mode that this torch does not have.
    """
    if not isinstance(fields, dict):
        raise ProtocolError(f"a record of modes is a dict, not {type(fields).__name__}")
    values = {}
    for name, value in fields.items():
        mode = MODES.get(name) if isinstance(name, str) else None
        if mode is None:
            raise ConfigurationError(
                f"the torch {torch.__version__} of this worker has no mode {name!r:.60}. "
                "Install the client's torch on the worker."
            )
        if not mode.accepts(value):
            raise ProtocolError(f"the mode {name} cannot be {value!r:.60}")
        if cuda or not mode.cuda_only:
            values[name] = tuple(value) if isinstance(value, list) else value
    return tuple((name, values[name]) for name, mode in MODES.items() if values.get(name, mode.usual) != mode.usual)
