"""A provider that cannot run here says exactly what is missing, and nobody else takes its place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyproxy as sky
from skyproxy.errors import SkyproxyError
from skyproxy.providers.local import free_port

CLUSTER = """
apiVersion: v1
kind: Config
current-context: nowhere
contexts: [{name: nowhere, context: {cluster: nowhere, user: nobody}}]
clusters: [{name: nowhere, cluster: {server: "http://127.0.0.1:%d"}}]
users: [{name: nobody, user: {token: x}}]
"""


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which nothing is installed or configured."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    names = [
        "KUBECONFIG",
        "KUBERNETES_SERVICE_HOST",
        "SKYPROXY_TOKEN",
        "SKYPROXY_CONTAINER_ENGINE",
        "SKYPROXY_PROVIDER",
    ]
    names += ["AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
    for name in names:
        monkeypatch.delenv(name, raising=False)


def without(module: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setitem(sys.modules, module, None)


def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pass


@pytest.mark.parametrize(
    ("provider", "change", "told"),
    [
        (lambda: sky.AWS(), without("boto3"), r"AWS\(\) needs boto3.*pip install .*boto3"),
        (lambda: sky.AWS(), nothing, "no region is configured"),
        (lambda: sky.AWS(region="eu-central-1"), nothing, "no credentials were found.*aws configure"),
        (lambda: sky.Container(), nothing, "docker or podman, which is not installed"),
        (lambda: sky.Kubernetes(), without("kubernetes_asyncio"), r"pip install 'kubernetes-asyncio"),
        (lambda: sky.Kubernetes(), nothing, "there is no kubeconfig. Set KUBECONFIG"),
        (lambda: sky.Remote(["ws://127.0.0.1:1"]), nothing, "no token. Pass token=..., or set SKYPROXY_TOKEN"),
        (lambda: sky.Remote([f"ws://127.0.0.1:{free_port()}"], token="x" * 32), nothing, "127.0.0.1"),
    ],
)
def test_it_says_what_to_install_or_to_set(
    provider: Callable[[], Any],
    change: Callable[[pytest.MonkeyPatch], None],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "boto3" not in told and provider().name == "aws":
        pytest.importorskip("boto3")
    change(monkeypatch)
    with pytest.raises(SkyproxyError, match=told):
        sky.Compute(provider=provider()).start()


def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path) -> None:
    pytest.importorskip("kubernetes_asyncio")
    port = free_port()
    path = tmp_path / "config"
    path.write_text(CLUSTER % port, encoding="utf-8")
    with pytest.raises(SkyproxyError, match=f"127.0.0.1:{port}"):
        sky.Compute(provider=sky.Kubernetes(kubeconfig=str(path))).start()


@pytest.mark.parametrize(("name", "told"), [("container", "docker or podman"), ("kubernetes", "no kubeconfig")])
def test_what_was_chosen_is_not_replaced_by_this_machine(name: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPROXY_PROVIDER", name)
    with pytest.raises(SkyproxyError, match=told):
        sky.Compute().start()
