"""How two sides agree on a version."""

from __future__ import annotations

import pytest

from skyproxy.errors import VersionMismatchError
from skyproxy.protocol import versions


def test_the_newest_common_version_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "SUPPORTED", (1, 2, 3))
    assert versions.choose_version([0, 1, 2, 9]) == 2


def test_ours_is_supported() -> None:
    assert versions.choose_version([versions.PROTOCOL_VERSION]) == versions.PROTOCOL_VERSION


@pytest.mark.parametrize(("offered", "named"), [([7, 5], "5, 7"), ([], "none")])
def test_a_mismatch_names_both_sides(offered: list[int], named: str) -> None:
    with pytest.raises(VersionMismatchError, match=f"versions {named}, the worker {versions.PROTOCOL_VERSION}"):
        versions.choose_version(offered)
