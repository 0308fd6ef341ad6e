"""Arguments of one call, as they travel."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from skyproxy.errors import UnsupportedOpError
from skyproxy.tensor.core.torch_private import BelowAutograd, DispatchKey, DispatchKeySet, ExcludedKeys
from skyproxy.tensor.dispatch import binding


def test_symbolic_numbers_travel_as_the_numbers_that_they_stand_for() -> None:
    shapes = ShapeEnv()
    three = shapes.create_symintnode(shapes.create_symbol(3, ConstantSource("n")), hint=3)
    half = three / 6
    assert isinstance(half, torch.SymFloat)
    assert isinstance(three > 2, torch.SymBool)
    found = [binding._number(a) for a in (half, three > 2, three > 4)]
    assert found == [0.5, True, False]
    assert [type(a) for a in found] == [float, bool, bool]


def test_what_is_no_number_is_refused_by_its_type() -> None:
    with pytest.raises(UnsupportedOpError, match="an argument of type object"):
        binding._number(object())


def test_a_number_is_conjugated_and_negated_also_where_pytorch_does_not_look_at_these_bits() -> None:
    x = torch.tensor(1 + 2j)
    numbers = [x, x.conj(), x.conj().imag, torch.ops.aten._neg_view(x.conj())]
    expected = [1 + 2j, 1 - 2j, -2.0, -1 + 2j]
    assert [binding.number_of(number) for number in numbers] == expected
    bits = DispatchKeySet(DispatchKey.Conjugate) | DispatchKeySet(DispatchKey.Negative)
    with BelowAutograd(), ExcludedKeys(bits):
        assert numbers[1].item() == 1 + 2j
        assert [binding.number_of(number) for number in numbers] == expected
