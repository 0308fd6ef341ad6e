"""Tensors held against descriptions of them, and made to look like those."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyproxy import torch_codec
from skyproxy.errors import InferenceMismatchError, ProtocolError
from skyproxy.torch_codec import Description, describe, encode_description
from skyproxy_server import layouts
from skyproxy_server.failures import Failed

LAST_FIRST = describe(torch.empty(3, 2).t())  # (2, 3), strides (1, 2)


def test_other_idle_strides_are_another_look_at_the_same_memory() -> None:
    slots: dict[int, Any] = {1: torch.ones(1, 4)}
    memory = slots[1].data_ptr()
    assert layouts.conform(slots, 1, describe(slots[1])._replace(stride=(9, 1)), fresh=False, written=False)
    assert (slots[1].stride(), slots[1].data_ptr()) == ((9, 1), memory)


def test_a_fresh_value_is_copied_into_the_strides_that_were_believed_in() -> None:
    slots: dict[int, Any] = {1: torch.arange(6).view(2, 3)}
    assert layouts.conform(slots, 1, LAST_FIRST._replace(dtype=torch.int64), fresh=True, written=False)
    assert slots[1].stride() == (1, 2)
    assert slots[1].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not layouts.conform(slots, 1, describe(slots[1]), fresh=True, written=False)


@pytest.mark.parametrize("fresh", [False, True])
def test_other_sizes_are_a_mismatch(fresh: bool) -> None:
    slots: dict[int, Any] = {1: torch.ones(4)}
    with pytest.raises(InferenceMismatchError, match="inferred"):
        layouts.conform(slots, 1, describe(torch.ones(5)), fresh=fresh, written=False)


def test_other_strides_of_a_view_are_a_mismatch() -> None:
    with pytest.raises(InferenceMismatchError):
        layouts.conform({1: torch.ones(2, 3)}, 1, LAST_FIRST, fresh=False, written=False)


def test_inputs_are_compared_but_for_those_that_failed() -> None:
    believed = [encode_description(describe(torch.ones(n))) for n in (2, 3)]
    failed = Failed(RuntimeError("x"), "op", 1, 0)
    layouts.check_inputs("op", [failed, None, torch.ones(3)], believed)
    with pytest.raises(InferenceMismatchError, match="op was given"):
        layouts.check_inputs("op", [torch.ones(2), torch.ones(2)], believed)


def test_a_tensor_grows_into_the_look_that_a_failed_resize_should_have_given() -> None:
    value = torch.arange(4.0)
    assert layouts.restore_look(value, describe(torch.empty(2, 4)), allowed=True)
    assert value.shape == (2, 4)
    assert value[0].tolist() == [0, 1, 2, 3]
    assert value.untyped_storage().nbytes() == 32
    assert value[1].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("description", "allowed"),
    [(describe(torch.empty(2, 4)), False), (describe(torch.empty(4, dtype=torch.int64)), True)],
)
def test_another_look_is_refused(description: Description, allowed: bool) -> None:
    value = torch.arange(4.0)
    assert not layouts.restore_look(value, description, allowed=allowed)
    assert value.shape == (4,)


def test_the_memory_that_a_tensor_needs_reaches_to_its_last_element() -> None:
    assert layouts.needed_bytes(torch.ones(3, 4)[1:, 1:]) == 12 * 4
    assert layouts.needed_bytes(torch.ones(0, 4)) == 0
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    assert layouts.needed_bytes(nested) == nested.untyped_storage().nbytes() == 9 * 4


def test_a_tensor_is_packed_without_gaps_and_lazy_bits() -> None:
    gaps = torch.arange(8.0)[::2]
    assert layouts.packed(gaps).stride() == (1,)
    dense = torch.ones(2, 3).t()
    assert layouts.packed(dense) is dense
    assert not layouts.packed(torch.ones(2, dtype=torch.complex64).conj()).is_conj()
    for lazy in (dense.to(torch.complex64).conj()[:, ::2], torch._neg_view(torch.ones(4, 6)[:, ::2].t())):
        assert layouts.packed(lazy).stride() == torch_codec.packed_stride(tuple(lazy.shape), lazy.stride())


@pytest.mark.parametrize(
    "changes",
    [
        {"size": (-1,)},
        {"size": (True,)},
        {"stride": ()},
        {"size": (1,) * 65, "stride": (1,) * 65},
        {"layout": torch.sparse_coo},
    ],
)
def test_what_no_tensor_looks_like_is_not_uploaded(changes: dict[str, Any]) -> None:
    layouts.check_packed(describe(torch.ones(2)))
    with pytest.raises(ProtocolError):
        layouts.check_packed(describe(torch.ones(2))._replace(**changes))


def test_malformed_descriptions_are_a_protocol_error() -> None:
    assert layouts.decode_all([encode_description(LAST_FIRST)]) == [LAST_FIRST]
    with pytest.raises(ProtocolError, match="malformed"):
        layouts.decode_all([["float32"]])
