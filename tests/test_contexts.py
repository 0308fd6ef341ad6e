"""Saved contexts: what is kept, for whom, and which one counts."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from skyproxy.contexts import CONTEXT_VARIABLE, Context, ContextStore, checked_name, config_folder, state_folder
from skyproxy.errors import ConfigurationError


@pytest.fixture
def store(tmp_path: Path) -> ContextStore:
    return ContextStore(tmp_path / "config")


def test_what_was_saved_comes_back_and_is_current(store: ContextStore) -> None:
    context = Context("dev", "kubernetes", {"namespace": "team", "kubeconfig": "/k"})
    store.save(context)
    assert ContextStore(store.folder).get("dev") == context
    assert store.chosen({}) == context


def test_saving_for_later_leaves_the_current_one(store: ContextStore) -> None:
    store.save(Context("a", "local"))
    store.save(Context("b", "local"), make_current=False)
    assert store.current_name() == "a"
    assert store.names() == ["a", "b"]


def test_the_variable_goes_before_the_current_one_and_an_empty_one_means_none(store: ContextStore) -> None:
    for name in ("a", "b"):
        store.save(Context(name, "local"))
    chosen = store.chosen({CONTEXT_VARIABLE: "a"})
    assert chosen is not None
    assert chosen.name == "a"
    assert store.chosen({CONTEXT_VARIABLE: ""}) is None
    with pytest.raises(ConfigurationError, match="Saved are: a, b"):
        store.chosen({CONTEXT_VARIABLE: "c"})


def test_removing_the_current_one_leaves_none(store: ContextStore) -> None:
    store.save(Context("a", "local"))
    assert store.remove("a")
    assert not store.remove("a")
    assert store.chosen({}) is None


def test_a_current_one_whose_file_is_gone_is_none(store: ContextStore) -> None:
    store.save(Context("a", "local"))
    (store.folder / "contexts" / "a.json").unlink()
    assert store.chosen({}) is None


@pytest.mark.skipif(os.name != "posix", reason="POSIX modes")
def test_only_the_owner_reads_it_whatever_the_umask(store: ContextStore) -> None:
    before = os.umask(0)
    try:
        store.save(Context("a", "local"))
    finally:
        os.umask(before)
    for path in store.folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "other", "provider": "local", "options": {}}'])
def test_a_broken_file_is_an_error_that_says_which(store: ContextStore, text: str) -> None:
    store.save(Context("a", "local"))
    (store.folder / "contexts" / "a.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"a\.json"):
        store.get("a")


def test_many_at_once_lose_nothing(store: ContextStore) -> None:
    def save(number: int) -> None:
        store.save(Context(f"c{number}", "local"))

    threads = [threading.Thread(target=save, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.names()) == 20
    assert store.current_name() in store.names()
    assert list(store.folder.rglob(".*")) == []


@pytest.mark.parametrize("name", ["a", "dev-1", "x" * 50])
def test_names_that_can_be(name: str) -> None:
    assert checked_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "1a", "a.b", "../a", "a/b", "a\n", "ä", "x" * 51])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot name a worker"):
        checked_name(name)


@pytest.mark.skipif(os.name != "posix", reason="XDG")
def test_folders_follow_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/elsewhere")
    assert config_folder() == tmp_path / ".config" / "skyproxy"
    assert state_folder() == Path("/elsewhere/skyproxy")
