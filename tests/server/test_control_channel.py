"""The control channel: records stay whole, descriptors arrive or are closed, and nobody waits for ever."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterator

import msgpack
import pytest

from skyproxy_server.limits import are_sessions_separable

if not are_sessions_separable():
    pytest.skip("session processes need Linux", allow_module_level=True)

from skyproxy_server.control_channel import MAX_BYTES, ChannelClosedError, ControlChannel


@pytest.fixture
def ends() -> Iterator[tuple[ControlChannel, ControlChannel]]:
    ours, theirs = ControlChannel.pair()
    other = ControlChannel(theirs)
    yield ours, other
    ours.close()
    other.close()


def raw_pair() -> tuple[ControlChannel, socket.socket]:
    """A channel, and a peer that sends what it likes."""
    return ControlChannel.pair()


def test_messages_arrive_whole_and_in_order(ends: tuple[ControlChannel, ControlChannel]) -> None:
    ours, other = ends
    sent = [{"number": number, "bytes": bytes([number]) * number * 1000} for number in range(20)]
    for message in sent:
        ours.send(message)
    assert [other.receive(10)[0] for _ in sent] == sent


def test_the_largest_message_arrives_and_a_larger_one_is_not_sent(ends: tuple[ControlChannel, ControlChannel]) -> None:
    ours, other = ends
    overhead = len(msgpack.packb({"data": bytes(MAX_BYTES)}, use_bin_type=True)) - MAX_BYTES
    fits = {"data": bytes(MAX_BYTES - overhead)}
    ours.send(fits)
    assert other.receive(10) == (fits, [])
    with pytest.raises(ValueError, match="the limit is"):
        ours.send({"data": bytes(MAX_BYTES)})
    ours.send({"still": "usable"})
    assert other.receive(10) == ({"still": "usable"}, [])


def test_descriptors_arrive_as_copies(ends: tuple[ControlChannel, ControlChannel]) -> None:
    ours, other = ends
    reading, writing = os.pipe()
    try:
        ours.send({"pipe": True}, [writing])
        _, (copy,) = other.receive(10)
        assert copy != writing
        assert not os.get_inheritable(copy)
        os.write(copy, b"through the copy")
        os.close(copy)
        assert os.read(reading, 100) == b"through the copy"
    finally:
        os.close(reading)
        os.close(writing)


def test_nobody_waits_longer_than_it_says(ends: tuple[ControlChannel, ControlChannel]) -> None:
    with pytest.raises(TimeoutError, match="no control message"):
        ends[1].receive(0)


def test_a_peer_that_does_not_read_counts_as_gone_for_whoever_does_not_wait(
    ends: tuple[ControlChannel, ControlChannel],
) -> None:
    ours, _ = ends
    with pytest.raises(ChannelClosedError):
        for _ in range(10_000):
            ours.send({"data": bytes(10_000)}, wait=False)


@pytest.mark.parametrize("close", ["ours", "other"])
def test_an_end_that_was_closed_is_noticed_by_both(ends: tuple[ControlChannel, ControlChannel], close: str) -> None:
    ours, other = ends
    (ours if close == "ours" else other).close()
    rest = other if close == "ours" else ours
    with pytest.raises(ChannelClosedError):
        rest.receive(10)
    with pytest.raises(ChannelClosedError):
        rest.send({"late": True})


def test_a_closed_copy_leaves_the_channel_open(ends: tuple[ControlChannel, ControlChannel]) -> None:
    ours, other = ends
    ControlChannel(socket.socket(fileno=os.dup(other.fileno()))).abandon()
    ours.send({"still": "there"})
    assert other.receive(10)[0] == {"still": "there"}


@pytest.mark.parametrize(
    "data",
    [b"\xc1", msgpack.packb([1, 2]), msgpack.packb("text"), b"\x81", b"\x81\xa1a", b"\xff" * 100],
    ids=["no msgpack", "a list", "a text", "cut map", "cut value", "numbers"],
)
def test_what_is_no_message_ends_the_channel_and_leaves_no_descriptor(data: bytes) -> None:
    ours, theirs = raw_pair()
    reading, writing = os.pipe()
    try:
        rights = array.array("i", [writing])
        theirs.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        os.close(writing)
        with pytest.raises(ChannelClosedError):
            ours.receive(10)
        # Every copy of the writing end is closed, so the pipe has ended.
        assert os.read(reading, 1) == b""
    finally:
        os.close(reading)
        theirs.close()
        ours.close()


def test_more_descriptors_than_a_message_may_have_end_the_channel() -> None:
    ours, theirs = raw_pair()
    reading, writing = os.pipe()
    try:
        rights = array.array("i", [writing] * 40)
        theirs.sendmsg([msgpack.packb({"many": 40})], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        os.close(writing)
        with pytest.raises(ChannelClosedError, match="in part"):
            ours.receive(10)
        assert os.read(reading, 1) == b""
    finally:
        os.close(reading)
        theirs.close()
        ours.close()
