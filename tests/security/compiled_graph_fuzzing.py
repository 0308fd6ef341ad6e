"""Graphs that inductor takes, called as they were meant and then as nobody means it, for `fuzzing`.

`python -m tests.security.graph_fuzzing --graphs 300 --mode compiled` runs them. Each node is tried before it stays, so
that the graph compiles. The first call is that which it is compiled for. The further ones have what a client can send
to the same program: other numbers in the tensors, such as indices that lead elsewhere, and other tensors: of another
dtype, size or order, of one memory with another one, without memory.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from skyproxy.errors import SkyproxyError
from skyproxy.protocol import commands
from skyproxy_server.compiled import CompiledGraph
from tests.security.fuzzing import Call, Pool
from tests.security.graph_fuzzing import GraphMaker, make_graph

_SIZES = ((4,), (4, 4), (2, 4), (4, 2), (1, 4), (4, 1), (2, 3, 4), (16,), (33,), (8, 40))
_PLACES = (-1, -2, 3, 4, 5, 17, 64, 1000, 2**20, 2**31 - 1, 2**40, 2**62, 2**63 - 1, -(2**20), -(2**31), -(2**63))
_FLOATS = (float("nan"), float("inf"), float("-inf"), 1e38, -1e38, 1e-40, 2.0**62, -(2.0**62))
_OTHER_DTYPES = (torch.uint8, torch.int8, torch.bool, torch.int32, torch.int64, torch.float16, torch.float64)
_TRIES = 60


def make_any_graph(mode: str, seed: int) -> tuple[Call, Pool]:
    """The graph of this number in one of `graph_fuzzing.MODES`."""
    return make_compiled_graph(seed) if mode == "compiled" else make_graph(mode, seed)


def make_compiled_graph(seed: int) -> tuple[Call, Pool]:
    """The graph of this number, its calls, and the values in the slots that they name."""
    chance = random.Random(f"compiled {seed}")
    pool = Pool(chance)
    given = [_ordinary(chance) for _ in range(chance.choice((1, 2, 3)))]
    nodes = _grow(chance, given, chance.choice((1, 2, 3, 4, 6)))
    outputs = _tensors_of(nodes, given)
    chosen = [chance.choice(outputs) for _ in range(chance.choice((1, 2)))]
    fields: dict[str, Any] = {"nodes": nodes, "outputs": chosen, "options": {"worker": "inductor"}}
    if chance.random() < 0.3:
        fields["options"]["dynamic"] = True
    calls = [[pool.add(value) for value in given]]
    pool.shrunk.clear()
    calls += [[pool.add(value) for value in _twisted(given, chance)] for _ in range(3)]
    first, *others = [[*slots, *range(base, base + len(chosen))] for base, slots in zip((900, 1000, 1100, 1200), calls)]
    definition = [commands.COMPILED, [commands.TENSOR] * len(given), fields, [commands.NEW] * len(chosen)]
    return Call(definition, first, others), pool


def _ordinary(chance: random.Random) -> torch.Tensor:
    size = chance.choice(_SIZES)
    kind = chance.random()
    if kind < 0.3:
        return torch.zeros(size, dtype=torch.int64) + torch.arange(size[-1]) % 2  # a place in whatever has two
    if kind < 0.38:
        return torch.arange(size[-1]).expand(size).clone() % 2 == 0
    if kind < 0.45:
        return torch.ones(size, dtype=torch.float64)
    return torch.linspace(0, 1, size[-1]).expand(size).clone()


def _grow(chance: random.Random, given: list[torch.Tensor], count: int) -> list[list[Any]]:
    """Nodes that run, one after the other, on what is given, and that a compiler may have."""
    kept: list[list[Any]] = []
    for _ in range(_TRIES):
        if len(kept) == count:
            break
        node = GraphMaker(chance, len(given) + len(kept)).propose()
        if _runs([*kept, node], given):
            kept.append(node)
    return kept or [["aten::neg", [["node", 0]], {}]]


def _runs(nodes: list[list[Any]], given: list[torch.Tensor]) -> bool:
    try:
        return _evaluate(nodes, given) is not None
    except (SkyproxyError, RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, ArithmeticError):
        return False
    except (NotImplementedError, AssertionError, MemoryError, RecursionError):
        return False


def _evaluate(nodes: list[list[Any]], given: list[torch.Tensor]) -> tuple[Any, ...] | None:
    """What all nodes make, op by op; None where a compiler does not get them."""
    made = list(range(len(given), len(given) + len(nodes)))
    fields = {"nodes": nodes, "outputs": made, "options": {"worker": "inductor"}}
    program = CompiledGraph(len(given), len(made), fields, on_cpu=True)
    if program._mode != "inductor":
        return None
    results: Any = program._eager(*[value.clone() for value in given])
    if any(isinstance(result, torch.Tensor) and result.numel() > 1 << 16 for result in results):
        return None
    return results


def _tensors_of(nodes: list[list[Any]], given: list[torch.Tensor]) -> list[int]:
    """The numbers of the values that are tensors; those of inputs where no node makes one."""
    results = _evaluate(nodes, given) or ()
    found = [len(given) + i for i, result in enumerate(results) if isinstance(result, torch.Tensor)]
    return found or list(range(len(given)))


def _twisted(given: list[torch.Tensor], chance: random.Random) -> list[torch.Tensor]:
    values = [_twist(value, chance) if chance.random() < 0.7 else value.clone() for value in given]
    if len(values) > 1 and chance.random() < 0.1:
        values[0] = values[1]
    return values


def _twist(value: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """What a client sends in place of a tensor."""
    if chance.random() < 0.5:
        return _refilled(value, chance)
    match chance.randrange(6):
        case 0:
            return value.to(chance.choice(_OTHER_DTYPES))
        case 1:
            return value.new_ones((1,) * value.dim()).expand(value.shape)
        case 2:
            return value.new_ones(chance.choice(_SIZES))
        case 3:
            return value.new_ones(value.shape[::-1]).permute(*reversed(range(value.dim())))
        case 4:
            return value[..., :0]
        case _:
            return value.to_sparse() if value.dim() else value


def _refilled(value: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """Other numbers in the same tensor."""
    changed = value.clone()
    flat = changed.view(-1)
    for place in {chance.randrange(flat.numel()) for _ in range(chance.choice((1, 1, 2, flat.numel())))}:
        if value.dtype is torch.bool:
            flat[place] = not flat[place]
        else:
            number = chance.choice(_FLOATS if value.dtype.is_floating_point else _PLACES)
            flat[place] = (
                torch.tensor(number, dtype=torch.float64).to(value.dtype) if isinstance(number, float) else number
            )
    return changed
