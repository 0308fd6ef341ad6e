"""When sessions get processes of their own, by the worker's arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

import skyproxy_server.__main__ as program
from skyproxy.errors import ConfigurationError
from skyproxy_server.arguments import parser

PROCESSES, ONE = True, False


def choice(*arguments: str) -> bool:
    return program._wants_processes(parser().parse_args(arguments))


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "token").write_text("a-token-of-one-client")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((), ONE),
        (("--no-functions",), PROCESSES),
        (("--no-functions", "--sessions-in-process"), ONE),
        (("--no-functions", "--embedded"), ONE),
        (("--embedded",), ONE),
        (("--embedded", "--session-processes"), PROCESSES),
        (("--session-processes",), PROCESSES),
        (("--sessions-in-process",), ONE),
        (("--token-file", "token"), ONE),
        (("--token-file", "tokens"), PROCESSES),
        (("--token-file", "tokens", "--sessions-in-process"), ONE),
        (("--session-memory", "1000000"), PROCESSES),
        (("--session-gpu-fraction", "0.5"), PROCESSES),
    ],
)
def test_sessions_have_processes_where_not_all_clients_may_run_functions(
    tokens: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], wanted: bool
) -> None:
    monkeypatch.chdir(tokens)
    monkeypatch.setattr(program, "are_sessions_separable", lambda: True)
    assert choice(*arguments) is wanted


def test_a_system_without_the_means_runs_all_in_one_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "are_sessions_separable", lambda: False)
    assert choice("--no-functions") is ONE
    for arguments in (("--session-processes",), ("--session-memory", "1000000")):
        with pytest.raises(ConfigurationError, match="needs Linux"):
            choice(*arguments)


def test_bounds_and_sessions_in_one_process_contradict_one_another() -> None:
    with pytest.raises(ConfigurationError, match="leave out --sessions-in-process"):
        choice("--session-memory", "1000000", "--sessions-in-process")
