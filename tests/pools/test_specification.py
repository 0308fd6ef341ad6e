"""What users write, as providers are asked for it."""

from __future__ import annotations

from typing import Any

import pytest

import skyproxy as sky
from skyproxy.errors import ConfigurationError, PluginError
from skyproxy.pools.specification import PlannedPool, transformed, worker_spec
from skyproxy.providers import Accelerator, Image, Volume, WorkerSpec

DEFAULTS: dict[str, Any] = {
    "name": None,
    "nodes": 1,
    "procs_per_node": 1,
    "accelerator": None,
    "vcpus": None,
    "memory_gb": None,
    "resources": None,
    "image": None,
    "volumes": (),
    "env": None,
    "timeout": 60,
    "idle_timeout": None,
    "max_lifetime": None,
    "keep": False,
    "options": {},
    "local": False,
}


def spec(**asked: Any) -> WorkerSpec:
    return worker_spec(**DEFAULTS | asked)


def test_everything_comes_into_one_form() -> None:
    made = spec(
        name="train",
        nodes=2,
        procs_per_node="gpu",
        accelerator="a100:8",
        vcpus=4,
        memory_gb=2.5,
        volumes=[{"name": "cache", "storage": "10Gi", "path": "/cache"}],
        env={"N": 1},
        timeout="1h30m",
        idle_timeout="10m",
        options={"priority": "high"},
    )
    assert made == WorkerSpec(
        name="train",
        nodes=2,
        procs_per_node=8,
        resources={"cpu": "4", "memory": "2.5Gi"},
        accelerator=Accelerator("A100", 8),
        volumes=(Volume("cache", "10Gi", "/cache"),),
        env={"N": "1"},
        timeout_seconds=5400.0,
        idle_timeout_seconds=600.0,
        options={"priority": "high"},
    )
    assert made.world_size == 16


def test_a_process_for_each_gpu_that_was_asked_for() -> None:
    assert spec(procs_per_node="gpu", resources={"nvidia.com/gpu": "4"}).procs_per_node == 4


def test_a_process_for_each_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyproxy.pools.specification.count_accelerators", lambda: 8)
    assert spec(procs_per_node="gpu", local=True, nodes=2).procs_per_node == 4


def test_names_are_made_up_and_differ() -> None:
    assert spec().name != spec().name


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"nodes": 0}, "nodes"),
        ({"nodes": "2"}, "nodes"),
        ({"procs_per_node": 0}, "procs_per_node"),
        ({"procs_per_node": "gpu"}, "accelerator"),
        ({"accelerator": "A1000"}, "A100"),
        ({"vcpus": 2, "resources": {"cpu": "1"}}, "twice"),
        ({"memory_gb": -1}, "memory_gb"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": None}, "timeout"),
        ({"idle_timeout": "soon"}, "idle_timeout"),
        ({"keep": True}, "name"),
        ({"keep": "no"}, "keep='no': use True or False"),
        ({"name": ""}, "name='': use a text"),
        ({"name": 3}, "name=3 is int. Give a text"),
        ({"env": {"A": None}}, "env={'A': None}"),
        ({"accelerator": 3}, "accelerator=3: use 'A100'"),
        ({"volumes": [{"name": "x"}]}, "storage"),
        ({"volumes": ["x"]}, "volumes: an element='x' is str. Give a Volume"),
        ({"volumes": "x"}, "volumes='x' is str. Give a list"),
        ({"resources": 5}, "resources=5 is int. Give a dict"),
        ({"env": ["A=b"]}, "env=.* is list. Give a dict"),
        ({"image": 3}, "image=3 is int. Give an Image"),
        ({"memory_gb": "lots"}, "memory_gb='lots': use a number"),
        ({"vcpus": float("nan")}, "vcpus=nan"),
        ({"vcpus": True}, "vcpus=True"),
    ],
)
def test_what_cannot_work_is_named(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        spec(**asked)


def test_a_compute_says_so_where_it_was_written() -> None:
    with pytest.raises(ConfigurationError, match="nodes"):
        sky.Compute(nodes=0)
    with pytest.raises(ConfigurationError, match="concurrency"):
        sky.Compute(concurrency=0)
    with pytest.raises(ConfigurationError, match="retry='a'"):
        sky.Compute(retry="a")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"provider='local' is no provider. Make one"):
        sky.Compute(provider="local")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"provider=.*Local.* is no provider. Make one"):
        sky.Compute(provider=sky.Local)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"plugins='torch' is str. Give a list"):
        sky.Compute(plugins="torch")
    with pytest.raises(ConfigurationError, match="plugins: 'torch' is no plugin"):
        sky.Compute(plugins=["torch"])  # type: ignore[list-item]


class Adds:
    def __init__(self, package: str) -> None:
        self.package = package
        self.saw: list[Any] = []

    def transform(self, image: Image, cluster: PlannedPool) -> Image:
        self.saw.append((cluster.spec.accelerator, cluster.spec.image))
        return image.replace(pip=(*image.pip, self.package))


def test_plugins_add_to_the_image_one_after_the_other() -> None:
    first, second = Adds("one"), Adds("two")
    before = spec(image=Image(pip=["zero"]), accelerator="A100")
    after = transformed(before, [first, object(), second])
    assert after.image == Image(pip=["zero", "one", "two"])
    assert before.image == Image(pip=["zero"])
    assert second.saw == [(Accelerator("A100"), Image(pip=["zero", "one"]))]


def test_plugins_add_to_the_name_of_a_container_image() -> None:
    assert transformed(spec(image="worker:1"), [Adds("one")]).image == Image(base="worker:1", pip=["one"])
    assert transformed(spec(image="worker:1"), [object()]).image == "worker:1"


def test_a_transform_that_returns_nothing_is_an_error() -> None:
    class Forgets:
        def transform(self, image: Image, cluster: PlannedPool) -> None:
            return None

    with pytest.raises(ConfigurationError, match="Forgets"):
        transformed(spec(), [Forgets()])


def test_a_transform_that_fails_is_named() -> None:
    class Fails:
        name = "cuda-kernels"

        def transform(self, image: Image, cluster: PlannedPool) -> Image:
            raise LookupError("no wheel for this accelerator")

    with pytest.raises(PluginError, match="plugin 'cuda-kernels', transform: LookupError: no wheel") as caught:
        transformed(spec(), [Fails()])
    assert isinstance(caught.value.__cause__, LookupError)
