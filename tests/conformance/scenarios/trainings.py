"""Trainings whose modules, optimizers, modes and random states change on the way."""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_swa_avg_fn

if TYPE_CHECKING:
    from tests.conformance.scenario_fuzz import Run

_OPTIMIZERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "SGD": {"momentum": (0, 0.9)},
    "Adam": {"amsgrad": (False, True)},
    "AdamW": {"weight_decay": (0, 0.1)},
    "RMSprop": {"centered": (False, True)},
    "Adagrad": {"lr_decay": (0, 0.1)},
    "NAdam": {},
    "Rprop": {},
    "ASGD": {},
    "Adafactor": {},
    "LBFGS": {"max_iter": (2, 3)},
}


def _model(r: Run) -> nn.Module:
    with torch.device("cpu"):
        made = nn.Sequential(
            nn.Linear(4, 6),
            r.one(nn.Tanh, nn.GELU, nn.ReLU)(),
            r.one(lambda: nn.BatchNorm1d(6), lambda: nn.LayerNorm(6), lambda: nn.Dropout(0.3))(),
            nn.Linear(6, 4),
        )
        if r.chance(0.2):
            made[3] = nn.Linear(6, 4, bias=False)
            made[3].weight = nn.Parameter(made[0].weight.detach().t().clone())
        if r.chance(0.2):
            made.append(nn.Linear(4, 4))
            made.append(made[-1])
    for parameter in made.parameters():  # drawn here, whatever the random states are
        parameter.data = r.values(list(parameter.shape), torch.float32).cpu()
    torch.manual_seed(r.seed)  # the CPU's generator has drawn on both sides, and is the device's on one
    return made.to(r.device)


def _optimizer(r: Run, model: nn.Module) -> torch.optim.Optimizer:
    name = r.one(*_OPTIMIZERS)
    options = {key: r.one(*values) for key, values in _OPTIMIZERS[name].items()}
    if isinstance(options.get("lr"), torch.Tensor):
        options["lr"] = options["lr"].clone()
    if name != "LBFGS":  # what is chosen where nothing is said depends on the device
        options["foreach"] = r.chance(0.5)
    if name == "Adam" and not options["foreach"] and r.chance(0.5):
        options["lr"] = torch.tensor(0.01)
    kind: Any = getattr(torch.optim, name)
    return kind(model.parameters(), **{"lr": 0.01, **options})


def _step(r: Run, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, parts: int) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=to_none)
        total = x.new_zeros(())
        for piece in x.chunk(parts):
            loss = F.mse_loss(model(piece.to(next(model.parameters()).dtype)).float(), piece)
            loss.backward()
            total = total + loss.detach()
        if clip == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        elif clip == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.1, foreach=False)
        return total

    to_none, clip = r.chance(0.6), r.one("", "", "norm", "value")
    if isinstance(optimizer, torch.optim.LBFGS) or r.chance(0.3):
        return optimizer.step(closure)
    found = closure()
    optimizer.step()
    return found


def _changed(r: Run, model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> Any:
    """Change something; the model and the optimizer to go on with."""
    first = model[0]  # type: ignore[index]
    if kind == "deepcopy":
        model = copy.deepcopy(model)
        return model, _optimizer(r, model)
    if kind == "pickle":
        model = pickle.loads(pickle.dumps(model))
        return model, _optimizer(r, model)
    if kind == "together":
        return copy.deepcopy((model, optimizer))
    if kind in ("assign", "load"):
        state = {key: value.detach().clone() * 1.5 for key, value in model.state_dict().items()}
        model.load_state_dict(state, assign=kind == "assign")
        return (model, _optimizer(r, model)) if kind == "assign" else (model, optimizer)
    if kind == "save":
        file = io.BytesIO()
        torch.save({"m": model.state_dict(), "o": optimizer.state_dict()}, file)
        file.seek(0)
        state = torch.load(file, weights_only=True, map_location=r.one(None, "cpu", r.device))
        model.load_state_dict(state["m"])
        optimizer.load_state_dict(state["o"])
    elif kind == "dtype":
        model.to(r.one(torch.float64, torch.bfloat16)).to(torch.float32)
    elif kind == "double":
        model.double()
    elif kind == "float":
        model.float()
    elif kind == "elsewhere":
        model.cpu()
        model.to(r.device)
    elif kind == "freeze":
        r.one(*model.parameters()).requires_grad_(r.chance(0.5))
    elif kind == "group":
        extra = nn.Linear(4, 4, bias=False, device=r.device)
        with torch.no_grad():
            extra.weight.fill_(0.1)
        model.append(extra)  # type: ignore[operator]
        optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.02})
    elif kind == "parametrize":
        if parametrize.is_parametrized(first):
            parametrize.remove_parametrizations(first, "weight", leave_parametrized=True)
        else:
            r.one(parametrizations.weight_norm, parametrizations.orthogonal)(first)
        return model, _optimizer(r, model)
    elif kind == "rate":
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(0.5)
            else:
                group["lr"] *= 0.5
    elif kind == "tie":
        model.append(nn.Linear(4, 4, device=r.device))  # type: ignore[operator]
        model[-1].weight = nn.Parameter(r.values([4, 4], torch.float32))  # type: ignore[index]
        model.append(model[-1])  # type: ignore[index,operator]
        return model, _optimizer(r, model)
    elif kind == "mode":
        model.train(r.chance(0.6))
    elif kind == "data":
        first.bias.data = r.values([6], torch.float32)
    elif kind == "buffers":
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.clone())
    elif kind == "seed":
        torch.manual_seed(r.int(0, 9))
    elif kind == "fork":
        with torch.random.fork_rng(devices=[0] if r.device.type != "cpu" else [], device_type="sky"):
            torch.manual_seed(3)
            r.see("forked", torch.rand(3, device=r.device))
    elif kind == "random":
        r.see("random", torch.randn(3, device=r.device))
    return model, optimizer


_KINDS = (
    *("deepcopy", "pickle", "together", "assign", "load", "save", "dtype", "double", "float", "elsewhere", "freeze"),
    *("group", "parametrize", "rate", "tie", "mode", "data", "buffers", "seed", "fork", "random"),
)


def trainings(r: Run) -> None:
    """Train a small network, and change something about it after each step."""
    model = _model(r)
    optimizer = _optimizer(r, model)
    average: Any = None
    if r.chance(0.4):
        average = AveragedModel(model, avg_fn=r.one(get_swa_avg_fn, lambda: get_ema_avg_fn(0.9))())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if r.chance(0.3) else None
    x = r.values([6, 4], torch.float32)
    for number in range(r.int(3, 12)):
        loss = r.attempt(
            f"step {number}",
            lambda: _step(r, model, optimizer, x, r.int(1, 2)),
        )
        r.see(f"loss {number}", loss if isinstance(loss, torch.Tensor) else "none")
        if average is not None:
            r.attempt("average", lambda: average.update_parameters(model))
        if scheduler is not None and r.chance(0.5):
            scheduler.step()
        if r.chance(0.6):
            kind = r.one(*_KINDS)
            found = r.attempt(f"{kind} {number}", lambda kind=kind: _changed(r, model, optimizer, kind))
            model, optimizer = found if found is not None else (model, optimizer)
    for whole in (model, average):
        for name, value in whole.state_dict().items() if whole is not None else ():
            r.see(f"{name} at the end", value)
    for number, state in enumerate(optimizer.state.values()):
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                r.see(f"state {number} {name}", value)
