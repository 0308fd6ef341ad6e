"""Accelerators by name."""

from __future__ import annotations

import pickle

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy.providers import Accelerator


@pytest.mark.parametrize(
    ("given", "name", "count"), [("A100", "A100", 1), ("a100:8", "A100", 8), (Accelerator("H100", 2), "H100", 2)]
)
def test_a_name_an_amount_or_an_object(given: str | Accelerator, name: str, count: int) -> None:
    parsed = Accelerator.parse(given)
    assert parsed is not None
    assert (parsed.name, parsed.count, parsed.cuda) == (name, count, True)
    assert Accelerator.parse(str(parsed)) == parsed


def test_nothing_stays_nothing() -> None:
    assert Accelerator.parse(None) is None


def test_what_is_no_cuda_device_says_so() -> None:
    assert "cuda" not in Accelerator("MI300X").metadata
    assert not Accelerator("Trainium").cuda


@pytest.mark.parametrize("text", ["A1000", "A100:many", "A100:0", ""])
def test_an_unknown_one_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        Accelerator.parse(text)


def test_an_unknown_one_works_with_a_word_about_it() -> None:
    assert Accelerator("Z1", metadata={"cuda": True}).cuda


def test_it_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(Accelerator("A100", 8))) == Accelerator("A100", 8)
