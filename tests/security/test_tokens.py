"""What a token allows, on a worker with several: scopes, bounds, revocation, the audit, and what others can read."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import trustme

import skyproxy
from skyproxy.errors import AuthenticationError, ConfigurationError, ConnectError, RemoteError, SessionLostError
from skyproxy.protocol.messages import Hello
from skyproxy.session.local_worker import LocalWorker
from skyproxy.settings import Settings
from skyproxy.transport.websocket import connect_websocket
from skyproxy_server import audit
from skyproxy_server.certificates import Certificate
from skyproxy_server.jobs.store import Jobs
from skyproxy_server.listener import Listener, serve
from skyproxy_server.tokens import Tokens
from skyproxy_server.worker_host import WorkerHost

CODE = "code-0123456789abcdef0123456789"
MATH = "math-0123456789abcdef0123456789"
PROBE = "probe-0123456789abcdef012345678"
NAMESAKE = "namesake-0123456789abcdef012345"
SETTINGS = Settings(close_timeout_seconds=0.3, token_poll_seconds=0.01, max_sessions=8, max_sessions_per_client=3)
CPU = {"type": "cpu", "index": 0, "name": "cpu"}


def put(path: Path, text: str) -> None:
    partial = path.with_name("." + path.name)
    partial.write_text(text)
    partial.chmod(0o600)
    partial.replace(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    put(tmp_path / "coder", CODE)
    put(tmp_path / "math", f"{MATH}\nscopes: operations\nsessions: 1\n")
    put(tmp_path / "probe", f"{PROBE}\nscopes: admin\n")
    return tmp_path


@contextmanager
def worker(folder: Path, settings: Settings = SETTINGS) -> Iterator[Listener]:
    host = WorkerHost([CPU], settings, functions=True)
    listener = serve("127.0.0.1", 0, Tokens(folder, settings.token_overlap_seconds), host, settings=settings)
    try:
        yield listener
    finally:
        listener.close()


@pytest.fixture
def listener(folder: Path) -> Iterator[Listener]:
    with worker(folder) as made:
        yield made


def url(listener: Listener) -> str:
    return f"ws://127.0.0.1:{listener.port}"


def activity(listener: Listener, token: str, path: str = "/activity") -> int:
    request = urllib.request.Request(
        f"http://127.0.0.1:{listener.port}{path}", headers={"Authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def hello(session: str = "", role: str = "operations") -> Hello:
    return Hello([1], role, session, {})


def test_a_token_for_operations_runs_no_functions(listener: Listener) -> None:
    with skyproxy.connect(url(listener), token=MATH) as node:
        assert torch.ones(3, device=node.device("cpu")).sum().item() == 3
        with pytest.raises(ConfigurationError, match="token does not allow"):
            node.run(int)
        # Nor does a client that does not look: neither the connection, nor the commands of calls.
        with pytest.raises(ConnectError):
            connect_websocket(url(listener), MATH, hello(node._session.welcome.session, "functions"))
        with pytest.raises(RemoteError, match="no functions"):
            node._session.call("forget_call", "x" * 32)
    with skyproxy.connect(url(listener), token=CODE) as node:
        assert node.run(int) == 0


def test_a_token_without_operations_opens_no_session(listener: Listener) -> None:
    with pytest.raises(AuthenticationError, match="scope 'operations'"):
        connect_websocket(url(listener), PROBE, hello())
    assert activity(listener, PROBE) == 200


def test_activity_is_for_the_scope_admin(listener: Listener) -> None:
    assert [activity(listener, token) for token in (PROBE, CODE, MATH, "wrong" * 5)] == [200, 200, 403, 401]


def test_no_token_of_several_says_that_the_worker_is_ended_for_good(folder: Path, listener: Listener) -> None:
    assert [activity(listener, token, "/ending") for token in (PROBE, CODE, MATH, "wrong" * 5)] == [403, 403, 403, 401]
    # Nor one of the name that the only token of a worker has.
    put(folder / "token", NAMESAKE)
    listener._tokens.refresh()
    assert [activity(listener, NAMESAKE, path) for path in ("/activity", "/ending")] == [200, 403]


def test_nobody_joins_the_session_of_another_token(listener: Listener) -> None:
    operations, welcome = connect_websocket(url(listener), MATH, hello())
    for role in ("bulk", "functions"):
        with pytest.raises(ConnectError, match="no such session"):
            connect_websocket(url(listener), CODE, hello(welcome.session, role))
    operations.close()


def test_a_token_has_as_many_sessions_as_it_may(listener: Listener) -> None:
    first, _ = connect_websocket(url(listener), MATH, hello())
    with pytest.raises(ConnectError, match="the token math already has 1 sessions"):
        connect_websocket(url(listener), MATH, hello())
    other, _ = connect_websocket(url(listener), CODE, hello())
    for transport in (first, other):
        transport.close()


def test_one_client_does_not_take_all_sessions(listener: Listener) -> None:
    transports = [connect_websocket(url(listener), CODE, hello())[0] for _ in range(3)]
    with pytest.raises(ConnectError, match="SKYPROXY_MAX_SESSIONS_PER_CLIENT"):
        connect_websocket(url(listener), CODE, hello())
    transports.append(connect_websocket(url(listener), MATH, hello())[0])
    for transport in transports:
        transport.close()


def test_a_token_has_as_many_connections_as_it_may(folder: Path) -> None:
    put(folder / "math", f"{MATH}\nconnections: 2\n")
    with worker(folder) as listener:
        operations, welcome = connect_websocket(url(listener), MATH, hello())
        bulk, _ = connect_websocket(url(listener), MATH, hello(welcome.session, "bulk"))
        with pytest.raises(ConnectError, match="the token math already has 2 connections"):
            connect_websocket(url(listener), MATH, hello())
        for transport in (operations, bulk):
            transport.close()


def test_sessions_of_a_revoked_token_end_and_say_why(folder: Path, listener: Listener) -> None:
    with skyproxy.connect(url(listener), token=CODE) as revoked, skyproxy.connect(url(listener), token=MATH) as other:
        tensor = torch.ones(3, device=revoked.device("cpu"))
        (folder / "coder").unlink()
        ended = threading.Event()
        revoked._session.at_end.append(lambda error: ended.set())
        assert revoked._session.lost is not None or ended.wait(10)
        with pytest.raises(SessionLostError, match="token coder was revoked"):
            tensor.sum().item()
        assert torch.ones(3, device=other.device("cpu")).sum().item() == 3
    with pytest.raises(AuthenticationError):
        skyproxy.connect(url(listener), token=CODE)


def test_every_connection_of_a_revoked_token_ends(folder: Path) -> None:
    jobs = Jobs(None, SETTINGS)
    host = WorkerHost([CPU], SETTINGS, functions=True)
    listener = serve("127.0.0.1", 0, Tokens(folder), host, settings=SETTINGS, jobs=jobs)
    try:
        operations, welcome = connect_websocket(url(listener), CODE, Hello([1], "operations", "", {}, 60))
        others = [
            connect_websocket(url(listener), CODE, hello("" if role == "jobs" else welcome.session, role))[0]
            for role in ("bulk", "functions", "jobs")
        ]
        (folder / "coder").unlink()
        for transport in (operations, *others):
            with pytest.raises(SessionLostError, match="token coder was revoked"):
                transport.recv(10)
        # What is open for its client to come back is over, too, and the token is none any more.
        with pytest.raises(AuthenticationError):
            connect_websocket(url(listener), CODE, Hello([1], "operations", welcome.session, {}, 60, welcome.secret))
        put(folder / "coder", CODE)
        listener._tokens.refresh()
        with pytest.raises(ConnectError, match="no such session"):
            connect_websocket(url(listener), CODE, Hello([1], "operations", welcome.session, {}, 60, welcome.secret))
    finally:
        listener.close()
        jobs.close()


def test_a_token_is_revoked_although_its_files_could_not_be_looked_at_once(
    folder: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()
    refresh = Tokens.refresh

    def fail_once(tokens: Tokens) -> None:
        if not failed.is_set():
            failed.set()
            raise ValueError("what nobody thought of")
        refresh(tokens)

    operations, _ = connect_websocket(url(listener), CODE, hello())
    monkeypatch.setattr(Tokens, "refresh", fail_once)
    assert failed.wait(10)
    (folder / "coder").unlink()
    with pytest.raises(SessionLostError, match="was revoked"):
        operations.recv(10)


def test_sessions_outlive_the_replacement_of_their_token(folder: Path, listener: Listener) -> None:
    with skyproxy.connect(url(listener), token=CODE) as node:
        put(folder / "coder", CODE.replace("code", "next"))
        listener._tokens.refresh()
        assert node.run(int) == 0  # which opens one more connection, with the former token
        assert skyproxy.connect(url(listener), token=CODE.replace("code", "next")).alive


def audit_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == audit.NAME]


def forger() -> int:
    return 7


def test_the_audit_names_tokens_sessions_functions_and_refusals(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, audit.NAME)
    with skyproxy.connect(url(listener), token=CODE) as node:
        session = node._session.welcome.session[:8]
        name = 'x" token="probe\nsession-begin \x1b[2J'
        assert node.submit(forger, name=name).result() == 7
    assert activity(listener, MATH) == 403
    lines = audit_lines(caplog)
    assert lines[0] == f'session-begin token="coder" address="127.0.0.1" session="{session}"'
    call = r'function="x\" token=\"probe\nsession-begin \u001b[2J"'
    assert f'call token="coder" address="127.0.0.1" session="{session}" {call}' in lines
    assert any(line.startswith('refused token="math"') and "no scope admin" in line for line in lines)
    assert not any(token in caplog.text for token in (CODE, MATH, PROBE))


def nothing() -> None:
    """The function that is called."""


def test_a_worker_that_belongs_to_one_program_writes_no_line_a_call() -> None:
    worker = LocalWorker("cpu", Settings())
    try:
        with skyproxy.connect(worker.url, token=worker.token) as node:
            for _ in range(3):
                node.run(nothing)
            log = worker.output()
    finally:
        worker.stop()
    assert "session-begin" in log
    assert "nothing" not in log


def test_the_audit_is_complete_however_long_it_gets() -> None:
    from skyproxy_server.log_limits import RepetitionFilter

    limit = RepetitionFilter(lambda: 0.0)
    record = logging.LogRecord(audit.NAME, logging.INFO, "", 0, "%s", ("call",), None)
    assert all(limit.filter(record) for _ in range(1000))


def test_a_renewed_certificate_is_used_without_a_restart(tmp_path: Path, folder: Path) -> None:
    def issue(authority: trustme.CA) -> None:
        issued = authority.issue_cert("127.0.0.1")
        put(tmp_path / "tls.key", issued.private_key_pem.bytes().decode())
        put(tmp_path / "tls.crt", issued.cert_chain_pems[0].bytes().decode())

    first, second = trustme.CA(), trustme.CA()
    issue(first)
    certificate = Certificate(tmp_path / "tls.crt", tmp_path / "tls.key")
    tokens = folder / "coder"
    host = WorkerHost([CPU], SETTINGS)
    listener = serve("127.0.0.1", 0, Tokens(tokens), host, certificate.context, settings=SETTINGS)

    def connects(authority: trustme.CA) -> None:
        trusted = authority.cert_pem.bytes().decode()
        skyproxy.connect(f"wss://127.0.0.1:{listener.port}", token=CODE, certificate=trusted).close()

    try:
        connects(first)
        issue(second)
        connects(second)
        put(tmp_path / "tls.key", "half of a key")
        connects(second)
    finally:
        listener.close()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="only Linux shows environments there")
def test_the_token_of_the_environment_is_not_left_there() -> None:
    program = (
        "from pathlib import Path\n"
        "from skyproxy_server import auth\n"
        "import os\n"
        "assert auth.token_from_environment(os.environ) == os.environ['SKYPROXY_TOKEN']\n"
        "auth.erase_from_environment()\n"
        "assert 'SKYPROXY_TOKEN' not in os.environ\n"
        "print(Path('/proc/self/environ').read_bytes())\n"
    )
    environment = {**os.environ, "SKYPROXY_TOKEN": CODE, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "PYTHONPATH" in shown
    assert CODE not in shown
