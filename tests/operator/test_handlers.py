"""What kopf is told, and what it makes of it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kopf
import pytest

from skyproxy_operator import handlers
from skyproxy_operator.__main__ import main, parser
from skyproxy_operator.cluster import Cluster


class Touched:
    """Stands for the operator: remembers what it was told of."""

    def __init__(self) -> None:
        self.keys: list[tuple[str | None, str, bool]] = []

    def touch(self, namespace: str | None, name: str, *, children: bool = False) -> None:
        self.keys.append((namespace, name, children))


def test_kopf_puts_no_finalizer_and_no_progress_on_anything() -> None:
    registry = handlers.REGISTRY
    assert list(registry._spawning.get_all_handlers()) == []
    assert list(registry._changing.get_all_handlers()) == []
    assert {handler.id for handler in registry._watching.get_all_handlers()} == {
        "compute_changed",
        "pod_changed",
        "child_changed",
    }


@pytest.mark.parametrize(("kind", "touched"), [("MODIFIED", True), ("DELETED", True), ("ADDED", False), (None, False)])
def test_changes_become_looks(kind: str | None, touched: bool) -> None:
    memo = SimpleNamespace(operator=Touched())
    labels = {"skyproxy.dev/compute": "dev"}
    event: dict[str, Any] = {"namespace": "lab", "memo": memo, "labels": labels}

    async def scenario() -> None:
        await handlers.compute_changed(name="dev", **event)
        await handlers.pod_changed(name="dev-0", **event)
        await handlers.child_changed(type=kind, name="dev-token", **event)

    asyncio.run(scenario())
    assert memo.operator.keys == [("lab", "dev", False)] * 2 + [("lab", "dev", True)] * touched


def test_only_what_bears_our_label_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = kopf.OperatorSettings()
    started = []

    class Operator:
        def __init__(self, options: object) -> None:
            started.append(options)

        async def start(self) -> None:
            started.append("started")

    monkeypatch.setattr(handlers, "Operator", Operator)
    asyncio.run(handlers.start(settings=settings, memo=SimpleNamespace()))
    assert started[1:] == ["started"]
    assert set(settings.watching.label_selectors.values()) == {"skyproxy.dev/compute"}
    assert settings.posting.enabled is False


def test_the_operator_needs_no_torch_and_no_worker() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy', 'skyproxy_server')));"
        "import skyproxy_operator.handlers, skyproxy_operator.__main__, skyproxy_operator.certificates"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr


def test_one_has_to_say_what_to_look_after() -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args([])
    assert caught.value.code == 2
    assert parser().parse_args(["-n", "a", "-n", "b"]).namespace == ["a", "b"]


def test_a_bad_option_is_told_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SKYPROXY_OPERATOR_CONCURRENCY", "many")
    assert main(["-A"]) == 2
    assert "SKYPROXY_OPERATOR_CONCURRENCY='many' is not a number" in capsys.readouterr().err


def test_a_cluster_that_is_too_old_ends_the_operator_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Old(Cluster):
        async def request(self, method: str, path: str, **_: Any) -> dict[str, Any]:
            return {"major": "1", "minor": "18", "gitVersion": "v1.18.20"}

        async def close(self) -> None:
            pass

    async def connect(_timeout: float) -> Cluster:
        return Old(None, 1.0)

    monkeypatch.setattr(Cluster, "connect", connect)
    monkeypatch.setattr(kopf, "operator", None)
    monkeypatch.setattr(kopf, "configure", lambda **_: None)
    assert main(["-A"]) == 2
    assert "Kubernetes v1.18.20, and skyproxy needs 1.20 or newer" in capsys.readouterr().err


def test_a_kubeconfig_that_cannot_be_used_ends_the_operator_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "typo"))
    monkeypatch.setattr(kopf, "operator", None)
    monkeypatch.setattr(kopf, "configure", lambda **_: None)
    assert main(["-A"]) == 2
    assert "the credentials for the cluster cannot be used" in capsys.readouterr().err
