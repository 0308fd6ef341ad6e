"""Kubeconfigs: several files, files without a current context, and files that are none."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from skyproxy.errors import ConfigurationError
from skyproxy.kubernetes.address import ClusterAddress, NoClusterError
from skyproxy.kubernetes.client import ClusterClient
from skyproxy.kubernetes.kubeconfig import is_there, read


def write(path: Path, current: str | None, **namespaces: str) -> Path:
    """A kubeconfig with a context for each namespace, all on a server that is nowhere."""
    rows = [{"name": name, "context": {"cluster": "c", "namespace": where}} for name, where in namespaces.items()]
    clusters = [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}]
    content: dict[str, Any] = {"kind": "Config", "contexts": rows, "clusters": clusters}
    if current is not None:
        content["current-context"] = current
    path.write_text(yaml.safe_dump(content))
    return path


def resolve(**given: Any) -> ClusterAddress:
    return asyncio.run(ClusterAddress(**given).resolved())


@pytest.mark.parametrize(
    ("first", "second", "meant"),
    [("a", "b", "a"), (None, "b", "b"), ("", "b", "b"), ("b", None, "b")],
    ids=["both", "none in the first", "empty in the first", "another file's"],
)
def test_the_first_current_context_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str | None, second: str | None, meant: str
) -> None:
    files = [write(tmp_path / "1", first, a="one"), write(tmp_path / "2", second, a="not this", b="two")]
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(map(str, files)))
    found = resolve()
    assert (found.context, found.namespace) == (meant, {"a": "one", "b": "two"}[meant])


def test_files_that_are_empty_or_not_there_are_left_out(kubeconfig: Path, server: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    named = os.pathsep.join([str(tmp_path / "empty"), str(tmp_path / "absent"), str(kubeconfig)])

    async def handler(request: Any) -> Any:
        return web.json_response({"fine": True})

    async def ask() -> Any:
        async with ClusterClient(ClusterAddress(kubeconfig=named)) as client:
            return client.address, await client.request("GET", "/api")

    server.handler = handler
    address, answer = asyncio.run(ask())
    assert (address.context, address.kubeconfig) == ("mine", str(kubeconfig))
    assert answer == {"fine": True}
    assert server.tokens == ["Bearer secret-token"]


@pytest.mark.parametrize("current", [None, "", "deleted"])
def test_a_context_that_is_named_needs_no_current_one(tmp_path: Path, current: str | None) -> None:
    path = write(tmp_path / "1", current, a="one")
    assert resolve(kubeconfig=str(path), context="a").namespace == "one"
    with pytest.raises(ConfigurationError, match=r"has no (current context|context 'deleted'). It has: a. Name one"):
        resolve(kubeconfig=str(path))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"contexts: [", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"- a", "it is no object"),
        (b"contexts: 5", "its contexts are no list"),
        (b"contexts: [5]", "a context has no name"),
        (b"contexts: [{name: a, context: x}]", "a context has no name, or says nothing"),
        (b"[" * 5000, "cannot be read"),
    ],
)
def test_what_is_no_kubeconfig_is_named_with_its_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, says: str
) -> None:
    path = tmp_path / "config"
    path.write_bytes(content)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(ConfigurationError, match=f"the kubeconfig {path} .*{says}") as caught:
        resolve()
    assert not isinstance(caught.value, NoClusterError)


@pytest.mark.parametrize("namespace", ["../kube-system", "Team", "a b", "a/b", "-a", "a" * 64, "a\n"])
def test_a_namespace_that_cannot_be_one_is_asked_for_nowhere(tmp_path: Path, namespace: str) -> None:
    path = write(tmp_path / "1", "a", a="one", b=namespace)
    with pytest.raises(ConfigurationError, match="cannot name a namespace"):
        resolve(kubeconfig=str(path), namespace=namespace)
    with pytest.raises(ConfigurationError, match="cannot name a namespace"):
        resolve(kubeconfig=str(path), context="b")
    assert resolve(kubeconfig=str(path)).namespace == "one"


def test_a_folder_is_no_kubeconfig_and_what_is_below_a_file_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be read: .*directory"):
        read(str(tmp_path))
    (tmp_path / "file").write_text("")
    assert not is_there(tmp_path / "file" / "config")
    assert read(str(tmp_path / "file" / "config")).files == ()
