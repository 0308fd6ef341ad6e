"""A worker that answers every question of a program with something else: errors are ours, and in words."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import skyproxy
from skyproxy.cli import jobs as cli_jobs
from skyproxy.cli.main import app
from skyproxy.errors import SkyproxyError
from skyproxy.jobs import job, link, output
from skyproxy.loading.node_names import KnownTensors
from skyproxy.node import Node
from skyproxy.protocol.answers import ANSWERS, checked
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.programs.compiler import compile_report
from skyproxy.tensor.programs.graphs import graph_report
from skyproxy.tensor.torch_api import sky_module

OSC = "\x1b]52;c;ZXZpbA==\x07"
LEAVES: tuple[Any, ...] = (
    None,
    True,
    0,
    1,
    -1,
    1 << 62,
    1 << 63,
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    "",
    OSC,
    b"",
    b"x",
)
KEYS = (
    "allocated",
    "bytes",
    "document",
    "held_seconds",
    "moved",
    "names",
    "part",
    "refused",
    "rows",
    "sequence",
    "version",
)


def anything(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(5 if depth < 4 else 3)
    if kind < 3:
        return chance.choice(LEAVES)
    if kind == 3:
        return [anything(chance, depth + 1) for _ in range(chance.randrange(5))]
    return {chance.choice(KEYS): anything(chance, depth + 1) for _ in range(chance.randrange(5))}


def words(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(words(key) + words(item) for key, item in value.items())
    if isinstance(value, list):
        return "".join(map(words, value))
    return value if isinstance(value, str) else ""


NOT_FOR_PEOPLE = {
    *("list_named", "named_value", "save_snapshot"),  # names, which are asked for again as they are
    *("open_snapshot", "list_snapshots", "named_sessions"),  # tables that are read entry by entry
}


@pytest.mark.parametrize("control", ANSWERS)
def test_no_answer_to_any_control_is_another_error_or_commands_the_terminal(
    control: str,
) -> None:
    chance = random.Random(control)
    for _ in range(2000):
        try:
            taken = checked(control, anything(chance))
        except SkyproxyError as error:
            taken = str(error)
            assert len(taken) < 500
        if control not in NOT_FOR_PEOPLE:
            assert "\x1b" not in words(taken)


def asks(device: str) -> dict[str, Callable[[], object]]:
    """Everything that waits for a worker's answer, and is not a transfer of tensors."""
    tensor = torch.ones(4, device=device)
    generator = torch.Generator(device)
    event = torch.Event(device)
    event.record()
    return {
        "item": lambda: tensor.sum().item(),
        "equal": lambda: torch.equal(tensor, torch.zeros(4, device=device)),
        "nonzero": lambda: torch.nonzero(tensor + torch.rand(4, device=device)),
        "unique": lambda: torch.unique(tensor + torch.rand(4, device=device), return_counts=True),
        "mask": lambda: tensor[torch.rand(4, device=device) > 0.5],
        "generator": generator.get_state,
        "default generator": lambda: torch.sky.get_rng_state(device),  # type: ignore[attr-defined]
        "seed": lambda: torch.sky.initial_seed(),  # type: ignore[attr-defined]
        "memory": lambda: torch.sky.memory_stats(device),  # type: ignore[attr-defined]
        "allocated": lambda: torch.sky.memory_allocated(device),  # type: ignore[attr-defined]
        "summary": lambda: torch.sky.memory_summary(device),  # type: ignore[attr-defined]
        "modes": lambda: sky_module.modes_in_force(device),
        "compiled": lambda: compile_report(device),
        "graphs": lambda: graph_report(device),
        "event": event.query,
    }


@pytest.mark.filterwarnings("ignore")
def test_whatever_a_worker_answers_to_a_program_it_gets_values_or_errors_of_ours(
    sky: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = DEVICES.of(sky).session
    chance = random.Random(7)
    rounds = asks(sky)
    session.synchronize()
    outcomes: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(session, "request", lambda purpose, command: anything(chance))
        for ask, call in rounds.items():
            for _ in range(60):
                try:
                    call()
                except SkyproxyError:
                    outcomes.append(f"{ask}: refused")
    assert {f"{ask}: refused" for ask in rounds} == set(outcomes)
    assert torch.ones(3, device=sky).sum().item() == 3


class Liar(Node):
    """A node whose worker answers with anything."""

    def __init__(self, chance: random.Random) -> None:
        self.session_name = "exp1"
        self._restored, self._devices, self._known = {}, [], KnownTensors()
        self._runner = SimpleNamespace(trusted=False)  # type: ignore[assignment]
        self._session = SimpleNamespace(  # type: ignore[assignment]
            call=lambda control, *arguments: checked(control, anything(chance))
        )


@pytest.mark.parametrize("ask", ["named", "get", "put", "forget", "hold"])
def test_whatever_a_worker_says_of_names_is_a_value_or_an_error_of_ours(ask: str) -> None:
    node = Liar(random.Random(ask))
    calls: dict[str, Callable[[], object]] = {
        "named": node.named,
        "get": lambda: node.get("x"),
        "put": lambda: node.put("x", [1, 2]),
        "forget": lambda: node.forget("x"),
        "hold": lambda: node._hold("x", take=False),
    }
    refusals: list[str] = []
    for _ in range(1000):
        try:
            calls[ask]()
        except SkyproxyError as error:
            refusals.append(str(error))
    assert len(refusals) > 300
    assert "\x1b" not in "".join(refusals)


class LyingLink:
    """A connection to a worker that answers anything about jobs, with the right words now and then."""

    chance = random.Random(0)

    def __init__(self, *arguments: object) -> None:
        pass

    def __enter__(self) -> LyingLink:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, action: str, **values: Any) -> tuple[dict[str, Any], bytes]:
        chance = self.chance
        row: dict[str, Any] = {"name": OSC, "kind": "function", "title": OSC, "state": "failed", "exit_code": 1}
        row |= {"signal": None, "restarts": 0, "preemptions": 0, "age_seconds": 1.0, "seconds": 1.0, "part": [0, 1]}
        row |= {"offset": 0, "more": False, "total_bytes": 3, "jobs": [dict(row)]}
        for key in chance.sample(sorted(row), chance.randrange(3)):
            row[key] = anything(chance)
        return row, chance.choice((b"", b"xyz", b"\x1b]52;c;ZXZpbA==\x07\n"))


@pytest.mark.parametrize("ask", ["status", "logs", "wait", "result", "list", "part", "command"])
def test_whatever_a_worker_says_of_jobs_is_a_value_or_an_error_of_ours(
    ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (job, output, cli_jobs):
        monkeypatch.setattr(module, "JobLink", LyingLink)
    monkeypatch.setattr(LyingLink, "chance", random.Random(ask))
    monkeypatch.setattr(cli_jobs, "connection", lambda *arguments: contextlib.nullcontext(lambda: None))
    there = job.Job("n", [lambda: None])  # type: ignore[list-item, return-value]
    calls: dict[str, Callable[[], object]] = {
        "status": there.status,
        "logs": lambda: list(itertools.islice(there.logs(), 5)),
        "wait": lambda: there.wait(0),
        "result": lambda: there.result(0),
        "list": lambda: [job.status_of(row) for row in link.job_rows(LyingLink())],  # type: ignore[arg-type]
        "part": lambda: link.part_of(LyingLink().ask("status")[0]),
        "command": lambda: command(["jobs", "list"]),
    }
    refusals: list[str] = []
    for _ in range(20 if ask == "command" else 300):
        try:
            calls[ask]()
        except (SkyproxyError, TimeoutError) as error:
            refusals.append(str(error))
    assert refusals
    assert "\x1b" not in "".join(refusals)


def command(words: list[str]) -> None:
    """Run a command line, and look at what it prints.

    Raises:
        SkyproxyError: it ended with an error in words.
    """
    result = CliRunner().invoke(app, words)
    assert "\x1b]" not in result.output
    assert "\x07" not in result.output
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    if result.exit_code:
        raise SkyproxyError(result.output)


def test_a_worker_that_says_nothing_new_is_what_the_other_tests_have(sky: str) -> None:
    """So that the questions above are questions of a program that works."""
    for ask, call in asks(sky).items():
        assert call() is not None, ask
    assert skyproxy.list_nodes()
