"""A call as a future among others, and among arguments."""

from __future__ import annotations

import concurrent.futures

import pytest
import torch

import skyproxy
from skyproxy.errors import ConfigurationError
from tests.functions.gates import hold, open_gate


def test_wait_and_as_completed_know_calls(node: skyproxy.Node) -> None:
    calls = [node.submit(hold, "a call among several"), node.submit(pow, 2, 3), node.submit(int, "no")]
    quick = concurrent.futures.wait(calls[1:], timeout=60)
    assert (quick.done, quick.not_done) == (set(calls[1:]), set())
    ended = concurrent.futures.as_completed(calls, timeout=60)
    assert {next(ended), next(ended)} == set(calls[1:])
    calls[0].cancel()
    assert next(ended) is calls[0]
    node.run(open_gate, "a call among several")
    assert calls[1].result() == 8
    assert isinstance(calls[2].exception(), ValueError)


def test_a_call_cannot_be_an_argument_and_says_what_can(node: skyproxy.Node) -> None:
    with pytest.raises(ConfigurationError, match=r"Pass its result: call.result\(\)"):
        node.submit(str, node.submit(pow, 2, 3))


def test_a_function_that_names_sky_is_told_what_the_device_is_called_where_it_runs(node: skyproxy.Node) -> None:
    with pytest.raises(RuntimeError, match="device string: sky") as caught:
        node.run(lambda: torch.ones(2, device="sky:0"))
    assert any("x.device" in note for note in caught.value.__notes__)
    assert node.run(lambda device: torch.ones(2, device=device), torch.device("sky:0")).tolist() == [1.0, 1.0]
