"""Threads that share tensors and have modes of their own: each sees what it sees alone."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from tests.conformance.scenario_fuzz import Run

_AROUND: dict[str, Any] = {
    "": lambda r: contextlib.nullcontext(),
    "no_grad": lambda r: torch.no_grad(),
    "inference": lambda r: torch.inference_mode(),
    "autocast": lambda r: torch.autocast(r.device.type, torch.bfloat16),
    "enable_grad": lambda r: torch.enable_grad(),
    "device": lambda r: torch.device(r.device),
}


def _work(r: Run, shared: list[torch.Tensor], whole: torch.Tensor, row: int) -> None:
    """One thread's program: it reads what all have, and writes its own row of `whole`."""
    mine = whole[row]
    generator = torch.Generator(device=r.device).manual_seed(r.seed)
    leaf = r.values([4, 4], torch.float32).requires_grad_()
    x = shared[0] + row
    for number in range(r.int(8, 40)):
        around = r.one("", "", *_AROUND)
        kind = r.one("op", "op", "op", "product", "grad", "write", "read", "random", "drop", "mask", "step", "many")
        y = r.one(*shared)
        with _AROUND[around](r):
            if kind == "op":
                x = r.one(
                    lambda: x + y, lambda: (x * 0.5).sin(), lambda: torch.maximum(x, y), lambda: x.mT.contiguous()
                )()
            elif kind == "product":
                x = F.linear(x, y).tanh().to(torch.float32)
            elif kind == "grad":
                (found,) = (
                    torch.autograd.grad(F.gelu(leaf @ y).float().sum(), leaf) if torch.is_grad_enabled() else (y,)
                )
                x = x + found.clone()
            elif kind == "write":
                with torch.no_grad():
                    mine.copy_(x.detach()[0])
            elif kind == "read":
                r.see(
                    f"read {number} {around}",
                    r.one(lambda: x.sum().item(), lambda: x[0].tolist(), lambda: bool(x[0, 0] > 0))(),
                )
            elif kind == "random":
                x = x + torch.randn(4, generator=generator, device=r.device)
            elif kind == "drop":
                x = r.values([4, 4], torch.float32)
                if r.chance(0.1):
                    gc.collect(0)
            elif kind == "mask":
                r.see(f"masked {number}", x[y > 0].detach().clone())
            elif kind == "step":
                p = torch.nn.Parameter(leaf.detach().clone())
                p.grad = y.clone()
                torch.optim.Adam([p], lr=0.1).step()
                x = x + p.detach()
            else:
                x = [x + n for n in range(r.int(2, 60))][-1]
        x = x.detach().clone() if not x.is_inference() else x.clone().detach() + 0
        r.see(
            f"mode {number}",
            [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")],
        )
    r.see("result", x)
    r.see("row", mine.detach().clone())


def threads(r: Run) -> None:
    """Run two to four threads; on the CPU one after the other."""
    shared = [r.values([4, 4], torch.float32) for _ in range(3)]
    count = r.int(2, 4)
    whole = torch.zeros(count, 4, device=r.device)
    parts = [r.part(number) for number in range(count)]
    raised: list[BaseException | None] = [None] * count

    def run(number: int) -> None:
        try:
            _work(parts[number], shared, whole, number)
            parts[number].end()
        except BaseException as error:
            raised[number] = error

    if r.device.type == "cpu":
        for number in range(count):
            run(number)
    else:
        started = [threading.Thread(target=run, args=(number,)) for number in range(count)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
    for error in raised:
        if error is not None:
            raise error
    r.see("whole", whole)
