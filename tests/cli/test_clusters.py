"""Which cluster a command means, and what it says where there is none or it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

aiohttp_web = pytest.importorskip("aiohttp.web")
pytest.importorskip("kubernetes_asyncio")

from tests.kubernetes.conftest import ApiServer, kubeconfig, server  # noqa: E402, F401

Run = Callable[..., Result]
Read = Callable[..., Any]


def said(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.mark.parametrize("command", [["up", "x"], ["gpus"], ["install"], ["down", "x", "--provider", "kubernetes"]])
def test_a_kubeconfig_that_is_not_there_is_named_and_no_other_worker_is_taken(
    run: Run, read: Read, home: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    missing = str(home / "typo")
    monkeypatch.setenv("KUBECONFIG", missing)
    result = run(*command)
    assert result.exit_code == 2, result.output
    assert f"the kubeconfig {missing}, which KUBECONFIG names, cannot be used: there is no such file" in said(result)
    monkeypatch.delenv("KUBECONFIG")
    result = run(*command, "--kubeconfig", missing)
    assert result.exit_code == 2, result.output
    assert f"the kubeconfig {missing}, which --kubeconfig names, cannot be used: there is no such file" in said(result)
    assert "Config not found" not in result.output
    assert read("list") == []


def test_a_broken_kubeconfig_is_an_error_for_up_and_a_warning_for_list(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = home / ".kube" / "config"
    usual.parent.mkdir()
    usual.write_text("current-context: [")
    result = run("up", "x")
    assert result.exit_code == 2, result.output
    assert str(usual) in said(result)
    result = run("list")
    assert result.exit_code == 0, result.output
    assert "Warning" in result.output
    assert str(usual) in said(result)
    # Where the worker might be, nobody could look.
    result = run("status", "x")
    assert result.exit_code == 3
    assert "could not be asked" in said(result)


@pytest.mark.parametrize("content", ["", "apiVersion: v1\nkind: Config\ncontexts: []\ncurrent-context: ''\n"])
def test_a_kubeconfig_in_which_nothing_is_current_is_no_cluster(run: Run, home: Path, content: str) -> None:
    usual = home / ".kube" / "config"
    usual.parent.mkdir()
    usual.write_text(content)
    result = run("list")
    assert (result.exit_code, result.output) == (0, "There are no workers. Start one: skyproxy up NAME\n")
    result = run("gpus")
    assert result.exit_code == 2
    assert "no Kubernetes cluster is configured" in said(result)


def test_of_several_kubeconfigs_those_that_are_there_count(
    run: Run,
    read: Read,
    server: ApiServer,  # noqa: F811
    kubeconfig: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def handler(request: Any) -> Any:
        return aiohttp_web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})

    server.handler = handler
    monkeypatch.setenv("KUBECONFIG", f"/no/such/file:{kubeconfig}")
    assert read("list") == []
    assert server.requests == ["GET /apis/skyproxy.dev/v1alpha1/namespaces/team/computes"]


def test_gpus_without_the_right_to_see_nodes_ends_with_6(run: Run, server: ApiServer, kubeconfig: Path) -> None:  # noqa: F811
    async def handler(request: Any) -> Any:
        status = {"kind": "Status", "reason": "Forbidden", "message": "nodes is forbidden"}
        return aiohttp_web.json_response(status, status=403)

    server.handler = handler
    result = run("gpus", "--kubeconfig", str(kubeconfig))
    assert result.exit_code == 6, result.output
    assert "kubectl auth can-i list nodes" in said(result)
