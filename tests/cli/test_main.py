"""The `skyproxy` command."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from skyproxy.cli import main as cli
from skyproxy.contexts import Context, ContextStore


def run(*arguments: str) -> Result:
    return run_in(160, *arguments)


def run_in(width: int, *arguments: str) -> Result:
    settings = {"COLUMNS": str(width), "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(cli.app, list(arguments), env=settings)


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines that would have become the process."""
    commands: list[list[str]] = []

    def execv(_path: str, command: list[str]) -> None:
        commands.append(command)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return commands


def test_help_names_the_commands() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "serve" in result.output
    assert "version" in result.output


def test_help_of_serve_tells_of_the_token() -> None:
    result = run("serve", "--help")
    assert result.exit_code == 0
    assert "SKYPROXY_TOKEN" in result.output
    assert "--token-file" in result.output
    assert "--token " not in result.output


def test_help_breaks_lines_where_the_terminal_ends_and_has_a_line_for_each_example() -> None:
    for width in (80, 160):
        lines = [line.strip() for line in run_in(width, "up", "--help").output.splitlines()]
        paragraph = lines[lines.index("") :]
        begin = next(n for n, line in enumerate(paragraph) if line.startswith("With the provider local"))
        text = paragraph[begin : paragraph.index("", begin)]
        # All but the last are as full as the next word allows.
        for line, following in itertools.pairwise(text):
            assert len(line) + 1 + len(following.split()[0]) > width - 2
        assert "skyproxy up ssh://me@gpu-box" in lines


def test_a_full_disk_is_told_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cli, "_version_of", fails)
    result = run("version")
    assert result.exit_code == 1
    assert "the disk is full" in result.output
    assert "Make room" in result.output


def test_a_name_that_is_nearly_one_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("SKYPROXY_", "KUBE"))]:
        monkeypatch.delenv(name)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    ContextStore().save(Context("trainer", "local"))
    result = run("status", "trianer")
    assert result.exit_code == 3
    assert "there is no worker 'trianer' on this machine or over ssh. Did you mean 'trainer'?" in result.output
    assert "Did you mean" not in run("status", "other").output


@pytest.mark.parametrize(("typed", "meant"), [("ps", "list"), ("stop", "suspend"), ("rm", "down"), ("statu", "status")])
def test_a_command_of_another_name_is_told(typed: str, meant: str) -> None:
    result = run(typed)
    assert result.exit_code == 2
    assert f"No such command '{typed}'. Did you mean '{meant}'?" in result.output


def test_version_names_what_we_stand_on() -> None:
    result = run("version")
    assert result.exit_code == 0
    for name in ("skyproxy", "torch", "websockets", "python"):
        assert name in result.output


@pytest.mark.skipif(os.name != "posix", reason="exec is POSIX")
def test_serve_becomes_the_server(executed: list[list[str]], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("x" * 32)
    result = run("serve", "--port", "0", "--device", "cpu", "--token-file", str(token), "--insecure")
    assert result.exit_code == 0, result.output
    command = executed[0]
    assert command[:4] == [sys.executable, "-P", "-m", "skyproxy_server"]
    assert command[command.index("--token-file") + 1] == str(token)
    assert command[command.index("--device") + 1] == "cpu"
    assert "--insecure" in command
    assert "--embedded" not in command


@pytest.mark.skipif(os.name != "posix", reason="exec is POSIX")
def test_every_flag_is_one_that_the_server_knows(executed: list[list[str]], tmp_path: Path) -> None:
    from skyproxy_server.arguments import parser

    file = tmp_path / "file"
    file.write_text("x")
    flags = ["--token-file", "--tls-cert", "--tls-key"]
    paths = [text for flag in flags for text in (flag, str(file))]
    run("serve", *paths, "--insecure", "--embedded", "--allow-origin", "http://a", "--allow-origin", "http://b")
    parsed = parser().parse_args(executed[0][4:])
    assert parsed.allow_origin == ["http://a", "http://b"]
    assert parsed.tls_key == file
    assert parsed.embedded is True
    ours = {param.name for param in cli.typer.main.get_command(cli.app).commands["serve"].params}  # type: ignore[attr-defined]
    shown = {action.dest for action in parser()._actions if action.help != argparse.SUPPRESS}
    # Of --tls, the command makes the files that the server is told of, and what it says to clients.
    assert shown == {"help", "invite", *(ours - {"tls", "advertise"})}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["serve", "--port", "70000"], "65535"),
        (["serve", "--device", "tpu"], "tpu"),
        (["serve", "--token", "secret"], "--token"),
        (["serve", "--token-file", "no-such-file"], "no-such-file"),
        (["sreve"], "sreve"),
        ([], "serve"),
    ],
)
def test_wrong_arguments_end_with_2(arguments: list[str], problem: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert problem in result.output


@pytest.mark.parametrize("missing", ["skyproxy_server", "torch"])
def test_a_missing_server_is_explained(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.util.find_spec

    def find_spec(name: str, *rest: Any) -> Any:
        return None if name == missing else original(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    result = run("serve")
    assert result.exit_code == 2
    assert f"needs {missing}" in result.output
    assert "pip install" in result.output


def test_the_command_line_loads_no_torch() -> None:
    import subprocess

    code = "import sys, skyproxy.cli.main; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(item for item in sys.path if item)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("connect", "gpu-box:8765"), "begin it with wss://, ws:// or sky://"),
        (("connect", "http://gpu-box:8765"), "begin it with wss://, ws:// or sky://"),
        (("up", "me@gpu-box"), "a host to log in to, with ssh://"),
        (("up", "ssh:/gpu-box"), "a host to log in to, with ssh://"),
        (("run", "nowhere.py"), "there is no script 'nowhere.py'"),
        (("run", str(Path(__file__).with_name("test_mian.py"))), "/test_main.py'?"),
        (("run", "."), "That is a folder"),
        (("run", "nowhere/train.py"), "There is no folder 'nowhere'"),
        (("run", "train"), "For a module: skyproxy run -m train"),
        (("up", "x", "--provider", "moon"), "Invalid value for '--provider': 'moon' is not one of"),
        (("run", __file__, "--on", "dev"), "stand before the script"),
    ],
)
def test_a_beginners_mistake_is_told_as_such(home: Path, arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ("install",),
        ("install", "--dry-run"),
        ("install", "--namespace", "team"),
        ("gpus",),
        ("up", "dev", "--provider", "kubernetes"),
        ("list", "--provider", "kubernetes"),
        ("down", "dev", "--namespace", "team"),
    ],
    ids=" ".join,
)
def test_a_command_for_clusters_says_which_library_is_not_installed(
    home: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "is not installed here. Install it: pip install" in " ".join(result.output.split())


@pytest.mark.parametrize("url", ["ws://127.0.0.1:99999", "ws://127.0.0.1:x", "gpu-box", "http://127.0.0.1:1", "ws://"])
def test_an_address_that_is_none_is_told_as_such(home: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("SKYPROXY_URL", url)
    monkeypatch.setenv("SKYPROXY_TOKEN", "x" * 20)
    result = run("doctor")
    assert result.exit_code == 1
    assert "The worker's url" in " ".join(result.output.split())


def test_a_variable_that_cannot_be_read_is_told_without_a_traceback(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "skyproxy.cli.main", "version"],
        env=dict(os.environ) | {"SKYPROXY_MAX_HANDLES": "many"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: SKYPROXY_MAX_HANDLES='many' is not a number. Example: SKYPROXY_MAX_HANDLES=1000\n"


def test_the_version_is_an_option_and_python_runs_the_package() -> None:
    command = [sys.executable, "-m", "skyproxy", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == run("--version").output
    assert done.stdout.startswith("skyproxy ")
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
