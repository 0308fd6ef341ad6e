"""Fixtures for all tests: two workers, each in a process of its own, as users have them.

Not threads of this process: a worker draws from its process's default generator, and would draw from ours.
"""

from __future__ import annotations

import logging
import os
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

# Whatever worker this machine's owner has chosen with `skyproxy up`, the tests use their own.
os.environ["SKYPROXY_CONTEXT"] = ""
# Tests compare what programs print; tests/test_first_use.py has the line itself.
os.environ["SKYPROXY_ANNOUNCE_WORKER"] = "0"

_SLOW_TEST_SECONDS = 300
"""For a slow test that says nothing else; a dozen processes that import torch share two cores with other tests."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without the word out where slow tests alone are asked for: each process would import them all."""
    if not config.option.markexpr.startswith("slow") or not collection_path.match("test_*.py"):
        return None
    return True if "slow" not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    for path in {item.path for item in slow}:
        assert "slow" in path.read_text(encoding="utf-8"), f"{path}: `make slow` would leave out its slow tests"
    for item in slow:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_SLOW_TEST_SECONDS))


@pytest.fixture(scope="session")
def sky_devices() -> Iterator[tuple[str, str]]:
    """Two devices on two workers: "sky:0" and "sky:1"."""
    import skyproxy
    from skyproxy.tensor.core.devices import DEVICES

    if not any(node.alive for node in skyproxy.list_nodes()):
        skyproxy.reset()  # "sky:0" would be what a test before had closed
    while len(DEVICES.existing()) < 2:
        skyproxy.launch_local(os.environ.get("SKYPROXY_SWEEP_DEVICE", "cpu"))  # "cuda": `make gpu`
    yield "sky:0", "sky:1"
    skyproxy.reset()


@pytest.fixture
def sky(sky_devices: tuple[str, str]) -> str:
    """The first device."""
    return sky_devices[0]


@pytest.fixture
def sky1(sky_devices: tuple[str, str]) -> str:
    """A device with an index that is not zero: several of PyTorch's paths work for index 0 only."""
    return sky_devices[1]


@pytest.fixture(autouse=True)
def _log_is_left_as_found() -> Iterator[None]:
    """A worker that a test starts in its own process takes the log to a standard error that ends with the test."""
    own = logging.getLogger("skyproxy")
    handlers, propagates, level = own.handlers[:], own.propagate, own.level
    yield
    own.handlers[:], own.propagate = handlers, propagates
    own.setLevel(level)


@pytest.fixture(autouse=True)
def _modes_are_left_as_found() -> Iterator[None]:
    """A mode that one test leaves behind is in force in all that come after it, on whichever process they share."""
    yield
    if "skyproxy.tensor.core.devices" not in sys.modules:
        return
    from skyproxy.tensor.core.devices import DEVICES
    from skyproxy.torch_modes import MODES, put_in_force, record_of, values_in_force

    worker = sys.modules.get("skyproxy_server.kernel_warnings")
    # A worker in this process hears every warning, for good, and nobody is asked to take that back.
    usual = {"warn_always"} if worker is not None and worker._installed else set()
    left = tuple(row for row in record_of(values_in_force()) if row[0] not in usual)
    kept = {one.index: tuple(row for row in one.modes if row[0] not in usual) for one in DEVICES.alive()}
    on_devices = {index: modes for index, modes in kept.items() if modes != left}
    if left or on_devices:
        put_in_force({name: mode.usual for name, mode in MODES.items()})
        sys.modules["torch"].set_flush_denormal(False)  # each thread has its own
        pytest.fail(f"the test left global modes of PyTorch set: {left}; on devices: {on_devices}")


@pytest.fixture
def _settable_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's global flags may be set: its operator database, which any test of this process may have imported,
    forbids it. Not by way of `torch.backends`, which is a stand-in for the module whose variable this is."""
    import torch

    variables = torch.backends.disable_global_flags.__globals__
    monkeypatch.setitem(variables, "__allow_nonbracketed_mutation_flag", True)


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="session")
def tls_contexts(authority: trustme.CA) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A client's context that trusts a server's, and that server's."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return client, server
