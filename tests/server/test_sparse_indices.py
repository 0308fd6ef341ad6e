"""Indices of sparse tensors that a client changes in place: kernels would follow them anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from skyproxy.protocol import commands
from skyproxy.protocol.messages import Batch, Message, Sequence
from skyproxy.settings import SETTINGS
from skyproxy_server import sparse_indices
from skyproxy_server.allowed_ops import ALLOWED
from skyproxy_server.executor import Executor
from skyproxy_server.failures import Failed
from skyproxy_server.gates import Gates
from skyproxy_server.sparse_indices import WatchedIndices, may_share_indices
from skyproxy_server.transfers import Transfers

FIRST = commands.FIRST_SIGNATURE
OPS: list[list[Any]] = [
    ["aten::sparse_coo_tensor.indices_size", ["t", "t", "v"], {}, ["n"]],
    ["aten::sparse_csr_tensor.crow_col_value_size", ["t", "t", "t", "v"], {}, ["n"]],
    ["aten::_indices", ["t"], {}, ["n"]],
    ["aten::crow_indices", ["t"], {}, ["n"]],
    ["aten::col_indices", ["t"], {}, ["n"]],
    ["aten::fill_.Scalar", ["t", "v"], {}, [commands.IGNORED]],
    ["aten::_to_dense", ["t"], {}, ["n"]],
    ["aten::copy_", ["t", "t"], {}, [commands.IGNORED]],
]
COO, CSR, INDICES, CROW, COL, FILL, DENSE, COPY = range(FIRST, FIRST + len(OPS))


class Session:
    """An executor with these operators, and what it holds."""

    def __init__(self) -> None:
        sent: list[Message] = []
        devices = [{"type": "cpu", "index": 0, "name": "CPU"}]
        self.executor = Executor(devices, sent.append, Transfers(SETTINGS.chunk_bytes), SETTINGS)
        self.slots = self.executor.state.values.slots
        self._sequence = 0

    def run(self, *stream: Any) -> None:
        self._sequence += 1
        self.executor.run(Batch(Sequence(self._sequence), list(stream), ()))

    def define(self) -> None:
        for number, definition in enumerate(OPS, FIRST):
            self.run(commands.DEFINE, number, definition)

    def error(self, slot: int) -> str:
        value = self.slots[slot]
        assert isinstance(value, Failed), value
        return str(value.record["message"])


@pytest.fixture
def session() -> Session:
    made = Session()
    made.define()
    made.slots.update({1: torch.tensor([[0, 2]]), 2: torch.tensor([1.0, 2.0])})
    return made


@pytest.mark.parametrize("value", [3, -1, 1 << 40])
@pytest.mark.parametrize("by", ["what they were made of", "themselves"])
def test_indices_that_were_changed_to_ones_outside_are_refused(by: str, value: int, session: Session) -> None:
    session.run(COO, 1, 2, [3], 3)
    session.run(DENSE, 3, 4)
    assert session.slots[4].tolist() == [1, 0, 2]  # type: ignore[attr-defined]
    session.run(INDICES, 3, 5)
    session.run(FILL, 1 if by == "what they were made of" else 5, value)
    for result in (6, 7):
        session.run(DENSE, 3, result)
        assert "index" in session.error(result) or "indices" in session.error(result)
    session.run(FILL, 5, 1)  # they can be mended
    session.run(DENSE, 3, 8)
    assert session.slots[8].tolist() == [0, 3, 0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("accessor", [CROW, COL])
def test_so_are_those_of_compressed_tensors(accessor: int, session: Session) -> None:
    session.slots.update({10: torch.tensor([0, 1, 2]), 11: torch.tensor([0, 2])})
    session.run(CSR, 10, 11, 2, [2, 3], 3)
    session.run(DENSE, 3, 4)
    assert session.slots[4].tolist() == [[1, 0, 0], [0, 0, 2]]  # type: ignore[attr-defined]
    session.run(accessor, 3, 5, FILL, 5, 1 << 30, DENSE, 3, 6)
    assert session.error(6)


def test_dense_operations_beside_sparse_tensors_take_no_long_look(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []
    look = Gates.wait_until_usable

    def count(self: Gates, reads: Iterable[object], writes: Iterable[object], **how: bool) -> None:
        looks.append(reads)
        look(self, reads, writes, **how)

    session.run(COO, 1, 2, [3], 3, DENSE, 3, 4)
    monkeypatch.setattr(Gates, "wait_until_usable", count)
    session.run(FILL, 4, 2.0, COPY, 4, 4)
    assert not looks
    session.run(FILL, 1, 7, DENSE, 3, 5)
    assert len(looks) == 1
    assert session.error(5)


def test_changes_within_the_sizes_are_seen(session: Session) -> None:
    session.run(COO, 1, 2, [3], 3, DENSE, 3, 4, FILL, 1, 1, DENSE, 3, 5)
    assert session.slots[5].tolist() == [0, 3, 0]  # type: ignore[attr-defined]


def test_no_operation_changes_indices_that_it_reads(session: Session) -> None:
    session.slots.update({10: torch.tensor([[0, 0], [0, 1]]), 11: torch.tensor([1 << 40, 1 << 41])})
    session.run(COO, 10, 11, [2, 2], 3, COPY, 10, 3)
    session.run(DENSE, 3, 4)
    assert "cannot write to the indices" in session.error(4)
    assert session.slots[10].tolist() == [[0, 0], [0, 1]]  # type: ignore[attr-defined]


def test_no_compiled_graph_has_indices_and_changes_memory(session: Session) -> None:
    nodes = [
        ["aten::_indices", [["node", 0]], {}],
        ["aten::add_.Scalar", [["node", 1], ["", 1 << 40]], {}],
        ["aten::_to_dense", [["node", 0]], {}],
    ]
    fields = {"nodes": nodes, "outputs": [3], "options": {"worker": "eager"}}
    number = FIRST + len(OPS)
    session.run(COO, 1, 2, [3], 3, commands.DEFINE, number, [commands.COMPILED, ["t"], fields, ["n"]], number, 3, 4)
    assert "compiled graph" in session.error(4)


def test_no_compiled_graph_writes_to_indices_of_what_it_is_given(session: Session) -> None:
    nodes = [
        ["aten::add_.Scalar", [["node", 1], ["", 1 << 40]], {}],
        ["aten::mul.Tensor", [["node", 0], ["node", 0]], {}],
    ]
    fields = {"nodes": nodes, "outputs": [3], "options": {"worker": "eager"}}
    number = FIRST + len(OPS)
    definition = [commands.COMPILED, ["t", "t"], fields, ["n"]]
    session.run(COO, 1, 2, [3], 3, commands.DEFINE, number, definition, number, 3, 1, 4)
    assert "cannot write to the indices" in session.error(4)


def test_what_writes_without_saying_so_in_its_schema_has_indices_looked_at_again(session: Session) -> None:
    indices = torch.zeros(2, 4, dtype=torch.int64)
    numbers = torch.arange(4.0, dtype=torch.float64)[:, None].expand(4, 8)
    session.slots.update({10: indices, 11: torch.ones(4), 12: indices.view(torch.float64).view(8), 13: numbers})
    session.slots[14] = torch.ones(8, dtype=torch.float64)
    session.run(COO, 10, 11, [3, 3], 3, DENSE, 3, 4)
    number = FIRST + len(OPS)
    norm = ["aten::native_batch_norm", [*"tttttvvv"], {}, ["n", "n", "n"]]
    session.run(commands.DEFINE, number, norm, number, 13, 14, 14, 12, 14, True, 1.0, 1e-5, 20, 21, 22, DENSE, 3, 4)
    assert "size is inconsistent with indices" in session.error(4)


def test_no_compiled_graph_does_so(session: Session) -> None:
    wide, constants = [["node", 1], ["node", 2], ["node", 2], ["node", 1], ["node", 2]], [["", True], ["", 1.0]]
    norm = ["aten::native_batch_norm", [*wide, *constants, ["", 1e-5]], {}]
    fields = {"nodes": [norm, ["aten::_to_dense", [["node", 0]], {}]], "outputs": [4], "options": {"worker": "eager"}}
    number = FIRST + len(OPS)
    session.slots[1] = torch.zeros(1, 2, dtype=torch.int64)
    session.slots.update({10: session.slots[1].view(torch.float64), 11: torch.ones(2, dtype=torch.float64)})  # type: ignore[attr-defined]
    session.run(COO, 1, 2, [3], 3, commands.DEFINE, number, [commands.COMPILED, [*"ttt"], fields, ["n"]])
    session.run(number, 3, 10, 11, 4)
    assert "cannot write to the indices" in session.error(4)


def test_values_in_the_memory_of_the_indices_cannot_be_written_to(session: Session) -> None:
    memory = torch.zeros(1, 2, dtype=torch.int64)
    session.slots.update({10: memory, 11: memory[0]})
    number = FIRST + len(OPS)
    scale = ["aten::mul_.Scalar", ["t", "v"], {}, [commands.IGNORED]]
    session.run(COO, 10, 11, [3], 3, commands.DEFINE, number, scale, number, 3, 2, DENSE, 3, 4)
    assert "cannot write to the indices" in session.error(4)
    nodes = [
        ["aten::neg_", [["node", 0]], {}],
        ["aten::_to_dense", [["node", 0]], {}],
    ]
    fields = {"nodes": nodes, "outputs": [2], "options": {"worker": "eager"}}
    session.slots[5] = torch.sparse_coo_tensor(memory, memory[0], (3,))
    definition = [commands.COMPILED, ["t"], fields, ["n"]]
    session.run(commands.DEFINE, number + 1, definition, number + 1, 5, 6)
    assert "cannot write to the indices" in session.error(6)
    assert memory.tolist() == [[0, 0]]


@pytest.mark.parametrize("op", ["aten::_to_dense", "aten::transpose.int", "aten::_coalesced"])
@pytest.mark.parametrize("part", ["indices", "values"])
def test_parts_whose_memory_was_taken_away_are_not_looked_at(part: str, op: str, session: Session) -> None:
    session.slots.update({10: torch.zeros(2, 1 << 16, dtype=torch.int64), 11: torch.ones(1 << 16)})
    number = FIRST + len(OPS)
    operands: list[Any] = {"aten::_to_dense": [], "aten::transpose.int": [0, 1], "aten::_coalesced": [True]}[op]
    session.run(COO, 10, 11, [3, 3], 3, commands.DO, "resize_storage", [10 if part == "indices" else 11, 0])
    session.run(commands.DEFINE, number, [op, ["t", *"v" * len(operands)], {}, ["n"]], number, 3, *operands, 4)
    assert "this tensor's storage was resized to 0 bytes" in session.error(4)


@pytest.mark.parametrize("part", ["_indices", "_values"])
@pytest.mark.parametrize("size", [1 << 20, 1])
def test_parts_of_another_size_are_refused(size: int, part: str, session: Session) -> None:
    number = FIRST + len(OPS)
    accessor, resize = [f"aten::{part}", ["t"], {}, ["n"]], ["aten::resize_", ["t", "v"], {}, [commands.IGNORED]]
    session.run(commands.DEFINE, number, accessor, commands.DEFINE, number + 1, resize, COO, 1, 2, [3], 3, DENSE, 3, 4)
    with torch._C._AutoDispatchBelowADInplaceOrView():  # as a session's thread runs: the parts are the tensor's own
        session.run(number, 3, 5, number + 1, 5, [1, size] if part == "_indices" else [size], DENSE, 3, 4)
    assert "one of them was resized" in session.error(4)


def test_no_compiled_graph_resizes_values_that_it_is_given_beside_their_tensor(session: Session) -> None:
    nodes = [["aten::resize_", [["node", 1], ["", [1 << 20]]], {}], ["aten::_to_dense", [["node", 0]], {}]]
    fields = {"nodes": nodes, "outputs": [3], "options": {"worker": "eager"}}
    definition, number = [commands.COMPILED, ["t", "t"], fields, ["n"]], FIRST + len(OPS)
    session.run(COO, 1, 2, [3], 3, commands.DEFINE, number, definition, number, 3, 2, 4)
    assert "cannot write to the indices or values" in session.error(4)


@pytest.mark.filterwarnings("ignore:Sparse CS")
def test_compressed_tensors_with_an_index_twice_are_multiplied_by_dense_ones_only(session: Session) -> None:
    mm = ["aten::mm", ["t", "t"], {}, ["n"]]
    fields = {"nodes": [["aten::mm", [["node", 0], ["node", 0]], {}]], "outputs": [1], "options": {"worker": "eager"}}
    number = FIRST + len(OPS)
    session.run(commands.DEFINE, number, mm, commands.DEFINE, number + 1, [commands.COMPILED, ["t"], fields, ["n"]])
    inner = {"twice": [1, 2, 2, 2, 1], "in another order": [1, 2, 2, 1, 0]}
    for slot, columns in enumerate(inner.values(), 20):
        session.slots.update({10: torch.tensor([0, 1, 2, 5]), 11: torch.tensor(columns), 12: torch.ones(5)})
        session.slots[13] = torch.ones(3, 3)
        session.run(CSR, 10, 11, 12, [3, 3], slot)
    session.run(number, 20, 13, 4, number, 20, 20, 5, number + 1, 20, 6, number, 21, 21, 7, number + 1, 21, 8)
    assert session.slots[4].tolist() == [[1] * 3, [1] * 3, [3] * 3]  # type: ignore[attr-defined]
    assert "stands twice" in session.error(5)
    assert "stands twice" in session.error(6)
    for slot in (7, 8):
        assert torch.equal(session.slots[slot].to_dense(), session.slots[21].to_dense() @ session.slots[21].to_dense())  # type: ignore[attr-defined]


def test_sessions_without_sparse_tensors_are_as_quick_as_before() -> None:
    session = Session()
    session.run(commands.DEFINE, FIRST, OPS[-1])
    assert not session.executor.state.values.gates
    session.run(commands.DEFINE, FIRST + 1, OPS[2])
    assert session.executor.state.values.gates


def test_operators_of_sparse_tensors_may_share_their_indices_and_others_do_not() -> None:
    found = {
        packet
        for packet in {name.partition("::")[2].partition(".")[0] for name in ALLOWED}
        if may_share_indices(packet)
    }
    assert {"_indices", "row_indices", "sparse_coo_tensor", "_embedding_bag_sparse_backward", "sparse_mask"} <= found
    assert found.isdisjoint({"add", "max_pool2d_with_indices", "index_select", "embedding_dense_backward", "values"})


LAYOUTS: list[tuple[torch.layout, dict[str, Any]]] = [
    (torch.sparse_coo, {}),
    (torch.sparse_csr, {}),
    (torch.sparse_csc, {}),
    (torch.sparse_bsr, {"blocksize": (2, 2)}),
    (torch.sparse_bsc, {"blocksize": (2, 2)}),
]


@pytest.mark.parametrize(("layout", "blocks"), LAYOUTS)
def test_sparse_tensors_of_another_session_have_indices_of_their_own_and_its_values(
    layout: torch.layout, blocks: dict[str, Any]
) -> None:
    given = torch.eye(4).to_sparse(layout=layout, **blocks)
    taken = sparse_indices.with_own_indices(given)
    assert taken.layout is layout
    assert torch.equal(taken.to_dense(), torch.eye(4))
    (indices, values), (own, same) = sparse_indices.parts_of(given), sparse_indices.parts_of(taken)  # type: ignore[misc]
    assert same.data_ptr() == values.data_ptr()
    assert {part.data_ptr() for part in own}.isdisjoint(part.data_ptr() for part in indices)


def test_whether_one_is_coalesced_goes_along() -> None:
    for given in (torch.eye(2).to_sparse(), torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,))):
        assert sparse_indices.with_own_indices(given).is_coalesced() == given.is_coalesced()


def test_what_is_known_of_storages_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_indices, "_MOST_STORAGES", 2)
    watched, kept = WatchedIndices(), [torch.eye(2).to_sparse() for _ in range(5)]
    for sparse in kept:
        watched.check(sparse)
        assert len(watched._writes) <= 2
