"""Holds one entry of PyTorch's module database against the local device: three training steps, compared throughout."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.conformance.op_checks import SEED, Tally
from tests.conformance.reference import REFERENCE
from tests.conformance.twins import Twins

STEPS = 3


def check_module(info: Any, device: str) -> Tally:
    """Compares results, gradients of inputs and parameters, and what three steps of SGD make of the module."""
    tally = Tally()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for training in (True, False) if info.train_and_eval_differ else (True,):
            torch.manual_seed(SEED)
            inputs = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
            )
            for number, sample in enumerate(inputs):
                what = f"{'training' if training else 'evaluation'}, sample {number}"
                _check_sample(tally, info, sample, training, device, what)
    return tally


def _check_sample(tally: Tally, info: Any, sample: Any, training: bool, device: str, what: str) -> None:
    try:
        torch.manual_seed(SEED)
        arguments = sample.constructor_input
        original = info.module_cls(*arguments.args, **arguments.kwargs).to(torch.float32).train(training)
    except Exception:
        return

    def run(place: str) -> Any:
        module = copy.deepcopy(original).to(place)
        return lambda: _train(module, sample.forward_input, place)

    tally.check(what, lambda: run(REFERENCE)(), lambda: run(device)(), memory=False)


def _train(module: torch.nn.Module, forward: Any, place: str) -> Any:
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01) if parameters else None
    seen: list[Any] = []
    for _ in range(STEPS):
        args, kwargs = Twins(place).of((forward.args, forward.kwargs))
        module.zero_grad()
        result = module(*args, **kwargs)
        seen.append([leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)])
        roots = [leaf for leaf in seen[-1] if leaf.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.full_like(root, 0.5) for root in roots])
        inputs = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.is_leaf
        ]
        seen.append([leaf.grad for leaf in (*inputs, *parameters)])
        if optimizer is not None:
            optimizer.step()
    return seen, {name: value.detach() for name, value in module.state_dict().items()}
