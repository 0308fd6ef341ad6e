"""Waits that are warnings or errors, as `torch.cuda.set_sync_debug_mode` makes them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_mode_is_left() -> Iterator[None]:
    yield
    torch.sky.set_sync_debug_mode("default")


def test_a_wait_is_a_warning_or_an_error_where_the_program_chose_so(sky: str) -> None:
    total = torch.ones(3, device=sky).sum()
    torch.sky.set_sync_debug_mode("warn")
    assert torch.sky.get_sync_debug_mode() == 1
    with pytest.warns(UserWarning, match="synchronizing") as caught:
        assert total.item() == 3
    assert caught[0].filename == __file__
    torch.sky.set_sync_debug_mode(2)
    other = total.exp()
    with pytest.raises(RuntimeError, match="synchronizing"):
        other.item()
    torch.sky.synchronize()  # it is written down
    torch.sky.set_sync_debug_mode(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert other.item() > 20


@pytest.mark.parametrize("mode", [3, -1, "loud"])
def test_a_mode_that_does_not_exist_is_refused(mode: int | str, sky: str) -> None:
    with pytest.raises(RuntimeError, match="invalid value of debug_mode"):
        torch.sky.set_sync_debug_mode(mode)
    assert torch.sky.get_sync_debug_mode() == 0
