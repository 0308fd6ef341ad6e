"""Right calls made of known ones: `out=` and in-place overloads, guesses by schema, other dtypes and other strides."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from skyproxy_server.op_functions import function_of
from tests.security.further_seeds import written_seeds
from tests.security.seeds import Seed, record_seeds

Tensor = torch.Tensor
_CALLS_OF_ONE = 3
_FLOATING = ("bfloat16", "float16", "float64", "complex64", "float32", "int8", "int64", "uint8", "bool")
_INTEGERS = ("int32", "int64", "int16", "uint8", "bool")


def overload_of(name: str) -> torch._ops.OpOverload | None:
    """The operator with this name ("aten::add.out"); None if this torch has none."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def all_seeds(names: Iterable[str]) -> dict[str, list[Seed]]:
    """Right calls of nearly all operators: recorded, written, and made of those."""
    seeds = record_seeds()
    for name, calls in written_seeds().items():
        seeds.setdefault(name, []).extend(calls)
    add_other_forms(seeds, names)
    return seeds


def add_other_forms(seeds: dict[str, list[Seed]], names: Iterable[str]) -> None:
    """Add calls of operators that have none: from their plain forms, and else such as their schemas ask for."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for name in names:
            overload = overload_of(name)
            if overload is None or seeds.get(name):
                continue
            calls = list(_from_plain_form(overload, seeds)) or list(_guesses(overload))
            if calls:
                seeds[name] = calls[:_CALLS_OF_ONE]


def _from_plain_form(overload: torch._ops.OpOverload, seeds: dict[str, list[Seed]]) -> Iterator[Seed]:
    arguments = [argument for argument in overload._schema.arguments if not argument.is_out]
    outs = [argument.name for argument in overload._schema.arguments if argument.is_out]
    packet = overload._schema.name.removeprefix("aten::")
    for other in {packet, packet.removesuffix("_"), f"{packet}_"}:
        plain = getattr(torch.ops.aten, other, None)
        for overload_name in plain.overloads() if plain is not None else ():
            candidate = getattr(plain, overload_name)
            known = seeds.get(candidate.name())
            theirs = [(a.name, str(a.real_type)) for a in candidate._schema.arguments if not a.is_out]
            if known and theirs == [(a.name, str(a.real_type)) for a in arguments] and candidate is not overload:
                yield from _with_results(known, candidate, overload, outs)


def _with_results(
    known: list[Seed], plain: torch._ops.OpOverload, overload: torch._ops.OpOverload, outs: list[str]
) -> Iterator[Seed]:
    for args, kwargs in known[:_CALLS_OF_ONE]:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("out", *outs)}
        if not outs:
            yield args, kwargs
            continue
        with_outs = any(argument.is_out for argument in plain._schema.arguments)
        results = None if with_outs else _result_of(plain, args, kwargs)
        if results is None:
            continue
        several = results if isinstance(results, tuple) else (results,)
        call = args, {**kwargs, **dict(zip(outs, several, strict=False))}
        if len(several) == len(outs) and _result_of(overload, *call) is not None:
            yield call


def _copy(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def _result_of(overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call, () if that is None, or None if it failed."""
    args, kwargs = _copy((args, kwargs))
    try:
        result = function_of(overload.name(), overload, on_cpu=True)(*args, **kwargs)
    except Exception:
        return None
    return () if result is None else result


def _guesses(overload: torch._ops.OpOverload) -> Iterator[Seed]:
    for shape in ((2, 3), (4, 4), (4,), (1, 2, 4, 4), (1, 2, 4, 4, 4), ()):
        for dtype in (torch.float32, torch.int64, torch.bool):
            tensor = torch.ones(shape, dtype=dtype)
            call = _guess(overload, tensor)
            if call is not None and _result_of(overload, *call) is not None:
                yield call


def _guess(overload: torch._ops.OpOverload, tensor: Tensor) -> Seed | None:
    args, kwargs = [], {}
    for argument in overload._schema.arguments:
        value = _value_for(str(argument.real_type), tensor)
        if argument.has_default_value() and not argument.is_out:
            if argument.kwarg_only:
                continue
            value = argument.default_value
        if value is None and not argument.has_default_value():
            return None
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def _value_for(kind: str, tensor: Tensor) -> Any:
    match kind:
        case "Tensor" | "Optional[Tensor]":
            return tensor.clone()
        case "List[Tensor]" | "List[Optional[Tensor]]":
            return [tensor.clone(), tensor.clone()]
        case "int" | "SymInt" | "Optional[int]" | "Optional[SymInt]":
            return 1
        case "number" | "float" | "Optional[float]" | "Optional[number]":
            return 1.0 if tensor.dtype.is_floating_point else 1
        case "bool":
            return True
        case "List[int]" | "List[SymInt]":
            return list(tensor.shape) or [1]
        case "List[number]" | "List[float]":
            return [1.0, 1.0]
        case "ScalarType" | "Optional[ScalarType]":
            return tensor.dtype
        case "str":
            return "sum"
    return None


# --- other dtypes and strides ----------------------------------------------------------------------------------------


def varied(leaves: list[Any], chance: random.Random) -> list[Any]:
    """The same call with all floating tensors, or all integers, of another dtype; and with other strides."""
    if chance.random() < 0.35:
        floating = getattr(torch, chance.choice(_FLOATING))
        leaves = [_map(leaf, lambda t: t.to(floating) if t.is_floating_point() else t) for leaf in leaves]
    if chance.random() < 0.1:
        whole = getattr(torch, chance.choice(_INTEGERS))
        leaves = [_map(leaf, lambda t: t.to(whole) if t.dtype in (torch.int64, torch.int32) else t) for leaf in leaves]
    if chance.random() < 0.35:
        leaves = [_map(leaf, lambda t: _restrided(t, chance)) for leaf in leaves]
    return leaves


def changed_parts(nested: Tensor, chance: random.Random) -> Tensor | None:
    """A strided nested tensor with a part less, an empty or a flat one; a part alone; or nothing."""
    parts = list(nested.unbind())
    place = chance.randrange(len(parts))
    match chance.randrange(5):
        case 0:
            return None
        case 1:
            return parts[place]
        case 2:
            del parts[place]
        case 3:
            parts[place] = parts[place][..., :0]
        case _:
            parts = [part.reshape(-1) for part in parts]
    return torch.nested.as_nested_tensor(parts)


def copied(tensor: Tensor) -> Tensor:
    """The same tensor in a memory of its own, gaps, overlaps and what lies beside it included."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.clone()
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage().clone())
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def bytes_of(tensor: Tensor) -> bytes:
    """What a tensor holds; nothing where that cannot be read."""
    try:
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return bytes(dense.reshape(-1).view(torch.uint8).tolist())
    except RuntimeError:
        return b""


def _map(leaf: Any, change: Any) -> Any:
    if isinstance(leaf, Tensor):
        return change(leaf) if leaf.layout is torch.strided and not leaf.is_nested else leaf
    if isinstance(leaf, list | tuple) and any(isinstance(item, Tensor) for item in leaf):
        return [_map(item, change) for item in leaf]
    return leaf


def _restrided(tensor: Tensor, chance: random.Random) -> Tensor:
    """The same numbers in another order of memory: with gaps, transposed, channels last, or all of them one element."""
    match chance.randrange(6) if tensor.dim() else 5:
        case 0:
            return tensor.repeat_interleave(2, -1)[..., ::2]
        case 1:
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        case 2 if tensor.dim() == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        case 3:
            return tensor[:1].expand(tensor.shape) if tensor.shape[0] else tensor
        case 4:
            return torch.cat([tensor, tensor])[tensor.shape[0] :]
    return tensor
