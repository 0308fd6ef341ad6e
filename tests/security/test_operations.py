"""Attacks by operations: what a client with the token and hostile commands can do to a worker without functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyproxy.errors import ConfigurationError, ProtocolError, UnsupportedOpError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import Batch, Chunk, Failure, Message, Reply, Sequence
from skyproxy.settings import SETTINGS
from skyproxy_server import allowed_ops, compiled, graph_checks, graph_controls
from skyproxy_server.executor import Executor
from skyproxy_server.failures import Failed
from skyproxy_server.transfers import Transfers
from tests.security import list_allowed_ops

FIRST = commands.FIRST_SIGNATURE
CPU = ["cpu", None]


class Worker:
    """An executor and what it sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        devices = [{"type": "cpu", "index": 0, "name": "CPU"}]
        self.executor = Executor(devices, self.sent.append, Transfers(SETTINGS.chunk_bytes), SETTINGS)
        self._sequence = 0

    def run(self, *stream: Any, buffers: tuple[bytes, ...] = ()) -> None:
        self._sequence += 1
        self.executor.run(Batch(Sequence(self._sequence), list(stream), buffers))

    def op(self, definition: list[Any], *operands: Any) -> None:
        """Defines one op as the first of the table, and runs it."""
        self.run(commands.DEFINE, FIRST, definition, FIRST, *operands)

    def error(self, slot: int) -> str:
        """The type and text of the failure that stands in a slot."""
        value = self.executor.state.values.slots[slot]
        assert isinstance(value, Failed)
        return f"{value.record['type']}: {value.record['message']}"


@pytest.fixture
def worker() -> Worker:
    return Worker()


# --- the list --------------------------------------------------------------------------------------------------------


def test_the_list_has_what_this_torch_has_and_nobody_took_out_and_unknown_operators_are_refused_in_words() -> None:
    assert sorted(allowed_ops.ALLOWED) == list_allowed_ops.allowed(allowed_ops.ALLOWED)
    with pytest.raises(UnsupportedOpError, match="unknown to the worker's torch"):
        allowed_ops.open_ops(["aten::an_op_of_torch_2_99"])
        allowed_ops.find_overload("aten::an_op_of_torch_2_99")


@pytest.mark.parametrize(
    "name",
    [
        "aten::from_file",
        "aten::_print",
        "aten::set_data",
        "aten::manual_seed",
        "aten::seed",
        "aten::mul.left_t",
        "aten::set_.source_Storage_storage_offset",
        "aten::_convert_indices_from_coo_to_csr",
        "aten::quantize_per_tensor",
        "prims::convert_element_type",
        "prims::device_put",
        "quantized::linear",
        "profiler::_record_function_enter_new",
        "inductor::resize_storage_bytes_",
        "inductor::_reinterpret_tensor",
        "c10d::allreduce_",
    ],
)
def test_operators_that_are_not_on_the_list_cannot_be_named(name: str) -> None:
    with pytest.raises(UnsupportedOpError, match="not on the worker's list"):
        allowed_ops.find_overload(name)


def test_an_owner_opens_operators_by_name_and_no_namespace_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowed_ops, "_opened", set())
    library = torch.library.Library("skyproxy_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
    with pytest.raises(UnsupportedOpError):
        allowed_ops.find_overload("skyproxy_test::twice")
    allowed_ops.open_ops(["skyproxy_test"])
    assert allowed_ops.find_overload("skyproxy_test::twice")(torch.ones(1)).item() == 2
    for name in ("aten", "prims", "inductor", ""):
        with pytest.raises(ConfigurationError):
            allowed_ops.open_ops([name])
    allowed_ops.open_ops(["aten::from_file"])
    assert not allowed_ops.is_allowed("aten::from_file")


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [["c", "", 100000], ["c", "", 6], ["c", "layout", "strided"], ["c", "", "x"]])
def test_integers_do_not_stand_for_dtypes(worker: Worker, template: list[Any]) -> None:
    worker.executor.state.values.slots[1] = torch.ones(4)
    with pytest.raises(ProtocolError, match="dtype"):
        worker.op(["aten::view.dtype", ["t", template], {}, ["n"]], 1, 2)


@pytest.mark.parametrize("keyword", ["dtype", "layout", "memory_format", "device"])
def test_integers_do_not_stand_for_enumerations_in_operands_either(worker: Worker, keyword: str) -> None:
    worker.op(["aten::empty.memory_format", ["v"], {keyword: "v"}, ["n"]], [2], 99, 2)
    assert "cannot be given as 99" in worker.error(2)
    worker.op(["aten::empty.memory_format", ["v"], {keyword: "v"}, ["n"]], [2], None, 3)
    assert worker.executor.state.values.slots[3].shape == (2,)


@pytest.mark.parametrize("device", [["meta", None], ["cuda", 0], ["cpu", 3], ["hpu", 0], ["xla", 1]])
def test_tensors_are_made_on_devices_of_the_worker_only(worker: Worker, device: list[Any]) -> None:
    worker.op(["aten::ones", ["v"], {"device": ["c", "device", device]}, ["n"]], [2], 2)
    assert "does not offer the device" in worker.error(2)
    with pytest.raises(ProtocolError, match="does not offer the device"):
        worker.run(commands.UPLOAD, 3, ["float32", [1], [1], 0], device, buffers=(b"\0" * 4,))


def test_clients_cannot_lock_memory_nor_make_quantized_tensors(worker: Worker) -> None:
    worker.op(["aten::ones", ["v"], {"pin_memory": ["c", "", True]}, ["n"]], [2], 2)
    assert "lock memory" in worker.error(2)
    worker.op(["aten::ones", ["v"], {"dtype": ["c", "dtype", "qint8"]}, ["n"]], [2], 2)
    assert "cannot live on a worker" in worker.error(2)


def test_an_alias_does_not_reach_beyond_its_storage(worker: Worker) -> None:
    worker.executor.state.values.slots[1] = torch.ones(4)
    for size, stride in (([1 << 20], [1]), ([2, 2], [1 << 40, 1]), ([-5], [1]), ([2], [-1])):
        worker.op(["aten::_reshape_alias", ["t", "v", "v"], {}, ["n"]], 1, size, stride, 2)
        assert worker.error(2).startswith("RuntimeError")
    worker.op(["aten::_reshape_alias", ["t", "v", "v"], {}, ["n"]], 1, [2, 2], [2, 1], 2)
    assert worker.executor.state.values.slots[2].data_ptr() == worker.executor.state.values.slots[1].data_ptr()


@pytest.mark.parametrize("indices", [[[0, 99]], [[-1, 0]], [[0, 1 << 40]]])
def test_sparse_tensors_have_indices_within_their_sizes(worker: Worker, indices: list[list[int]]) -> None:
    worker.executor.state.values.slots.update({1: torch.tensor(indices), 2: torch.ones(2)})
    definition = ["aten::_sparse_coo_tensor_unsafe", ["t", "t", "v"], {"dtype": ["c", "dtype", "float32"]}, ["n"]]
    worker.op(definition, 1, 2, [3], 3)
    assert worker.error(3).startswith("RuntimeError")


@pytest.mark.parametrize(
    ("size", "stride", "message"),
    [([-1], [1], "sizes"), ([2], [1, 1], "sizes"), ([1] * 100, [1] * 100, "64"), ([2.0], [1], "sizes")],
)
def test_an_upload_has_sizes_and_strides_that_a_tensor_can_have(
    worker: Worker, size: list[Any], stride: list[int], message: str
) -> None:
    for number, rest in ((commands.UPLOAD, [CPU]), (commands.RECEIVE, [CPU, 5])):
        with pytest.raises(ProtocolError, match=message):
            worker.run(number, 3, ["float32", size, stride, 0], *rest)


def test_an_announced_upload_takes_no_memory_before_its_bytes_are_counted(worker: Worker) -> None:
    with pytest.raises(ProtocolError, match="came with 0"):
        worker.run(commands.UPLOAD, 3, ["uint8", [1 << 45], [1], 0], CPU)


def test_bytes_on_the_bulk_connection_lie_without_overlaps(worker: Worker) -> None:
    with pytest.raises(ProtocolError, match="without gaps or overlaps"):
        worker.run(commands.RECEIVE, 3, ["float32", [1000], [0], 0], CPU, 5)


# --- storages --------------------------------------------------------------------------------------------------------


def test_a_tensor_whose_storage_was_made_too_small_cannot_be_read_or_written(worker: Worker) -> None:
    base = torch.arange(1000.0)
    worker.executor.state.values.slots.update({1: base, 2: base[500:], 3: torch.ones(1000), 4: base[:10]})
    worker.run(commands.DO, "resize_storage", [1, 40])
    worker.run(commands.DEFINE, FIRST, ["aten::neg", ["t"], {}, ["n"]])
    worker.run(commands.DEFINE, FIRST + 1, ["aten::add_.Tensor", ["t", "t"], {}, ["x"]])
    worker.run(FIRST, 1, 10, FIRST, 2, 11, FIRST + 1, 3, 1, FIRST, 4, 12, FIRST, 3, 13)
    assert "was resized to 40 bytes" in worker.error(10)
    assert "was resized to 40 bytes" in worker.error(11)
    assert worker.executor.state.values.slots[12].tolist() == [-float(i) for i in range(10)]
    worker.run(commands.FETCH, 5, 1, 0)
    assert isinstance(worker.sent[-1], Failure)
    worker.run(commands.CALL, 6, "item", [2])
    assert isinstance(worker.sent[-1], Failure)
    worker.run(commands.CALL, 7, "equal", [1, 3])
    assert isinstance(worker.sent[-1], Failure)


def test_a_storage_that_gets_its_size_back_is_usable_again_and_gains_zeros(worker: Worker) -> None:
    worker.executor.state.values.slots[1] = torch.ones(1000)
    worker.run(commands.DO, "resize_storage", [1, 0])
    worker.run(commands.DO, "resize_storage", [1, 4000])
    assert worker.executor.state.values.slots[1].tolist() == [0.0] * 1000
    worker.run(commands.FETCH, 5, 1, 0)
    assert isinstance(worker.sent[-1], Reply)
    worker.run(commands.DO, "resize_storage", [1, 8000])
    assert not worker.executor.state.values.gates


def test_views_of_a_storage_without_memory_can_be_made_and_not_read(worker: Worker) -> None:
    worker.executor.state.values.slots[1] = torch.ones(4, 4)
    worker.run(commands.DO, "resize_storage", [1, 0])
    worker.op(["aten::view", ["t", "v"], {}, ["n"]], 1, [16], 2)
    assert worker.executor.state.values.slots[2].shape == (16,)
    worker.op(["aten::sum", ["t"], {}, ["n"]], 2, 3)
    assert "was resized to 0 bytes" in worker.error(3)


def test_a_sparse_tensor_is_as_readable_as_its_parts(worker: Worker) -> None:
    sparse = torch.eye(50).to_sparse()
    worker.executor.state.values.slots.update({1: sparse, 2: sparse._values()})
    worker.run(commands.DO, "resize_storage", [2, 0])
    worker.op(["aten::_to_dense", ["t"], {}, ["n"]], 1, 3)
    assert "was resized to 0 bytes" in worker.error(3)


def test_a_list_is_as_readable_as_its_parts(worker: Worker) -> None:
    worker.executor.state.values.slots[1] = torch.ones(1 << 20)
    worker.op(["aten::split.Tensor", ["t", "v"], {}, ["n"]], 1, 1 << 19, 2)
    assert isinstance(worker.executor.state.values.slots[2], list | tuple)
    worker.run(commands.DO, "resize_storage", [1, 0])
    worker.op(["aten::neg", ["t"], {}, ["n"]], 2, 3)
    assert "was resized to 0 bytes" in worker.error(3)
    worker.executor.state.values.slots[4] = [1.0, [worker.executor.state.values.slots[1]]]
    worker.op(["aten::neg", ["t"], {}, ["n"]], 4, 5)
    assert "was resized to 0 bytes" in worker.error(5)


@pytest.mark.parametrize("size", [-1, 1 << 63, 1.5, None, True])
def test_a_storage_has_a_number_of_bytes(worker: Worker, size: Any) -> None:
    worker.executor.state.values.slots[1] = torch.ones(4)
    with pytest.raises(ProtocolError, match="bytes"):
        worker.run(commands.DO, "resize_storage", [1, size])


# --- memory of others ------------------------------------------------------------------------------------------------

MAKERS: dict[str, tuple[list[Any], tuple[Any, ...]]] = {
    "empty": (["aten::empty.memory_format", ["v"], {"dtype": ["c", "dtype", "int64"]}, ["n"]], ([5000],)),
    "empty_strided": (["aten::empty_strided", ["v", "v"], {"dtype": ["c", "dtype", "int64"]}, ["n"]], ([5000], [2])),
    "empty_like": (["aten::empty_like", ["t"], {}, ["n"]], (1,)),
    "new_empty": (["aten::new_empty", ["t", "v"], {}, ["n"]], (1, [5000])),
    "resize_as": (["aten::resize_as_", ["t", "t"], {}, ["n"]], (2, 1)),
    "set": (["aten::set_.source_Tensor_storage_offset", ["t", "t", "v", "v", "v"], {}, ["n"]], (3, 2, 0, [5000], [1])),
    "out": (["aten::empty.out", ["v"], {"out": "t"}, ["n"]], ([5000], 2)),
    "resize": (["aten::resize_", ["t", "v"], {}, ["n"]], (2, [5000])),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_memory_that_others_freed_comes_as_zeros(worker: Worker, maker: str) -> None:
    definition, operands = MAKERS[maker]
    for _ in range(20):
        small = torch.zeros(1, dtype=torch.int64)
        worker.executor.state.values.slots.update({1: torch.zeros(5000, dtype=torch.int64), 2: small, 3: small.clone()})
        secrets = [torch.full((size,), -77, dtype=torch.int64) for size in (5000, 10_000)]
        del secrets
        worker.op(definition, *operands, 9)
        made = worker.executor.state.values.slots[9]
        assert not made.as_strided((made.untyped_storage().nbytes() // 8,), (1,), 0).any()


def test_an_upload_whose_pieces_came_twice_is_none(worker: Worker) -> None:
    transfers = worker.executor.state.transfers
    for _ in range(2):
        transfers.on_chunk(Chunk(5, 0, 8, (b"\1\2\3\4",)))
    worker.run(commands.RECEIVE, 3, ["uint8", [8], [1], 0], CPU, 5, commands.FETCH, 7, 3, 0)
    failures = [message.error["message"] for message in worker.sent if isinstance(message, Failure)]
    assert "came twice" in failures[-1]


# --- malformed commands ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        [FIRST, [1], 2],
        [FIRST, {"a": 1}, 2],
        [FIRST, 1, []],
        [FIRST],
        ["x"],
        [-1],
        [None],
        [[]],
        [1.5],
        [2**63],
        [commands.RELEASE, 7],
        [commands.DO, [], []],
        [commands.REPLAY, []],
    ],
    ids=str,
)
def test_malformed_commands_break_the_protocol_and_are_no_internal_errors(worker: Worker, command: list[Any]) -> None:
    worker.run(commands.DEFINE, FIRST, ["aten::relu", ["t"], {}, ["n"]])
    with pytest.raises(ProtocolError):
        worker.run(*command)


# --- compiled graphs -------------------------------------------------------------------------------------------------


def graph(nodes: list[Any], outputs: list[int], templates: Any = ("t",), mode: str = "eager") -> list[Any]:
    fields = {"nodes": nodes, "outputs": outputs, "options": {"worker": mode}}
    return [commands.COMPILED, list(templates), fields, ["n"] * len(outputs)]


@pytest.mark.parametrize(
    "nodes",
    [
        [["python::pow", [["", 7], ["", 10**8]], {}]],
        [["python::pow", [["node", 0], ["", 10**4]], {}]],
        [["python::pow", [["", 3], ["node", 0]], {}]],
        [["python::mul", [["node", 0], ["node", 0]], {}]]
        + [["python::mul", [["node", i], ["node", i]], {}] for i in range(1, 12)],
    ],
    ids=["constants", "a power", "an exponent", "products"],
)
def test_integers_in_a_graph_stay_small(worker: Worker, nodes: list[Any]) -> None:
    worker.op(graph(nodes, [1], ["v"]), 5, 9)
    assert "integers" in worker.error(9)


@pytest.mark.parametrize(
    "nodes",
    [
        [["python::mul", [["list", [["", 1]]], ["", 10**9]], {}]],
        [["python::mul", [["", "x"], ["", 10**9]], {}]],
        [["python::mod", [["", "%1000000000d"], ["", 5]], {}]],
        [["python::add", [["", [1]], ["", [2]]], {}]],
        [["python::getitem", [["", "x"], ["", 0]], {}]],
        [["aten::unbind.int", [["node", 0]], {}], ["python::mul", [["node", 1], ["", 10**9]], {}]],
        [["aten::neg", [["node", -1]], {}]],
        [["aten::sum.dim_IntList", [["node", 0], ["", {"a": 1}]], {}]],
        [["aten::to.dtype", [["node", 0], ["", 100000]], {}]],
        [["aten::to.dtype", [["node", 0], ["node", 0]], {}]],
    ],
    ids=str,
)
def test_arithmetic_in_a_graph_is_of_numbers(worker: Worker, nodes: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        worker.op(graph(nodes, [1]), 1, 9)


def test_an_operand_of_a_graph_is_a_number(worker: Worker) -> None:
    worker.op(graph([["python::mul", [["node", 0], ["", 3]], {}]], [1], ["v"]), [1, 2], 9)
    assert "takes tensors and numbers" in worker.error(9)


def test_no_text_of_a_client_leaves_its_literal_in_generated_code(worker: Worker) -> None:
    code = '"); system("touch /tmp/owned"); //'
    program = compiled.CompiledGraph(
        1, 1, {"nodes": [["aten::_assert_async.msg", [["node", 0], ["", code]], {}]], "outputs": [0]}, on_cpu=True
    )
    (check,) = [node for node in program._module.graph.nodes if node.op == "call_function"]
    assert check.args[1] == "?); system(?touch /tmp/owned?); //"
    worker.executor.state.values.slots[1] = torch.ones(2)
    worker.op(graph([["aten::div.Tensor_mode", [["node", 0], ["node", 0]], {"rounding_mode": ["", code]}]], [1]), 1, 9)
    assert "cannot be part of a compiled graph" in worker.error(9)


@pytest.mark.parametrize("op", ["aten::as_strided", "aten::_reshape_alias"])
def test_a_graph_with_views_that_a_compiler_does_not_check_runs_op_by_op(worker: Worker, op: str) -> None:
    worker.executor.state.values.slots[1] = torch.ones(4)
    nodes = [[op, [["node", 0], ["", [1000]], ["", [1]]], {}], ["aten::neg", [["node", 1]], {}]]
    worker.op(graph(nodes, [2], mode="inductor"), 1, 9)
    assert worker.error(9).startswith("RuntimeError")
    assert "only checked where it runs" in graph_controls.compile_report(worker.executor.state)["troubles"][0]


POOLING = ["aten::max_pool2d_with_indices_backward"]
POOLING += [[["node", 0], ["node", 1], *(["", [n, n]] for n in (2, 2, 0, 1)), ["", False], ["node", 2]], {}]


def test_what_is_checked_op_by_op_is_checked_in_a_graph(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    indices = torch.full((1, 1, 2, 2), 1 << 40)
    worker.executor.state.values.slots.update({1: torch.ones(1, 1, 2, 2), 2: torch.ones(1, 1, 4, 4), 3: indices})
    worker.op(graph([POOLING], [3], "ttt", mode="inductor"), 1, 2, 3, 9)
    assert worker.executor.state.values.slots[9].sum().item() == 4  # each index was clamped
    assert "only checked where it runs" in graph_controls.compile_report(worker.executor.state)["troubles"][0]
    monkeypatch.setattr(graph_checks._Process, "all_run_code", True)
    program = compiled.CompiledGraph(3, 1, {"nodes": [POOLING], "outputs": [3]}, on_cpu=True)
    assert not program.trouble  # who may run code may have it compiled; op by op, it is checked nevertheless
    assert program._eager(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 4, 4), indices)[0].sum().item() == 4


def test_a_graph_has_a_bounded_number_of_operations(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST_NODES", 3)
    worker.executor.state.values.slots[1] = torch.ones(2)
    nodes = [["aten::neg", [["node", number]], {}] for number in range(4)]
    worker.op(graph(nodes, [4]), 1, 9)
    assert "a compiled graph of 4 operations" in worker.error(9)


# --- derivatives -----------------------------------------------------------------------------------------------------


def test_only_ops_on_nested_tensors_are_differentiated(worker: Worker) -> None:
    worker.executor.state.values.slots[1] = torch.ones(1, 1, 4, 4)
    constant = ["c", "", False]
    worker.run(commands.DEFINE, FIRST, ["aten::max_pool2d_with_indices", [*"tvvvv", constant], {}, ["n", "n"]])
    with pytest.raises(ProtocolError, match="nested tensors"):
        worker.run(commands.CALL, 1, "differentiated", [5, [1], [FIRST, 1, [2, 2], [2, 2], [0, 0], [1, 1], 6, 7]])


def test_what_backward_reads_is_out_of_the_clients_reach(worker: Worker) -> None:
    slots = worker.executor.state.values.slots
    parts = [torch.rand(2, 3), torch.rand(4, 3)]
    slots.update({1: torch.nested.nested_tensor(parts), 2: torch.nested.nested_tensor(parts)})
    worker.run(commands.DEFINE, FIRST, ["aten::mul.Tensor", ["t", "t"], {}, ["n"]])
    worker.run(commands.CALL, 1, "differentiated", [5, [1, 2], [FIRST, 1, 2, 6]])
    slots[7] = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    with torch.no_grad():
        slots[1].values().fill_(99)
        slots[2].values().fill_(99)
    worker.run(commands.CALL, 2, "differentiate", [5, [7], [0, 1], [8, 9]])
    for slot in (8, 9):
        assert all(map(torch.equal, slots[slot].unbind(), parts))


# --- results ---------------------------------------------------------------------------------------------------------


def test_a_result_is_not_written_to_the_tensor_that_it_is_computed_from(worker: Worker) -> None:
    definition = ["aten::median.dim_values", ["t", "v", ["c", "", False]], {"values": "t", "indices": "t"}, ["x", "x"]]
    # Its sizes would change while they are relied on: here it was read from nowhere, which ended the process.
    nothing = torch.ones(2, 0, dtype=torch.int64)
    worker.executor.state.values.slots.update({1: nothing, 2: torch.zeros(0, dtype=torch.int64)})
    worker.op(definition, 1, 0, 1, 2)
    assert worker.executor.state.values.slots[1].shape == (0,)


def test_two_results_are_not_written_to_one_tensor(worker: Worker) -> None:
    worker.executor.state.values.slots.update({1: torch.rand(5, 3), 2: torch.zeros(0)})
    worker.op(["aten::linalg_qr.out", ["t"], {"Q": "t", "R": "t"}, ["n", "n"]], 1, 2, 2, 8, 9)
    assert "one tensor for two results" in worker.error(8)


def test_a_graph_indexes_with_the_checked_op() -> None:
    nodes = [["aten::_unsafe_index.Tensor", [["node", 0], ["list", [["node", 1]]]], {}]]
    program = compiled.CompiledGraph(2, 1, {"nodes": nodes, "outputs": [2]}, on_cpu=True)
    (index,) = [node for node in program._module.graph.nodes if node.op == "call_function"]
    assert index.target is torch.ops.aten.index.Tensor


# --- random numbers --------------------------------------------------------------------------------------------------


def test_no_operator_moves_another_sessions_random_numbers(worker: Worker) -> None:
    for name in ("aten::manual_seed", "aten::seed", "aten::manual_seed.generator"):
        before = torch.default_generator.get_state()
        worker.op([name, ["v"], {}, ["n"]], 5, 9)
        assert "not on the worker's list" in worker.error(9)
        assert torch.equal(before, torch.default_generator.get_state())
