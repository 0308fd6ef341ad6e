"""`Tensor.set_`: what becomes of histories and strides; bounds and storages are in `core/test_storage`."""

from __future__ import annotations

import pytest
import torch


def test_a_source_that_requires_gradients_gives_a_history_without_derivative(sky1: str) -> None:
    for device in ("cpu", sky1):
        source = torch.ones(3, device=device, requires_grad=True)
        x = torch.zeros(3, device=device).set_(source)
        assert x.requires_grad
        with pytest.raises(RuntimeError, match="derivative for set_ is not implemented"):
            x.sum().backward()


def test_parts_storages_and_changes_without_gradients_give_none(sky1: str) -> None:
    for device in ("cpu", sky1):
        source = torch.ones(3, device=device, requires_grad=True)
        part = torch.zeros(3, device=device).set_(source, 0, (2,), (1,))
        storage = torch.zeros(3, device=device).set_(source.untyped_storage())
        with torch.no_grad():
            plain = torch.zeros(3, device=device).set_(source)
        assert not part.requires_grad
        assert not storage.requires_grad
        assert not plain.requires_grad


def test_nothing_keeps_the_strides_of_what_is_empty_already(sky1: str) -> None:
    for device in ("cpu", sky1):
        empty, other = torch.ones(1, 3, device=device)[1:].unbind(1)[0], torch.ones(2, 2, device=device)
        assert empty.set_().stride() == (3,)
        assert other.set_().stride() == (1,)


def test_no_tensor_of_another_device_is_taken_over(sky1: str) -> None:
    for target, source in (("cpu", sky1), ("meta", sky1), (sky1, "meta")):
        with pytest.raises(RuntimeError, match="storage of a tensor on device"):
            torch.zeros(3, device=target).set_(torch.ones(3, device=source))


def test_a_graph_resizes_the_storage_of_a_parameter(sky1: str) -> None:
    for device in ("cpu", sky1):
        x = torch.ones(3, device=device)
        torch.ops.inductor.resize_storage_bytes_(x, 0)
        assert (x.untyped_storage().nbytes(), x.shape) == (0, (3,))
        torch.ops.inductor.resize_storage_bytes_(x, 12)
        assert x.fill_(2).tolist() == [2, 2, 2]
