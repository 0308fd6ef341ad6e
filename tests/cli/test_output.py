"""What is shown, and where."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import typer

from skyproxy.cli.arguments import variables_of, volume_of
from skyproxy.cli.output import age_text, bytes_text, fail, show_table, warn
from skyproxy.errors import ConfigurationError

WAIT = """
from skyproxy.cli.output import progress
with progress("asking [for] it") as say:
    say("dev: no node has [room]")
print("result")
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(item for item in sys.path if item), "TERM": "xterm"}


def test_progress_is_silent_without_a_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", WAIT], capture_output=True, text=True, check=True, env=environment())
    assert (done.stdout, done.stderr) == ("result\n", "")


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals")
def test_progress_is_shown_on_a_terminal_and_stays_out_of_the_result() -> None:
    ours, theirs = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", WAIT],
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            check=True,
            env=environment(),
        )
        os.set_blocking(ours, False)
        shown = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.stdout == "result\n"
    assert "[for] it" in shown or "no node has [room]" in shown


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, ""), (0, "0s"), (119, "119s"), (120, "2m"), (7200, "2h"), (200000, "2d"), (-1, "0s")]
)
def test_ages(seconds: float | None, text: str) -> None:
    assert age_text(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(None, ""), (5, "5 B"), (1536, "1.5 KiB"), (80 << 30, "80.0 GiB")])
def test_sizes(count: int | None, text: str) -> None:
    assert bytes_text(count) == text


def test_volumes_and_variables_are_read() -> None:
    assert volume_of("cache:10Gi:/cache:reclaimPolicy=Retain") == {
        "name": "cache",
        "storage": "10Gi",
        "path": "/cache",
        "reclaimPolicy": "Retain",
    }
    assert variables_of(["A=b=c", "B=", "MINE"], {"MINE": "x"}) == {"A": "b=c", "B": "", "MINE": "x"}


@pytest.mark.parametrize("text", ["", "cache", "cache:10Gi", "cache::/x", "cache:10Gi:/x:ReadWriteMany"])
def test_what_is_no_volume(text: str) -> None:
    with pytest.raises(ConfigurationError, match="NAME:SIZE:PATH"):
        volume_of(text)


WORKERS = [
    {
        "current": "*",
        "name": "training-run-17",
        "provider": "kubernetes",
        "where": "research-team (arn:aws:eks:eu-central-1:cluster/production)",
        "phase": "Provisioning",
        "nodes": 16,
        "devices": "8x NVIDIA H100 80GB HBM3",
        "idle": "119s",
        "age": "23h",
    },
    {"name": "dev", "provider": "local", "where": "this machine", "phase": "Running", "nodes": 1, "devices": "cpu"},
]
_COLUMNS = tuple(WORKERS[0])


@pytest.mark.parametrize("width", [80, 100, 300])
def test_a_list_of_workers_has_a_line_each_that_fits(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    show_table(_COLUMNS, WORKERS, "", shorten=("where", "devices", "provider"), unnamed=("current",))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= width
    assert "training-run-17" in lines[1]
    assert "Provisioning" in lines[1]
    assert ("…" in lines[1]) == (width < 130)
    assert lines[2].split()[:3] == ["dev", "local", "this"]
    assert "Running" in lines[2]


@pytest.mark.parametrize("value", ["", "1"])
def test_who_wants_no_colours_gets_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    given: list[str | None] = []
    monkeypatch.setattr(typer, "secho", lambda message, fg, err: given.append(fg))
    monkeypatch.setenv("NO_COLOR", value)
    warn("beware")
    with pytest.raises(typer.Exit):
        fail("it is broken")
    assert given == ([None, None] if value else ["yellow", "red"])


def test_markup_in_a_text_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(("name",), [{"name": "[red]a[/red]"}], "")
    assert "[red]a[/red]" in capsys.readouterr().out


def test_lines_of_results_are_not_broken_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    show_table(("name", "details"), [{"name": "dev", "details": "x" * 300}], "none")
    assert capsys.readouterr().out.splitlines()[1] == "dev   " + "x" * 300
