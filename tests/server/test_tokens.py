"""Tokens in files: names, scopes, bounds, replacing and revoking, without a restart."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy_server.auth import SCOPES, Bounds, Identity
from skyproxy_server.tokens import Tokens

ONE = "one-0123456789abcdef0123456789"
TWO = "two-0123456789abcdef0123456789"
THREE = "three-0123456789abcdef01234567"


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def put(path: Path, text: str) -> None:
    """Write a file in place of another, as an administrator and Kubernetes do."""
    partial = path.with_name("." + path.name)
    partial.write_text(text)
    partial.chmod(0o600)
    partial.replace(path)


def bearer(token: str) -> list[str]:
    return [f"Bearer {token}"]


def name_of(tokens: Tokens, token: str) -> str | None:
    identity = tokens.identify(bearer(token))
    return None if identity is None else identity.name


def test_one_file_is_one_token_with_all_scopes(tmp_path: Path) -> None:
    put(tmp_path / "secret", ONE + "\n")
    tokens = Tokens(tmp_path / "secret")
    assert tokens.identify(bearer(ONE)) == Identity("token", SCOPES)
    assert tokens.identify(bearer(TWO)) is None
    assert tokens.identify([]) is None
    assert tokens.identify([*bearer(ONE), *bearer(ONE)]) is None
    assert ONE not in repr(tokens)


def test_a_directory_has_named_tokens_with_scopes_and_bounds(tmp_path: Path) -> None:
    bounded = "sessions: 4\nconnections: 12\nmemory: 8GiB\nuploads: 512 MiB\nsnapshots: 1GiB"
    put(tmp_path / "ci", f"{ONE}\nscopes: operations\n{bounded}\n")
    put(tmp_path / "alice", f"{TWO}\n# runs code\nscopes: functions\n")
    put(tmp_path / "probe", f"{THREE}\nscopes: admin\n")
    (tmp_path / "..data").mkdir()
    tokens = Tokens(tmp_path)
    assert tokens.names == ["alice", "ci", "probe"]
    bounds = Bounds(4, 12, 8 << 30, 512 << 20, 1 << 30)
    assert tokens.identify(bearer(ONE)) == Identity("ci", frozenset({"operations"}), bounds)
    alice = tokens.identify(bearer(TWO))
    assert alice is not None
    assert alice.scopes == {"operations", "functions"}
    probe = tokens.identify(bearer(THREE))
    assert probe is not None
    assert not probe.may("operations")
    assert probe.may("admin")


def test_an_identity_travels_as_plain_data() -> None:
    identity = Identity("ci", frozenset({"operations"}), Bounds(sessions=3), 12.5, "10.0.0.7")
    assert Identity.from_plain(identity.to_plain()) == identity


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no token"),
        ("two words", "header cannot carry"),
        (f"{ONE}\nscope: operations", "an unknown line after its token: 'scope'"),
        (f"{ONE}\nscopes: root", "'root'"),
        (f"{ONE}\nscopes:", "scopes"),
        (f"{ONE}\nexpires: soon", "'soon'"),
        (f"{ONE}\nsessions: -1", "'sessions'"),
        (f"{ONE}\nsessions: \u00b2", "'sessions'"),
        (f"{ONE}\nconnections: {'9' * 5000}", "'connections'"),
        (f"{ONE}\nmemory: much", "memory='much' is not a size"),
        (f"{ONE}\n{TWO}", "an unknown line after its token"),
    ],
)
def test_a_file_that_cannot_be_understood_is_refused_at_the_start(tmp_path: Path, text: str, problem: str) -> None:
    put(tmp_path / "ci", text)
    with pytest.raises(ConfigurationError, match=problem) as caught:
        Tokens(tmp_path)
    assert ONE not in str(caught.value)


def test_a_missing_file_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Tokens(tmp_path / "nothing")


@pytest.mark.parametrize("content", [b"\n\n", b"\xff\xfe", b"x" * 70_000])
def test_a_file_that_holds_no_text_of_a_token_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ci").write_bytes(content)
    with pytest.raises(ConfigurationError, match="token"):
        Tokens(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
def test_a_file_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "ci", ONE)
    Tokens(tmp_path / "ci")
    assert caplog.text == ""
    (tmp_path / "ci").chmod(0o644)
    Tokens(tmp_path / "ci")
    assert f"chmod 600 {tmp_path / 'ci'}" in caplog.text
    assert ONE not in caplog.text


def test_two_names_for_one_token_are_refused(tmp_path: Path) -> None:
    put(tmp_path / "a", ONE)
    put(tmp_path / "b", ONE)
    with pytest.raises(ConfigurationError, match="same token as a"):
        Tokens(tmp_path)


def test_names_that_differ_in_capitals_only_are_refused(tmp_path: Path) -> None:
    put(tmp_path / "alice", ONE)
    tokens = Tokens(tmp_path)
    put(tmp_path / "Alice", TWO)
    if len(list(tmp_path.iterdir())) < 2:
        pytest.skip("this file system has one file for both")
    with pytest.raises(ConfigurationError, match="in capitals only"):
        Tokens(tmp_path)
    tokens.refresh()
    assert [name_of(tokens, token) for token in (ONE, TWO)] == ["alice", None]


def test_a_former_token_under_another_name_has_the_rights_of_that_name(tmp_path: Path, clock: Clock) -> None:
    for name in ("aaa", "zzz"):  # before the other one, and after it
        put(tmp_path / "ci", ONE)
        tokens = Tokens(tmp_path, clock=clock)
        put(tmp_path / "ci", TWO)
        put(tmp_path / name, f"{ONE}\nscopes: operations")
        tokens.refresh()
        assert name_of(tokens, ONE) == name
        put(tmp_path / name, f"{THREE}\nscopes: operations")
        tokens.refresh()
        assert name_of(tokens, ONE) == name
        (tmp_path / name).unlink()


def test_a_token_that_was_replaced_long_before_is_given_to_another_name(tmp_path: Path, clock: Clock) -> None:
    put(tmp_path / "zzz", ONE)
    tokens = Tokens(tmp_path, clock=clock)
    put(tmp_path / "zzz", TWO)
    tokens.refresh()
    assert name_of(tokens, ONE) == "zzz"
    put(tmp_path / "ci", f"{ONE}\nscopes: operations")
    tokens.refresh()
    assert name_of(tokens, ONE) == "ci"


def test_a_replaced_token_is_accepted_for_a_while(tmp_path: Path, clock: Clock) -> None:
    put(tmp_path / "ci", ONE)
    tokens = Tokens(tmp_path, overlap_seconds=60, clock=clock)
    before = tokens.identify(bearer(ONE))
    put(tmp_path / "ci", TWO)
    tokens.refresh()
    assert name_of(tokens, ONE) == name_of(tokens, TWO) == "ci"
    assert before is not None
    assert tokens.refusal(before) == ""
    clock.now += 61
    assert name_of(tokens, ONE) is None
    assert name_of(tokens, TWO) == "ci"


def test_a_token_that_is_taken_away_is_revoked_at_once(tmp_path: Path, clock: Clock) -> None:
    put(tmp_path / "ci", ONE)
    put(tmp_path / "alice", THREE)
    tokens = Tokens(tmp_path, clock=clock)
    identity = tokens.identify(bearer(ONE))
    assert identity is not None
    put(tmp_path / "ci", TWO)
    tokens.refresh()
    (tmp_path / "ci").unlink()
    tokens.refresh()
    assert name_of(tokens, ONE) is None
    assert name_of(tokens, TWO) is None
    assert "ci was revoked" in tokens.refusal(identity)
    assert name_of(tokens, THREE) == "alice"


def test_a_new_token_is_known_without_waiting_for_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyproxy_server.tokens._LOOK_AGAIN_SECONDS", 0.0)
    put(tmp_path / "ci", ONE)
    tokens = Tokens(tmp_path)
    put(tmp_path / "new", TWO)
    assert name_of(tokens, TWO) == "new"


def test_a_token_expires(tmp_path: Path, clock: Clock) -> None:
    put(tmp_path / "ci", f"{ONE}\nexpires: 1970-01-12T13:46:45+00:00")  # five seconds from the clock's now
    tokens = Tokens(tmp_path, clock=clock)
    identity = tokens.identify(bearer(ONE))
    assert identity is not None
    assert tokens.refusal(identity) == ""
    clock.now += 5
    assert tokens.identify(bearer(ONE)) is None
    assert "ci has expired" in tokens.refusal(identity)


def test_a_token_that_loses_a_scope_loses_its_connections(tmp_path: Path) -> None:
    put(tmp_path / "ci", ONE)
    tokens = Tokens(tmp_path)
    identity = tokens.identify(bearer(ONE))
    put(tmp_path / "ci", f"{ONE}\nscopes: operations")
    tokens.refresh()
    assert identity is not None
    assert "no longer allows admin, functions" in tokens.refusal(identity)


def test_a_file_that_became_nonsense_changes_nothing_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    put(tmp_path / "ci", f"{ONE}\nscopes: operations")
    tokens = Tokens(tmp_path)
    put(tmp_path / "ci", f"{TWO}\nscopes: everything")
    tokens.refresh()
    identity = tokens.identify(bearer(ONE))
    assert identity is not None
    assert identity.scopes == {"operations"}
    assert "'everything'" in caplog.text
    assert TWO not in caplog.text


def test_a_single_file_that_vanishes_leaves_its_token(tmp_path: Path) -> None:
    put(tmp_path / "token", ONE)
    tokens = Tokens(tmp_path / "token")
    (tmp_path / "token").unlink()
    tokens.refresh()
    assert name_of(tokens, ONE) == "token"


@pytest.mark.skipif(os.name != "posix", reason="Kubernetes mounts Secrets on POSIX systems only")
def test_a_secret_of_kubernetes_is_replaced_by_its_symbolic_link(tmp_path: Path) -> None:
    for number, token in ((1, ONE), (2, TWO)):
        (tmp_path / f"..{number}").mkdir()
        put(tmp_path / f"..{number}" / "token", token)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "token").symlink_to("..data/token")
    directory, file = Tokens(tmp_path), Tokens(tmp_path / "token")
    (tmp_path / "..tmp").symlink_to("..2")
    (tmp_path / "..tmp").replace(tmp_path / "..data")
    for tokens in (directory, file):
        tokens.refresh()
        assert name_of(tokens, TWO) == name_of(tokens, ONE) == "token"
