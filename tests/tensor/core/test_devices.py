"""Devices as their worker names them."""

from __future__ import annotations

import types

import pytest
import torch

from skyproxy.errors import ProtocolError
from skyproxy.tensor.core.devices import SkyDevice


@pytest.mark.parametrize("place", [["x", 0], ["%s%n{0}", None], ["cuda", -2]], ids=str)
def test_a_device_that_pytorch_does_not_know_is_named(place: list[object]) -> None:
    read = SkyDevice.worker_device.fget
    assert read is not None
    with pytest.raises(ProtocolError, match="which PyTorch does not know"):
        read(types.SimpleNamespace(place=place))  # type: ignore[arg-type]
    assert read(types.SimpleNamespace(place=["cpu", None])) == torch.device("cpu")  # type: ignore[arg-type]
