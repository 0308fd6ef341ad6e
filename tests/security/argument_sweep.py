"""Right calls with one argument changed, in every way of a list, one after the other: no chance, and no worker dies.

    cc -O2 -shared -fPIC -o guard_pages.so tests/security/guard_pages.c -ldl -lpthread
    LD_PRELOAD=./guard_pages.so python -m tests.security.argument_sweep [--only aten::median.dim] [--part 0 --parts 2]

Deaths, calls that compute too long and results that hold memory of others are told by operator, argument and change.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from skyproxy_server.op_functions import function_of
from tests.security.fuzzing import CANARY, names
from tests.security.seed_forms import all_seeds, bytes_of, copied, overload_of
from tests.security.seeds import Seed

Tensor = torch.Tensor
Change = tuple[str, Any]
_CANARY = CANARY.to_bytes(8, "little")
_CALL_SECONDS = 8
_MEMORY_BYTES = 3 << 30
_INTS = (0, 1, -1, 2, 3, 5, -3, 64, 1000, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -1.0, 0.3, 1e300, -1e300, 1e-300, float("nan"), float("inf"))
_DTYPES = (
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.int8,
)


def changes(value: Any) -> Iterator[Change]:
    """Every change of an argument, by name."""
    if isinstance(value, Tensor):
        yield from _changes_of_tensor(value)
    elif isinstance(value, bool):
        yield "other", not value
    elif isinstance(value, int):
        yield from ((str(n), n) for n in dict.fromkeys((*_INTS, value + 1, value - 1, value * 2)) if n != value)
    elif isinstance(value, float):
        yield from ((str(n), n) for n in _FLOATS)
    elif isinstance(value, torch.dtype):
        yield from ((str(dtype), dtype) for dtype in _DTYPES if dtype is not value)
    elif isinstance(value, list | tuple):
        items = list(value)
        yield from (("empty", []), ("shorter", items[:-1]), ("longer", items + items[-1:]), ("tail", items[1:]))
        for place in {0, len(items) - 1} if items else ():
            for what, item in changes(items[place]):
                yield f"{place}: {what}", [*items[:place], item, *items[place + 1 :]]


def _changes_of_tensor(tensor: Tensor) -> Iterator[Change]:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return
    yield from (("scalar", tensor.new_ones(())), ("empty", tensor.new_ones(0)), ("inner", tensor[None].clone()))
    yield "outer", tensor[..., None].clone()
    yield from ((str(dtype), tensor.to(dtype)) for dtype in _DTYPES if dtype is not tensor.dtype)
    if tensor.dim():
        yield "expanded", tensor.new_ones(()).expand(tensor.shape)
        yield from (("fewer rows", tensor[:-1].clone()), ("fewer columns", tensor[..., :-1].clone()))
        yield from (("more rows", torch.cat([tensor, tensor])), ("more columns", torch.cat([tensor, tensor], -1)))
        yield from (("half", tensor[..., : tensor.shape[-1] // 2].clone()), ("flat", tensor.reshape(-1).clone()))
        yield from (("no rows", tensor[:0].clone()), ("no columns", tensor[..., :0].clone()))
        yield "one", tensor.new_ones((1,) * tensor.dim())
        yield "transposed", tensor.transpose(0, -1).contiguous()
        yield "restrided", tensor.transpose(0, -1).contiguous().transpose(0, -1)
        yield "gaps", tensor.repeat_interleave(2, -1)[..., ::2]
    if tensor.numel():
        yield from _changes_of_numbers(tensor)


def _changes_of_numbers(tensor: Tensor) -> Iterator[Change]:
    if tensor.is_floating_point():
        for number in (float("nan"), float("inf"), -1e30, 1e30, -1.0):  # some types hold not all of them
            yield f"all {number}", torch.full(tensor.shape, number, dtype=torch.float64).to(tensor.dtype)
    elif tensor.dtype in (torch.int32, torch.int64):
        bounds = torch.iinfo(tensor.dtype)
        for number in (-1, -(2**20), 2**20, 2**31 - 1, -(2**31), 2**40, 2**62, bounds.min, bounds.max):
            if bounds.min <= number <= bounds.max:
                yield f"all {number}", torch.full_like(tensor, number)
                for place in (0, -1):
                    changed = tensor.clone().reshape(-1)
                    changed[place] = number
                    yield f"{place} is {number}", changed.reshape(tensor.shape)


Job = tuple[str, str, dict[str, Any]]
"""The argument, the change, and all arguments by name."""


def jobs(overload: torch._ops.OpOverload, seeds: list[Seed]) -> list[Job]:
    """All changed calls of an operator."""
    order = [argument.name for argument in overload._schema.arguments]
    found: list[Job] = []
    for args, kwargs in seeds[:4]:
        plain = pytree.tree_map(_without_canary, dict(zip(order, args, strict=False)) | kwargs)
        for kind in (None, torch.bfloat16, torch.float64, torch.complex64):
            given = pytree.tree_map(lambda leaf, kind=kind: _as_kind(leaf, kind), plain)
            for name, value in given.items():
                found += [(name, f"{what} ({kind})", {**given, name: new}) for what, new in changes(value)]
    return found


def _as_kind(leaf: Any, kind: torch.dtype | None) -> Any:
    return leaf.to(kind) if kind and isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _without_canary(leaf: Any) -> Any:
    return torch.zeros_like(leaf) if isinstance(leaf, Tensor) and holds(leaf) else leaf


def holds(tensor: Tensor) -> bool:
    """Whether a tensor holds the canary."""
    plain = tensor.layout is torch.strided and not tensor.is_nested and 0 < tensor.numel() < 1 << 16
    return plain and _CANARY in bytes_of(tensor)


def _call(overload: torch._ops.OpOverload, given: dict[str, Any]) -> bytes:
    given = pytree.tree_map(lambda leaf: copied(leaf) if isinstance(leaf, Tensor) else leaf, given)
    order = [argument.name for argument in overload._schema.arguments if not argument.kwarg_only]
    args = [given.pop(name) for name in order if name in given]
    try:
        result = function_of(overload.name(), overload, on_cpu=True)(*args, **given)
    except (Exception, MemoryError):
        return b"e"
    leaves = pytree.tree_leaves((result, args, given))
    return b"L" if any(isinstance(leaf, Tensor) and holds(leaf) for leaf in leaves) else b"r"


def sweep(overload: torch._ops.OpOverload, made: list[Job]) -> Iterator[str]:
    """Make all calls of an operator in children, one after the other; yield what was found."""
    done = 0
    while done < len(made):
        outcomes, status = _run_child(overload, made[done:])
        for (name, what, _), outcome in zip(made[done:], outcomes, strict=False):
            if outcome == ord("L"):
                yield f"leak\t{overload.name()}\t{name}\t{what}"
        done += len(outcomes)
        if not status:
            return
        name, what, _ = made[done]
        yield f"{'hang' if status == signal.SIGPROF else 'death'}: {status}\t{overload.name()}\t{name}\t{what}"
        done += 1


def _run_child(overload: torch._ops.OpOverload, made: list[Job]) -> tuple[bytes, int]:
    answers, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
        with torch._C._AutoDispatchBelowADInplaceOrView():
            for _, _, given in made:
                signal.setitimer(signal.ITIMER_PROF, _CALL_SECONDS)
                os.write(told, _call(overload, given))
        os._exit(0)
    os.close(told)
    with os.fdopen(answers, "rb") as stream:
        outcomes = stream.read()
    return outcomes, os.waitpid(child, 0)[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="an operator; repeatable")
    parser.add_argument("--part", type=int, default=0, help="which part of the operators")
    parser.add_argument("--parts", type=int, default=1, help="how many parts there are")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = arguments.only or [n for n in names() if zlib.crc32(n.encode()) % arguments.parts == arguments.part]
    seeds = all_seeds(chosen)
    calls = findings = 0
    for name in chosen:
        overload = overload_of(name)
        if overload is None:
            continue
        made = jobs(overload, seeds.get(name, []))
        calls += len(made)
        for line in sweep(overload, made):
            findings += 1
            print(line, flush=True)
    print(f"{calls} calls of {len(chosen)} operators, {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
