"""Ops that are not simply recorded: some are answered or divided here, some need values that PyTorch reads itself.

What moves values is in `copies`, attention in `attention`.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor

from skyproxy import patching
from skyproxy.errors import UnsupportedOpError
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.remote_tensor import RemoteTensor, make_view
from skyproxy.tensor.core.storage import root_of
from skyproxy.tensor.core.torch_private import (
    DispatchKey,
    OpOverload,
    SetExcludedKey,
    broadcast_two,
    checks_sparse_invariants,
    has_kernel,
    has_modes_or_transforms,
    maybe_resize_out,
    op_names_with_kernel,
    safe_copy_out,
    set_sparse_invariant_checks,
)
from skyproxy.tensor.dispatch.binding import BoundCall
from skyproxy.tensor.dispatch.hot_path import dispatch_remote
from skyproxy.tensor.dispatch.kernels import kernel
from skyproxy.tensor.dispatch.mixed_devices import make_elsewhere, mixed_devices_error
from skyproxy.tensor.dispatch.op_info import OpInfo, Special, implements, plain_op
from skyproxy.tensor.dispatch.recording import run
from skyproxy.tensor.ops.set_storage import set_to_part

aten = torch.ops.aten
_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_DEVICE_KERNEL = DispatchKey.PrivateUse1
_COMPOSITE_EXPLICIT = DispatchKey.CompositeExplicitAutograd
_VIEWS_AND_CHANGES = DispatchKey.ADInplaceOrView
_ExclusionOf = SetExcludedKey
_in_inference_mode = torch.is_inference_mode_enabled
_plain = functools.cache(plain_op)


@implements("composite")
def _divide(info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Decompose a composite that arrived whole, as they do below autograd and in inference mode.

    By PyTorch's own kernel where there is one: the decompositions in Python are for compilers, and round otherwise.
    Where tensors or the mode are for inference, nothing above has divided it: its parts are what counts changes, notes
    what is a view of what, and refuses to change tensors of inference elsewhere. `narrow` and `chunk` do so as a whole.
    """
    inference = _in_inference_mode() or any(isinstance(a, torch.Tensor) and a.is_inference() for a in args)
    if inference and not has_kernel(info.name, "ADInplaceOrView"):
        with _ExclusionOf(_VIEWS_AND_CHANGES, False):
            return _parts_of(info, func, args, kwargs)
    return _parts_of(info, func, args, kwargs)


def _parts_of(info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    if has_kernel(info.name, "CompositeImplicitAutograd"):
        return func._op_dk(_COMPOSITE, *args, **kwargs)
    return func.decompose(*args, **kwargs)


@implements("aten::_has_compatible_shallow_copy_type")
def _compare_kinds(info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """PyTorch's own question, before a tensor takes over another's look: it makes no tensor, and changes none."""
    return func._op_dk(_COMPOSITE, *args)


@implements("aten::_assert_tensor_metadata", "aten::_print", "aten::_assert_scalar", "aten::resize", "aten::resize_as")
def _run_here(info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """PyTorch's own kernel, which is made of ops that come back to us, or needs no values at all.

    `torch.func.functionalize` makes `resize` of `resize_`: a copy that is changed in place.
    """
    return func._op_dk(_COMPOSITE_EXPLICIT, *args, **kwargs)


@implements("foreign")
def _foreign(info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """A custom op: one written in terms of PyTorch's ops is run here, and they are recorded.

    A kernel that was registered for the device (`register_kernel("sky")`) goes before one for all, as on every device.
    Of kernels for certain devices only, workers have those of libraries: they import what is called like the namespace.
    """
    library = info.name.partition("::")[0]
    of_groups = "c10d" in library  # PyTorch has kernels of its own for every device, and no group
    if not of_groups and has_kernel(info.name, "PrivateUse1"):
        return func._op_dk(_DEVICE_KERNEL, *args, **kwargs)
    if has_kernel(info.name, "CompositeExplicitAutograd"):
        return _run_here(info, func, args, kwargs)
    if has_kernel(info.name, "CompositeImplicitAutograd"):
        return func.decompose(*args, **kwargs)
    if of_groups:
        raise UnsupportedOpError(
            f"{info.name}: a process group here cannot reach the tensors of workers. Run the training itself on a "
            "pool, whose workers have a group of their own: skyproxy.Compute(nodes=...) with "
            "skyproxy.plugins.torch(). Or communicate a copy: x.cpu()"
        )
    if library in sys.modules:
        return dispatch_remote(None, _plain(func), (), args, kwargs)
    raise UnsupportedOpError(
        f"{info.name} is a custom op with kernels for certain devices only; workers do not have it. Give it a kernel "
        'written in PyTorch ops (torch.library.custom_op without device_types, or with device_types="sky"), or move '
        "the tensor first: x.cpu()"
    )


@implements("refused")
def _refuse(info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    raise UnsupportedOpError(f"{info.name} cannot run on a worker. Move the tensor first: x.cpu()")


@implements("prim::layout")
def _layout(info: OpInfo, func: OpOverload, args: tuple[RemoteTensor], kwargs: dict[str, object]) -> torch.layout:
    layout: torch.layout = args[0]._sky.meta.layout
    return layout


@implements("aten::detach")
def _detach(info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Another tensor on the same value; nothing to be done on the worker. Autograd detaches every gradient."""
    (tensor,) = args
    if type(tensor) is not RemoteTensor:
        return NotImplemented
    handle = tensor._sky
    if not handle.meta.plain:
        return run(BoundCall(info, args, kwargs))
    handle.is_shared = True
    return make_view(handle.meta, handle, tensor)


@implements("aten::_fw_primal", "aten::_make_dual")
def _value_without_tangent(
    info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """The value without its tangent, in inference mode: elsewhere autograd answers these itself."""
    return torch.ops.aten.alias.default(args[0])


@implements("aten::is_same_size")
def _is_same_size(
    info: OpInfo, func: OpOverload, args: tuple[torch.Tensor, torch.Tensor], kwargs: dict[str, object]
) -> bool:
    """Forward-mode AD asks this of tensors on different devices, too: of those that `copy_` combines."""
    return bool(args[0].shape == args[1].shape)


@implements("aten::lift_fresh", "aten::lift")
def _lift(info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    return args[0]


@implements("aten::dequantize.self")
def _dequantize(info: OpInfo, func: OpOverload, args: tuple[torch.Tensor], kwargs: dict[str, object]) -> torch.Tensor:
    """No remote tensor is quantized; PyTorch makes such a one single precision."""
    return args[0].to(torch.float32)


@implements("aten::is_pinned")
def _is_pinned(info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    return False


@implements("aten::_validate_compressed_sparse_indices")
def _validate_indices(info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Check here what the worker is not asked to: from 2.15 on, `torch.load` does so for every sparse tensor."""
    return func(*(a.cpu() if isinstance(a, RemoteTensor) else a for a in args), **kwargs)


@implements("aten::_pin_memory")
def _pin_memory(info: OpInfo, func: OpOverload, args: tuple[torch.Tensor, ...], kwargs: dict[str, object]) -> object:
    raise RuntimeError(f"cannot pin '{args[0].device.type}' tensors: only dense CPU tensors can be pinned")


@implements("aten::record_stream")
def _record_stream(info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """A device has one stream, and the worker frees memory in its order."""


_QUANTIZED = (
    "aten::quantize_per_tensor",
    "aten::quantize_per_tensor.tensor_qparams",
    "aten::quantize_per_tensor.tensors",
    "aten::quantize_per_tensor_dynamic",
    "aten::quantize_per_channel",
    "aten::_make_per_tensor_quantized_tensor",
    "aten::_make_per_channel_quantized_tensor",
    "aten::_empty_affine_quantized",
    "aten::_empty_per_channel_affine_quantized",
    "aten::empty_quantized",
)


@implements(*_QUANTIZED)
def _refuse_quantized(info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    raise UnsupportedOpError(
        f"{info.name}: tensors with quantized dtypes cannot live on a worker, because their scales would not travel. "
        "Keep them on the CPU, or quantize with integers and scales of your own (torchao does)."
    )


# --- composites that look at values, or treat tensor subclasses otherwise --------------------------------------------


def _tensor_split(self: torch.Tensor, tensor_indices_or_sections: torch.Tensor, dim: int = 0) -> object:
    """`torch.tensor_split` with the places to split at in a tensor: the number of results depends on its values."""
    places = tensor_indices_or_sections
    if places.dtype is not torch.int64 or places.dim() > 1:  # PyTorch says what is wrong with them
        torch.tensor_split(torch.empty(1, device="cpu"), torch.empty_like(places, device="cpu"))
    split = aten.tensor_split.indices if places.dim() else aten.tensor_split.sections
    return split(self, places.tolist(), dim)


def _needs_vectors(x: torch.Tensor) -> bool:
    """Return whether PyTorch computes vectors with the values: for derivatives, and wherever it cannot see those."""
    if has_modes_or_transforms():
        return True
    return (torch.is_grad_enabled() and x.requires_grad) or torch.autograd.forward_ad.unpack_dual(x).tangent is not None


def _svdvals(A: torch.Tensor, *, driver: str | None = None) -> torch.Tensor:
    """`torch.linalg.svdvals`. For subclasses PyTorch computes the vectors too, and the values round otherwise then."""
    result: torch.Tensor = aten._linalg_svd.default(A, False, _needs_vectors(A), driver=driver)[1]
    return result


def _eigvalsh(self: torch.Tensor, UPLO: str = "L") -> torch.Tensor:
    """`torch.linalg.eigvalsh`, likewise."""
    result: torch.Tensor = aten._linalg_eigh.default(self, UPLO, _needs_vectors(self))[0]
    return result


def _eigvals(self: torch.Tensor) -> torch.Tensor:
    """`torch.linalg.eigvals`, likewise."""
    result: torch.Tensor = (
        aten.linalg_eig.default(self)[0] if _needs_vectors(self) else aten._linalg_eigvals.default(self)
    )
    return result


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    *rest: object,
) -> object:
    """`ctc_loss` with lengths in tensors: on the CPU, as every device takes them, they travel as numbers.

    Lengths on the device stay there; looking at them would wait.
    """
    lengths = (input_lengths, target_lengths)
    if has_modes_or_transforms() or not any(a.device.type == "cpu" for a in lengths):
        return _COMPOSITE_CTC_LOSS(log_probs, targets, *lengths, *rest)
    for name, a in zip(("input_lengths", "target_lengths"), lengths, strict=True):
        if a.dtype.is_floating_point or a.dtype.is_complex or a.dtype is torch.bool:
            raise RuntimeError(f"{name} must be integral")
    if targets.device.type == "cpu":  # as cuDNN takes them
        targets = targets.to(log_probs.device)
    return aten.ctc_loss.IntList(log_probs, targets, *(a.reshape(-1).tolist() for a in lengths), *rest)


_COMPOSITE_CTC_LOSS = functools.partial(aten.ctc_loss.Tensor._op_dk, DispatchKey.CompositeImplicitAutograd)


def _wrap_fill(functional: OpOverload) -> Callable[..., torch.Tensor]:
    """An out= form of `linalg.matrix_rank` made of the functional one: PyTorch's own fills no `out` of a class."""

    def fill(*args: object, out: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return _fill_from(functional(*args, **kwargs), out, functional.name())

    return fill


def _matmul_out(self: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """`matmul.out`, which multiplies into the memory of `out`: how a product is rounded depends on its strides.

    Of batches, PyTorch asks C++ whether two tensors share a storage, which only Python knows of ours.
    """
    if min(self.dim(), other.dim()) == 0 or max(self.dim(), other.dim()) <= 2:
        return _MATRIX_PRODUCT_OUT(self, other, out=out)  # type: ignore[no-any-return]
    _refuse_gradients("matmul", self, other, out)
    if out.device != self.device:
        raise mixed_devices_error("aten::matmul", self.device, out.device)
    if other.dim() <= 2 and _is_folded(self):
        rows = self.reshape(math.prod(self.shape[:-1]), self.size(-1))
        maybe_resize_out(out, torch.Size((*self.shape[:-1], *other.shape[1:])))
        place = out.reshape(len(rows), *other.shape[1:])
        (aten.mm if other.dim() == 2 else aten.mv).out(rows, other, out=place)
    else:
        left = self if self.dim() > 1 else self.unsqueeze(0)
        right = other if other.dim() > 1 else other.unsqueeze(1)
        batch = broadcast_two(left.shape[:-2], right.shape[:-2])
        left, right = (x.expand(*batch, *x.shape[-2:]).reshape(math.prod(batch), *x.shape[-2:]) for x in (left, right))
        size = (*batch, *self.shape[-2:-1], *(other.shape[-1:] if other.dim() > 1 else ()))
        maybe_resize_out(out, torch.Size(size))
        place = out.reshape(len(left), left.size(1), right.size(2))
        aten.bmm.out(left, right, out=place)
    if not (isinstance(place, RemoteTensor) and isinstance(out, RemoteTensor) and root_of(place) is root_of(out)):
        out.copy_(place.view(out.shape))
    return out


def _is_folded(rows: torch.Tensor) -> bool:
    """Return whether PyTorch multiplies batches of rows with a matrix as if all rows were one matrix."""
    strides = rows.stride()
    outer = zip(strides, strides[1:], rows.shape[1:-1])
    return rows.numel() == 0 or all(step == inner * count for step, inner, count in outer)


_MATRIX_PRODUCT_OUT = functools.partial(aten.matmul.out._op_dk, _COMPOSITE)


def _refuse_gradients(name: str, *tensors: object) -> None:
    """Refuse an out= form that is to be differentiated, in PyTorch's words: some do in their kernel, below autograd."""
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, but one of the "
            "arguments requires grad."
        )


def _fill_from(result: torch.Tensor, out: torch.Tensor, name: str) -> torch.Tensor:
    """Make `out` what an operator gave, and return it.

    Raises:
        RuntimeError: it is on another device.
    """
    if out.device != result.device:
        raise mixed_devices_error(name, result.device, out.device)
    maybe_resize_out(out, result.shape)
    filled: torch.Tensor = safe_copy_out(copy_from=result, copy_to=out)
    return filled


_COMPOSITES: dict[str, Callable[..., object]] = {
    "ctc_loss.Tensor": _ctc_loss,
    "set_.source_Tensor_storage_offset": set_to_part,
    "tensor_split.tensor_indices_or_sections": _tensor_split,
    "linalg_svdvals": _svdvals,
    "linalg_eigvalsh": _eigvalsh,
    "linalg_eigvals": _eigvals,
    "matmul.out": _matmul_out,
    "linalg_matrix_rank.out": _wrap_fill(aten.linalg_matrix_rank.default),
    "linalg_matrix_rank.out_tol_tensor": _wrap_fill(aten.linalg_matrix_rank.tol_tensor),
    "linalg_matrix_rank.atol_rtol_float_out": _wrap_fill(aten.linalg_matrix_rank.atol_rtol_float),
    "linalg_matrix_rank.atol_rtol_tensor_out": _wrap_fill(aten.linalg_matrix_rank.atol_rtol_tensor),
}


def _sparse_compressed(
    compressed_indices: torch.Tensor,
    plain_indices: torch.Tensor,
    values: torch.Tensor,
    size: list[int],
    *,
    layout: torch.layout | None = None,
    **options: Any,
) -> torch.Tensor:
    """PyTorch's unchecked constructor makes a tensor without asking the device. The other one is an op."""
    options = {name: value for name, value in options.items() if name in ("dtype", "device") and value is not None}
    options["check_invariants"] = checks_sparse_invariants()
    return torch.sparse_compressed_tensor(compressed_indices, plain_indices, values, size, layout=layout, **options)


_COMPOSITES["_sparse_compressed_tensor_unsafe"] = _sparse_compressed
for _layout_name in ("csr", "csc", "bsr", "bsc"):
    _COMPOSITES[f"_sparse_{_layout_name}_tensor_unsafe"] = functools.partial(
        _sparse_compressed, layout=getattr(torch, f"sparse_{_layout_name}")
    )


def _sparse_coo(op: OpOverload) -> Callable[..., object]:
    """A constructor of COO tensors that has its arguments checked by the worker where checks are asked for.

    PyTorch's own check of indices that are said to be coalesced calls a function that each device must have in C++.
    """
    divide = op._op_dk

    def construct(
        indices: torch.Tensor, values: torch.Tensor, size: object, *, is_coalesced: object = None, **options: object
    ) -> object:
        if not checks_sparse_invariants():
            return divide(_COMPOSITE, indices, values, size, is_coalesced=is_coalesced, **options)
        aten._validate_sparse_coo_tensor_args.default(indices, values, size, is_coalesced)
        set_sparse_invariant_checks(False)  # for this call, and only here: workers are not told
        try:
            return divide(_COMPOSITE, indices, values, size, is_coalesced=is_coalesced, **options)
        finally:
            set_sparse_invariant_checks(True)

    return construct


_COMPOSITES["sparse_coo_tensor.indices_size"] = _sparse_coo(aten.sparse_coo_tensor.indices_size)
_COMPOSITES["_sparse_coo_tensor_unsafe"] = _sparse_coo(aten._sparse_coo_tensor_unsafe.default)


_plain_compressed = plain_op(aten.sparse_compressed_tensor.comp_plain_value_size)


@implements("aten::sparse_compressed_tensor.comp_plain_value_size")
def _compress(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Make a tensor of aliases: PyTorch's keeps its very arguments, which its `zero_` and resizing would shorten."""
    parts = [aten.alias.default(part) if type(part) is RemoteTensor else part for part in args[:3]]
    if checks_sparse_invariants():
        aten._validate_sparse_compressed_tensor_args.default(*parts, args[3], kwargs["layout"])
    return dispatch_remote(None, _plain_compressed, None, (*parts, *args[3:]), kwargs)


def _as_special(function: Callable[..., object]) -> Special:
    return lambda info, func, args, kwargs: function(*args, **kwargs)


_plain_unbind_copy = plain_op(aten.unbind_copy.int_out)


@implements("aten::unbind_copy.int_out")
def _unbind_copy(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    _refuse_gradients("unbind_copy", *kwargs["out"])
    return dispatch_remote(None, _plain_unbind_copy, None, args, kwargs)


_plain_empty_strided = plain_op(aten.new_empty_strided.default)


@implements("aten::new_empty_strided")
def _new_empty_strided(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Make an empty tensor; where autograd asks for a leaf's layout, that of a compressed one is none to have strides.

    It takes a leaf of no elements, or of one, for dense, which locally none of a compressed layout is: there, the
    gradient is copied as it is.
    """
    if kwargs.get("layout") in (None, torch.strided):
        rest = {name: value for name, value in kwargs.items() if name not in ("layout", "device")}
        asked = kwargs.get("device")
        if type(args[0]) is RemoteTensor:
            if asked is None or (asked.type == "sky" and DEVICES.of(asked) is args[0]._sky.device):
                return dispatch_remote(None, _plain_empty_strided, None, args, rest)
            elsewhere = {"dtype": args[0].dtype, **rest, "device": asked}
            return make_elsewhere(aten.empty_strided.default, args[1:], elsewhere)
        return run(BoundCall(info, args, kwargs))
    return args[0].new_empty(args[1], dtype=kwargs.get("dtype"), device=kwargs.get("device"))


@implements("aten::range.out", "aten::range.out_")
def _range(info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, Any]) -> object:
    """`torch.range(out=)`, whose own form no worker runs: its kernel trusts its arguments."""
    out = kwargs["out"]
    values = aten.range.step(*args, dtype=out.dtype, device=out.device)
    if values.numel() == out.numel():
        values = values.view(out.shape)  # an `out` of as many elements keeps its shape
    return _fill_from(values, out, info.name)


for _name, _function in _COMPOSITES.items():
    implements(f"aten::{_name}")(_as_special(_function))


def install(library: torch.library.Library) -> None:
    """Put our composites in the place of PyTorch's, and make factories of sparse tensors ours too."""
    patching.replace_everywhere(
        "HANDLED_TYPES",
        proxy_tensor.HANDLED_TYPES,
        (*proxy_tensor.HANDLED_TYPES, RemoteTensor),
        why="tracing (`make_fx`, `torch.func.linearize`) leaves tensors of other classes out of its graph",
        test="tests/tensor/torch_api/test_autograd.py::test_function_transforms",
    )
    for name, function in _COMPOSITES.items():
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            library.impl(name, function, key)
    library.impl("empty_quantized", kernel("aten::empty_quantized"), "QuantizedPrivateUse1")
    # PyTorch's own decomposition calls a function that each device must have in C++.
    library.impl(
        "_validate_sparse_coo_tensor_args", kernel("aten::_validate_sparse_coo_tensor_args"), "AutogradPrivateUse1"
    )
    for name in op_names_with_kernel("BackendSelect"):
        if name.startswith("aten::") and not has_kernel(name, "CompositeImplicitAutograd"):
            for key in ("SparsePrivateUse1", "SparseCsrPrivateUse1"):
                library.m.impl(name[len("aten::") :], key, kernel(name), False)  # type: ignore[union-attr]


__all__ = ["install"]
