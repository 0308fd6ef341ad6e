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
from skyproxy_operator.cluster import ClusterConnection
from skyproxy_operator.options import Options


class Touched:
    """Stands for the controller: remembers what it was told of."""

    def __init__(self) -> None:
        self.keys: list[tuple[tuple[str, str], dict[str, bool]]] = []

    def touch(self, key: tuple[str, str], **how: bool) -> None:
        self.keys.append((key, how))


def test_kopf_watches_nothing_and_puts_nothing_on_anything() -> None:
    registry = handlers.REGISTRY
    assert [list(part.get_all_handlers()) for part in (registry._spawning, registry._changing, registry._watching)] == [
        [],
        [],
        [],
    ]


@pytest.mark.parametrize(
    ("kind", "change", "listed", "how"),
    [
        ("Compute", "MODIFIED", False, {"routine": False}),
        ("Compute", "ADDED", True, {"routine": True}),
        ("Compute", "DELETED", True, {"routine": False}),
        ("Pod", "DELETED", False, {"routine": False}),
        ("Service", "MODIFIED", False, {"children": True}),
        ("NetworkPolicy", "DELETED", True, {"children": True}),
        ("Service", "ADDED", False, None),
        ("PersistentVolumeClaim", "ADDED", True, None),
    ],
)
def test_changes_become_looks(kind: str, change: str, listed: bool, how: dict[str, bool] | None) -> None:
    operator = handlers.Operator(Options())
    operator.controller = touched = Touched()  # type: ignore[assignment]
    name = "dev" if kind == "Compute" else "dev-0"
    labels = {} if kind == "Compute" else {"skyproxy.dev/compute": "dev"}
    item = {"kind": kind, "metadata": {"name": name, "namespace": "lab", "labels": labels}}
    operator.changed(kind, change, item, listed)
    assert touched.keys == ([(("lab", "dev"), how)] if how is not None else [])


def test_a_runtime_that_changes_is_a_look_at_those_who_name_it() -> None:
    class View:
        def computes(self) -> list[tuple[str, str]]:
            return [("lab", "a"), ("lab", "b"), ("field", "c")]

        def compute(self, _namespace: str, name: str) -> dict[str, Any] | None:
            return {"a": {"spec": {"runtime": "a100"}}, "b": {"spec": {}}}.get(name)

    operator = handlers.Operator(Options())
    operator.controller = touched = Touched()  # type: ignore[assignment]
    operator._view = View()  # type: ignore[assignment]
    for change in ("ADDED", "MODIFIED", "DELETED"):
        operator.changed("Runtime", change, {"metadata": {"name": "a100", "namespace": "skyproxy-system"}}, False)
    assert touched.keys == [(("lab", "a"), {"routine": True})] * 3


@pytest.mark.parametrize("memo", [SimpleNamespace(), SimpleNamespace(namespaces=("a", "b"))])
def test_kopf_hands_on_the_namespaces_and_looks_for_nothing_itself(
    memo: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = kopf.OperatorSettings()
    started: list[Any] = []

    class Operator:
        def __init__(self, options: object, namespaces: object) -> None:
            started.append(namespaces)

        async def start(self) -> None:
            started.append("started")

    monkeypatch.setattr(handlers, "Operator", Operator)
    namespaces = getattr(memo, "namespaces", ())
    asyncio.run(handlers.start(settings=settings, memo=memo))
    assert started == [namespaces, "started"]
    assert (settings.posting.enabled, settings.scanning.disabled) == (False, True)


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
    class Old(ClusterConnection):
        async def request(self, method: str, path: str, **_: Any) -> dict[str, Any]:
            return {"major": "1", "minor": "18", "gitVersion": "v1.18.20"}

        async def close(self) -> None:
            pass

    async def connect(_timeout: float) -> ClusterConnection:
        return Old(None, 1.0)

    monkeypatch.setattr(ClusterConnection, "connect", connect)
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
