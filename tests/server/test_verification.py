"""What the worker does with ops it does not know, and with a client that believes something else of a result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyproxy.protocol import commands
from skyproxy.protocol.messages import Batch, Failure, Message, Reply, Sequence
from skyproxy.settings import SETTINGS
from skyproxy.torch_codec import Description, describe, encode_description, is_described
from skyproxy_server.executor import Executor
from skyproxy_server.transfers import Transfers

DEFINE, EXPECT, DESCRIBE = commands.DEFINE, commands.EXPECT, commands.DESCRIBE
ADD, REDUCE, UNKNOWN = range(commands.FIRST_SIGNATURE, commands.FIRST_SIGNATURE + 3)
SIGNATURES = [
    [DEFINE, ADD, ["aten::add.Tensor", ["t", "t"], {"alpha": "v"}, ["n"]]],
    [DEFINE, REDUCE, ["aten::sum.dim_IntList", ["t", "v"], {}, ["n"]]],
    [DEFINE, UNKNOWN, ["nowhere::nothing", ["t", "v"], {"x) or (": "t"}, ["n"]]],
]


class Worker:
    """An executor, and what it sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.executor = Executor(
            [{"type": "cpu", "index": 0, "name": "CPU"}], self.sent.append, Transfers(SETTINGS.chunk_bytes), SETTINGS
        )
        self._sequence = 0
        for definition in SIGNATURES:
            self.run(*definition)

    def run(self, *stream: Any) -> None:
        self._sequence += 1
        self.executor.run(Batch(Sequence(self._sequence), list(stream)))

    def __setitem__(self, slot: int, tensor: torch.Tensor) -> None:
        self.executor.state.values.slots[slot] = tensor

    def __getitem__(self, slot: int) -> Any:
        return self.executor.state.values.slots[slot]


@pytest.fixture
def worker() -> Worker:
    return Worker()


def _expectation(tensor: torch.Tensor, **changes: Any) -> list[Any]:
    return [EXPECT, [encode_description(Description(*describe(tensor))._replace(**changes))]]


def test_an_unknown_op_fails_where_it_is_called_and_nowhere_else(worker: Worker) -> None:
    worker[1] = torch.ones(2)
    worker.run(UNKNOWN, 1, 5, 1, 2, ADD, 1, 1, 1, 3, DESCRIBE, 9, [2], [])
    assert worker[3].tolist() == [2.0, 2.0]
    failures = [message for message in worker.sent if isinstance(message, Failure)]
    assert failures[-1].request == 9
    assert failures[-1].error["type"] == "UnsupportedOpError"


def test_strides_the_client_believes_in_are_kept_to_whatever_the_numbers(worker: Worker) -> None:
    worker[1] = torch.arange(6.0).view(2, 3)
    believed = _expectation(worker[1], stride=(1, 2))
    worker.run(*believed, ADD, 1, 1, 0.5, 2)
    assert worker[2].stride() == (1, 2)
    assert torch.equal(worker[2], worker[1] * 1.5)
    # The client does not say again what it expects: for its cache, another number is the same op.
    worker.run(ADD, 1, 1, 0.25, 3)
    assert worker[3].stride() == (1, 2)
    assert torch.equal(worker[3], worker[1] * 1.25)


def test_inputs_of_another_look_are_left_alone(worker: Worker) -> None:
    worker[1] = torch.arange(6.0).view(2, 3)
    worker.run(*_expectation(worker[1], stride=(1, 2)), ADD, 1, 1, 0.5, 2)
    worker[4] = torch.arange(12.0).view(4, 3)
    worker.run(ADD, 4, 4, 0.5, 5)
    assert worker[5].stride() == (3, 1)


def test_a_number_that_shapes_the_result_tells_ops_apart(worker: Worker) -> None:
    worker[1] = torch.arange(8.0).view(2, 2, 2)
    worker.run(*_expectation(torch.ones(2, 2), stride=(1, 2)), REDUCE, 1, [0], 2)
    worker.run(REDUCE, 1, [0], 3, REDUCE, 1, [1], 4)
    assert worker[2].stride() == worker[3].stride() == (1, 2)
    assert worker[4].stride() == (2, 1)


@pytest.mark.parametrize("changes", [{"size": (3, 2)}, {"dtype": torch.float64}, {"size": (6,), "stride": (1,)}])
def test_another_size_or_dtype_poisons_the_result(worker: Worker, changes: dict[str, Any]) -> None:
    worker[1] = torch.arange(6.0).view(2, 3)
    worker.run(*_expectation(worker[1], **changes), ADD, 1, 1, 0.5, 2, DESCRIBE, 7, [2], [])
    failure = worker.sent[-1]
    assert isinstance(failure, Failure)
    assert failure.error["type"] == "InferenceMismatchError"


def test_what_an_op_wrote_is_held_against_the_belief_too(worker: Worker) -> None:
    number = UNKNOWN + 1
    worker.run(DEFINE, number, ["aten::t_", ["t"], {}, ["x"]])
    worker[1] = torch.ones(2, 3)
    worker.run(*_expectation(torch.ones(3, 2).t().t(), stride=(1, 3)), number, 1, DESCRIBE, 6, [1], [])
    assert isinstance(worker.sent[-1], Reply)
    worker[2] = torch.ones(2, 3)
    worker.run(*_expectation(torch.ones(2, 3)), number, 2, DESCRIBE, 7, [2], [])
    assert isinstance(worker.sent[-1], Failure)


def test_lists_are_described_item_by_item_and_taken_apart(worker: Worker) -> None:
    worker[1] = torch.arange(4.0)
    worker.executor.state.values.slots[2] = [worker[1][:2], torch.ones(3)]
    worker.run(DESCRIBE, 4, [2], [1])
    reply = worker.sent[-1]
    assert isinstance(reply, Reply)
    ((mark, rows),) = reply.value
    assert mark == "list"
    assert [alias for _, alias in rows] == [0, -1]
    worker.run(commands.DO, "take_apart", [2, [5, 6]])
    assert worker[6].tolist() == [1.0] * 3


def test_strides_that_address_nothing_are_the_clients_too(worker: Worker) -> None:
    worker[1] = torch.arange(3.0).view(1, 3)
    worker.run(*_expectation(worker[1], stride=(9, 1)), ADD, 1, 1, 0.5, 2)
    worker.run(ADD, 1, 1, 0.25, 3)
    for slot, factor in ((2, 1.5), (3, 1.25)):
        assert worker[slot].stride() == (9, 1)
        assert torch.equal(worker[slot], worker[1] * factor)


@pytest.mark.parametrize("size", [(1, 3), (0, 3)])
def test_a_view_gets_the_clients_idle_strides_and_stays_a_view(worker: Worker, size: tuple[int, int]) -> None:
    number = UNKNOWN + 1
    worker.run(DEFINE, number, ["aten::alias", ["t"], {}, ["n"]])
    worker[1] = torch.ones(size)
    believed = _expectation(worker[1], stride=(7, 1))
    worker.run(*believed, number, 1, 2)
    worker.run(number, 1, 3)
    for slot in (2, 3):
        assert worker[slot].stride() == (7, 1)
        assert worker[slot].untyped_storage().data_ptr() == worker[1].untyped_storage().data_ptr()
    assert worker[1].stride() == (3, 1)


def test_what_is_changed_in_place_gets_the_clients_idle_strides(worker: Worker) -> None:
    number = UNKNOWN + 1
    worker.run(DEFINE, number, ["aten::t_", ["t"], {}, ["x"]])
    for slot in (1, 2):
        worker[slot] = torch.ones(1, 3)
    worker.run(*_expectation(torch.ones(3, 1), stride=(1, 8)), number, 1)
    worker.run(number, 2)
    assert worker[1].stride() == worker[2].stride() == (1, 8)


def test_inputs_that_are_not_what_the_client_believes_are_refused(worker: Worker) -> None:
    worker[1] = torch.ones(1, 3)
    (expect, described), other = _expectation(worker[1]), encode_description(describe(torch.ones(3, 1).t()))
    worker.run(expect, [*described, other, other], ADD, 1, 1, 0.5, 2, DESCRIBE, 7, [2], [])
    failure = worker.sent[-1]
    assert isinstance(failure, Failure)
    assert failure.error["type"] == "InferenceMismatchError"
    assert "was given" in failure.error["message"]


def test_a_check_that_a_failed_input_prevented_is_made_up_for(worker: Worker) -> None:
    worker[1] = torch.ones(2, 3)
    look = encode_description(describe(worker[1]))
    (expect, described) = _expectation(worker[1], stride=(1, 2))
    worker.run(UNKNOWN, 1, 5, 1, 2)
    worker.run(expect, [*described, look, look], ADD, 2, 1, 0.5, 3)
    worker[4] = torch.ones(4, 3)
    worker.run(ADD, 4, 4, 0.5, 5, ADD, 1, 1, 0.5, 6, ADD, 1, 1, 0.5, 7)
    assert worker[5].stride() == (3, 1)
    assert worker[6].stride() == worker[7].stride() == (1, 2)


def test_a_wrong_belief_is_refused_again_and_again(worker: Worker) -> None:
    worker[1] = torch.ones(2, 3)
    look = encode_description(describe(worker[1]))
    worker.run(EXPECT, [encode_description(describe(torch.ones(3, 3))), look, look], ADD, 1, 1, 0.5, 2)
    worker.run(ADD, 1, 1, 0.5, 3, DESCRIBE, 7, [3], [])
    failure = worker.sent[-1]
    assert isinstance(failure, Failure)
    assert failure.error["type"] == "InferenceMismatchError"


def test_where_none_stands_among_the_inputs_tells_calls_apart(worker: Worker) -> None:
    number = UNKNOWN + 1
    worker.run(DEFINE, number, ["aten::index.Tensor", ["t", "T"], {}, ["n"]])
    worker[1], worker[2] = torch.arange(6.0).view(2, 3), torch.tensor([0, 1])
    worker.run(*_expectation(torch.ones(2, 2), stride=(1, 2)), number, 1, [0, 2], 3)
    worker.run(number, 1, [2, 0], 4)
    assert worker[3].stride() == (1, 2)
    assert worker[4].shape == (2, 3)
    assert worker[4].stride() == (3, 1)


def test_a_belief_that_is_true_is_decoded_nowhere(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[object] = []
    for module in ("verification.decode_all", "layouts.torch_codec.decode_description"):
        monkeypatch.setattr(f"skyproxy_server.{module}", decoded.append)
    worker[1] = torch.arange(6.0).view(2, 3).t()
    look = encode_description(describe(worker[1]))
    worker.run(EXPECT, [look, look, look], ADD, 1, 1, 0.5, 1)  # the result takes its argument's place
    assert torch.equal(worker[1], torch.arange(6.0).view(2, 3).t() * 1.5)
    assert not decoded


def test_a_result_in_the_place_of_its_argument_is_mended_for_such_arguments(worker: Worker) -> None:
    worker[1] = worker[2] = torch.arange(6.0).view(2, 3)
    believed = _expectation(worker[1], stride=(1, 2))
    worker.run(*believed, ADD, 1, 1, 0.5, 1)
    worker.run(ADD, 2, 2, 0.5, 2)
    assert worker[1].stride() == worker[2].stride() == (1, 2)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3).t()[1:],
        torch.ones((), dtype=torch.bfloat16),
        torch.ones(0, 3),
    ],
    ids=["plain", "a window of a transposed one", "a number", "empty"],
)
def test_a_plain_tensor_is_told_from_others_without_decoding(tensor: torch.Tensor) -> None:
    look = encode_description(describe(tensor))
    assert is_described(tensor, look)
    changed = [["int8"], [[*tensor.shape, 1]], [[*tensor.stride(), 1]], [tensor.storage_offset() + 1]]
    assert not any(is_described(tensor, [*look[:at], *change, *look[at + 1 :]]) for at, change in enumerate(changed))
    assert not any(is_described(tensor, fields) for fields in (None, 1, [], look[:3], [*look, "strided", False, False]))


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, dtype=torch.cfloat).conj(), torch.ones(2, dtype=torch.cfloat).conj().imag, torch.eye(2).to_sparse()],
    ids=["conjugate", "negative", "sparse"],
)
def test_tensors_of_other_kinds_are_left_to_the_whole_comparison(tensor: torch.Tensor) -> None:
    assert not is_described(tensor, encode_description(describe(tensor))[:4])
