"""Values on the move: from the CPU to a worker, back, and between workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import string_at

import torch

from skyproxy.errors import UnsupportedOpError
from skyproxy.protocol.answers import MOST_DIMENSIONS
from skyproxy.protocol.commands import UPLOAD
from skyproxy.tensor.core import host_copies, known_values
from skyproxy.tensor.core.devices import Handle, SkyDevice
from skyproxy.tensor.core.metadata import Meta, intern_meta, meta_of
from skyproxy.tensor.core.pieces import copied, copy_into
from skyproxy.tensor.core.prefetching import READER
from skyproxy.tensor.core.remote_tensor import RemoteTensor, is_wrapper_class, make_tensor
from skyproxy.tensor.core.torch_private import has_modes_or_transforms, make_wrapper_subclass
from skyproxy.torch_codec import Description, is_dense, packed_stride

_make_wrapper = make_wrapper_subclass
_strided = torch.strided


def upload(tensor: torch.Tensor, device: SkyDevice) -> RemoteTensor:
    """A copy of a CPU tensor on a worker's device. The bytes are read before this returns."""
    if (
        type(tensor) in OWN_CLASSES
        and tensor.is_cpu
        and tensor.layout is _strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.dim() <= MOST_DIMENSIONS
    ):
        byte_count = tensor.nbytes
        if byte_count <= device.session.settings.max_inline_bytes:
            return _upload_inline(tensor, device, byte_count)
    if tensor.dim() > MOST_DIMENSIONS and tensor.layout is torch.strided:
        # Workers take no upload of more, and end sessions that send one. Of what they computed they have no such bound.
        values = upload(tensor.detach().flatten(), device)
        return values.view(tensor.shape)  # type: ignore[return-value]
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        return _upload_sparse(tensor, device)
    if tensor.device.type == "meta":
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    if is_wrapper_class(type(tensor)):  # its address may be none
        raise UnsupportedOpError(
            f"the values of a {type(tensor).__name__} are not in its own memory, to be sent from there"
        )
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if tensor.is_conj() or tensor.is_neg() or not is_dense(tuple(tensor.shape), tensor.stride()):
        # Closes the gaps in the order of the strides, as PyTorch's own copies do.
        tensor = copied(tensor).resolve_conj().resolve_neg()
    meta = meta_of(tensor) if tensor.storage_offset() == 0 else meta_of(torch.empty_like(tensor, device="meta"))
    handle = device.new_handle(meta)
    device.session.upload(handle.slot, tensor, device.place)
    if not meta.size:
        known_values.know(handle, tensor.clone())
    return make_tensor(meta, handle)


OWN_CLASSES = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors that are not remote and no subclass of somebody's."""


@functools.lru_cache(1024)
def _inline_meta(size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Meta:
    return intern_meta(Description(tuple(size), stride, 0, dtype))


def _upload_inline(tensor: torch.Tensor, device: SkyDevice, byte_count: int) -> RemoteTensor:
    """The short way of a small contiguous tensor, which travels with the commands."""
    meta = _inline_meta(tensor.shape, tensor.stride(), tensor.dtype)
    result = _make_wrapper(RemoteTensor, meta.size, meta.stride, 0, None, meta.dtype, _strided, device.torch_device)
    handle = device.new_handle(meta)
    result._sky_dict = {"_sky": handle}
    values = string_at(tensor.data_ptr(), byte_count) if byte_count else b""
    device.recorder.append_with_buffer(values, UPLOAD, handle.slot, meta.encoded, device.place)
    if not meta.size:
        known_values.know_bytes(handle, values)
    elif byte_count <= host_copies.MOST_BYTES:
        host_copies.keep(handle, values)
    return result


def _upload_sparse(tensor: torch.Tensor, device: SkyDevice) -> RemoteTensor:
    place = device.torch_device
    if tensor.layout is torch.sparse_coo:
        result = torch.sparse_coo_tensor(
            tensor._indices().to(place), tensor._values().to(place), tensor.shape, check_invariants=False
        )
        return result._coalesced_(tensor.is_coalesced())  # type: ignore[return-value]
    parts = (
        (tensor.crow_indices(), tensor.col_indices())
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        else (tensor.ccol_indices(), tensor.row_indices())
    )
    return torch.sparse_compressed_tensor(  # type: ignore[return-value]
        parts[0].to(place),
        parts[1].to(place),
        tensor.values().to(place),
        tensor.shape,
        layout=tensor.layout,
        check_invariants=False,
    )


def download(tensor: RemoteTensor) -> torch.Tensor:
    """A copy of a remote tensor on the CPU, in the strides that PyTorch's `preserve_format` gives. Waits."""
    handle = tensor._sky
    meta: Meta = handle.meta
    if meta.layout is not torch.strided:
        return _download_sparse(tensor)
    ahead = READER.expected_around(handle)
    result = ahead.take(handle) if ahead is not None else None
    if result is None:
        known = _known_here(handle)
        if known is not None:
            return known
        result = handle.device.session.fetch(handle.slot, meta.description)
    return _as_preserved(result, meta)


def _known_here(handle: Handle) -> torch.Tensor | None:
    """Return a copy of values that were uploaded or asked for, as long as nothing has written to them."""
    if not (handle.meta.known or (handle.root or handle).copied) or handle.device.session.lost is not None:
        return None
    if has_modes_or_transforms():  # they would act on the copying itself
        return None
    value = known_values.value_of(handle)
    return value.clone() if value is not None else host_copies.copy_of(handle)


def start_download(tensor: torch.Tensor) -> tuple[Callable[[], torch.Tensor], Callable[[], bool]]:
    """Asks for a tensor's values without waiting.

    Returns:
        A function that waits for the values, as a CPU tensor, and one that tells whether it would wait.
    """
    if type(tensor) is not RemoteTensor or tensor.layout is not torch.strided:
        value = tensor.detach().cpu() if type(tensor) is RemoteTensor else tensor.detach().clone().cpu()
        return lambda: value, lambda: True
    meta: Meta = tensor._sky.meta
    session = tensor._sky.device.session
    waiter = session.start_fetch(tensor._sky.slot, meta.description)

    def finish() -> torch.Tensor:
        return _as_preserved(session.fetched(waiter, meta.description, counted=not waiter.done), meta)

    return finish, lambda: waiter.done


def _as_preserved(result: torch.Tensor, meta: Meta) -> torch.Tensor:
    """Values travel dense; gaps are closed as `preserve_format` would, which for overlaps is not row-major."""
    if result.stride() == meta.stride or packed_stride(meta.size, meta.stride) == meta.stride:
        return result
    like = torch.empty_like(torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device="meta"))
    if like.stride() == result.stride():
        return result
    return copy_into(torch.empty_strided(meta.size, like.stride(), dtype=meta.dtype, device="cpu"), result)


def _download_sparse(tensor: RemoteTensor) -> torch.Tensor:
    if tensor.layout is torch.sparse_coo:
        coalesced = tensor.is_coalesced()
        indices, values = tensor._indices().cpu(), tensor._values().cpu()
        result = torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False)
        return result._coalesced_(coalesced)
    rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    outer = tensor.crow_indices() if rows else tensor.ccol_indices()
    inner = tensor.col_indices() if rows else tensor.row_indices()
    return torch.sparse_compressed_tensor(
        outer.cpu(), inner.cpu(), tensor.values().cpu(), tensor.shape, layout=tensor.layout, check_invariants=False
    )


def move(tensor: RemoteTensor, device: SkyDevice) -> RemoteTensor:
    """A copy on another `sky` device."""
    source = tensor._sky.device
    if source.session is device.session:
        handle = device.new_handle(tensor._sky.meta)
        device.session.do("copy_to_device", handle.slot, tensor._sky.slot, device.place)
        meta = plain_copy_meta(tensor._sky.meta)
        handle.meta = meta
        return make_tensor(meta, handle)
    return upload(download(tensor), device)


def plain_copy_meta(meta: Meta) -> Meta:
    """Return what a copy with `preserve_format` looks like."""
    if meta.layout is not torch.strided:
        return meta
    return meta_of(torch.empty_like(torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device="meta")))


__all__ = ["OWN_CLASSES", "download", "move", "start_download", "upload"]
