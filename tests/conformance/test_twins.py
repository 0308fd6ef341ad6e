"""Copies of arguments for either side."""

from __future__ import annotations

import pytest
import torch

import skyproxy  # noqa: F401  # whose name for its devices is in use from here on
from tests.conformance import twins
from tests.conformance.twins import Twins


@pytest.mark.parametrize("reference", ["cpu", "cuda"])
def test_devices_among_arguments_are_those_of_the_side(reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "REFERENCE", reference)
    named = [reference, "cpu", torch.device("cpu"), torch.device(reference, 0), "meta", torch.device("meta")]
    there = torch.device("sky", 1)
    assert Twins("sky:1").of(named) == ["sky:1", "sky:1", there, there, "meta", torch.device("meta")]
