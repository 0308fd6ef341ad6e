"""Calls with hostile arguments over the schemas of the allowed operators, run in child processes that may die.

`python -m tests.security.fuzzing --calls 50000` reports every call that ended a worker, held it, or read what was not
the session's own; `make fuzz` runs it. A call is known by its number: `--only aten::view.dtype --seed 7` repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import Batch, Failure, Message, Sequence
from skyproxy.settings import SETTINGS
from skyproxy_server.executor import Executor
from skyproxy_server.gates import Gates
from skyproxy_server.transfers import Transfers
from tests.security.seed_forms import all_seeds, bytes_of, changed_parts, copied, varied
from tests.security.seeds import Seed

CALL_SECONDS = 15
"""How long one call may compute before it counts as one that holds the worker; it may wait ten times as long."""
COMPILE_SECONDS = 240
"""The same for a graph that a C++ compiler works on first."""
_COMPILED = ("graph:inductor", "graph:compiled")
_MEMORY_BYTES = 3 << 30
"""Address space of a child: what asks for more gets an error, not the machine's memory."""
FINDINGS = ("death", "hang", "leak")
CANARY = 0x5EC2E7BADC0FFEE1
"""What memory holds that is not the session's."""

_INTS = (0, 1, 2, 3, -1, -2, 7, 64, 1000, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63))
_SMALL_INTS = (0, 1, 1, 2, 2, 3, -1)
_FLOATS = (0.0, 1.0, 0.5, -1.0, 1e-8, 1e308, -1e308, float("nan"), float("inf"), float("-inf"))
_STRINGS = ("sum", "mean", "none", "amax", "linear", "tanh", "floor", "", "ij,jk->ik", "N", 'x"); //', "%s%n{}" * 50)
_DTYPES = ("float32", "float64", "int64", "int32", "uint8", "bool", "complex64", "bfloat16", "float16", "int8")
_ODD_DTYPES = ("qint8", "quint4x2", "bits8", "float8_e4m3fn", "uint16", "uint64", "complex32", "float4_e2m1fn_x2")
_SHAPES = ((), (0,), (1,), (3,), (2, 3), (3, 3), (2, 0), (2, 3, 4), (1, 2, 5, 5), (2, 3, 4, 5, 6), (1, 1, 1, 1, 1, 1))


@dataclass(frozen=True)
class Call:
    """One command: an operator's definition, its operands, and those of further calls of the same."""

    definition: list[Any]
    operands: list[Any]
    again: list[list[Any]] = field(default_factory=list)


@dataclass
class Report:
    """What became of the calls.

    Attributes:
        findings: calls that ended the process, held it, or whose result held `CANARY`: what, operator, seed, details.
        outcomes: how many calls ended in which way.
    """

    findings: list[tuple[str, str, int, str]] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)


class Pool:
    """The values that hostile calls are made of, in slots; made anew for each call, for calls change them."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.values: dict[int, Any] = {}
        self.shrunk: list[int] = []
        """Slots whose storages are resized to 0 bytes before the call, as a client can."""

    def add(self, value: Any) -> int:
        slot = len(self.values) + 1
        self.values[slot] = value
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and self._chance.random() < 0.02:
            self.shrunk.append(slot)
        return slot

    def tensor(self, like: torch.Tensor | None = None) -> torch.Tensor:
        chance = self._chance
        if like is not None and chance.random() < 0.6:
            return like.clone() if chance.random() < 0.8 else like
        shape = chance.choice(_SHAPES)
        dtype = getattr(torch, chance.choice(_DTYPES))
        if dtype in (torch.int64, torch.int32) and chance.random() < 0.5:
            limit = 2**31 - 1 if dtype is torch.int32 else 2**63 - 1
            fill = chance.choice((-1, 5, 10**6, limit, -limit, 2**20))
            return torch.full(shape, min(max(fill, -limit), limit), dtype=dtype)
        made = torch.ones(shape, dtype=torch.float32).cumsum(-1).to(dtype) if shape else torch.ones(shape, dtype=dtype)
        kind = chance.random()
        if kind < 0.05 and made.dim():
            return made.to_sparse()
        if kind < 0.09 and made.dim() == 2 and made.numel() and dtype.is_floating_point:
            return made.to_sparse_csr()
        if kind < 0.14 and made.dim():
            return made[:1].expand(5, *made.shape[1:]) if made.shape[0] else made
        if kind < 0.2:
            return made.transpose(0, -1) if made.dim() > 1 else made
        return made


def make_call(name: str, seed: int) -> tuple[Call, Pool]:
    """The call of this number of an operator, and the values in the slots that it names."""
    chance = random.Random(f"{name} {seed}")
    pool = Pool(chance)
    schema = _overload(name)._schema
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    operands: list[Any] = []
    like: list[torch.Tensor] = []
    for argument in schema.arguments:
        if argument.kwarg_only and argument.default_value is not None and chance.random() < 0.3:
            continue
        template, operand = _argument(str(argument.real_type), chance, pool, like)
        if argument.kwarg_only:
            keywords[argument.name] = template
        else:
            positional.append(template)
        operands += operand
    outputs = _outputs(schema, chance, operands)
    return Call([name, positional, keywords, outputs], operands), pool


def make_near_call(name: str, seed: int, seeds: list[Seed]) -> tuple[Call, Pool]:
    """A call of a known good kind with one or two of its arguments changed."""
    chance = random.Random(f"near {name} {seed}")
    pool = Pool(chance)
    args, kwargs = chance.choice(seeds)
    schema = _overload(name)._schema
    leaves = varied([*args, *kwargs.values()], chance)
    changed = {chance.randrange(len(leaves)) for _ in range(chance.choice((1, 1, 2)))} if leaves else set()
    operands: list[Any] = []
    templates: list[Any] = []
    for number, leaf in enumerate(leaves):
        template, operand = _as_sent(_hostile(leaf, chance) if number in changed else leaf, pool)
        templates.append(template)
        operands += operand
    outputs = _outputs(schema, chance, operands)
    keywords = dict(zip(kwargs, templates[len(args) :], strict=True))
    return Call([name, templates[: len(args)], keywords, outputs], operands), pool


def _hostile(leaf: Any, chance: random.Random) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _hostile_tensor(leaf, chance)
    if isinstance(leaf, list | tuple) and leaf:
        items = list(leaf)
        place = chance.randrange(len(items))
        match chance.randrange(3):
            case 0:
                del items[place]
            case 1:
                items.append(items[place])
            case _:
                items[place] = _hostile(items[place], chance)
        return items
    if isinstance(leaf, bool):
        return not leaf
    if isinstance(leaf, int):
        return chance.choice((leaf + 1, leaf - 1, -leaf, leaf * 2, *_INTS))
    if isinstance(leaf, float):
        return chance.choice(_FLOATS)
    if isinstance(leaf, torch.dtype):
        return getattr(torch, chance.choice(_DTYPES))
    return leaf


def _hostile_tensor(leaf: torch.Tensor, chance: random.Random) -> torch.Tensor | None:
    if leaf.is_nested:
        return changed_parts(leaf, chance)
    if leaf.layout is not torch.strided:
        return None if chance.random() < 0.3 else leaf.to_dense()
    if not leaf.dtype.is_floating_point and not leaf.dtype.is_complex and leaf.dtype is not torch.bool and leaf.numel():
        if chance.random() < 0.7:  # an index, a length or a place to begin
            changed = leaf.clone().reshape(-1)
            least, most = torch.iinfo(leaf.dtype).min, torch.iinfo(leaf.dtype).max
            chosen = chance.choice((-1, -(2**20), 2**20, 2**31 - 1, 2**40, 2**62))
            changed[chance.randrange(changed.numel())] = max(min(chosen, most), least)
            return changed.view(leaf.shape)
    match chance.randrange(8):
        case 0:
            return None
        case 1:
            return leaf.new_ones(chance.choice(_SHAPES))
        case 2:
            return leaf[: max(leaf.shape[0] - 1, 0)] if leaf.dim() else leaf.new_ones(0)
        case 3:
            return leaf[..., : max(leaf.shape[-1] // 2, 0)].clone() if leaf.dim() else leaf.reshape(1)
        case 4:
            return leaf.to(getattr(torch, chance.choice(_DTYPES)))
        case 5:
            return leaf.new_ones((1,) * leaf.dim())
        case 6:
            return leaf.reshape(-1)
        case _:
            return leaf.new_ones(()).expand(leaf.shape)


def _as_sent(leaf: Any, pool: Pool) -> tuple[Any, list[Any]]:
    """A value as a client writes it."""
    if isinstance(leaf, torch.Tensor):
        return commands.TENSOR, [pool.add(copied(leaf))]
    if isinstance(leaf, torch.Generator):
        return commands.TENSOR, [pool.add(leaf)]
    if leaf is None:
        return commands.TENSOR, [0]
    if isinstance(leaf, list | tuple) and any(isinstance(item, torch.Tensor) for item in leaf):
        return commands.TENSORS, [[0 if item is None else pool.add(copied(item)) for item in leaf]]
    if isinstance(leaf, bool | str | torch.dtype | torch.layout | torch.memory_format | torch.device) or (
        isinstance(leaf, list | tuple) and any(isinstance(item, bool) for item in leaf)
    ):
        return [commands.CONSTANT, *torch_codec.encode_constant(leaf)], []
    return commands.VALUE, [list(leaf) if isinstance(leaf, tuple) else leaf]


def _overload(name: str) -> torch._ops.OpOverload:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    return found


def _outputs(schema: Any, chance: random.Random, operands: list[Any]) -> list[Any]:
    outputs: list[Any] = []
    for result in schema.returns:
        several = "List" in str(result.type)
        outputs.append(commands.NEW_LIST if several else commands.NEW)
        operands.append([1000 + i for i in range(chance.choice((1, 2, 3)))] if several else 900 + len(outputs))
    return outputs


def _argument(kind: str, chance: random.Random, pool: Pool, like: list[torch.Tensor]) -> tuple[Any, list[Any]]:
    odd = chance.random() < 0.03
    if kind.startswith("Optional["):
        kind = kind[len("Optional[") : -1]
        if chance.random() < 0.4:
            return _none(kind)
    if odd:
        kind = chance.choice(("int", "str", "List[int]", "float", "Tensor", "Generator", "ScalarType as int"))
    match kind:
        case "Tensor":
            made = pool.tensor(like[0] if like else None)
            like.append(made)
            return commands.TENSOR, [pool.add(made)]
        case "List[Tensor]" | "List[Optional[Tensor]]":
            tensors = [pool.tensor(like[0] if like else None) for _ in range(chance.choice((0, 1, 2, 3)))]
            slots = [pool.add(tensor) for tensor in tensors]
            if "Optional" in kind and slots and chance.random() < 0.3:
                slots[0] = 0
            return commands.TENSORS, [slots]
        case "int" | "SymInt":
            return commands.VALUE, [chance.choice(_SMALL_INTS if chance.random() < 0.6 else _INTS)]
        case "List[int]" | "List[SymInt]":
            choices = _SMALL_INTS if chance.random() < 0.6 else _INTS
            if like and chance.random() < 0.4:
                return commands.VALUE, [list(like[0].shape)]
            return commands.VALUE, [[chance.choice(choices) for _ in range(chance.choice((0, 1, 2, 2, 3, 4, 5)))]]
        case "number" | "float" | "complex":
            return commands.VALUE, [chance.choice((*_FLOATS, *_SMALL_INTS) if kind == "number" else _FLOATS)]
        case "List[number]" | "List[float]":
            return commands.VALUE, [[chance.choice(_FLOATS) for _ in range(chance.choice((0, 1, 2, 3)))]]
        case "bool":
            return [commands.CONSTANT, "", chance.random() < 0.5], []
        case "List[bool]":
            return [commands.CONSTANT, "", [chance.random() < 0.5 for _ in range(chance.choice((1, 2, 3)))]], []
        case "str":
            return [commands.CONSTANT, "", chance.choice(_STRINGS)], []
        case "ScalarType" | "Layout" | "MemoryFormat" | "ScalarType as int" | "QScheme":
            return _enumeration(kind, chance)
        case "Device":
            device = chance.choice((["cpu", None], ["cpu", 0], ["meta", None], ["cuda", 7], ["mkldnn", 0], ["xla", 1]))
            return [commands.CONSTANT, "device", device], []
        case "Generator":
            made_generator = torch.Generator() if chance.random() < 0.6 else torch.ones(2)
            return commands.TENSOR, [pool.add(made_generator)]
    return _none(kind)


def _none(kind: str) -> tuple[Any, list[Any]]:
    if kind in ("Tensor", "Generator"):
        return commands.TENSOR, [0]
    return [commands.CONSTANT, "", None], []


def _enumeration(kind: str, chance: random.Random) -> tuple[Any, list[Any]]:
    if kind == "ScalarType as int" or chance.random() < 0.25:
        number = chance.choice((0, 1, 6, 7, 12, 13, 16, 21, 44, 45, 46, 127, 128, 255, 100000, -1, 2**40))
        return (commands.VALUE, [number]) if chance.random() < 0.5 else ([commands.CONSTANT, "", number], [])
    if kind == "Layout":
        return [commands.CONSTANT, "layout", chance.choice(("strided", "sparse_coo", "sparse_csr", "sparse_bsr"))], []
    if kind == "MemoryFormat":
        formats = ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")
        return [commands.CONSTANT, "memory_format", chance.choice(formats)], []
    return [commands.CONSTANT, "dtype", chance.choice(_DTYPES if chance.random() < 0.7 else _ODD_DTYPES)], []


# --- the child -------------------------------------------------------------------------------------------------------


def run_call(executor: Executor, call: Call, pool: Pool, sequence: int) -> str:
    """Executes a call as a session would; "result", "compiled", "error" or "protocol error"."""
    executor.state.values.slots.clear()
    executor.state.values.gates = Gates()
    executor.state.values.slots.update({0: None, **pool.values})
    number = commands.FIRST_SIGNATURE
    shrink = [item for slot in pool.shrunk for item in (commands.DO, "resize_storage", [slot, 0])]
    stream = [*shrink, commands.DEFINE, number, call.definition]
    for operands in (call.operands, *call.again):
        stream += [number, *operands]
    try:
        executor.run(Batch(Sequence(sequence), stream))
    except ProtocolError:
        return "protocol error"
    program = getattr(executor.state.ops.signatures.get(number), "program", None)
    return "compiled" if getattr(program, "ran", "") == "inductor" else "result"


def holds_canary(executor: Executor) -> bool:
    """Whether a value of the session holds what it never put there. Asks for all of them, as a client would."""
    for slot in list(executor.state.values.slots):
        try:
            value = executor.state.values.get(slot)
        except Exception:
            continue
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.device.type == "cpu":
                if 0 < tensor.numel() < 1 << 16 and CANARY.to_bytes(8, "little") in bytes_of(tensor):
                    return True
    return False


def _zygote(near: bool) -> None:
    """Loads PyTorch once, and forks a runner; another one whenever that is gone. The alarm's signal is a hang."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    answers = os.dup(1)
    os.dup2(2, 1)
    seeds = all_seeds(names()) if near else {}
    while True:
        runner = os.fork()
        if runner == 0:
            # Guarding pages take addresses and no memory.
            bound = resource.RLIMIT_DATA if "LD_PRELOAD" in os.environ else resource.RLIMIT_AS
            resource.setrlimit(bound, (_MEMORY_BYTES, _MEMORY_BYTES))
            _run(answers, seeds)
            os._exit(0)
        _, status = os.waitpid(runner, 0)
        if status == 0:
            return
        killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)
        os.write(answers, f"{'hang' if killed in (signal.SIGALRM, signal.SIGPROF) else 'death'}: {killed}\n".encode())


def _run(answers: int, seeds: dict[str, list[Seed]]) -> None:
    """Runs the calls that standard input names, `[operator, seed]` a line; answers each with its outcome."""
    sent: list[Message] = []
    devices = [{"type": "cpu", "index": 0, "name": "CPU"}]
    executor = Executor(devices, sent.append, Transfers(SETTINGS.chunk_bytes), SETTINGS)
    neighbours = [torch.full((size,), CANARY - (1 << 63), dtype=torch.int64) for size in (2, 5, 30, 200, 5000, 100_000)]
    with torch._C._AutoDispatchBelowADInplaceOrView():
        for sequence, line in enumerate(iter(_read_line, b""), 1):
            name, seed = json.loads(line)
            for size in (1, 3, 17, 150, 4000):
                torch.full((size,), CANARY - (1 << 63), dtype=torch.int64)  # freed at once: the next call's memory
            sent.clear()
            _set_bounds(COMPILE_SECONDS if name in _COMPILED else CALL_SECONDS)
            try:
                call, pool = _make(name, seed, seeds)
                outcome = run_call(executor, call, pool, sequence)
                if outcome == "result" and any(isinstance(message, Failure) for message in sent):
                    outcome = "error"
                if holds_canary(executor):
                    outcome = "leak"
            except MemoryError:
                outcome = "error"
            _set_bounds(0)
            os.write(answers, f"{outcome}\n".encode())
    del neighbours


def _set_bounds(seconds: int) -> None:
    """Bound what follows in processor time, and in time where it waits: other programs may hold the machine."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(10 * seconds)


def _make(name: str, seed: int, seeds: dict[str, list[Seed]]) -> tuple[Call, Pool]:
    if name.startswith("graph:"):
        from tests.security.compiled_graph_fuzzing import make_any_graph

        return make_any_graph(name.removeprefix("graph:"), seed)
    known = seeds.get(name)
    return make_near_call(name, seed, known) if known else make_call(name, seed)


def _read_line() -> bytes:
    """A line of standard input, without reading ahead: the rest belongs to the next runner."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            break
        line += piece
    return line


# --- the parent ------------------------------------------------------------------------------------------------------


def fuzz(
    calls: Iterable[tuple[str, int]],
    tell: Callable[[str], object] = lambda line: None,
    *,
    near: bool = False,
    guard: Path | None = None,
) -> Report:
    """Runs calls one by one in a child, and in another one after each death; each finding is told at once.

    Args:
        calls: operators, or graph: and a mode of `graph_fuzzing`, each with the number of a call.
        tell: is called with each finding.
        near: whether calls that are right are changed.
        guard: the library made of `guard_pages.c`, to be loaded by the child.
    """
    command = [sys.executable, "-m", "tests.security.fuzzing", "--child", *["--near"] * near]
    report = Report()
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "LD_PRELOAD": str(guard.resolve())} if guard is not None else None,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for name, seed in calls:
            child.stdin.write(json.dumps([name, seed]).encode() + b"\n")
            child.stdin.flush()
            outcome = child.stdout.readline().decode().strip() or "death: of the process that forks"
            kind = outcome.partition(":")[0]
            report.outcomes[kind] = report.outcomes.get(kind, 0) + 1
            if kind in FINDINGS:
                report.findings.append((kind, name, seed, outcome))
                tell(f"{kind}\t{name}\t--seed {seed}\t{outcome}")
        child.stdin.close()
    return report


def names() -> list[str]:
    """The operators that a worker without functions may call."""
    from skyproxy_server.allowed_ops import ALLOWED

    return sorted(name for name in ALLOWED if _exists(name))


def _exists(name: str) -> bool:
    return torch._C._dispatch_has_kernel(name) if "::" in name else False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=50_000, help="how many calls to make, over all operators")
    parser.add_argument("--only", action="append", default=[], help="an operator; repeatable")
    parser.add_argument("--names", type=Path, help="a file with one operator a line, in place of the allowed ones")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first call of each operator")
    parser.add_argument(
        "--near", action="store_true", help="change calls that are right, where there is a sample of them"
    )
    parser.add_argument("--guard", type=Path, help="the library made of tests/security/guard_pages.c")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        _zygote(arguments.near)
        return 0
    chosen = arguments.only or (arguments.names.read_text().split() if arguments.names else names())
    rounds = max(arguments.calls // len(chosen), 1)
    calls = ((name, arguments.seed + number) for name in chosen for number in range(rounds))
    report = fuzz(calls, lambda line: print(line, flush=True), near=arguments.near, guard=arguments.guard)
    print(report.outcomes)
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
