"""Barriers, counters and locks within one rank; several are in test_torch_pool."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import skyproxy as sky
from skyproxy.errors import ConfigurationError
from skyproxy.runtime import InstanceInfo
from skyproxy.runtime.lifecycle import free_ports


@pytest.fixture
def store() -> Iterator[None]:
    with sky.plugins.coordination().around_app(InstanceInfo(job="pool/1")):
        yield


def test_without_the_plugin_the_error_says_what_to_add() -> None:
    with pytest.raises(ConfigurationError, match=r"Add sky\.plugins\.coordination\(\)"):
        sky.plugins.barrier()
    with pytest.raises(ConfigurationError):
        sky.plugins.counter("x").add()


@pytest.mark.usefixtures("store")
def test_a_counter_begins_with_zero_and_loses_nothing() -> None:
    counter = sky.plugins.counter("steps")
    assert counter.value == 0
    threads = [threading.Thread(target=lambda: [counter.add() for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counter.value == 200
    assert sky.plugins.counter("others").value == 0
    assert counter.add(-5) == 195


@pytest.mark.usefixtures("store")
def test_a_lock_has_one_holder_and_a_timeout_names_it() -> None:
    with sky.plugins.lock("x"):
        with pytest.raises(TimeoutError, match=r"lock 'x' was not free within 0\.1 s; held by rank 0, process"):
            with sky.plugins.lock("x", timeout_seconds=0.1):
                pass
        with sky.plugins.lock("y", timeout_seconds=0.1):
            pass
    with sky.plugins.lock("x", timeout_seconds=0.1):
        pass


@pytest.mark.usefixtures("store")
def test_a_lock_is_free_after_an_exception() -> None:
    with pytest.raises(KeyError):
        with sky.plugins.lock():
            raise KeyError
    with sky.plugins.lock(timeout_seconds=0.1):
        pass


@pytest.mark.usefixtures("store")
def test_a_barrier_of_one_is_passed_again_and_again() -> None:
    for _ in range(3):
        sky.plugins.barrier(timeout_seconds=10)


def test_an_abort_ends_a_wait() -> None:
    plugin = sky.plugins.coordination()
    (port,) = free_ports(1)
    info = InstanceInfo(total_nodes=2, world_size=2, head_port=port, job="pool/1")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            sky.plugins.barrier()
        except RuntimeError as error:
            errors.append(error)

    with plugin.around_app(info):
        thread = threading.Thread(target=wait)
        thread.start()
        plugin.abort(info)
        thread.join(60)
    assert "another rank failed" in str(errors[0])
