"""What a client makes of a named value that a worker made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch

from skyproxy.errors import ProtocolError, UntrustedResultError
from skyproxy.loading.node_names import KnownTensors, NodeNames


class Touched(Exception):
    """Something of a pickle was run."""


def touch() -> None:
    raise Touched


class Bomb:
    def __reduce__(self) -> Any:
        return touch, ()


def node(answer: dict[str, Any], *, trusted: bool = False) -> NodeNames:
    """A node whose worker has this under every name."""
    made = NodeNames()
    made.session_name, made._known = "exp1", KnownTensors()
    made._runner = SimpleNamespace(trusted=trusted)  # type: ignore[assignment]
    made._session = SimpleNamespace(call=lambda name, *arguments: answer if name == "named_value" else True)  # type: ignore[assignment]
    made._devices = []
    return made


def answer(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"form": "plain", "tables": {"tensors": [], "bases": []}, "pieces": [b""]}
    fields.update(changes)
    return {"version": 1, "document": msgpack.packb(fields), "rows": msgpack.packb([])}


@pytest.mark.parametrize("form", ["pickle", "plain"])
def test_no_pickle_of_a_worker_that_is_not_trusted_is_read(form: str) -> None:
    import cloudpickle

    expected = UntrustedResultError if form == "pickle" else ProtocolError
    with pytest.raises(expected):
        node(answer(form=form, pieces=[cloudpickle.dumps(Bomb())])).get("x")


ROW = ["reference", ["float32", [2], [1], 0], False, False]
FORGED = [
    {"version": 1, "document": b"\xc1", "rows": msgpack.packb([])},
    {"version": 1, "document": msgpack.packb([1, 2]), "rows": msgpack.packb([])},
    {"version": 1, "document": 5, "rows": msgpack.packb([])},
    {**answer(), "rows": b"\xc1"},
    {**answer(), "rows": msgpack.packb([[1, ["float32", [2], [1], 0], ["cpu", 0], 8, [1]]])},
    {**answer(tables={"tensors": [ROW], "bases": []}), "rows": msgpack.packb([[1]])},
    {
        **answer(tables={"tensors": [ROW], "bases": []}),
        "rows": msgpack.packb([[1, ["float33", [2], [1], 0], ["cpu", 0], 8, [1]]]),
    },
    {
        **answer(tables={"tensors": [ROW], "bases": []}),
        "rows": msgpack.packb([[1, ["float32", [2], [1], 0], ["cuda", 7], 8, [1]]]),
    },
    answer(pieces=[]),
    answer(pieces=["text"]),
    answer(form="other"),
    answer(tables={"tensors": 3, "bases": []}),
    answer(tables={}),
]


@pytest.mark.parametrize("forged", FORGED)
def test_an_answer_that_cannot_be_is_refused(forged: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        node(forged).get("x")


def test_a_tensor_by_value_does_not_reach_beyond_its_bytes() -> None:
    row = ["value", ["float32", [1 << 30], [1], 0], False, False, 0]
    document = answer(tables={"tensors": [row], "bases": [0]}, pieces=[_plain_tensor(), bytes(8)])
    with pytest.raises(ProtocolError, match="does not fit"):
        node(document).get("x")


def _plain_tensor() -> bytes:
    from skyproxy.payloads.plain_writing import to_plain

    return bytes(to_plain(torch.zeros(2), lambda tensor: None).pieces[0])
