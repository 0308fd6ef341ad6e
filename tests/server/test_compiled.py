"""Programs of compiled graphs on the worker: allowed ops only, checked, and with a way out where nothing compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyproxy.errors import ProtocolError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import Batch, Failure, Message, Reply, Sequence
from skyproxy.settings import SETTINGS
from skyproxy.torch_codec import describe, encode_description
from skyproxy_server import compiled, graph_controls
from skyproxy_server.compiled import CompiledGraph, compiler_problem
from skyproxy_server.executor import Executor
from skyproxy_server.failures import Failed
from skyproxy_server.transfers import Transfers

GRAPH = commands.FIRST_SIGNATURE
DOUBLE_AND_ADD = {
    "nodes": [
        ["aten::mul.Tensor", [["node", 0], ["", 2.0]], {}],
        ["aten::add.Tensor", [["node", 2], ["node", 1]], {"alpha": ["", 3]}],
        ["aten::split.Tensor", [["node", 3], ["", 1]], {}],
        ["python::getitem", [["node", 4], ["", 1]], {}],
    ],
    "outputs": [3, 5],
    "options": {"worker": "eager"},
}


def definition(fields: Any = DOUBLE_AND_ADD, outputs: int = 2, templates: Any = ("t", "t")) -> list[Any]:
    return [commands.COMPILED, list(templates), fields, ["n"] * outputs]


class Worker:
    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.executor = Executor(
            [{"type": "cpu", "index": 0, "name": "CPU"}], self.sent.append, Transfers(SETTINGS.chunk_bytes), SETTINGS
        )
        self.executor.state.values.slots.update({1: torch.tensor([1.0, 2.0]), 2: torch.tensor([10.0, 20.0])})
        self._sequence = 0

    def run(self, *stream: Any) -> None:
        self._sequence += 1
        self.executor.run(Batch(Sequence(self._sequence), list(stream)))


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_a_program_runs_like_an_op(worker: Worker) -> None:
    worker.run(commands.DEFINE, GRAPH, definition(), GRAPH, 1, 2, 3, 4)
    assert worker.executor.state.values.slots[3].tolist() == [32, 64]
    assert worker.executor.state.values.slots[4].tolist() == [64]
    report = graph_controls.compile_report(worker.executor.state)
    assert report == {"graphs": 1, "eager": 1, "inductor": 0, "troubles": []}


def test_its_results_are_checked_like_an_ops(worker: Worker) -> None:
    wrong = [encode_description(describe(torch.zeros(n))) for n in (2, 2)]
    worker.run(commands.DEFINE, GRAPH, definition(), commands.EXPECT, wrong, GRAPH, 1, 2, 3, 4)
    assert isinstance(worker.executor.state.values.slots[3], Failed)
    assert worker.executor.state.values.slots[3].record["type"] == "InferenceMismatchError"


def test_an_op_that_is_not_allowed_fails_where_the_graph_is_called(worker: Worker) -> None:
    fields = {**DOUBLE_AND_ADD, "nodes": [["aten::from_file", [["", "x"]], {}]], "outputs": [2]}
    worker.run(commands.DEFINE, GRAPH, definition(fields, 1), GRAPH, 1, 2, 3)
    assert isinstance(worker.executor.state.values.slots[3], Failed)
    assert isinstance(worker.sent[0], Failure)
    assert "allowed" in worker.sent[0].error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"nodes": [["aten::add.Tensor", [["node", 7]], {}]], "outputs": [2]},
        {"nodes": [["aten::add.Tensor", [["node", 0], ["node", 1]], {"x=1)#": ["", 1]}]], "outputs": [2]},
        {"nodes": [["aten::neg", [["node", 0], ["node", 0]], {}]], "outputs": [2]},
        {"nodes": [["python::getitem", [["node", 0]], {"key": ["", 0]}]], "outputs": [2]},
        {"nodes": [["aten::neg", [["secret", 0]], {}]], "outputs": [2]},
        {"nodes": [["aten::neg"]], "outputs": [2]},
        {"nodes": [], "outputs": [9]},
        {"outputs": [0]},
        {"nodes": [], "outputs": [0], "options": {"worker": "shell"}},
    ],
    ids=str,
)
def test_malformed_programs_break_the_protocol(worker: Worker, fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        worker.run(commands.DEFINE, GRAPH, definition(fields, 1))


def test_python_functions_are_those_on_the_list(worker: Worker) -> None:
    fields = {**DOUBLE_AND_ADD, "nodes": [["python::exec", [["", "1"]], {}]], "outputs": [2]}
    worker.run(commands.DEFINE, GRAPH, definition(fields, 1), GRAPH, 1, 2, 3)
    assert isinstance(worker.executor.state.values.slots[3], Failed)


def test_without_a_compiler_auto_runs_op_by_op_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "compiler_problem", lambda kind: "no C++ compiler was found")
    program = CompiledGraph(2, 2, {**DOUBLE_AND_ADD, "options": {"worker": "auto"}}, on_cpu=True)
    total, _ = program(torch.ones(2), torch.ones(2))
    assert total.tolist() == [5, 5]
    assert (program.ran, program.trouble) == ("eager", "no C++ compiler was found")


def test_where_inductor_fails_auto_runs_op_by_op_and_inductor_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: Any, args: Any) -> Any:
        raise RuntimeError("C++ compile error")

    monkeypatch.setattr(compiled, "compiler_problem", lambda kind: "")
    monkeypatch.setattr(compiled, "_compile", broken)
    program = CompiledGraph(2, 2, {**DOUBLE_AND_ADD, "options": {"worker": "auto"}}, on_cpu=True)
    assert program(torch.ones(2), torch.ones(2))[0].tolist() == [5, 5]
    assert "C++ compile error" in program.trouble
    strict = CompiledGraph(2, 2, {**DOUBLE_AND_ADD, "options": {"worker": "inductor"}}, on_cpu=True)
    with pytest.raises(RuntimeError, match="compile error"):
        strict(torch.ones(2), torch.ones(2))


def test_sizes_that_change_are_compiled_apart_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def compile_for(module: Any, args: Any) -> Any:
        sizes.append(args[0].numel())
        return module.forward

    monkeypatch.setattr(compiled, "compiler_problem", lambda kind: "")
    monkeypatch.setattr(compiled, "_compile", compile_for)
    options = {"worker": "auto", "dynamic": True}
    program = CompiledGraph(2, 2, {**DOUBLE_AND_ADD, "options": options}, on_cpu=True)
    for n in (2, 3, 2, 3, *range(4, 20)):
        assert program(torch.ones(n), torch.ones(n))[0].tolist() == [5] * n
    assert sizes == [2, 3, 4, 5, 6, 7, 8, 9]
    assert "sets of sizes" in program.trouble


def test_a_missing_compiler_is_found_out() -> None:
    from torch._inductor import config, cpp_builder

    cpp_builder.get_cpp_compiler.cache_clear() if hasattr(cpp_builder.get_cpp_compiler, "cache_clear") else None
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert "compiler" in compiler_problem("cpu")


def test_a_forgotten_program_fails_clearly(worker: Worker) -> None:
    worker.run(commands.DEFINE, GRAPH, definition(), commands.DO, "forget_compiled", [GRAPH], GRAPH, 1, 2, 3, 4)
    assert isinstance(worker.executor.state.values.slots[3], Failed)
    worker.run(commands.FETCH, 5, 1, 0)
    assert isinstance(worker.sent[-1], Reply)
