"""Tensors that functions hand to a session: they are looked at as what other sessions hand over is."""

from __future__ import annotations

import pytest
import torch

from skyproxy.settings import SETTINGS
from skyproxy_server import function_controls
from skyproxy_server.executor import Executor
from skyproxy_server.session_state import SessionState
from skyproxy_server.transfers import Transfers


class KeptResults:
    """Calls of which one has given these tensors."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = list(tensors)
        self.bound: list[torch.Tensor] = []
        self.refusal: dict[str, object] = {}

    def bind(self, session: str, call: str, arguments: list[torch.Tensor], *others: object) -> None:
        self.bound = arguments

    def refuse(self, session: str, call: str, words: dict[str, object]) -> None:
        self.refusal = words

    def take(self, call: str, number: int) -> list[torch.Tensor]:
        return self._tensors


def adopted(monkeypatch: pytest.MonkeyPatch, *tensors: torch.Tensor) -> SessionState:
    devices = [{"type": "cpu", "index": 0, "name": "CPU"}]
    state = Executor(devices, lambda message: None, Transfers(SETTINGS.chunk_bytes), SETTINGS).state
    monkeypatch.setattr(function_controls, "_calls", lambda session: KeptResults(*tensors))
    function_controls.adopt_results(state, "call", 1, list(range(1, len(tensors) + 1)))
    return state


def test_indices_that_a_function_gives_with_their_memory_are_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    indices = torch.zeros(1, 2, dtype=torch.int64)
    values = adopted(monkeypatch, indices, torch.sparse_coo_tensor(indices, torch.ones(2), (3,))).values
    values.get(2)
    values.get(1, writes=True).fill_(7)
    with pytest.raises(RuntimeError, match="found index 7"):
        values.get(2)


def test_a_result_whose_memory_the_function_has_taken_away_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    result = torch.ones(1000)
    result.untyped_storage().resize_(0)
    values = adopted(monkeypatch, result, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])).values
    with pytest.raises(RuntimeError, match="was resized to 0 bytes"):
        values.get(1)
    assert values.get(2).is_nested


def test_indices_that_a_function_has_as_an_argument_are_looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    indices = torch.zeros(1, 2, dtype=torch.int64)
    state = adopted(monkeypatch, indices, torch.sparse_coo_tensor(indices, torch.ones(2), (3,)))
    calls = KeptResults()
    monkeypatch.setattr(function_controls, "_calls", lambda session: calls)
    function_controls.bind_call(state, "call", [1])
    state.values.get(2)
    calls.bound[0].fill_(7)  # by the function, in its own time
    with pytest.raises(RuntimeError, match="found index 7"):
        state.values.get(2)


def test_a_call_with_an_argument_that_cannot_be_read_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    argument = torch.ones(1000)
    argument.untyped_storage().resize_(0)
    state, calls = adopted(monkeypatch, argument), KeptResults()
    monkeypatch.setattr(function_controls, "_calls", lambda session: calls)
    function_controls.bind_call(state, "call", [1])
    assert "was resized to 0 bytes" in str(calls.refusal["message"])
    assert calls.bound == []
