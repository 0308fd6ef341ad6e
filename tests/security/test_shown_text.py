"""Text of a worker, a cluster or a host, wherever a person is shown it: it shows, and commands nothing."""

from __future__ import annotations

import ast
import asyncio
import io
import logging
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from skyproxy.cli import doctor, inspecting, ssh_fleet
from skyproxy.cli.fleet import LONGEST_LINE, WorkerRow, last_bytes, printed_lines
from skyproxy.cli.local_fleet import devices_text
from skyproxy.cli.output import progress, show_line, show_output
from skyproxy.errors import RankErrors, SkyproxyError, UnknownNameError, say, visible, visible_output
from skyproxy.kubernetes.explain import explain
from skyproxy.notebook import magic
from skyproxy.pools.output_view import TaskOutput
from skyproxy.pools.progress_view import ProgressView
from skyproxy.providers.base import Progress
from skyproxy.providers.ssh_connection import SshTarget

COPY = "\x1b]52;c;ZXZpbA==\x07\x9d\x1b[31m\r\u202e\ud800[bold]\\[/] [/x]"
CLI = Path(__file__).parents[2] / "skyproxy" / "cli"
OWN_WRITERS = {
    ("output.py", "echo"),
    ("output.py", "secho"),
    ("__init__.py", "print"),  # a setting that cannot be read, before there is anything else
    ("debugger.py", "write"),  # without an end of line; what a debugger says, made visible
}


def is_harmless(text: str) -> bool:
    """Return whether text commands no terminal, reads as it stands, and can be written; rich's own colours aside."""
    text.encode()
    return not any(character in text for character in "\x1b]\x07\x9d\r\u202e".replace("]", "")) and "\x1b]" not in text


def writers(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id == "print":
            yield "print"
        elif isinstance(node.func, ast.Attribute) and node.func.attr in ("echo", "secho"):
            yield node.func.attr
        elif isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in ("sys.stdout", "sys.stderr"):
            yield from ["write"] if node.func.attr.startswith("write") else []


def test_commands_write_through_one_module() -> None:
    found = {
        (path.relative_to(CLI).as_posix(), writer)
        for path in CLI.rglob("*.py")
        for writer in writers(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == OWN_WRITERS


def kinds_of_errors(kind: type[SkyproxyError] = SkyproxyError) -> Iterator[type[SkyproxyError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from kinds_of_errors(below)


@pytest.mark.parametrize(
    "kind",
    [kind for kind in kinds_of_errors() if kind.__module__.startswith("skyproxy.") and kind is not RankErrors],
    ids=lambda kind: kind.__name__,
)
def test_no_error_of_ours_commands_the_terminal_that_shows_it(
    kind: type[SkyproxyError], caplog: pytest.LogCaptureFixture
) -> None:
    error = kind(COPY)
    error.add_note(COPY)
    assert is_harmless("".join(traceback.format_exception(error)))
    logging.getLogger("skyproxy").warning("skyproxy: %s", error)
    assert is_harmless(caplog.text)


def test_neither_does_a_group_of_them() -> None:
    group = RankErrors.of(COPY, {0: UnknownNameError(COPY), 1: UnknownNameError(COPY)}, 0)
    assert is_harmless("".join(traceback.format_exception(group)))


@pytest.mark.parametrize(
    "code", [0x61C, 0x200E, 0x200F, 0x202A, 0x202E, 0x2066, 0x2069, 0x2028, 0x2029, 0xD800, 0xDFFF]
)
def test_what_turns_text_around_or_cannot_be_written_is_an_escape(code: int) -> None:
    assert visible(f"a{chr(code)}b") == f"a\\u{code:04x}b"
    visible_output(f"a{chr(code)}b").encode()


@pytest.mark.parametrize("text", ["plain", "zwölf", "日本", "\N{SNOWMAN}", "a\tb\nc", "עברית"])
def test_words_of_all_languages_stay_as_they_are(text: str) -> None:
    assert visible(text) == visible_output(text) == text


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_what_is_being_waited_for_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    with progress(COPY) as tell:
        tell(COPY)
    say(COPY)
    assert "\\x1b]52" in shown.getvalue()
    assert "[bold]\\[/] [/x]" in shown.getvalue()
    assert "\x1b]" not in shown.getvalue()
    shown.getvalue().encode()


def test_the_status_of_a_worker_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    words = dict.fromkeys(("phase", "reason", "message", "hint", "devices", "queue", "url"), COPY)
    row = WorkerRow("dev", "kubernetes", COPY, ready=False, events=(COPY,), software={COPY: COPY}, nodes=1, **words)  # type: ignore[arg-type]
    inspecting._show_status(row)
    show_line(COPY)
    show_output(COPY)
    shown = capsys.readouterr().out
    assert shown.count("\\x1b]52") == 12
    assert "\x1b]" not in shown
    assert "\x07" not in shown


def test_names_of_devices_are_text_and_short() -> None:
    report = {"devices": [{"type": COPY, "index": 0, "name": COPY, "utilization_percent": COPY}], "idle_seconds": 1}
    shown = io.StringIO()
    Console(file=shown, width=400).print(inspecting._top_table(COPY, report))
    assert is_harmless(shown.getvalue())
    assert shown.getvalue().count("[bold]\\[/] [/x]") == 4
    assert len(devices_text([{"type": "cuda", "index": 0, "name": "x" * 1_000_000}])) < 200
    assert devices_text([{"type": "xpu", "index": 0}]).startswith("xpu")


def test_findings_are_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    found = [doctor.Finding("worker", "ok", COPY, COPY)]
    monkeypatch.setattr(doctor, "examine", lambda *arguments: iter(found))
    doctor.doctor()
    shown = capsys.readouterr().out
    assert is_harmless(shown)
    assert shown.replace("\n", " ").count("[bold]\\[/] [/x]") == 2


def test_steps_of_a_pool_are_text() -> None:
    step = Progress("provisioning", 0, COPY)
    assert is_harmless(step.message)
    view = ProgressView("pool", show=False)
    view.report(step)
    shown = io.StringIO()
    Console(file=shown, width=400).print(view._table())
    assert is_harmless(shown.getvalue())


def test_a_clusters_words_are_read_whatever_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    metadata = {"name": "dev", "generation": 1}
    event = {"type": "Warning", "message": COPY, "involvedObject": {"kind": "Pod", "name": COPY}}
    ready = {"type": "Ready", "status": "False", "reason": COPY, "message": COPY}
    status = {"phase": COPY, "observedGeneration": 1, "conditions": [ready]}
    found = explain({"metadata": metadata, "status": status}, [], [event])  # type: ignore[list-item]
    row = WorkerRow("dev", "kubernetes", "lab", found.phase, found.ready, message=found.text, events=found.events)
    inspecting._show_status(row)
    assert is_harmless(capsys.readouterr().out)


def test_the_log_in_a_notebook_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Logged:
        url = "ws://127.0.0.1:1"

        def log_tail(self) -> str:
            return COPY

    monkeypatch.setattr(magic, "_node", lambda device: Logged())
    assert "\x1b]" not in magic._logs(None)
    magic._logs(None).encode()


@pytest.mark.parametrize(
    "report",
    [7, [], {"devices": [7]}, {"devices": [{"name": "x"}]}, {"software": 7}, {"software": {"torch": []}}]
    + [
        {"software": "torch"},
        {"idle_seconds": "x"},
        {"devices": [{"type": "a", "index": 0, "total_memory_bytes": []}]},
    ],
    ids=str,
)
def test_a_host_that_reports_nonsense_is_a_row_with_a_problem(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_fleet.SshWorker, "ask", lambda *arguments: {"alive": True, "there": True, "report": report})
    worker = ssh_fleet.SshWorker("box", SshTarget("box"), "python3", "2026-01-01T00:00:00+00:00")
    row = ssh_fleet._row(worker)
    assert (row.phase, row.ready) == ("Failed", False)
    assert row.message


def test_a_line_without_an_end_is_shown_in_parts_and_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    shown = TaskOutput(3)
    for _ in range(40):
        shown.write("stdout", "x" * 10_000)
    kept = sum(map(len, shown._begun.values()))
    assert kept < 80_000
    shown.finish()
    lines = capsys.readouterr().out.splitlines()
    assert sum(len(line.removeprefix("[3] ")) for line in lines) == 400_000
    assert all(line.startswith("[3] ") for line in lines)


def test_a_log_without_line_ends_comes_in_parts_and_its_errors_hold_nothing_up() -> None:
    program = (
        "import sys\n"
        "for _ in range(40): sys.stderr.write('e' * 100000)\n"
        "for _ in range(30): sys.stdout.write('x' * 100000)\n"
        "sys.stdout.write('\\nlast')\n"
    )

    async def read() -> tuple[list[str], bytes]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        telling = asyncio.create_task(last_bytes(process.stderr))
        return [line async for line in printed_lines(process)], await telling

    lines, told = asyncio.run(asyncio.wait_for(read(), 60))
    assert lines[-1] == "last"
    assert sum(map(len, lines[:-1])) == 3_000_000
    assert max(map(len, lines)) <= LONGEST_LINE + (1 << 16)
    assert told == b"e" * (1 << 14)
