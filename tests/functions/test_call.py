"""A call as a future among others, and among arguments."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import skyproxy
from skyproxy.errors import ConfigurationError
from skyproxy_server.limits import are_sessions_separable
from tests.functions.gates import hold, open_gate
from tests.server.isolation.workers import TOKEN, Worker


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


def make_ones(device: torch.device | str) -> list[float]:
    from skyproxy import launch_local  # noqa: F401 - as modules of a program do

    values: list[float] = torch.ones(2, device=device).tolist()
    return values


@pytest.fixture(params=["worker", "isolated", "one of many", "session process"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """What runs a function on a new worker, in a process of each kind."""
    if request.param in ("worker", "isolated"):
        with skyproxy.launch_local("cpu") as node:
            yield lambda *call: node.submit(*call, isolate=request.param == "isolated").result()
    elif request.param == "one of many":  # which are forked
        with skyproxy.Compute(provider=skyproxy.Local(device="cpu"), nodes=4) as pool:
            yield pool.run
    else:
        if not are_sessions_separable():
            pytest.skip("processes of sessions need Linux")
        worker = Worker(tmp_path)
        try:
            with skyproxy.connect(worker.url, token=TOKEN) as node:
                yield node.run
        finally:
            worker.end()


def test_a_function_that_names_sky_is_told_what_the_device_is_called_where_it_runs(run: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="device string: sky") as caught:
        run(make_ones, "sky:0")
    assert any("x.device" in note for note in caught.value.__notes__)


def test_an_argument_that_names_a_device_of_sky_arrives_as_the_workers_own(node: skyproxy.Node) -> None:
    assert node.run(make_ones, torch.device("sky:0")) == [1.0, 1.0]


def test_a_function_that_opens_a_node_has_the_device(run: Callable[..., Any]) -> None:
    def compute_elsewhere() -> list[float]:
        with skyproxy.launch_local("cpu") as node:
            return make_ones(node.device("cpu"))

    assert run(compute_elsewhere) == [1.0, 1.0]
