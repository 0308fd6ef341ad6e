"""What is asked of a provider."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

import skyproxy
from skyproxy.errors import ConfigurationError
from skyproxy.providers import Endpoint, Volume, WorkerSpec
from skyproxy.providers.base import COMPUTE_ARGUMENTS


def test_a_volume_as_a_dict() -> None:
    volume = Volume.parse({"name": "cache", "storage": "10Gi", "path": "/cache", "accessMode": "ReadWriteMany"})
    assert volume == Volume("cache", "10Gi", "/cache", {"accessMode": "ReadWriteMany"})
    assert Volume.parse(volume) is volume


@pytest.mark.parametrize("given", [{"name": "a", "storage": "1Gi"}, {"name": "a", "storage": "1Gi", "path": "a"}])
def test_a_volume_without_a_place_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError):
        Volume.parse(given)


def test_no_token_in_what_people_see() -> None:
    assert "secret" not in repr(Endpoint("ws://h:1", "secret", certificate="secret"))


def test_every_process_is_a_rank() -> None:
    assert WorkerSpec("a", nodes=3, procs_per_node=2).world_size == 6


@pytest.mark.parametrize(
    "provider",
    [
        skyproxy.Local(),
        skyproxy.Container(),
        skyproxy.Remote(["ws://127.0.0.1:1"], token="t"),
        skyproxy.AWS(region="r"),
    ],
    ids=lambda provider: type(provider).__name__,
)
@pytest.mark.parametrize(("name", "value"), [("nodez", 2), ("nodez", 0)])
def test_an_argument_that_nobody_knows_is_refused_by_every_provider(provider: Any, name: str, value: object) -> None:
    spec = WorkerSpec("dev", options={name: value})
    with pytest.raises(ConfigurationError, match=r"has an argument nodez=\. Did you mean nodes=\?"):
        asyncio.run(provider.launch(spec, lambda progress: None))


def test_suggestions_are_the_arguments_of_compute() -> None:
    parameters = inspect.signature(skyproxy.Compute.__init__).parameters
    assert tuple(name for name in parameters if name not in ("self", "options")) == COMPUTE_ARGUMENTS


def test_local_says_which_devices_it_ignores(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "skyproxy"):
        spec = WorkerSpec("dev", resources={"nvidia.com/gpu": "1", "cpu": "1", "disk": "9Gi"})
        skyproxy.Local(device="cpu")._check_image(spec, lambda step: None)
    assert "ignores resources: nvidia.com/gpu=1, disk=9Gi." in caplog.text
