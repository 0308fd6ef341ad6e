"""Presents remote tensors to PyTorch's compiler as tensors of an accelerator, and sends their graphs to us.

The only place that touches Dynamo. It sees a tensor subclass with a dispatcher of its own as something foreign; but a
remote tensor is to be compiled like a tensor of any device: guarded, made fake on `sky:k`, and an input of the graph.
Tried on torch 2.13, where it needs two functions of Dynamo replaced, and none of ours on the hot path changed.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from skyproxy import patching, torch_versions
from skyproxy.import_watcher import when_imported
from skyproxy.patching import When
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.generators import KeptRandomState, SkyGenerator
from skyproxy.tensor.core.remote_tensor import OWN_CLASSES, RemoteTensor
from skyproxy.tensor.core.torch_private import disable_current_modes
from skyproxy.tensor.dispatch import memoized_calls
from skyproxy.tensor.programs import compiler
from skyproxy.tensor.torch_api import distributions, sky_module

_FIRST_RUNS = "torch._functorch._aot_autograd.runtime_wrappers"
_TESTS = "tests/tensor/programs/test_compile.py"
_inlined = {Path(str(module.__file__)).as_posix() for module in (memoized_calls, distributions)}


def trace_through(file: str) -> None:
    """Have Dynamo trace through what this file of ours wraps around functions of others, as if it were not there."""
    _inlined.add(Path(file).as_posix())
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and patching.is_replaced(rules, "clear_lru_cache"):
        rules.get_mod_inlinelist().update(_inlined)


def _teach(dynamo: Any) -> None:
    """Patches Dynamo; called once, when it has been imported."""
    builder = importlib.import_module("torch._dynamo.variables.builder")
    for owner, name, make in (
        (builder.VariableBuilder, "_wrap", _wrapping_remote),
        (builder, "infer_subclass_type", _inferring_remote),
    ):
        patching.wrap(
            owner,
            name,
            make,
            why="Dynamo takes a remote tensor for a plain one, not for a class that it should trace",
            test=f"{_TESTS}::test_a_training_step_is_one_graph_and_few_commands",
            when=When.DYNAMO,
        )
    fake_tensor = importlib.import_module("torch._subclasses.fake_tensor")
    if hasattr(fake_tensor, "_is_privateuse1_backend_available"):  # 2.11 does not ask
        patching.replace(
            fake_tensor,
            "_is_privateuse1_backend_available",
            lambda: False,  # asked for nothing but this, and only on machines without an accelerator of their own
            why="`torch.tensor(1.0, device='sky')` in traced code would make a tensor on the worker while it is traced",
            test=f"{_TESTS}::test_nested_functions_and_closures",
            when=When.DYNAMO,
        )
    patching.wrap(
        importlib.import_module("torch._subclasses.meta_utils").ViewFunc,
        "from_tensor",
        _replaying_strides,
        why="fakes of jagged rows would repeat the steps of their values' view, whose numbers have no source",
        test="tests/tensor/torch_api/test_dynamo.py::test_jagged_rows_of_a_view_are_compiled_once",
        when=When.DYNAMO,
    )
    _run_higher_order_ops()
    _keep_random_states()
    when_imported(_FIRST_RUNS, _run_below_analysis)
    dynamo.register_backend(compiler.sky_backend, name="sky")
    backends = importlib.import_module("torch._dynamo.backends.registry")
    patching.registered(
        "torch._dynamo.register_backend",
        lambda: [table.pop("sky", None) for table in (backends._COMPILER_FNS, backends._BACKENDS)],
        why='`torch.compile(..., backend="sky")`',
        test=f"{_TESTS}::test_training_is_bit_equal_to_local_cpu",
        when=When.DYNAMO,
    )
    _leave_out_own_frames()
    _name_methods()


def _name_methods() -> None:
    """Give methods of remote tensors the names that they have there: by these, Dynamo knows a method of a tensor."""
    for kind in OWN_CLASSES:
        for name, method in vars(kind).items():
            if isinstance(method, FunctionType):
                method.__name__ = name


def _leave_out_own_frames() -> None:
    """Keep Dynamo from compiling what we do on the way: it is called with each frame that Python begins."""
    rules = importlib.import_module("torch._dynamo.trace_rules")
    before = len(rules.SKIP_DIRS)
    rules.add("skyproxy")
    # Except for what we wrap around functions of the user and of PyTorch: Dynamo is to trace through that.
    rules.get_mod_inlinelist().update(_inlined)

    def undo() -> None:
        for name in rules.SKIP_DIRS[before:]:
            if Path(name).name.startswith("skyproxy"):
                rules.SKIP_DIRS.remove(name)
        rules._recompile_re()
        rules.get_mod_inlinelist().difference_update(_inlined)

    why = "Dynamo would trace our own code, and looks through what is put around functions of the user"
    test = "tests/tensor/torch_api/test_dynamo.py::test_our_own_frames_are_not_compiled"
    patching.registered("torch._dynamo.trace_rules.add", undo, why=why, test=test, when=When.DYNAMO)

    def clearing(clear: Callable[[], None]) -> Callable[[], None]:
        def clear_but_for_ours() -> None:
            clear()
            rules.get_mod_inlinelist().update(_inlined)

        return clear_but_for_ours

    # `init_process_group` makes it anew.
    patching.wrap(rules, "clear_lru_cache", clearing, why=why, test=test, when=When.DYNAMO)


def _wrapping_remote(wrap: Callable[..., object]) -> Callable[..., object]:
    def wrap_remote(self: Any, value: object) -> object:
        if type(value) in OWN_CLASSES:
            return self.wrap_tensor(value)
        # As one of PyTorch's own class: what draws from it is left out of the graph.
        return self.wrap_user_defined(value) if isinstance(value, SkyGenerator) else wrap(self, value)

    return wrap_remote


def _inferring_remote(infer: Callable[..., object]) -> Callable[..., object]:
    def infer_remote(value: object) -> object:
        return None if type(value) in OWN_CLASSES else infer(value)

    return infer_remote


def _replaying_strides(from_tensor: Callable[[torch.Tensor], object]) -> object:
    """Have a fake of jagged rows made of a fake of their base by one step, as for tensors of C++: sizes and strides.

    For tensors of Python, C++ keeps the steps of a view (`view(-1, 2, 4)`, then the rows). Each number in them becomes
    a symbol, and one that says less than a size is guarded without a source: an internal error.
    """
    nested = importlib.import_module("torch.nested._internal.nested_tensor")

    @functools.wraps(from_tensor)
    def from_remote(tensor: Any) -> object:
        base = tensor._base if type(tensor) is nested.NestedTensor else None
        if type(base) is not RemoteTensor or base.dtype is not tensor._values.dtype:
            return from_tensor(tensor)
        values, lengths = tensor._values, tensor._metadata_cache
        with disable_current_modes():
            tensor = torch._nested_view_from_jagged(
                base.as_strided(values.size(), values.stride(), values.storage_offset()),
                tensor._offsets,
                nested._nt_view_dummy(),
                tensor._lengths,
                tensor._ragged_idx,
                lengths.get("min_seqlen"),
                lengths.get("max_seqlen"),
            )
        return from_tensor(tensor)

    return staticmethod(from_remote)


def _run_higher_order_ops() -> None:
    """Lets `torch.cond` and its like run on remote tensors, by their ordinary kernels: Python that calls ops."""
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    ours: list[Any] = []
    for op in list(torch._ops._higher_order_ops.values()):
        kernel = op.py_kernels.get(key)
        if kernel is not None and RemoteTensor not in op.python_key_table:
            op.py_impl(RemoteTensor)(kernel)
            ours.append(op.python_key_table)
    patching.registered(
        "kernels of `torch.cond` and its like",
        lambda: [table.pop(RemoteTensor, None) for table in ours],
        why="they run on remote tensors as on plain ones, by the kernels that call ops",
        test=f"{_TESTS}::test_conditions_on_values_are_run_op_by_op",
        when=When.DYNAMO,
    )


def _keep_random_states() -> None:
    """Have compiled checkpoints draw again what they drew: their graphs take a state, and go back to it for one op."""
    prims = importlib.import_module("torch._prims.rng_prims")

    def device_of(args: tuple[object, ...]) -> torch.device:
        return next(a.device for a in args if isinstance(a, RemoteTensor))

    def save_and_run(op: Callable[..., object], *args: object, **kwargs: object) -> tuple[torch.Tensor, object]:
        return sky_module.get_rng_state(device_of(args)), op(*args, **kwargs)

    def run_again(state: torch.Tensor, op: Callable[..., object], *args: object, **kwargs: object) -> object:
        device = device_of(args)
        before = KeptRandomState(DEVICES.of(device))
        sky_module.set_rng_state(state, device)
        try:
            return op(*args, **kwargs)
        finally:
            before.restore()

    for op, kernel in ((prims.run_and_save_rng_state, save_and_run), (prims.run_with_rng_state, run_again)):
        op.py_impl(RemoteTensor)(kernel)
        patching.registered(
            f"kernel of `{op.name()}`",
            functools.partial(op.python_key_table.pop, RemoteTensor, None),
            why="a compiled checkpoint draws again what it drew, on devices that PyTorch lists",
            test="tests/tensor/torch_api/test_dynamo.py::test_a_checkpoint_draws_again_what_it_drew",
            when=When.DYNAMO,
        )


def _run_without_mode(op: Callable[..., object], mode: object, *args: object, **kwargs: object) -> object:
    return op(*args, **kwargs)


def _run_below_analysis(module: ModuleType) -> None:
    """Lets the first run of compiled code come to our kernels of higher-order ops.

    Its mode that looks for aliases answers `NotImplemented` for any class of tensors, and PyTorch takes that for the
    result. Of what the ops call, the mode sees nothing for other tensors either.
    """
    mode = getattr(module, "_AnalyzeCustomOpInputOutputMode", None)
    if mode is None or torch_versions.minor(torch.__version__) < (2, 14):  # up to 2.13, the ops come to us all the same
        return
    ops: list[Any] = [op for op in torch._ops._higher_order_ops.values() if RemoteTensor in op.python_key_table]
    for op in ops:
        op.py_impl(mode)(functools.partial(_run_without_mode, op))
    patching.registered(
        "kernels of `torch.cond` and its like, for the first run of compiled code",
        lambda: [op.python_key_table.pop(mode, None) for op in ops],
        why="PyTorch takes the `NotImplemented` of the mode that looks for aliases for the op's result",
        test="tests/tensor/torch_api/test_dynamo.py::test_a_checkpoint_draws_again_what_it_drew",
        when=When.DYNAMO,
    )


def _admit_to_flex_attention(module: object) -> None:
    """Lets `flex_attention` take remote tensors, which are not on its list of devices. It is made of ordinary ops.

    Raises:
        ConfigurationError: this torch checks devices in another way.
    """
    patching.wrap(
        module,
        "_validate_device",
        _admitting_sky,
        why="`flex_attention` has a list of devices; it is made of ordinary ops",
        test="tests/tensor/ops/test_flex_attention.py::test_the_result_is_that_of_the_cpu",
        when=When.FLEX_ATTENTION,
    )


def _admitting_sky(check: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(check)
    def validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != "sky":
            check(query, key, value)

    return validate_device


def _compile_fx(self: object, model_: Any, inputs_: Sequence[object], **options: object) -> object:
    """Compile a graph as plain `torch.compile` does: inductor here, unless its tensors are remote.

    Args:
        options: of inductor; torch 2.11 has none.
    """
    if compiler.touches_sky(model_, inputs_):
        return compiler.sky_backend(model_, inputs_)
    return _plain_compile_fx(self, model_, inputs_, **options)


_plain_compile_fx: Callable[..., object]


def _coerce(self: RemoteTensor, expected_metadata: object, expected_type: object = torch.Tensor) -> RemoteTensor | None:
    """A gradient that comes into compiled code: equivalent to a plain tensor, and to no wrapper of several."""
    return self if expected_type is torch.Tensor else None


def install() -> None:
    """Teaches Dynamo about remote tensors, now or when it is imported.

    Raises:
        ConfigurationError: this torch compiles in another way.
    """
    global _plain_compile_fx
    patching.require(torch, "_TorchCompileInductorWrapper")
    _plain_compile_fx = patching.wrap(
        torch._TorchCompileInductorWrapper,
        "__call__",
        lambda plain: _compile_fx,
        why="plain `torch.compile` of a graph with remote tensors compiles it on the worker",
        test=f"{_TESTS}::test_plain_torch_compile_comes_to_us",
    )
    RemoteTensor.__coerce_same_metadata_as_tangent__ = _coerce  # type: ignore[attr-defined]
    sky_module.MODULE.__dict__.update(compile_report=compiler.compile_report)
    when_imported("torch._dynamo", _teach)
    when_imported("torch.nn.attention.flex_attention", _admit_to_flex_attention)
