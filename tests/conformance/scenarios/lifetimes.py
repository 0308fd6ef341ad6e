"""Tensors that die, come back, and die in circles, while others take their place."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.conformance.scenario_fuzz import Run

_SAVED: list[Any] = []


class _Keeper:
    """Holds a tensor, and does something with it when it dies."""

    def __init__(self, r: Run, x: torch.Tensor, what: str, into: torch.Tensor) -> None:
        self.x, self.what, self.into, self.me = x, what, into, self
        self.r = r

    def __del__(self) -> None:
        if self.what == "resurrect":
            _SAVED.append(self.x)
        elif self.what == "write":
            self.into.add_(1)
        elif self.what == "write own":
            self.x.mul_(2)
            _SAVED.append(self.x)
        elif self.what == "compute":
            _SAVED.append(self.x * 2 + 1)
        elif self.what == "read":
            _SAVED.append(torch.tensor(self.x.sum().item()))
        elif self.what == "view":
            _SAVED.append(self.x[..., :1])
        elif self.what == "collect":
            gc.collect(0)


class _Own(torch.Tensor):
    """A class of a user's that dies loudly."""

    def __del__(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # what that gives is of this class else, and dies the same way
            _SAVED.append(self.detach() + 1)


def lifetimes(r: Run) -> None:
    """Drop, revive and replace tensors; what is left has the values that it should."""
    gc.disable()
    gc.freeze()  # what is not the program's: the hundred thousands of objects of torch
    _SAVED.clear()
    try:
        _live(r)
    finally:
        gc.unfreeze()
        gc.enable()
        _SAVED.clear()


def _live(r: Run) -> None:
    pool: list[torch.Tensor] = [r.values([4], torch.float32) for _ in range(6)]
    references: list[weakref.ref[Any]] = []
    stayed: list[Any] = []
    table: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
    called: list[int] = []
    for number in range(r.int(20, 90)):
        at = r.int(0, 5)
        x, y = pool[at], pool[r.int(0, 5)]
        kind = r.one(
            "compute",
            "compute",
            "compute",
            "view",
            "drop",
            "circle",
            "keeper",
            "weak",
            "collect",
            "revive",
            "graph",
            "attribute",
            "hook",
            "finalizer",
            "table",
            "many",
            "exception",
            "generator",
            "grad",
            "own",
            "see",
            "data",
            "storage",
        )
        r.told.append(kind)
        if kind == "compute":
            pool[r.int(0, 5)] = r.one(
                lambda: x + y, lambda: x * 0.5, lambda: x.detach().clone().sub_(y.detach()), lambda: torch.maximum(x, y)
            )()
        elif kind == "view":
            pool[r.int(0, 5)] = r.one(
                lambda: x[:], lambda: x.view(2, 2).t().reshape(4), lambda: x.flip(0), lambda: x.detach()
            )()
        elif kind == "drop":
            pool[at] = r.values([4], torch.float32)
        elif kind == "circle":
            first: list[Any] = [x * 2]
            second = {"first": first, "view": first[0][1:]}
            first.append(second)
            references.append(weakref.ref(first[0], lambda ref, n=number: called.append(n)))
            if r.chance(0.5):
                pool[at] = second["view"].new_zeros(4)
        elif kind == "keeper":
            what = r.one("resurrect", "write", "write own", "compute", "read", "view", "collect")
            keeper = _Keeper(r, x.detach() + number, what, y.detach())
            if r.chance(0.5):
                keeper.me = None  # type: ignore[assignment]
            if r.chance(0.3):
                stayed.append(keeper)
            del keeper
        elif kind == "weak":
            references.append(weakref.ref(x))
        elif kind == "collect":
            gc.collect(r.int(0, 2))
        elif kind == "revive":
            found = [ref() for ref in references]
            r.see("alive", [f is not None for f in found])
            for f in found:
                if f is not None and f.shape == (4,) and r.chance(0.3):
                    pool[r.int(0, 5)] = f
            r.see("saved", len(_SAVED))
            if _SAVED and r.chance(0.5):
                back = _SAVED.pop(r.int(0, len(_SAVED) - 1))
                r.see("revived", back)
                if back.shape == (4,):
                    pool[r.int(0, 5)] = back.to(r.device)
        elif kind == "graph":
            leaf = x.detach().clone().requires_grad_()
            z = (leaf * y.detach()).sin()
            leaf.circle = z  # type: ignore[attr-defined]
            references.append(weakref.ref(leaf))
            references.append(weakref.ref(z))
            if r.chance(0.6):
                z.sum().backward()
                pool[r.int(0, 5)] = leaf.grad  # type: ignore[assignment]
            if r.chance(0.3):
                pool[r.int(0, 5)] = z.detach()
            del leaf, z
        elif kind == "attribute":
            x.mine = r.one(y, x, [y], 3)  # type: ignore[attr-defined]
            r.see("attribute", isinstance(pool[at].mine, torch.Tensor))  # type: ignore[attr-defined]
        elif kind == "hook":
            leaf = x.detach().clone().requires_grad_()
            seen: list[torch.Tensor] = []
            leaf.register_hook(lambda g, keep=leaf, seen=seen: seen.append(g * keep))
            leaf.register_post_accumulate_grad_hook(lambda t: pool.__setitem__(0, t.grad.detach().clone()))
            (leaf * leaf).sum().backward()
            r.see("hooked", seen[0].detach())
            references.append(weakref.ref(leaf))
            del leaf, seen
        elif kind == "finalizer":
            weakref.finalize(r.one(x, x + 1), called.append, number)
        elif kind == "table":
            table[number] = x
            r.see("table", sorted(table))
        elif kind == "many":
            made = [x + n for n in range(r.int(1, 300))]
            order = list(range(len(made)))
            r._random.shuffle(order)
            for n in order[: len(order) // 2]:
                made[n] = None  # type: ignore[call-overload]
            pool[at] = next((m for m in made if m is not None), x)
        elif kind == "exception":
            try:
                local = x * 3
                pool[at] = local[:4] + local.new_ones(7)
            except RuntimeError as error:
                if r.chance(0.5):
                    stayed.append(error)
        elif kind == "generator":

            def each(x: torch.Tensor = x) -> Any:
                for _ in range(5):
                    x = x + 1
                    yield x

            stream = each()
            pool[at] = next(stream)
            if r.chance(0.5):
                stayed.append(stream)
        elif kind == "grad":
            leaf = x.detach().clone().requires_grad_()
            out = leaf * 2
            out.retain_grad()
            out.sum().backward()
            pool[r.int(0, 5)] = out.grad  # type: ignore[assignment]
            del leaf
            stayed.append(out)
        elif kind == "own":
            own = (x.detach() + 1).as_subclass(_Own)
            if r.chance(0.3):
                own.me = own  # type: ignore[attr-defined]
            del own
        elif kind == "data":
            z = x.detach().clone()
            z.data = y.detach()
            z.add_(1)
            pool[at] = z
            del z
        elif kind == "storage":
            storage = x.detach().untyped_storage()
            pool[at] = torch.empty(0, device=r.device).set_(storage)
            del storage
        else:
            r.see(f"tensor {at}", x.detach())
        if r.chance(0.05) and stayed:
            stayed.pop(r.int(0, len(stayed) - 1))
        pool = [p if p.shape == (4,) else p.detach().reshape(-1).new_ones(4) for p in pool]
        x = y = None  # type: ignore[assignment]
    for at, x in enumerate(pool):
        r.see(f"tensor {at} at the end", x.detach())
    r.see("called", sorted(called))
    stayed.clear()
    gc.collect()
    for at, saved in enumerate(_SAVED):
        r.see(f"saved {at}", saved)
