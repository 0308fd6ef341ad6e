"""What is asked of a provider."""

from __future__ import annotations

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy.providers import Endpoint, Volume, WorkerSpec


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
