"""Which provider is meant when none is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyproxy.contexts import Context, ContextStore
from skyproxy.errors import ConfigurationError
from skyproxy.providers.choice import default_provider


@pytest.mark.parametrize("name", ["local", "container", "kubernetes", "aws", " Local "])
def test_the_variable_names_one(name: str, tmp_path: Path) -> None:
    assert default_provider({"SKYPROXY_PROVIDER": name}, ContextStore(tmp_path)).name == name.strip().lower()


def test_another_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="kubernetes"):
        default_provider({"SKYPROXY_PROVIDER": "cloud"}, ContextStore(tmp_path))


def test_a_saved_cluster_comes_next_and_this_machine_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKYPROXY_CONTEXT", raising=False)
    store = ContextStore(tmp_path)
    assert default_provider({}, store).name == "local"
    store.save(Context("here", "local"))
    assert default_provider({}, store).name == "local"
    store.save(Context("dev", "kubernetes", {"namespace": "ours", "context": "kind"}))
    chosen = default_provider({}, store)
    assert chosen.name == "kubernetes"
    assert (chosen.address.namespace, chosen.address.context) == ("ours", "kind")  # type: ignore[attr-defined]
