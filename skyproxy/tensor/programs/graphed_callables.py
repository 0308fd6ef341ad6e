"""`torch.sky.make_graphed_callables`: functions and modules whose forward and backward are one replay each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from skyproxy.tensor.core.torch_private import pytree
from skyproxy.tensor.programs.graphs import SkyGraph, graph

Tensors = tuple[torch.Tensor, ...]


@dataclass
class _Graphed:
    """One callable on its way to being graphed.

    Attributes:
        function: what was passed in.
        args: its sample arguments, as passed.
        inputs: the same, flat, and then the parameters of a module: everything that can get a gradient.
        user_inputs: how many of the inputs are arguments.
        outputs, structure: what it returned when it was captured, flat, and how to put it together again.
        output_gradients: static tensors for the gradients that come in; None for outputs without.
        input_gradients: what the captured backward leaves; None for inputs without.
    """

    function: Callable[..., object]
    args: tuple[object, ...]
    inputs: Tensors
    user_inputs: int
    forward: SkyGraph
    backward: SkyGraph
    outputs: Tensors = ()
    structure: Any = None
    output_gradients: tuple[torch.Tensor | None, ...] = ()
    input_gradients: tuple[torch.Tensor | None, ...] = ()

    def differentiable(self) -> Tensors:
        """The inputs that want a gradient."""
        return tuple(tensor for tensor in self.inputs if tensor.requires_grad)

    def warm_up(self, times: int, allow_unused: bool) -> None:
        """Runs forward and backward a few times, so that nothing is new when they are captured."""
        for _ in range(times):
            outputs = [o for o in pytree.tree_leaves(self.function(*self.args)) if o.requires_grad]
            if outputs:
                gradients = [torch.empty_like(o) for o in outputs]
                torch.autograd.grad(outputs, self.differentiable(), gradients, allow_unused=allow_unused)

    def capture_forward(self, pool: object) -> None:
        with graph(self.forward, pool=pool):
            outputs = self.function(*self.args)
        leaves, self.structure = pytree.tree_flatten(outputs)
        self.outputs = tuple(leaves)

    def capture_backward(self, pool: object, allow_unused: bool) -> None:
        self.output_gradients = tuple(torch.empty_like(o) if o.requires_grad else None for o in self.outputs)
        outputs = [o for o in self.outputs if o.requires_grad]
        gradients: Iterable[torch.Tensor | None] = ()
        if outputs:
            with graph(self.backward, pool=pool):
                gradients = torch.autograd.grad(
                    outputs,
                    self.differentiable(),
                    [g for g in self.output_gradients if g is not None],
                    allow_unused=allow_unused,
                )
        found = iter(gradients)
        self.input_gradients = tuple(next(found) if outputs and i.requires_grad else None for i in self.inputs)


def make_graphed_callables(
    callables: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: object = None,
) -> Any:
    """Makes callables whose forward, and whose backward, are one replay of a captured graph each.

    As `torch.cuda.make_graphed_callables`: arguments must look like the sample ones, outputs are overwritten by the
    next call, Python in the callable runs only now.

    Args:
        callables: a function or module, or a tuple of them in the order in which they will run.
        sample_args: the arguments of each, a tuple of tensors; for a tuple of callables, a tuple of these.
        num_warmup_iters: how often each is run before it is captured.
        allow_unused_input: whether inputs without influence on the outputs are allowed.
        pool: for code written for CUDA.

    Returns:
        The graphed callables, in the shape of `callables`. Of a module, its `forward` is replaced while it is in the
        mode (training or evaluation) that it is in now.

    Raises:
        RuntimeError: autocast is on and caches its casts.
        ValueError: a module has hooks, or buffers that want gradients, or an argument is no tensor.
        CaptureError: something inside cannot be captured.
    """
    if torch.is_autocast_enabled("sky") and torch.is_autocast_cache_enabled():
        raise RuntimeError(
            "make_graphed_callables does not support the autocast caching. Please set `cache_enabled=False`."
        )
    single = not isinstance(callables, tuple)
    functions, samples = ((callables,), (sample_args,)) if single else (callables, sample_args)
    items = [_check(function, args) for function, args in zip(functions, samples, strict=True)]
    for item in items:
        item.warm_up(num_warmup_iters, allow_unused_input)
    for item in items:
        item.capture_forward(pool)
    for item in reversed(items):
        item.capture_backward(pool, allow_unused_input)
    results = tuple(_wrap(item) for item in items)
    return results[0] if single else results


def _check(function: Callable[..., object], args: tuple[object, ...]) -> _Graphed:
    parameters: Tensors = ()
    if isinstance(function, torch.nn.Module):
        if function._backward_hooks or function._forward_hooks or function._forward_pre_hooks:
            raise ValueError("a module must have no hooks when it is graphed; they can be added afterwards")
        if any(buffer.requires_grad for buffer in function.buffers()):
            raise ValueError("of a module that is graphed, only parameters may want gradients, not buffers")
        parameters = tuple(function.parameters())
    leaves = pytree.arg_tree_leaves(*args)
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise ValueError("the sample arguments of a graphed callable must be tensors")
    return _Graphed(function, args, (*leaves, *parameters), len(leaves), SkyGraph(), SkyGraph())


def _fill(static: torch.Tensor, value: torch.Tensor) -> None:
    if static.data_ptr() != value.data_ptr():
        static.copy_(value)


def _autograd_function(item: _Graphed) -> type[torch.autograd.Function]:
    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, *inputs: torch.Tensor) -> Tensors:
            for static, value in zip(item.inputs[: item.user_inputs], inputs, strict=False):
                _fill(static, value)
            item.forward.replay()
            outputs = tuple(output.detach() for output in item.outputs)
            ctx.mark_non_differentiable(
                *(output for output, static in zip(outputs, item.output_gradients, strict=True) if static is None)
            )
            return outputs

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            for static, value in zip(item.output_gradients, gradients, strict=True):
                if static is not None:
                    _fill(static, value)
            if any(gradient is not None for gradient in item.input_gradients):
                item.backward.replay()
            return tuple(None if g is None else g.detach() for g in item.input_gradients)

    return Graphed


def _wrap(item: _Graphed) -> Callable[..., object]:
    function = _autograd_function(item)
    parameters = item.inputs[item.user_inputs :]

    def graphed(*args: object) -> Any:
        outputs = function.apply(*pytree.arg_tree_leaves(*args), *parameters)
        return pytree.tree_unflatten(outputs, item.structure)

    module = item.function
    if not isinstance(module, torch.nn.Module):
        return graphed
    original, mode = module.forward, module.training

    def forward(*args: object, **kwargs: object) -> object:
        return graphed(*args, **kwargs) if module.training == mode else original(*args, **kwargs)

    module.forward = forward
    return module
