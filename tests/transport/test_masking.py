"""The XOR is the same whichever way it is computed."""

from __future__ import annotations

import pytest
from websockets.utils import apply_mask

from skyproxy.transport import masking

KEY = b"\x11\x22\x44\x88"


@pytest.fixture(params=["numpy", "without numpy"], autouse=True)
def numpy_or_not(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without numpy":
        monkeypatch.setattr(masking, "load_numpy", lambda: None)


@pytest.mark.parametrize("size", [0, 1, 5, 1000, 16 << 10, (64 << 10) + 3])
@pytest.mark.parametrize("source_shift", [0, 1, 4])
@pytest.mark.parametrize("target_shift", [0, 1, 6])
def test_xor_between_any_alignments(size: int, source_shift: int, target_shift: int) -> None:
    data = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    source = memoryview(bytearray(source_shift) + data)[source_shift:]
    target = memoryview(bytearray(target_shift + size + 8))[target_shift : target_shift + size]
    masking.xor(source, target, KEY)
    assert bytes(target) == apply_mask(data, KEY)
    assert bytes(source) == data
    masking.unmask(target, KEY)
    assert bytes(target) == data


def test_parts_are_masked_as_one_payload() -> None:
    parts = [b"abc", memoryview(bytearray(b"z" * 40_001)), b"", bytearray(b"12345")]
    whole = b"".join(parts)
    target = memoryview(bytearray(len(whole)))
    masking.mask_parts(parts, KEY, target)
    assert bytes(target) == apply_mask(whole, KEY)


@pytest.mark.parametrize("position", range(6))
def test_a_key_turns_with_its_position(position: int) -> None:
    data = bytes(range(20))
    assert masking.mask(data[position:], masking.rotate(KEY, position)) == apply_mask(data, KEY)[position:]
