"""Signatures: from a definition on the wire to a function; and everything that is no definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError, UnsupportedOpError
from skyproxy.protocol import commands
from skyproxy.torch_codec import FORBIDDEN_OPS
from skyproxy_server.signatures import Signature

FIRST = 32


def run(definition: list[Any], values: dict[int, Any], *operands: Any) -> dict[int, Any]:
    signature = Signature(definition, on_cpu=True)
    stream = ["before", FIRST, *operands, "after"]
    values[0] = None
    assert signature.width == len(operands)
    assert signature.handler(values, stream, 1) == 2 + len(operands)
    return values


def test_tensors_come_from_slots_and_results_go_there() -> None:
    values = {1: torch.tensor([1.0]), 2: torch.tensor([2.0])}
    assert run(["aten::add.Tensor", ["t", "t"], {"alpha": "v"}, ["n"]], values, 1, 2, 10, 3)[3].item() == 21


def test_lists_of_tensors_and_numbers() -> None:
    values = {1: torch.ones(1), 2: torch.zeros(1)}
    assert run(["aten::cat", ["T", "v"], {}, ["n"]], values, [1, 2, 1], 0, 3)[3].tolist() == [1, 0, 1]
    assert run(["aten::permute", ["t", "v"], {}, ["n"]], {1: torch.ones(2, 3)}, 1, [1, 0], 4)[4].shape == (3, 2)


def test_none_is_the_value_of_slot_0() -> None:
    values = {1: torch.tensor([1.0, 5.0]), 2: torch.tensor([2.0])}
    assert run(["aten::clamp.Tensor", ["t", "t", "t"], {}, ["n"]], values, 1, 0, 2, 3)[3].tolist() == [1, 2]


def test_constants_and_host_scalars() -> None:
    definition = ["aten::to.dtype", ["t", ["c", "dtype", "int64"]], {}, ["n"]]
    assert run(definition, {1: torch.tensor([1.9])}, 1, 2)[2].tolist() == [1]
    definition = ["aten::mul.Tensor", ["t", ["k", "float32"]], {}, ["n"]]
    assert run(definition, {1: torch.tensor([2], dtype=torch.float16)}, 1, 1.5, 2)[2].dtype is torch.float16


def test_several_results_lists_and_those_that_are_not_kept() -> None:
    values = run(["aten::max.dim", ["t", "v"], {}, ["n", "n"]], {1: torch.tensor([3.0, 7.0])}, 1, 0, 2, 3)
    assert (values[2].item(), values[3].item()) == (7, 1)
    values = run(["aten::split.Tensor", ["t", "v"], {}, ["N"]], {1: torch.arange(4)}, 1, 2, [5, 6])
    assert values[6].tolist() == [2, 3]
    values = run(["aten::add_.Tensor", ["t", "t"], {}, ["x"]], {1: torch.ones(1)}, 1, 1)
    assert values[1].item() == 2


def test_a_keyword_of_python_can_be_a_keyword_of_an_op() -> None:
    definition = ["aten::random_.from", ["t"], {"from": "v", "to": "v"}, ["x"]]
    assert run(definition, {1: torch.zeros(3)}, 1, 4, 5)[1].tolist() == [4, 4, 4]


def test_inputs_outputs_and_writes_are_known() -> None:
    signature = Signature(["aten::add.out", ["t", "t"], {"alpha": "v", "out": "t"}, ["x"]], on_cpu=True)
    stream = [FIRST, 1, 0, 2.0, 3]
    assert signature.input_slots(stream, 0) == [1, 3]
    assert signature.written_slots(stream, 0) == [3]
    assert signature.output_slots(stream, 0) == []
    several = Signature(["aten::_foreach_add_.List", ["T", "T"], {}, []], on_cpu=True)
    assert several.written_slots([FIRST, [1, 2], [3, 4]], 0) == [1, 2]


def test_ops_that_draw_are_known() -> None:
    assert Signature(["aten::rand", ["v"], {}, ["n"]], on_cpu=True).draws
    assert Signature(["aten::native_dropout", ["t", "v", "v"], {}, ["n", "n"]], on_cpu=True).draws
    assert not Signature(["aten::relu", ["t"], {}, ["n"]], on_cpu=True).draws


@pytest.mark.parametrize(
    "definition",
    [
        None,
        [],
        "aten::relu",
        ["aten::relu", ["t"], {}],
        ["aten::relu", ["t"] * 5, {}, ["n"]],
        ["aten::relu", ["?"], {}, ["n"]],
        ["aten::relu", [["c", "dtype"]], {}, ["n"]],
        ["aten::relu", [["c", "dtype", "float33"]], {}, ["n"]],
        ["aten::relu", [["c", "no_such_tag", 1]], {}, ["n"]],
        ["aten::relu", [["c", "device", "cpu"]], {}, ["n"]],
        ["aten::relu", [["k", "float33"]], {}, ["n"]],
        ["aten::relu", [["k", 5]], {}, ["n"]],
        ["aten::relu", ["t"], {"no_such_keyword": "v"}, ["n"]],
        ["aten::relu", ["t"], {}, []],
        ["aten::relu", ["t"], {}, ["n", "n"]],
        ["aten::relu", ["t"], {}, ["?"]],
    ],
    ids=str,
)
def test_what_is_no_definition_is_a_protocol_error(definition: Any) -> None:
    with pytest.raises(ProtocolError):
        Signature(definition, on_cpu=True)


@pytest.mark.parametrize(
    "name", [*sorted(FORBIDDEN_OPS), "nowhere::nothing", "aten::nothing", "aten::add.nothing", "relu", ""]
)
def test_what_is_not_on_the_list_is_refused_when_it_is_called(name: str) -> None:
    signature = Signature([name, ["t", "v"], {"x": "t"}, ["n", "N"]], on_cpu=True)
    assert signature.width == 5
    with pytest.raises(UnsupportedOpError):
        signature.handler({0: None, 1: torch.ones(1)}, [FIRST, 1, 2, 1, 3, [4]], 0)
    assert signature.output_slots([FIRST, 1, 2, 1, 3, [4]], 0) == [3, 4]


@pytest.mark.parametrize(
    ("definition", "written"),
    [
        (["aten::_add_relu_.Tensor", ["t", "t"], {}, ["x"]], [1]),  # its schema says so
        (["aten::_add_relu.out", ["t", "t"], {"out": "t"}, ["x"]], [3]),
        (["aten::nothing_", ["t", "T"], {}, ["x"]], [1, 2, 3]),  # nobody knows, and it makes nothing
        (["aten::nothing", ["t", "T"], {}, ["n"]], []),
    ],
)
def test_what_a_refused_op_should_have_changed_is_known(definition: Any, written: list[int]) -> None:
    operands: list[Any] = [1, [2, 3]] if "T" in definition[1] else [1, 2, 3]
    assert Signature(definition, on_cpu=True).written_slots([FIRST, *operands, 4], 0) == written


def test_a_list_of_another_length_is_a_protocol_error() -> None:
    signature = Signature(["aten::split.Tensor", ["t", "v"], {}, ["N"]], on_cpu=True)
    with pytest.raises(ProtocolError, match="2 results"):
        signature.handler({1: torch.arange(4)}, [FIRST, 1, 2, [5]], 0)


def test_what_the_client_counts_is_what_the_worker_reads() -> None:
    """The width of a signature, over templates of every kind."""
    definition = ["aten::add.Tensor", ["t", "t"], {"alpha": ["c", *torch_codec.encode_constant(2)]}, ["n"]]
    in_place = ["aten::add_.Tensor", ["t", ["k", "float32"]], {}, ["x"]]
    parts = ["aten::split.Tensor", ["t", "v"], {}, ["N"]]
    for name, positional, keywords, outputs in (definition, in_place, parts):
        signature = Signature([name, positional, keywords, outputs], on_cpu=True)
        assert signature.width == commands.operand_count([*positional, *keywords.values(), *outputs])


@pytest.mark.parametrize("name", ["native_batch_norm", "batch_norm_update_stats", "batch_norm", "instance_norm"])
def test_ops_that_write_without_saying_so_may_have_written_to_all_that_they_read(name: str) -> None:
    overload = getattr(torch.ops.aten, name).default
    kinds = ["t" if "Tensor" in str(argument.type) else "v" for argument in overload._schema.arguments]
    outputs = ["n"] * len(overload._schema.returns)
    signature = Signature([f"aten::{name}", kinds, {}, outputs], on_cpu=True)
    stream = [FIRST, *range(1, len(kinds) + 1), *outputs]
    assert signature.written_slots(stream, 0) == []
    assert signature.changed_slots(stream, 0) == signature.input_slots(stream, 0) != []
    assert signature.changes_inputs
