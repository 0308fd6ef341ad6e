"""docs/reference/cli.md says what the commands say of themselves."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import typer

from skyproxy.cli.examples import EXAMPLES
from skyproxy.cli.exit_codes import MEANINGS, ExitCode, code_of
from skyproxy.cli.main import app
from skyproxy.errors import (
    AuthenticationError,
    ClusterError,
    ConfigurationError,
    ConnectError,
    SessionLostError,
    WorkerStartError,
)

_spec = importlib.util.spec_from_file_location(
    "write_cli_reference", Path(__file__).resolve().parents[2] / "docs" / "write_cli_reference.py"
)
assert _spec is not None
assert _spec.loader is not None
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)


def test_the_page_is_what_the_commands_say() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run: python docs/write_cli_reference.py"


def test_every_command_and_argument_has_a_help() -> None:
    for path, command in reference.commands(typer.main.get_command(app)):
        assert command.help, path
        assert [item.name for item in command.params if not item.help] == [], path


def test_every_command_has_an_example_that_its_parser_accepts() -> None:
    commands = dict(reference.commands(typer.main.get_command(app)))
    assert EXAMPLES.keys() == commands.keys()
    for path, command in commands.items():
        assert EXAMPLES[path]
        for example in EXAMPLES[path]:
            assert example.startswith(path)
            assert example in command.epilog
            command.make_context(path, shlex.split(example.removeprefix(path)))


def test_commands_that_read_print_json() -> None:
    reading = {"list", "logs", "status", "top", "gpus", "doctor", "version", "context list", "context current", "up"}
    reading |= {"sessions list", "debug", "jobs list", "jobs logs"}
    with_json = {
        path.removeprefix("skyproxy ")
        for path, command in reference.commands(typer.main.get_command(app))
        if any("--json" in item.opts for item in command.params)
    }
    assert with_json == reading


def test_every_status_has_a_meaning_and_every_error_a_status() -> None:
    assert set(MEANINGS) == set(ExitCode)
    for error, code in (
        (ConfigurationError(), ExitCode.USAGE),
        (WorkerStartError(), ExitCode.NOT_STARTED),
        (AuthenticationError(), ExitCode.UNREACHABLE),
        (ConnectError(), ExitCode.UNREACHABLE),
        (ClusterError(), ExitCode.CLUSTER),
        (SessionLostError(), ExitCode.FAILED),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
    ):
        assert code_of(error) is code
