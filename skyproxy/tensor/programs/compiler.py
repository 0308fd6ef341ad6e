"""`torch.compile` for remote tensors: each graph is shipped once, run on the worker, and called with one command.

`torch.compile(model, backend="sky")` and plain `torch.compile(model)` come here; gradients are AOTAutograd's, a forward
and a backward graph. Options, `options={"worker": ...}`: "inductor" compiles on the worker and fails where that cannot
be; "eager" runs the graph there op by op, with the very results of uncompiled code; "auto", the default, compiles where
the worker can.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from skyproxy.errors import ConfigurationError, UnsupportedOpError
from skyproxy.tensor.core.devices import DEVICES, SkyDevice
from skyproxy.tensor.core.torch_private import HigherOrderOperator, disable_current_modes, load_aot_autograd

logger = logging.getLogger("skyproxy")

WORKER_MODES = ("auto", "eager", "inductor")
_troubles: dict[tuple[str, str], str] = {}


def sky_backend(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    options: dict[str, object] | None = None,
    **unused: object,
) -> Callable[..., object]:
    """Compiles a graph that Dynamo found; the backend that is registered as "sky".

    Args:
        module: the graph.
        example_inputs: what it will be called with, fake or real.
        options: `{"worker": "auto" | "eager" | "inductor"}`.

    Raises:
        ConfigurationError: an unknown option, or "inductor" on a worker that cannot compile.
    """
    mode = _mode_of(options)
    if not touches_sky(module, example_inputs):
        return module.forward
    from functorch.compile import default_partition, min_cut_rematerialization_partition

    mode = _settle(mode, _devices_of(module, example_inputs))
    lower = _Lowering(mode)
    # Op by op, computing a value twice costs more than keeping it; compiled, it is the other way round.
    partition = default_partition if mode == "eager" else min_cut_rematerialization_partition
    compiled: Callable[..., object] = load_aot_autograd()(
        fw_compiler=lower,
        bw_compiler=lower,
        inference_compiler=lower,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )(module, example_inputs)
    return compiled


def _mode_of(options: dict[str, object] | None) -> str:
    options = options or {}
    unknown = sorted(set(options) - {"worker"})
    mode = options.get("worker", "auto")
    if unknown or mode not in WORKER_MODES:
        what = f"option {unknown[0]!r}" if unknown else f"worker={mode!r}"
        raise ConfigurationError(f'{what} is unknown. Use options={{"worker": "auto"}}, "eager" or "inductor".')
    return str(mode)


def _settle(mode: str, devices: list[SkyDevice]) -> str:
    """Decide what "auto" means for these workers. Asks each worker once in its life."""
    if mode == "eager":
        return mode
    for device in devices:
        key = (device.session.welcome.session, device.place[0])
        if key not in _troubles:
            _troubles[key] = device.session.call("compiler_trouble", device.place)
            if _troubles[key] and mode == "auto":
                logger.warning(
                    "skyproxy: the worker of sky:%d cannot compile (%s); graphs are sent there whole and run op by op.",
                    device.index,
                    _troubles[key],
                )
        if _troubles[key]:
            if mode == "inductor":
                raise ConfigurationError(
                    f"the worker of sky:{device.index} cannot compile: {_troubles[key]}. "
                    'Use options={"worker": "eager"}.'
                )
            return "eager"
    return mode


def touches_sky(module: torch.fx.GraphModule, example_inputs: Sequence[object]) -> bool:
    """Return whether any tensor of a graph is, or will be, on a `sky` device."""
    return bool(_devices_of(module, example_inputs))


def _devices_of(module: torch.fx.GraphModule, example_inputs: Sequence[object]) -> list[SkyDevice]:
    found: dict[torch.device, None] = {}
    for value in example_inputs:
        if isinstance(value, torch.Tensor) and value.device.type == "sky":
            found[value.device] = None
    for node in module.graph.nodes:
        value = node.meta.get("val", node.meta.get("example_value"))
        for item in (value, *node.args, *node.kwargs.values()):
            place = getattr(item, "device", None) if isinstance(item, torch.Tensor) else item
            if isinstance(place, str) and place.partition(":")[0] == "sky":
                place = torch.device(place)
            if isinstance(place, torch.device) and place.type == "sky":
                found[place] = None
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "sky":
            found[tensor.device] = None
    return [DEVICES.of(place) for place in found]


class _Lowering:
    """Makes calls of the graphs that AOTAutograd hands over."""

    def __init__(self, mode: str) -> None:
        self._mode = mode

    def __call__(self, module: torch.fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
        from skyproxy.tensor.programs import compiler_ir
        from skyproxy.tensor.programs.compiled_call import CompiledCall

        compiler_ir.spell_in_aten(module)
        compiler_ir.keep_precision_of_statistics(module)
        try:
            if self._mode == "eager":
                compiler_ir.write_in_place(module)
            program = compiler_ir.program_of(module)
            if not program.devices:
                return _box(module)
            if len({id(device.session) for device in program.devices.values()}) > 1:
                raise UnsupportedOpError("its tensors are on several workers")
            return CompiledCall(program, {"worker": self._mode}).boxed()
        except UnsupportedOpError as error:
            logger.warning("skyproxy: a compiled graph is run op by op from here: %s", error)
            return _box(module)


def _box(module: torch.fx.GraphModule) -> Callable[..., object]:
    nodes = module.graph.nodes
    # The first call is watched by a mode of AOTAutograd, which does not let these be answered by a tensor's class.
    watched = any(isinstance(node.target, HigherOrderOperator) for node in nodes)

    def run(args: list[object]) -> object:
        inputs = list(args)
        args.clear()
        with disable_current_modes() if watched else contextlib.nullcontext():
            return module.forward(*inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def compile_report(device: torch.device | str | int | None = None) -> dict[str, Any]:
    """Return how a worker runs the graphs that this process compiled for it. Waits.

    Returns:
        graphs: how many it holds; eager, inductor: how many of them ran that way; troubles: why some were not compiled.
    """
    report: dict[str, Any] = DEVICES.of(device).session.call("compile_report")
    return report
