"""Where the token comes from, and who has it."""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy_server import auth

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("headers", "accepted"),
    [
        ([f"Bearer {TOKEN}"], True),
        ([f"bearer  {TOKEN} "], True),
        ([], False),
        ([f"Bearer {TOKEN}", f"Bearer {TOKEN}"], False),
        ([f"Bearer {TOKEN[:-1]}"], False),
        ([f"Bearer {TOKEN}x"], False),
        (["Bearer \udce9"], False),
        ([f"Basic {TOKEN}"], False),
        ([TOKEN], False),
        ([""], False),
    ],
)
def test_who_is_accepted(headers: list[str], accepted: bool) -> None:
    assert auth.TokenCheck(TOKEN).accepts(headers) is accepted


def test_a_check_does_not_show_its_token() -> None:
    assert TOKEN not in repr(auth.TokenCheck(TOKEN))


def test_a_stream_gives_its_first_line_and_keeps_the_rest() -> None:
    stream = io.BytesIO(TOKEN.encode() + b"\r\nmore")
    assert auth.token_from_stream(stream) == TOKEN
    assert stream.read() == b"more"
    with pytest.raises(ConfigurationError, match="standard input"):
        auth.token_from_stream(io.BytesIO(b""))


def test_the_environment_may_have_one() -> None:
    assert auth.token_from_environment({"SKYPROXY_TOKEN": TOKEN}) == TOKEN
    assert auth.token_from_environment({}) is None
    with pytest.raises(ConfigurationError, match="empty"):
        auth.token_from_environment({"SKYPROXY_TOKEN": ""})


def test_a_short_token_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    auth.checked("short")
    assert "fewer than 16" in caplog.text
    assert "short" not in caplog.text


def test_a_new_token_is_in_a_file_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    token, path = auth.new_token_file()
    assert path.parent == tmp_path
    assert path.read_text().strip() == token
    assert len(token) >= 32
    if os.name == "posix":
        assert path.stat().st_mode & 0o777 == 0o600
    assert auth.new_token_file()[0] != token
