"""Tracebacks end at the user's innermost line where what is below passes through skyproxy."""

from __future__ import annotations

import time
import traceback
from pathlib import Path

import pytest

import skyproxy
from skyproxy.notebook.tracebacks import shorten

pytest.importorskip("skyproxy.tensor.core.user_lines")


def files(error: BaseException) -> list[str]:
    return [Path(row.filename).name for row in traceback.extract_tb(error.__traceback__)]


def test_what_is_below_the_users_line_is_cut() -> None:
    with pytest.raises(skyproxy.errors.ConfigurationError) as caught:
        skyproxy.connect("ftp://nowhere", token="x")
    assert len(files(caught.value)) > 1
    shorten(caught.value)
    assert files(caught.value) == [Path(__file__).name]


def test_what_waits_in_the_standard_library_below_ours_is_cut(sky: str) -> None:
    node = skyproxy.list_nodes()[0]
    call = node.submit(time.sleep, 30.0)
    with pytest.raises(TimeoutError) as caught:
        call.result(0.01)
    innermost = traceback.extract_tb(caught.value.__traceback__)[-1].filename
    call.cancel()
    assert Path(innermost).parts[-3:-1] == ("concurrent", "futures")
    shorten(caught.value)
    assert files(caught.value) == [Path(__file__).name]


def test_the_errors_that_it_came_from_are_cut_too() -> None:
    with pytest.raises(RuntimeError) as caught:
        try:
            skyproxy.connect("ftp://nowhere", token="x")
        except skyproxy.errors.ConfigurationError as error:
            raise RuntimeError("mine") from error
    assert caught.value.__cause__ is not None
    shorten(caught.value)
    assert files(caught.value.__cause__) == [Path(__file__).name]


def test_what_has_nothing_to_do_with_skyproxy_stays() -> None:
    import torch

    with pytest.raises(Exception) as caught:
        torch.nn.Linear(2, 2)(torch.ones(3))
    before = files(caught.value)
    shorten(caught.value)
    assert files(caught.value) == before
    assert len(before) > 1
