"""`skyproxy context`, and connecting to a worker by its url."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import skyproxy
from skyproxy.cli.arguments import complete_worker
from skyproxy.contexts import Context, ContextStore
from skyproxy.errors import SessionLostError
from skyproxy.session.local_worker import LocalWorker
from skyproxy.settings import SETTINGS

Run = Callable[..., Result]
Read = Callable[..., Any]


@pytest.fixture(scope="module")
def worker() -> Iterator[LocalWorker]:
    started = LocalWorker("cpu", SETTINGS)
    yield started
    started.stop()


def test_contexts_are_listed_used_and_removed(run: Run, read: Read) -> None:
    store = ContextStore()
    store.save(Context("a", "local"))
    store.save(Context("b", "kubernetes", {"namespace": "team"}))
    assert [(row["name"], row["current"]) for row in read("context", "list")] == [("a", False), ("b", True)]
    assert run("context", "use", "a").exit_code == 0
    assert run("context", "current").stdout == "a\n"
    assert run("context", "remove", "a").exit_code == 0
    assert read("context", "current") is None
    assert run("context", "remove", "a").exit_code == 3


def test_a_url_is_kept_with_the_path_of_its_token(run: Run, read: Read, worker: LocalWorker, home: Path) -> None:
    token = home / "token"
    token.write_text(worker.token)
    token.chmod(0o600)
    result = run("connect", worker.url, "--token-file", str(token), "--name", "far")
    assert result.exit_code == 0, result.output
    saved = read("context", "current")
    assert saved == {"name": "far", "provider": "remote", "options": {"url": worker.url, "token_file": str(token)}}
    assert run("doctor").exit_code == 0
    assert read("status")["ready"] is True
    assert [(row["name"], row["provider"]) for row in read("list")] == [("far", "remote")]
    assert read("top", "--interval", "0.1")["name"] == "far"
    for command in ("down", "logs"):
        assert run(command, "far").exit_code == 2
    assert ContextStore().names() == ["far"]
    for path in (home / "config").rglob("*"):
        assert path.is_dir() or worker.token not in path.read_text()


def test_named_sessions_are_listed_and_ended(run: Run, read: Read, worker: LocalWorker, home: Path, sky: str) -> None:
    import torch

    token = home / "token"
    token.write_text(worker.token)
    token.chmod(0o600)
    assert run("connect", worker.url, "--token-file", str(token), "--name", "far").exit_code == 0
    assert "no named sessions" in run("sessions").output
    with skyproxy.connect(worker.url, token=worker.token, session="exp1") as node:
        x = torch.ones(1 << 10, device=node.devices[0])
        node.put("x", x)
        (row,) = read("sessions", "list")
        assert (row["name"], row["names"], row["bytes"], row["held"]) == ("exp1", 1, 4 << 10, True)
        assert row["expires_in_seconds"] is None
        assert "exp1" in run("sessions", "list", "--on", "far").output
        assert run("sessions", "end", "exp2").exit_code == 3
        assert run("sessions", "end", "exp1").exit_code == 0
        with pytest.raises(SessionLostError, match="ended by name"):
            x.sum().item()
    assert read("sessions", "list") == []


def test_a_refused_token_ends_with_5_and_keeps_nothing(run: Run, worker: LocalWorker, home: Path) -> None:
    token = home / "token"
    token.write_text("not-the-token-of-this-worker")
    result = run("connect", worker.url, "--token-file", str(token))
    assert result.exit_code == 5
    assert "refused the token" in result.output
    assert "connect URL --token-file FILE" in result.output
    assert ContextStore().names() == []


def test_a_worker_elsewhere_that_is_gone_is_said_to_be(run: Run, read: Read, home: Path) -> None:
    token = home / "token"
    token.write_text("x" * 20)
    ContextStore().save(Context("far", "remote", {"url": "ws://127.0.0.1:1", "token_file": str(token)}))
    assert read("list")[0]["phase"] == "Lost"
    status = run("status")
    assert status.exit_code == 1
    assert "skyproxy context remove far" in status.stdout


def test_names_are_completed(run: Run) -> None:
    for name in ("dev", "dev-2", "prod"):
        ContextStore().save(Context(name, "local"))
    assert complete_worker("dev") == ["dev", "dev-2"]


def test_the_worker_of_the_environment_goes_before_the_saved_one(
    run: Run, read: Read, worker: LocalWorker, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ContextStore().save(Context("gone", "remote", {"url": "ws://127.0.0.1:1", "token_file": str(home / "none")}))
    monkeypatch.setenv("SKYPROXY_URL", worker.url)
    assert "SKYPROXY_TOKEN is not" in run("sessions").output
    monkeypatch.setenv("SKYPROXY_TOKEN", worker.token)
    assert read("sessions", "list") == []
    assert run("doctor").exit_code == 0
    assert run("sessions", "--help").exit_code == 0
    assert run("sessions", "list", "--on", "gone").exit_code == 2  # who is named is meant


def test_a_command_that_needs_a_name_says_that_the_environment_gives_an_address_only(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYPROXY_URL", "ws://127.0.0.1:1")
    monkeypatch.setenv("SKYPROXY_TOKEN", "x" * 20)
    for command in ("status", "logs", "top"):
        result = run(command)
        assert result.exit_code == 2
        assert 'skyproxy connect "$SKYPROXY_URL"' in result.output
