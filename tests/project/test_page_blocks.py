"""Every block of the documentation is run, parsed, or named with the reason why it is not."""

from __future__ import annotations

import itertools
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from skyproxy.cli.main import app
from tests.firstrun.pages import COMMANDS_NOT_RUN, FIRST_STEPS, NOT_RUN, ROOT, RUN, blocks, command_lines, pages

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
PROMISED = ("README.md", "docs/tutorial/", "docs/howto/")
"""What a reader follows step by step: no shell line of these may be unknown."""


def test_every_page_with_python_is_run_or_says_why_not() -> None:
    with_python = {page for page in pages() if blocks(page, "python")}
    assert with_python == {*FIRST_STEPS, *RUN, *NOT_RUN}
    assert not RUN.keys() & NOT_RUN.keys()


@pytest.mark.parametrize("page", [page for page, needs in RUN.items() if needs.worker])
def test_an_address_that_stands_for_a_worker_is_on_its_page(page: str) -> None:
    assert RUN[page].worker in "\n".join(blocks(page, "python"))


REFERENCE = "docs/reference/cli.md"
"""Made from the commands themselves; tests/cli/test_reference.py parses their examples."""
LINES = [
    (page, line)
    for page in pages()
    if page != REFERENCE
    for line in command_lines(page)
    if line.startswith("skyproxy ")
]


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{Path(page).stem}: {line}" for page, line in LINES])
def test_a_command_line_is_one_that_skyproxy_takes(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    words = [word.replace("~", str(tmp_path), 1) for word in shlex.split(line)]
    for option, value in itertools.pairwise(words):
        if option in ("--token-file", "--tls-cert", "--tls-key"):  # must be there
            Path(value).parent.mkdir(parents=True, exist_ok=True)
            Path(value).touch()
    command: Any = typer.main.get_command(app)
    name, arguments = "skyproxy", words[1:]
    while hasattr(command, "commands") and arguments and arguments[0] in command.commands:
        command, name, arguments = command.commands[arguments[0]], f"{name} {arguments[0]}", arguments[1:]
    if hasattr(command, "commands"):  # sessions by itself, or skyproxy --install-completion
        assert command.invoke_without_command or arguments[0].startswith("--"), f"{page}: {line}"
        return
    command.make_context(name, arguments)


def test_every_extra_that_a_page_installs_exists() -> None:
    installed = {
        extra
        for page in pages()
        for line in command_lines(page)
        for listed in re.findall(r"\.\[([\w,-]+)\]", line)
        for extra in listed.split(",")
    }
    assert {"torch", "server", "kubernetes"} <= installed <= EXTRAS.keys()


def test_every_shell_line_of_a_page_to_follow_is_accounted_for() -> None:
    """In blocks that hold commands: whatever is neither skyproxy's nor known was never thought of."""
    strangers = []
    for page in pages():
        if not page.startswith(PROMISED):
            continue
        for block in blocks(page, "", "bash"):
            if any(line.split()[:1] == ["skyproxy"] or line.split()[:1] == ["pip"] for line in block.splitlines()):
                lines = [re.sub(r"^\w+\$ ", "", line.strip()) for line in block.replace("\\\n", " ").splitlines()]
                first = {line.split()[0] for line in lines if line and not line.startswith("#")}
                strangers += [f"{page}: {word}" for word in first - {"skyproxy", *COMMANDS_NOT_RUN}]
    assert strangers == []


def test_a_reason_is_given_for_each_that_is_not_run() -> None:
    used = {line.split()[0] for page in pages() for line in command_lines(page)}
    assert COMMANDS_NOT_RUN.keys() - used == set(), "named, and on no page any more"
    assert all(len(reason) > 3 for reason in (*COMMANDS_NOT_RUN.values(), *NOT_RUN.values()))


@pytest.mark.parametrize("seed", range(3))
def test_the_training_of_the_tutorial_learns(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    torch.manual_seed(seed)
    program = "\n".join(blocks("docs/tutorial/first-tensor.md", "python")).replace('"sky:0"', '"cpu"')
    exec(program.replace('"sky"', '"cpu"'), {})  # the numbers are the same there, and no worker is started
    assert float(capsys.readouterr().out.split()[-1]) < 0.01
