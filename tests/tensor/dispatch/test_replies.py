"""What a worker says of results that only it knows is checked before a tensor is made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyproxy.errors import ProtocolError
from skyproxy.tensor.dispatch.binding import BoundCall
from skyproxy.tensor.dispatch.op_info import info_of
from skyproxy.tensor.dispatch.replies import described_meta, wrap_answer, wrap_result
from skyproxy.torch_codec import describe, encode_description


def test_a_description_becomes_the_look_of_the_tensor() -> None:
    x = torch.zeros(2, 3, dtype=torch.half).t()
    meta = described_meta(encode_description(describe(x)))
    assert (meta.size, meta.stride, meta.dtype) == ((3, 2), (1, 3), torch.half)


@pytest.mark.parametrize("fields", [["no dtype", [2], [1], 0], ["float32", [2], [1]]])
def test_a_description_of_no_tensor_is_an_error_of_the_protocol(fields: list[Any]) -> None:
    with pytest.raises(ProtocolError, match="describes no tensor"):
        described_meta(fields)


def test_a_view_of_an_input_that_there_is_none_of_is_refused(sky1: str) -> None:
    x = torch.zeros(2, device=sky1)
    call = BoundCall(info_of(torch.ops.aten.nonzero.default), (x,), {})
    with pytest.raises(ProtocolError, match="view of input 1"):
        wrap_result(call, x._sky.device.new_handle(None), [encode_description(describe(torch.zeros(2))), 1])


def test_where_there_is_no_tensor_there_is_none(sky1: str) -> None:
    handle = torch.zeros(2, device=sky1)._sky.device.new_handle(None)
    assert wrap_answer(handle, [None, -1]) is None
