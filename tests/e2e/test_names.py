"""The cluster's name server of real nodes: what it answers, and what it refuses, without a cluster."""

from __future__ import annotations

import struct

import pytest

from tests.e2e.real.names import answer

_KNOWN = {
    "web.shop.svc.cluster.local": ["198.19.0.7"],
    "many.shop.svc.cluster.local": [f"198.18.1.{n}" for n in range(60)],
}
_A, _AAAA = 1, 28


def query(name: str, kind: int = _A, *, flags: int = 0x0100, questions: int = 1) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!6H", 77, flags, questions, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)


def code_and_count(told: bytes | None) -> tuple[int, int]:
    assert told is not None
    identity, flags, _, count, _, _ = struct.unpack_from("!6H", told)
    assert identity == 77
    assert flags & 0x8000
    return flags & 0xF, count


def test_a_name_is_answered_with_its_address() -> None:
    asked = query("Web.shop.svc.cluster.local")
    told = answer(asked, _KNOWN.get)
    assert code_and_count(told) == (0, 1)
    assert told is not None
    assert told[12 : len(asked)] == asked[12:]
    assert told[len(asked) :] == b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 0, 4) + bytes([198, 19, 0, 7])


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (query("web.shop.svc.cluster.local", _AAAA), (0, 0)),  # it is there, and has no such address
        (query("other.shop.svc.cluster.local"), (3, 0)),
        (query("web.shop.svc.cluster.local", flags=0x2800), (4, 0)),  # an update
        (query("web.shop.svc.cluster.local", questions=2), (1, 0)),
        (query("web.shop.svc.cluster.local", questions=0), (1, 0)),
        (query("web.shop.svc.cluster.local")[:20], (1, 0)),
        (query("web.shop.svc.cluster.local")[:-3], (1, 0)),
        (query("")[:12] + b"\xc0\x0c\x00\x01\x00\x01", (1, 0)),  # a pointer to itself
    ],
)
def test_what_is_no_address_of_a_service_gets_none(asked: bytes, expected: tuple[int, int]) -> None:
    assert code_and_count(answer(asked, _KNOWN.get)) == expected


def test_an_answer_fits_into_a_datagram_of_the_smallest_size() -> None:
    told = answer(query("many.shop.svc.cluster.local"), _KNOWN.get)
    assert code_and_count(told) == (0, 28)
    assert told is not None
    assert len(told) <= 512


@pytest.mark.parametrize("sent", [b"", b"\0" * 11, query("web.shop.svc.cluster.local", flags=0x8180)])
def test_what_is_no_query_gets_no_answer(sent: bytes) -> None:
    assert answer(sent, _KNOWN.get) is None
