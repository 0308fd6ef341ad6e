"""Each scope of a token against everything that can be asked of a worker: who adds something decides whom it is for."""

from __future__ import annotations

import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyproxy.protocol import commands
from skyproxy.protocol.call_messages import CallAck, CallAttach, CallCancel, CallData, CallStart
from skyproxy.protocol.message_checks import ROLES
from skyproxy.protocol.message_table import MESSAGES
from skyproxy.protocol.messages import (
    BULK,
    CLIENT,
    FUNCTIONS,
    JOB_ACTIONS,
    JOBS,
    OPERATIONS,
    Batch,
    CancelOperations,
    CancelTransfer,
    Chunk,
    Continue,
    Goodbye,
    Hello,
    JobAnswer,
    JobRequest,
    Landed,
    Message,
    NamedBatch,
    Offer,
    PackedChunk,
    Ping,
    Pong,
    Proof,
    Received,
    Repeat,
    RequestId,
    Sequence,
)
from skyproxy.settings import Settings
from skyproxy_server import auth, health
from skyproxy_server.controls import CONTROLS
from skyproxy_server.jobs.store import Jobs
from skyproxy_server.listener import Listener, serve
from skyproxy_server.tokens import Tokens
from skyproxy_server.worker_host import WorkerHost
from tests.security.message_samples import CONTROL_SAMPLES, MESSAGE_SAMPLES, Place, hello
from tests.security.raw_client import RawClient
from tests.security.test_tokens import CPU, put

HOLDERS = {
    "operations": "operations-0123456789abcdef0123",
    "functions": "functions-0123456789abcdef01234",
    "admin": "admin-0123456789abcdef012345678",
    "operations, admin": "both-0123456789abcdef0123456789",
}
"""A token of each set of scopes that a file can have; functions bring operations with them."""
STRANGER = "stranger-0123456789abcdef012345"

MESSAGE_SCOPES: dict[type[Message], str] = {
    **dict.fromkeys((Hello, Goodbye, Batch, NamedBatch, Repeat, Received), OPERATIONS),
    **dict.fromkeys((Chunk, PackedChunk, CancelTransfer, Landed, Continue, CancelOperations), OPERATIONS),
    **dict.fromkeys((Offer, Proof, Ping, Pong), OPERATIONS),
    **dict.fromkeys((CallStart, CallData, CallAck, CallCancel, CallAttach, JobRequest), FUNCTIONS),
}
ROLE_SCOPES = {OPERATIONS: OPERATIONS, BULK: OPERATIONS, FUNCTIONS: FUNCTIONS, JOBS: FUNCTIONS}
CONTROL_REACH = {
    "its own session": {
        *(
            "synchronize",
            "end_cancellation",
            "stats",
            "item",
            "numbers",
            "equal",
            "take_apart",
            "copy_to_device",
            "set_modes",
        ),
        *("modes_in_force", "manual_seed", "random_state", "set_random_state", "keep_random_state"),
        *("restore_random_state", "initial_seed", "new_generator", "seed_generator", "generator_state"),
        *("set_generator_state", "generator_seed", "copy_generator_state", "differentiated", "differentiate"),
        *("set_storage", "view_storage", "resize_storage", "storage_bytes", "reset_peak_memory", "empty_cache"),
        *("record_event", "wait_event", "query_event", "elapsed_milliseconds", "clock", "profile_start"),
        *("profile_stop", "graph_begin", "graph_define", "graph_abort", "graph_forget", "graph_report"),
        *("forget_compiled", "compile_report"),
    },
    "what its token has": {
        *("hold_named", "put_named", "named_value", "adopt_named", "list_named", "forget_named", "named_sessions"),
        *("end_named", "leave_named", "save_snapshot", "load_snapshot", "list_snapshots", "delete_snapshot"),
        *("open_snapshot", "adopt_snapshot", "read_snapshot", "read_snapshot_piece", "begin_snapshot"),
        *("write_snapshot_piece", "write_snapshot", "blob_stats"),
    },
    "what is known of the machine": {"memory_stats", "memory_summary", "device_properties", "compiler_trouble"},
    "functions": {"bind_call", "adopt_results", "forget_call"},
}
"""What each control reaches. Another token's nothing: what reaches a token's is tried in `test_token_holders`."""
PATH_SCOPES = {
    health.LIVE_PATH: {*HOLDERS, ""},
    health.READY_PATH: {*HOLDERS, ""},
    health.ACTIVITY_PATH: {"admin", "operations, admin"},
    health.METRICS_PATH: {"admin", "operations, admin"},
    health.STATUS_PATH: set(HOLDERS),
    health.ENDING_PATH: set[str](),
}


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    folder = tmp_path_factory.mktemp("tokens")
    for number, (scopes, token) in enumerate(HOLDERS.items()):
        put(folder / f"holder{number}", f"{token}\nscopes: {scopes}\n")
    settings = Settings(close_timeout_seconds=0.3)
    jobs = Jobs(None, settings)
    host = WorkerHost([CPU], settings, functions=True)  # type: ignore[list-item]
    made = serve("127.0.0.1", 0, Tokens(folder), host, settings=settings, jobs=jobs)
    yield made
    made.close()
    jobs.close()


def status_of(listener: Listener, path: str, token: str) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{listener.port}{path}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_every_path_message_role_and_control_is_for_somebody() -> None:
    assert set(PATH_SCOPES) == {value for name, value in vars(health).items() if name.endswith("_PATH")}
    assert set(MESSAGE_SCOPES) == {kind for kind in MESSAGES.values() if CLIENT in kind.senders}
    assert set(ROLE_SCOPES) == set(ROLES)
    decided = [name for names in CONTROL_REACH.values() for name in names]
    assert sorted(decided) == sorted({*CONTROLS, *CONTROL_REACH["functions"]})
    assert set(CONTROL_SAMPLES) == set(decided)
    assert {OPERATIONS, FUNCTIONS, "admin"} == auth.SCOPES


@pytest.mark.parametrize("scopes", ["", *HOLDERS])
@pytest.mark.parametrize("path", PATH_SCOPES)
def test_a_path_answers_whom_it_is_for(listener: Listener, path: str, scopes: str) -> None:
    status = status_of(listener, path, HOLDERS.get(scopes, ""))
    assert (status == 200) is (scopes in PATH_SCOPES[path]), status
    assert status_of(listener, path, STRANGER) in ({200} if "" in PATH_SCOPES[path] else {401})


def connected(listener: Listener, token: str, role: str) -> tuple[RawClient, RawClient | None]:
    """A connection of a role, and that of the session which it joins."""
    if role in (OPERATIONS, JOBS):
        client, session = RawClient(listener.port, token), None
        client.greet(hello(role), 10)
    else:
        session = RawClient(listener.port, token)
        assert session.greet(hello(OPERATIONS), 10)
        client = RawClient(listener.port, token)
        client.greet(hello(role, session.session), 10)
    return client, session


def ends(client: RawClient) -> bool:
    """Return whether the worker ends the connection now."""
    while not client.is_over and not client.goodbye:
        if not client.listen(20):
            return False
    return True


FOREIGN = [
    (kind, role) for kind, scope in MESSAGE_SCOPES.items() for role in ROLES if FUNCTIONS in (scope, ROLE_SCOPES[role])
]
"""Messages for functions on each connection, and all others on those that are for functions."""


@pytest.mark.parametrize(("kind", "role"), FOREIGN, ids=lambda item: getattr(item, "__name__", item))
def test_a_token_for_operations_sends_no_message_of_functions_on_any_connection(
    listener: Listener, kind: type[Message], role: str
) -> None:
    client, session = connected(listener, HOLDERS["operations"], role)
    try:
        if role == FUNCTIONS:
            assert not client.welcome
            assert ends(client)
            return
        assert client.welcome
        client.say(MESSAGE_SAMPLES[kind](Place(random.Random(1), client.session)))
        if kind is JobRequest and role == JOBS:
            assert client.listen(20)
            assert b"scope 'functions'" in client.received
            assert not client.goodbye
        else:
            assert ends(client)
    finally:
        for each in (client, session):
            if each is not None:
                each.cut()


@pytest.mark.parametrize("action", sorted(JOB_ACTIONS))
def test_a_token_for_operations_has_no_job_by_any_action(listener: Listener, action: str) -> None:
    client, _ = connected(listener, HOLDERS["operations"], JOBS)
    value = {"name": "job", "kind": "script", "payload_bytes": 1, "offset": 0, "limit": 1, "wait_seconds": 0.0}
    client.say(JobRequest(RequestId(1), action, value, (b"x",) if action == "data" else ()))
    assert client.listen(20)
    assert bytes([JobAnswer.code]) in client.received
    assert b"refused" in client.received
    assert b"scope 'functions'" in client.received
    client.cut()


@pytest.mark.parametrize("name", sorted(CONTROL_REACH["functions"]))
@pytest.mark.parametrize("do", [False, True])
def test_a_token_for_operations_reaches_no_function_by_a_control(listener: Listener, name: str, do: bool) -> None:
    client, _ = connected(listener, HOLDERS["operations"], OPERATIONS)
    arguments = CONTROL_SAMPLES[name](Place(random.Random(1)))
    stream = [commands.DO, name, arguments] if do else [commands.CALL, 1, name, arguments]
    client.say(Batch(Sequence(1), [*stream, commands.CALL, 2, "synchronize", []]))
    while b"runs no functions" not in client.received:
        assert client.listen(20)
    client.cut()


@pytest.mark.parametrize("role", ROLES)
def test_a_token_for_admin_alone_opens_no_connection(listener: Listener, role: str) -> None:
    client = RawClient(listener.port, HOLDERS["admin"])
    assert client.is_over
    assert not client.greet(hello(role, "" if role in (OPERATIONS, JOBS) else "0" * 32), 10)


def test_status_tells_a_client_without_admin_nothing_of_the_worker(listener: Listener, tmp_path: Path) -> None:
    other, _ = connected(listener, HOLDERS["functions"], OPERATIONS)
    own, _ = connected(listener, HOLDERS["operations"], OPERATIONS)
    request = urllib.request.Request(
        f"http://127.0.0.1:{listener.port}{health.STATUS_PATH}",
        headers={"Authorization": f"Bearer {HOLDERS['operations']}"},
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        text = response.read().decode()
    assert own.session[:8] in text
    assert other.session[:8] not in text
    assert "holder1" not in text
    for client in (other, own):
        client.cut()
