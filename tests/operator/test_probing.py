"""Asking workers: real ones over TLS, and strange ones."""

from __future__ import annotations

import asyncio
import datetime
import gc
import gzip
import json
import socket
import ssl
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from skyproxy.settings import Settings
from skyproxy_operator.certificates import issue
from skyproxy_operator.pod_builder import build_pod
from skyproxy_operator.probing import ENDING, ProbeCredentials, Prober, report_of
from skyproxy_operator.reaping import Report
from skyproxy_server.listener import Listener, serve
from tests.operator.makers import OPTIONS, make_compute, spec_of

TOKEN = "the-token-of-this-compute"
OTHER = "the-token-of-another-compute"
PAIR = issue("dev", "lab", datetime.datetime.now(datetime.UTC))
ACCESS = ProbeCredentials(TOKEN, PAIR.authority, "dev.lab.svc")


class Host:
    """A worker that was idle for a while."""

    def __init__(self) -> None:
        self.was_asked = threading.Event()

    def activity(self) -> dict[str, object]:
        self.was_asked.set()
        return {"sessions": 1, "calls_running": 0, "idle_seconds": 12.5, "devices": [], "software": {"torch": "2"}}


@pytest.fixture
def host() -> Host:
    return Host()


def server_context(folder: Path) -> ssl.SSLContext:
    (folder / "crt").write_text(PAIR.certificate)
    (folder / "key").write_text(PAIR.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "crt", folder / "key")
    return context


@pytest.fixture
def worker(tmp_path: Path, host: Host) -> Iterator[Listener]:
    context = server_context(tmp_path)
    settings = Settings(close_timeout_seconds=0.3)
    listener = serve("127.0.0.1", 0, TOKEN, host, context, settings=settings)  # type: ignore[arg-type]
    yield listener
    listener.close()


def ask(
    addresses: list[tuple[str, int]], access: ProbeCredentials = ACCESS, timeout_seconds: float = 20.0
) -> list[Report]:
    async def main() -> list[Report]:
        prober = Prober(timeout_seconds)
        try:
            return await prober.ask(addresses, access)
        finally:
            await prober.close()

    return asyncio.run(main())


def test_a_worker_answers_those_who_have_its_token_and_trust_its_authority(worker: Listener) -> None:
    (report,) = ask([("127.0.0.1", worker.port)])
    assert report.idle_seconds == 12.5
    assert report.answer is not None
    assert report.answer["software"] == {"torch": "2"}


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_a_pods_worker_is_asked_at_whichever_family_of_addresses_it_has(tmp_path: Path) -> None:
    compute = make_compute()
    (container,) = build_pod(compute, spec_of(compute), 0, 0, OPTIONS)["spec"]["containers"]  # type: ignore[index]
    host = container["args"][container["args"].index("--host") + 1]
    context = server_context(tmp_path)
    listener = serve(host, 0, TOKEN, Host(), context, settings=Settings(close_timeout_seconds=0.3))  # type: ignore[arg-type]
    try:
        reports = ask([("127.0.0.1", listener.port), ("::1", listener.port)])
        assert [report.idle_seconds for report in reports] == [12.5, 12.5]
    finally:
        listener.close()


def test_a_worker_is_told_that_it_is_ended_for_good(tmp_path: Path) -> None:
    context = server_context(tmp_path)
    told: list[None] = []
    listener = serve("127.0.0.1", 0, TOKEN, Host(), context, on_ending=lambda: told.append(None))  # type: ignore[arg-type]

    async def main() -> list[Report]:
        prober = Prober(20.0)
        try:
            refused = await prober.ask([("127.0.0.1", listener.port)], replace(ACCESS, token=OTHER), ENDING)
            assert (refused[0].reason, told) == ("TokenRefused", [])
            return await prober.ask([("127.0.0.1", listener.port)], ACCESS, ENDING)
        finally:
            await prober.close()

    try:
        (report,) = asyncio.run(main())
    finally:
        listener.close()
    assert (report.idle_seconds, told) == (12.5, [None])


def test_each_gets_its_own_answer_and_the_silent_do_not_hold_up_the_others(worker: Listener, host: Host) -> None:
    """The silent one says nothing before the other was asked: who waited for it would wait to the end."""
    silent = socket.create_server(("127.0.0.1", 0))

    def hang_up() -> None:
        assert host.was_asked.wait(60)
        silent.close()

    hanging_up = threading.Thread(target=hang_up)
    hanging_up.start()
    addresses = [("127.0.0.1", silent.getsockname()[1]), ("127.0.0.1", worker.port), ("", 1)]
    first, second, third = ask(addresses, timeout_seconds=90.0)
    hanging_up.join()
    assert (first.idle_seconds, second.idle_seconds, third.idle_seconds) == (None, 12.5, None)
    assert "within" not in first.problem
    assert third.problem == "it has no address yet"


def test_closing_waits_for_the_last_word_of_a_peer(tmp_path: Path) -> None:
    """A socket that was left when the loop ended would be closed by the collector, with a warning."""
    body = b'{"idle_seconds": 1}'
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with server_context(tmp_path).wrap_socket(listening.accept()[0], server_side=True) as peer:
                peer.recv(1 << 16)
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                time.sleep(0.2)

        answering = threading.Thread(target=answer)
        answering.start()
        gc.collect()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ResourceWarning)
            (report,) = ask([("127.0.0.1", listening.getsockname()[1])])
            gc.collect()
        answering.join()
    assert report.idle_seconds == 1
    assert [str(warning.message) for warning in warned] == []


def test_one_who_stays_silent_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (report,) = ask([("127.0.0.1", silent.getsockname()[1])], timeout_seconds=0.3)
    assert report.idle_seconds is None
    assert "within 0.3 s" in report.problem


def test_another_token_is_refused(worker: Listener) -> None:
    (report,) = ask([("127.0.0.1", worker.port)], replace(ACCESS, token=OTHER))
    assert (report.idle_seconds, report.problem, report.reason) == (None, "it answered HTTP 401", "TokenRefused")


def test_until_the_new_token_has_got_to_the_worker_it_is_asked_with_the_former_one(worker: Listener) -> None:
    (report,) = ask([("127.0.0.1", worker.port)], replace(ACCESS, token=OTHER, former=TOKEN))
    assert report.idle_seconds == 12.5
    assert TOKEN not in repr(replace(ACCESS, former=TOKEN))


def test_until_the_new_certificate_has_got_to_the_worker_both_authorities_are_trusted(worker: Listener) -> None:
    renewed = issue("dev", "lab", datetime.datetime.now(datetime.UTC))
    (report,) = ask([("127.0.0.1", worker.port)], replace(ACCESS, authority=renewed.authority + PAIR.authority))
    assert report.idle_seconds == 12.5
    (report,) = ask([("127.0.0.1", worker.port)], replace(ACCESS, authority=renewed.authority))
    assert report.reason == "CertificateRefused"


def test_the_token_is_not_shown_to_a_stranger(worker: Listener) -> None:
    stranger = issue("dev", "lab", datetime.datetime.now(datetime.UTC))
    (report,) = ask([("127.0.0.1", worker.port)], replace(ACCESS, authority=stranger.authority))
    assert report.idle_seconds is None
    assert "certificate" in report.problem.lower()
    (report,) = ask([("127.0.0.1", worker.port)], replace(ACCESS, server_name="other.lab.svc"))
    assert report.idle_seconds is None
    assert TOKEN not in report.problem


def test_a_compressed_answer_is_not_unpacked(worker: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, object]] = []
    session = aiohttp.ClientSession

    def note(*arguments: object, **given: object) -> aiohttp.ClientSession:
        made.append(given)
        return session(*arguments, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(aiohttp, "ClientSession", note)
    (report,) = ask([("127.0.0.1", worker.port)])
    assert report.idle_seconds == 12.5
    assert [given["auto_decompress"] for given in made] == [False]
    assert report_of(200, gzip.compress(b'{"idle_seconds": 1}')).idle_seconds is None


def test_nobody_there(worker: Listener) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    (report,) = ask([("127.0.0.1", port)])
    assert "cannot be asked" in report.problem
    (report,) = ask([("127.0.0.1", worker.port)], replace(ACCESS, authority="nonsense"))
    assert "authority" in report.problem


@pytest.mark.parametrize(
    ("status", "text", "idle"),
    [
        (200, {"idle_seconds": 3, "calls_running": 0}, 3.0),
        (200, {"idle_seconds": 3}, 3.0),
        (200, {"idle_seconds": 300, "calls_running": 2}, 0.0),
        (404, {"idle_seconds": 3}, None),
        (200, {"idle_seconds": -1}, None),
        (200, {"idle_seconds": "soon"}, None),
        (200, {"idle_seconds": None}, None),
        (200, {"idle_seconds": 1e308}, None),
        (200, {"idle_seconds": 10**400}, None),
        (200, {"idle_seconds": 3, "calls_running": 10**400}, 0.0),
        (200, {}, None),
        (200, [1], None),
        (200, "x", None),
    ],
)
def test_answers_are_understood_or_not(status: int, text: object, idle: float | None) -> None:
    report = report_of(status, json.dumps(text).encode())
    assert report.idle_seconds == idle
    assert bool(report.problem) == (idle is None)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b'{"idle_seconds": 1, "calls_running": 1e400}',
        b'{"idle_seconds": NaN}',
        b'{"idle_seconds": Infinity}',
        b"[" * 100_000,
    ],
)
def test_bytes_that_mean_nothing_are_no_idleness(text: bytes) -> None:
    assert report_of(200, text).idle_seconds is None
