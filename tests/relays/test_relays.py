"""The payloads of a process, by session and name."""

from __future__ import annotations

import hashlib
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator

import pytest

from skyproxy.relays import relays
from skyproxy.relays.relays import RELAYS, end_relay, fetch_payload, hold_payload, open_relay
from skyproxy.runtime import CallContext, entered_call

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files without a name are there on Linux only")
PAYLOAD = b"payload" * 1000
ABOUT = len(PAYLOAD), hashlib.sha256(PAYLOAD).digest()
SECRET = b"s" * 32


@pytest.fixture(autouse=True)
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(RELAYS, "_gone", OrderedDict())
    with entered_call(CallContext("call", session="ours")):
        yield
    for name in ("ours", "another"):
        RELAYS.forget(name)
    assert len(RELAYS) == 0


def read(session: str, name: str) -> bytes:
    with RELAYS.claimed(session, name) as descriptor:
        return os.pread(descriptor, len(PAYLOAD), 0)


def test_one_session_passes_to_the_next() -> None:
    port, fingerprint = open_relay("a", *ABOUT, "127.0.0.1", [(SECRET, True)])
    assert hold_payload("a", *ABOUT, [PAYLOAD])
    with entered_call(CallContext("call", session="another")):
        assert fetch_payload("a", *ABOUT, "127.0.0.1", port, fingerprint, SECRET) == ""
        assert fetch_payload("b", *ABOUT, "127.0.0.1", port, fingerprint, SECRET) in ("failed", "unreachable")
        assert fetch_payload("c", *ABOUT, "127.0.0.1", 1, fingerprint, SECRET) == "unreachable"
    assert read("another", "a") == PAYLOAD


def test_a_payload_is_its_sessions_own_and_ends_with_it() -> None:
    hold_payload("a", *ABOUT, [PAYLOAD])
    for session, name in (("another", "a"), ("ours", "b"), ("", "a")):
        with pytest.raises(OSError, match="is here"):
            read(session, name)
    with entered_call(CallContext("call", session="another")):
        end_relay("a")
    RELAYS.forget("another")
    assert len(RELAYS) == 1
    RELAYS.forget("ours")
    assert len(RELAYS) == 0


def test_it_is_let_go_once_its_call_has_it() -> None:
    hold_payload("a", *ABOUT, [PAYLOAD])
    assert read("ours", "a") == PAYLOAD
    assert len(RELAYS) == 0


def test_there_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "_MAX_RELAYS", 1)
    hold_payload("a", *ABOUT, [PAYLOAD])
    with pytest.raises(ValueError, match="no more can be"):
        hold_payload("b", *ABOUT, [PAYLOAD])
    assert fetch_payload("b", *ABOUT, "127.0.0.1", 1, "", SECRET) == "failed"
    end_relay("a")
    end_relay("a")
    assert hold_payload("b", *ABOUT, [PAYLOAD])


def test_what_is_heard_after_the_end_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "_REMEMBERED", 2)
    hold_payload("d", *ABOUT, [PAYLOAD])
    for name in ("d", "e"):
        end_relay(name)
        with pytest.raises(ValueError, match="nobody wants"):
            hold_payload(name, *ABOUT, [PAYLOAD])
    end_relay("f")
    assert len(RELAYS._gone) == 2
