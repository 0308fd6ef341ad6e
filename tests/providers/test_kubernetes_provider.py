"""What the Kubernetes provider asks the operator for. That it comes to be is in tests/e2e."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy.kubernetes.gpus import WantedGpus
from skyproxy.providers import Accelerator, Image, Kubernetes, PipIndex, Volume, WorkerSpec
from skyproxy.providers import kubernetes_provider as module


class Client:
    namespace = "team"


def manifest(spec: WorkerSpec, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = asyncio.run(Kubernetes(**more)._manifest(Client(), spec))  # type: ignore[arg-type]
    return made


def test_everything_that_is_asked_for_is_passed_on() -> None:
    spec = WorkerSpec(
        "w",
        nodes=2,
        procs_per_node=4,
        image="worker:1",
        resources={"cpu": "4"},
        volumes=(Volume("cache", "1Gi", "/cache", {"reclaimPolicy": "Retain"}),),
        env={"A": "b"},
        idle_timeout_seconds=1800,
        options={"sharedMemory": "8Gi"},
    )
    made = manifest(spec, tolerations=[{"operator": "Exists"}])
    assert made["metadata"] == {"name": "w", "namespace": "team"}
    assert made["spec"] == {
        "nodes": 2,
        "procsPerNode": 4,
        "image": "worker:1",
        "resources": {"cpu": "4"},
        "volumes": [{"name": "cache", "storage": "1Gi", "path": "/cache", "reclaimPolicy": "Retain"}],
        "env": [{"name": "A", "value": "b"}],
        "idleTimeout": "30m",
        "tolerations": [{"operator": "Exists"}],
        "sharedMemory": "8Gi",
    }


def test_an_accelerator_is_a_resource_and_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def placement(_client: Any, kind: str) -> Any:
        return WantedGpus("amd.com/gpu", {"for": kind})

    monkeypatch.setattr(module, "placement", placement)
    spec = manifest(WorkerSpec("w", accelerator=Accelerator("MI300X", 8)))["spec"]
    assert spec["resources"] == {"amd.com/gpu": "8"}
    assert spec["affinity"] == {"for": "MI300X"}
    # Who says themselves where it goes, and of what, is not asked about anything.
    given = manifest(WorkerSpec("w", accelerator=Accelerator("A100", 8)), affinity={"own": 1})["spec"]
    assert (given["resources"], given["affinity"]) == ({"nvidia.com/gpu": "8"}, {"own": 1})


def test_packages_are_installed_when_the_worker_starts() -> None:
    image = Image(
        base="worker:1", pip=["torch==2.13.0", "tqdm"], pip_indexes=[PipIndex("https://i", ["torch"])], env={"X": "1"}
    )
    own = {"spec": {"containers": [{"name": "worker", "stdin": True}], "hostIPC": True}}
    spec = manifest(WorkerSpec("w", image=image, env={"X": "2"}), podTemplate=own)["spec"]
    assert spec["image"] == "worker:1"
    assert spec["env"] == [{"name": "X", "value": "2"}]
    (container,) = spec["podTemplate"]["spec"]["containers"]
    assert container["command"][:3] == ["python", "-m", "skyproxy_server.bootstrap"]
    wanted = json.loads(container["command"][3])
    assert wanted["requirements"] == ["torch==2.13.0", "tqdm"]
    assert wanted["steps"] == [["--no-deps", "--index-url", "https://i", "torch==2.13.0"], ["torch==2.13.0", "tqdm"]]
    assert (container["stdin"], spec["podTemplate"]["spec"]["hostIPC"]) == (True, True)
    assert "command" not in own["spec"]["containers"][0]  # type: ignore[index]


@pytest.mark.parametrize("image", [Image(apt=["git"]), Image(includes=["."]), Image(python="3.12")])
def test_what_only_a_built_image_can_have_is_refused(image: Image) -> None:
    with pytest.raises(ConfigurationError, match="Image\\(base="):
        manifest(WorkerSpec("w", image=image))


def test_a_template_with_a_command_of_its_own_gets_no_packages() -> None:
    own = {"spec": {"containers": [{"name": "worker", "command": ["x"]}]}}
    with pytest.raises(ConfigurationError, match="podTemplate"):
        manifest(WorkerSpec("w", image=Image(pip=["x"])), podTemplate=own)


def test_a_way_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="via='train'"):
        Kubernetes(via="train")
