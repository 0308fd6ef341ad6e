"""Graphs that a compiler works on for clients who may run no code: what is compiled does not look at its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyproxy_server import compiled, graph_checks
from tests.security.fuzzing import fuzz

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(compiled.compiler_problem("cpu")), reason="inductor cannot compile here"),
]

NEGATION = {"nodes": [["aten::neg", [["node", 0]], {}]], "outputs": [1], "options": {"worker": "inductor"}}


@pytest.mark.slow
def test_what_is_compiled_for_one_look_gets_no_other() -> None:
    program = compiled.CompiledGraph(1, 1, NEGATION, on_cpu=True)
    meant = torch.arange(64, dtype=torch.float64)
    assert torch.equal(program(meant), -meant)  # type: ignore[arg-type]
    assert program.ran == "inductor"
    for other in (
        torch.arange(64, dtype=torch.int8),
        torch.arange(64, dtype=torch.float32),
        torch.arange(3, dtype=torch.float64),
        torch.arange(64, dtype=torch.float64)[::2],
        torch.ones((), dtype=torch.float64).expand(64),
    ):
        found: Any = program(other)
        assert found.dtype == other.dtype
        assert torch.equal(found, -other)
    assert torch.equal(program(meant), -meant)  # type: ignore[arg-type]


@pytest.mark.parametrize("trusted", [False, True])
def test_each_look_has_a_form_of_its_own_where_clients_run_no_code(
    monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    made: list[tuple[Any, ...]] = []

    def compile_nothing(module: torch.fx.GraphModule, args: tuple[Any, ...]) -> Any:
        made.append(args)
        return lambda *given: (("compiled",),)

    monkeypatch.setattr(compiled, "_compile", compile_nothing)
    monkeypatch.setattr(graph_checks._Process, "all_run_code", trusted)
    program = compiled.CompiledGraph(1, 1, NEGATION, on_cpu=True)
    wide, narrow = torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.int8)
    assert program(wide) == ("compiled",)
    assert (program(narrow) == ("compiled",)) is trusted  # who may run code there spares the look
    assert program(wide) == ("compiled",)
    assert len(made) == 1


@pytest.mark.slow
def test_hostile_calls_of_compiled_graphs_end_no_worker_and_read_nothing_foreign() -> None:
    report = fuzz(("graph:compiled", seed) for seed in range(4))
    assert report.findings == []
    assert report.outcomes.get("compiled", 0) >= 2
