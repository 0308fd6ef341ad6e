"""What holds a shape rule against PyTorch: the op runs on real CPU tensors, and its results are compared in full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from skyproxy.tensor.core.metadata import Meta, meta_of
from skyproxy.tensor.shapes.rules import TARGET
from skyproxy.tensor.shapes.sparse import RULES

Case = tuple[str, tuple[Any, ...], dict[str, Any]]
_SIZES = [(), (1,), (5,), (3, 4), (1, 4), (3, 1), (2, 3, 4), (2, 1, 4), (2, 3, 4, 5), (0, 3), (1, 0)]


def tensors(dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    """Tensors of many sizes and layouts."""
    for size in _SIZES:
        base = torch.zeros(size, dtype=dtype)
        yield base
        if len(size) >= 2:
            yield base.transpose(0, -1)
            yield torch.zeros(*size[:-1], size[-1] + 2, dtype=dtype)[..., 1:-1]
            yield base.transpose(0, -1)[..., :1]
            yield torch.zeros(size[0], size[1] + 3, *size[2:], dtype=dtype)[:, : size[1]]
        if 1 in size:
            yield base.as_strided(size, [7 if n == 1 else s for n, s in zip(size, base.stride())])
        if len(size) == 4:
            yield base.contiguous(memory_format=torch.channels_last)
            yield base.contiguous(memory_format=torch.channels_last)[:1]


def look(a: Any) -> Any:
    """What a rule is given for an argument."""
    if isinstance(a, torch.Tensor):
        return meta_of(a)
    if isinstance(a, list | tuple) and any(isinstance(item, torch.Tensor) for item in a):
        return [look(item) for item in a]
    return list(a) if isinstance(a, tuple) else a


def overload(name: str) -> Any:
    """The overload of a name without its namespace."""
    packet, _, rest = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), rest or "default")


def answer_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the rule of an op tells of a call."""
    return RULES["aten::" + name](*map(look, args), **{key: look(a) for key, a in kwargs.items()})


def mismatch(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What the rule says wrongly; None where it is right, or leaves the answer to others."""
    answer = answer_of(name, args, kwargs)
    if answer is None:
        return None
    before = [look(a) for a in args]
    try:
        result = overload(name)(*args, **kwargs)
    except Exception as error:
        return f"answers {answer} where PyTorch raises {error!r:.120}"
    return difference(answer, result, args, before)


def difference(answer: Any, result: Any, args: Any, before: Any) -> str | None:
    """How an answer differs from what an op did.

    Args:
        answer: the rule's.
        result: the op's.
        args: what the op was called with.
        before: how that looked before the call.
    """
    if answer is TARGET:
        if result is not args[0]:
            return "the result is not the first argument"
        return None if meta_of(result) is before[0] else f"{before[0]} became {meta_of(result)}"
    if not answer:
        after = [look(a) for a in args]
        return None if after == before and result is None else f"{before} became {after}, with {result}"
    results = result if isinstance(result, tuple) else (result,)
    bases = [a for a in args if isinstance(a, torch.Tensor)]
    for said, actual in zip(answer, results, strict=True):
        listed = isinstance(said, list)
        if listed != isinstance(actual, list | tuple):
            return f"{said} is not {actual}"
        for (meta, shares), tensor in zip(said if listed else [said], actual if listed else [actual], strict=True):
            if meta is None or tensor is None:
                if meta is not tensor:
                    return f"{meta} is not {tensor}"
                continue
            if not _same(meta, tensor):
                return f"{meta} is not {meta_of(tensor)}"
            truly = any(tensor.untyped_storage()._cdata == t.untyped_storage()._cdata for t in bases)
            if truly != (shares is not None):
                return f"sharing of storage: {shares}, truly {truly}"
    return None


def _same(meta: Meta, actual: torch.Tensor) -> bool:
    return meta is meta_of(actual)


class Checking(TorchDispatchMode):
    """Inside, every op for which there is a rule is held against it.

    Attributes:
        wrong: what rules said wrongly, by op.
        answered, asked: how often a rule gave an answer, and how often one was asked, by op.
        unknown: how often an op came that has no rule.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wrong: dict[str, list[str]] = {}
        self.answered: dict[str, int] = {}
        self.asked: dict[str, int] = {}
        self.unknown: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name()
        rule = RULES.get(name)
        if rule is None:
            self.unknown[name] = self.unknown.get(name, 0) + 1
            return func(*args, **kwargs)
        before = [look(a) for a in args]
        named = {key: look(a) for key, a in kwargs.items() if key != "pin_memory"}
        asked = not any(isinstance(a, torch.Generator) for a in kwargs.values())
        answer = rule(*before, **named) if asked else None
        self.asked[name] = self.asked.get(name, 0) + 1
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if answer is not None:
                self._note(name, before, kwargs, f"answers {answer} where PyTorch raises {error!r:.120}")
            raise
        if answer is not None:
            self.answered[name] = self.answered.get(name, 0) + 1
            problem = difference(answer, result, args, before)
            if problem is not None:
                self._note(name, before, kwargs, problem)
        return result

    def _note(self, name: str, before: Any, kwargs: Any, problem: str) -> None:
        self.wrong.setdefault(name, []).append(f"{name}{before} {kwargs}: {problem}")
