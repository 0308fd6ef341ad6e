"""Compares the list of replacements with what differs in PyTorch and Python; `test_patches.py` runs it as a process.

Prints what it found as JSON in its last line. Everything is looked at as it lies there, without calling any of it.
"""

from __future__ import annotations

import functools
import importlib
import json
import pickle
import signal
import sys
import tempfile
import threading
import types
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.nn.attention.flex_attention
import torch.utils.data
from torch.fx.experimental import proxy_tensor

_PACKAGES = ("torch", "safetensors")
_STANDARD = (signal, threading, pickle, warnings, sys, importlib, tempfile)
_CHANGING = {"__slotnames__", "__warningregistry__", "__abstractmethods__", "last_traceback", "last_value", "last_type"}
"""Attributes that Python itself sets."""
_MADE_ANEW = {"torch._dynamo.trace_rules.SKIP_DIRS_RE"}
"""What functions of PyTorch that are listed themselves make anew."""
_ROOT = Path(__file__).resolve().parents[2]
_OURS = (str(_ROOT / "skyproxy"), str(_ROOT / "skyproxy_server"))
Snapshot = dict[int, tuple[Any, dict[str, Any]]]
"""Modules, classes and the setters of `torch.backends` by their id, each with its attributes."""


def owners() -> dict[int, Any]:
    """Everything whose attributes are compared."""
    found: dict[int, Any] = {id(module): module for module in _STANDARD}
    found[id(threading.Thread)] = threading.Thread
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _PACKAGES and isinstance(module, types.ModuleType):
            found[id(module)] = module
            for value in (*vars(module).values(), *vars(type(module)).values()):
                kind = isinstance(value, type) and str(value.__module__).partition(".")[0] in _PACKAGES
                if kind or type(value) is torch.backends.ContextProp:
                    found[id(value)] = value
    return found


def snapshot() -> Snapshot:
    """The attributes of everything."""
    return {key: (owner, dict(vars(owner))) for key, owner in owners().items()}


def is_ours(value: Any) -> bool:
    """Tell whether a function, a class or an object is skyproxy's, whatever name it goes by."""
    value = getattr(value, "__func__", value)
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, functools.partial):
        value = value.func
    code = getattr(value, "__code__", None)
    if isinstance(code, types.CodeType):
        return code.co_filename.startswith(_OURS)
    kind = value if isinstance(value, type) else type(value)
    return str(getattr(kind, "__module__", "")).startswith(("skyproxy.", "skyproxy_server."))


def differences(before: Snapshot, after: Snapshot) -> dict[tuple[int, str], tuple[str, Any, Any]]:
    """Each attribute that has another value, is new or is gone, with its place and both values; `None` for none.

    Counters and submodules, which change as PyTorch is used, are left out.
    """
    found = {}
    for key, (owner, now) in after.items():
        had = before[key][1] if key in before else {name: None for name, v in now.items() if is_ours(v)}
        place = owner.__name__ if isinstance(owner, types.ModuleType) else getattr(owner, "__module__", "")
        if str(place).startswith("torch.sky"):
            continue  # ours from top to bottom
        for name in {**had, **now}:
            old, new = had.get(name), now.get(name)
            if key not in before and name not in had:
                continue
            counter = type(old) is int and type(new) is int
            submodule = old is None and isinstance(new, types.ModuleType) and new.__name__ != "torch.sky"
            if old is not new and name not in _CHANGING and not counter and not submodule:
                found[key, name] = (f"{getattr(owner, '__name__', owner)}.{name}", old, new)
    return found


def compare(before: Snapshot, after: Snapshot) -> dict[str, list[str]]:
    """What differs and is not listed, and what is listed and does not differ."""
    from skyproxy import patching

    changed = differences(before, after)
    listed: dict[tuple[int, str], Any] = {}
    wrong: list[str] = []
    for patch in patching.PATCHES:
        if patch.owner is None:
            continue
        first = (id(patch.owner), patch.name) not in listed
        listed[id(patch.owner), patch.name] = patch
        if id(patch.owner) in before and first:
            had = before[id(patch.owner)][1].get(patch.name, patching.ABSENT)
            if patch.original is not had:
                wrong.append(f"{patch.place}: the original is not what was there")
    for patch in listed.values():
        if vars(patch.owner).get(patch.name) is not patch.replacement:
            wrong.append(f"{patch.place}: listed, and not replaced")
    stand_ins = {id(patch.replacement) for patch in listed.values()}
    unlisted = [
        place
        for key, (place, _, _) in changed.items()
        if key not in listed and key[0] not in stand_ins and place not in _MADE_ANEW
    ]
    same = [patch.place for key, patch in listed.items() if key not in changed and id(patch.owner) in before]
    return {"unlisted": unlisted, "wrong": wrong, "not different": same}


def whens() -> list[str]:
    """The moments of everything listed."""
    from skyproxy import patching

    return sorted({patch.when.name for patch in patching.PATCHES})


def after_undoing(before: Snapshot, left: list[str]) -> dict[str, list[str]]:
    """What differs still and was not announced, and whatever of ours is anywhere."""
    from skyproxy import patching

    stays = {(id(p.owner), p.name) for p in patching.PATCHES if p.stays}
    changed = differences(before, snapshot())
    return {
        "unannounced": [place for key, (place, _, _) in changed.items() if key not in stays],
        "not told": [patch.place for patch in patching.PATCHES if patch.place not in left],
    }


def train_on_the_cpu() -> float:
    """A little of everything that skyproxy had a hand in, on the CPU; returns a loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LazyLinear(2))
    data = torch.utils.data.TensorDataset(torch.ones(6, 4))
    loss = torch.zeros(())
    model(torch.ones(1, 4))
    optimizer = torch.optim.Adam(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no accelerator that memory could be pinned for
        batches = list(torch.utils.data.DataLoader(data, batch_size=3, pin_memory=True))
    for (batch,) in batches:
        with torch.autocast("cpu"):
            loss = model(batch).sum()
        optimizer.zero_grad()
        loss.float().backward()
        optimizer.step()
    with tempfile.TemporaryFile() as file:
        torch.save(model.state_dict(), file)
        file.seek(0)
        model.load_state_dict(torch.load(file))
    torch.randn(2, generator=torch.Generator().manual_seed(1))
    torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(torch.float32)
    torch.from_dlpack(torch.utils.dlpack.to_dlpack(torch.ones(2)))
    proxy_tensor.make_fx(torch.tanh)(torch.ones(2))
    model.double().to("cpu")
    return float(loss.detach())


def main() -> None:
    """Take a program through all moments; print what was found at each."""
    importlib.import_module("safetensors.torch")
    found: dict[str, Any] = {}
    handler = signal.getsignal(signal.SIGINT)
    found["loss before"] = train_on_the_cpu()
    before = snapshot()
    import skyproxy

    found["import"] = {"whens": whens(), **compare(before, snapshot())}
    found["loss beside"] = train_on_the_cpu()
    found["sum"] = float((torch.ones(2, device="sky:0") + 1).sum())
    found["first tensor"] = {"whens": whens(), **compare(before, snapshot())}
    skyproxy.launch_local()
    torch.sky.set_device(1)  # type: ignore[attr-defined]
    found["there"] = str(torch.ones(2).to("sky").device)
    found["another device"] = {"whens": whens(), **compare(before, snapshot())}

    left = skyproxy.uninstall()
    found["uninstalled"] = {"left": left, **after_undoing(before, left)}
    found["the handler is the program's"] = signal.getsignal(signal.SIGINT) is handler
    found["finders"] = [str(finder) for finder in sys.meta_path if type(finder).__module__.startswith("skyproxy")]
    found["loss after"] = train_on_the_cpu()
    try:
        torch.ones(2, device="sky:0")
        found["the device"] = "is there"
    except (NotImplementedError, ModuleNotFoundError):  # by the version of torch
        found["the device"] = "is gone"

    skyproxy.install()
    found["sum again"] = float((torch.ones(2, device="sky:0") + 1).sum())
    found["installed again"] = {"whens": whens(), **compare(before, snapshot())}
    left = skyproxy.uninstall()
    found["uninstalled again"] = {"left": left, **after_undoing(before, left)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
