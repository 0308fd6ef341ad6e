"""What a hostile worker can do to a client that calls no functions."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch  # noqa: F401 - before our modules that import it: the device is registered with it

from skyproxy.errors import RemoteError, SkyproxyError, visible, visible_output
from skyproxy.protocol.messages import Pong, Sequence, Welcome
from skyproxy.session import restoring, snapshot_copies
from skyproxy.session.failures import remote_error
from skyproxy.session.session import Session
from skyproxy.settings import SETTINGS
from skyproxy.transport import worker_questions
from skyproxy.transport.base import recv_before
from skyproxy.transport.memory import memory_transport_pair


def rebuilt(record: dict[str, Any]) -> RemoteError:
    return remote_error(record, "")


@pytest.mark.parametrize(
    "name",
    [
        "ExceptionGroup",
        "BaseExceptionGroup",
        "StopIteration",
        "SystemExit",
        "KeyboardInterrupt",
        "exec",
        "",
        7,
        None,
        [],
    ],
    ids=str,
)
def test_whatever_type_a_worker_names_there_is_an_error_to_raise(name: Any) -> None:
    error = rebuilt({"type": name, "message": "m", "op": "", "traceback": ""})
    assert type(error) is RemoteError
    assert str(error) == "m"


@pytest.mark.parametrize("name", ["UnicodeDecodeError", "UnicodeEncodeError", "ImportError", "KeyError", "OSError"])
def test_exceptions_of_unusual_making_are_made(name: str) -> None:
    error = rebuilt({"type": name, "message": "m", "op": "", "traceback": ""})
    assert isinstance(error, RemoteError)
    assert str(error) == "m"


@pytest.mark.parametrize("record", [{}, {"type": "ValueError"}, {"message": 5}, {"message": [], "op": {}}], ids=str)
def test_a_failure_that_lacks_everything_is_still_an_error(record: dict[str, Any]) -> None:
    assert isinstance(rebuilt(record), RemoteError)


MACHINERY = (
    'Traceback (most recent call last):\n  File "/w/skyproxy_server/op_table.py", line 98, in handler\n    run()\n'
    '  File "<skyproxy aten::mm>", line 2, in handler\n'
)
KERNELS = {
    "PyTorch's": ('  File "/w/skyproxy_server/safe_forms.py", line 4, in clear\nIndexError: m\n', None),
    "PyTorch's own": ("IndexError: m\n", None),
    "a user's": (
        '  File "/w/mylib.py", line 4, in scale\n    x[9]\nIndexError: m\n',
        'Traceback (most recent call last):\n  File "/w/mylib.py", line 4, in scale\n    x[9]\nIndexError: m',
    ),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_workers_traceback_is_shown_from_a_users_kernel_on(kernel: str) -> None:
    below, note = KERNELS[kernel]
    error = rebuilt({"type": "IndexError", "message": "m", "op": "aten::mm", "traceback": MACHINERY + below})
    assert getattr(error, "__notes__", None) == (None if note is None else [f"Traceback of the worker:\n{note}"])
    assert error.remote_traceback == MACHINERY + below


def test_a_workers_traceback_without_a_kernel_is_shown_whole() -> None:
    text = 'Traceback (most recent call last):\n  File "/w/skyproxy_server/session.py", line 9, in take\nIndexError: m'
    assert rebuilt({"message": "m", "traceback": text}).__notes__ == ["Traceback of the worker:\n" + text]


def test_a_workers_words_do_not_command_the_terminal() -> None:
    copy = "\x1b]52;c;ZXZpbA==\x07\x9d\x1b[31m\r"
    error = rebuilt({"type": "ValueError", "message": copy, "op": copy, "traceback": copy})
    text = str(error) + "".join(error.__notes__) + error.remote_traceback + error.op
    assert not any(character in text for character in "\x1b\x07\x9d\r")
    assert "\\x1b]52;c;ZXZpbA==\\x07" in str(error)
    assert visible("a\tb\nc") == "a\tb\nc"


@pytest.mark.parametrize(
    "place",
    [
        {},
        {"sequence": 1},
        {"position": 2},
        {"sequence": 1 << 70, "position": -(1 << 70)},
        {"sequence": [], "position": {}},
    ]
    + [
        {"graph": "x"},
        {"graph": [], "position": 1},
        {"graph": 1 << 80, "position": 1},
        {"sequence": "x", "position": 1.5},
    ],
)
def test_a_failed_argument_is_an_error_wherever_the_worker_says_that_it_failed(place: dict[str, Any]) -> None:
    client_end, _ = memory_transport_pair()
    bulk_end, _ = memory_transport_pair("bulk")
    session = Session(client_end, bulk_end, Welcome(1, "memory", {}, [], {}), SETTINGS)
    try:
        record = {"type": "ValueError", "message": "no", "traceback": "t", "failed": "x", **place}
        error = session.failure(record)
        assert isinstance(error, RemoteError)
        assert "no" in str(error)
    finally:
        session.close()


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "tab\tand\nlines\r\n",
        "50%\r100%",
        "\x1b[31mred\x1b[0m",
        "\x1b[1;38;5;208mx\x1b[m",
        "\x1b[2K\x1b[1A\x1b[?25l",
        "\b",
    ],
)
def test_what_draws_reaches_the_terminal(text: str) -> None:
    assert visible_output(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "\x1b]52;c;ZXZpbA==\x07",  # writes to the clipboard
        "\x1b]0;title\x1b\\\\",
        "\x1bP+q544e\x1b\\\\",
        "\x1b_G\x1b\\\\",
        "\x1b[6n",  # asks where the cursor is; the answer is typed
        "\x1b[c",
        "\x1b[21t",
        "\x1b[?1049h",
        "\x1b",
        "\x1b[31",
        "\x9d52;c;x\x9c",
        "\x07",
        "\x00",
    ],
)
def test_what_commands_the_terminal_is_shown_instead(text: str) -> None:
    shown = visible_output(f"a{text}b")
    assert not any(character in shown for character in "\x1b\x07\x00\x9c\x9d")
    assert shown.startswith("a\\x")


def test_half_a_sequence_does_not_meet_its_other_half() -> None:
    whole = "\x1b]52;c;ZXZpbA==\x07"
    for cut in range(len(whole)):
        assert "\x1b]" not in visible_output(whole[:cut]) + visible_output(whole[cut:])
    drawing = "\x1b[31m"
    for cut in range(1, len(drawing)):
        assert "\x1b" not in visible_output(drawing[:cut])


class Talker:
    """A worker that says something else at any time, without end; each message takes a second of the clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def recv(self, timeout_seconds: float | None = None) -> Pong:
        self.now += 1.0
        return Pong(0)


def test_who_is_told_other_things_without_end_does_not_wait_for_ever() -> None:
    talker = Talker()
    with pytest.raises(TimeoutError):
        while True:
            recv_before(talker, 30.0, talker.clock)  # type: ignore[arg-type]
    assert talker.now == 30.0


@pytest.mark.parametrize("ask", ["a control", "a first question", "a copy"])
def test_answers_that_do_not_come_among_others_are_not_waited_for(monkeypatch: pytest.MonkeyPatch, ask: str) -> None:
    talker = mock.Mock(**{"recv.return_value": Pong(0)})
    monkeypatch.setattr(worker_questions, "connect_websocket", lambda *_, **__: (talker, None))
    for module in (restoring, snapshot_copies):
        monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.05)
    with pytest.raises(SkyproxyError):
        if ask == "a control":
            worker_questions.ask_control("ws://127.0.0.1:1", "t", "x", timeout_seconds=0.05)
        elif ask == "a first question":
            restoring.NewSession(talker, talker, mock.Mock()).ask_control(Sequence(1), "x", [])
        else:
            opened = restoring.NewSession(talker, talker, mock.Mock())
            opener = mock.Mock(**{"copy.return_value.open_session.return_value": opened})
            snapshot_copies.WorkerCopies(opener)._ask("x")
