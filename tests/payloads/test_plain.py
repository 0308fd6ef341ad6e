"""Values that travel as plain data, and bytes that pretend to be some."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import json
import pathlib
import random
import sys
import types
import typing
import uuid
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch

from skyproxy.errors import ProtocolError, add_note
from skyproxy.payloads.pickling import Pickled
from skyproxy.payloads.pieces import flat_size
from skyproxy.payloads.plain import Code, NotPlainError
from skyproxy.payloads.plain_reading import from_plain
from skyproxy.payloads.plain_writer import pack
from skyproxy.payloads.plain_writing import to_plain
from skyproxy.payloads.rebuilding import UnknownClassError
from skyproxy.payloads.tensors import memory_for


def received(pickled: Pickled) -> list[Any]:
    """The pieces as they are on the other side."""
    allocate = memory_for(pickled.tables, len(pickled.pieces))
    pieces = []
    for index, piece in enumerate(pickled.pieces):
        memory, view = allocate(index, flat_size(piece))
        if len(view):
            view[:] = memoryview(piece).cast("B")
        pieces.append(memory)
    return pieces


def no_reference(row: Any, number: int) -> Any:
    raise AssertionError("no reference was written")


def back(value: Any) -> Any:
    pickled = to_plain(value, lambda tensor: None)
    return from_plain(received(pickled), pickled.tables, no_reference)


def document(codes: list[Any], atoms: list[Any]) -> Any:
    """What a hostile worker may send in place of a document."""
    packed = pack(codes)
    content = bytearray(len(packed).to_bytes(8, "little") + packed + pack(atoms))
    return from_plain([content], {"tensors": [], "bases": []}, no_reference)


@dataclass
class Point:
    x: int
    more: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Key:
    name: str = "k"


@dataclass
class Temporary:
    path: str

    def __del__(self) -> None:
        self.path += "!"


class Pair(typing.NamedTuple):
    one: int
    two: str


class Colour(enum.IntEnum):
    RED = 1


class OwnError(ValueError):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


@dataclass(frozen=True)
class FrozenError(ValueError):
    code: int


@dataclass(frozen=True, slots=True)
class SlotsError(ValueError):
    code: int


class OwnGroup(ExceptionGroup[Exception]):
    def __new__(cls, code: int) -> typing.Self:
        return super().__new__(cls, "several", [OwnError(code)])

    def __init__(self, code: int) -> None:
        self.code = code


class ErrorWithEnd(ValueError):
    def __del__(self) -> None:
        raise AssertionError("this ran")


class ErrorWithNew(ValueError):
    def __new__(cls, *args: object) -> typing.Self:
        raise AssertionError("this ran")


VALUES = [
    *(None, True, 3, -(2**63), 2**64 - 1, 2**70, -(2**70), 1.5, float("inf"), "text", "\udc80", b"", b"b" * 100_000),
    *(
        bytearray(b"a"),
        bytearray(b"a" * 70_000),
        1 + 2j,
        [],
        [1, 2],
        [1, [2, "x"], {}],
        [2**70, 1],
        (),
        (1,),
        (1, (2,)),
    ),
    *(
        {},
        {"a": 1},
        {"a": [1]},
        {(1, (2, 3)): 3},
        {1, 2},
        {(1, 2)},
        frozenset({(1, 2)}),
        range(3),
        slice(1, None, 2),
        ...,
    ),
    *(collections.OrderedDict(a=1), collections.defaultdict(list, a=[1]), collections.Counter("aab")),
    *(collections.deque([1, [2]], 5), types.SimpleNamespace(a=1), pathlib.Path("/x"), pathlib.PureWindowsPath("c:/x")),
    *(torch.float32, torch.strided, torch.channels_last, torch.device("cpu"), torch.Size([1, 2])),
    *(numpy.float32(3), numpy.int64(4), numpy.bool_(True), numpy.datetime64("2020-01-01"), numpy.dtype("f4")),
    *(datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1, 2, tzinfo=datetime.UTC), datetime.time(1, 2)),
    *(datetime.timedelta(1, 2, 3), decimal.Decimal("1.50"), fractions.Fraction(-1, 3), uuid.UUID(int=7)),
    *(Point(1, [2]), Key(), Pair(1, "x"), Colour.RED, {Key("q"): {Pair(1, "x"): [Colour.RED]}}),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}-{value!s:.20}")
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    result = back(value)
    assert type(result) is type(value)
    assert result == value


@pytest.mark.parametrize(
    "array",
    [
        numpy.arange(6).reshape(2, 3),
        numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
        numpy.arange(10)[::3],
        numpy.zeros((0, 3), "f2"),
        numpy.array(5),
        numpy.array([(1, 2.0)], dtype=[("a", "i4"), ("b", ">f8")]),
        numpy.array(["ab", "c"]),
        numpy.array([True, False]),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_arrays_come_back_as_they_were(array: Any) -> None:
    result = back([array])[0]
    assert result.dtype == array.dtype
    assert result.shape == array.shape
    assert (result == array).all()
    assert result.flags.writeable


def test_what_was_one_object_is_one_object() -> None:
    itself: list[Any] = [1]
    itself.append(itself)
    result = back(itself)
    assert result[1] is result
    shared, table = [1], {}
    table["table"] = table
    result = back(((shared, shared), table, Point(1, shared)))
    assert result[0][0] is result[0][1] is result[2].more
    assert result[1]["table"] is result[1]


def test_tensors_share_memory_and_keep_their_kind() -> None:
    whole = torch.arange(6.0, requires_grad=True)
    result = back({"whole": whole, "tail": whole.detach()[2:], "parameter": torch.nn.Parameter(torch.ones(2))})
    assert result["whole"].requires_grad
    assert result["whole"].detach()[2:].data_ptr() == result["tail"].data_ptr()
    assert isinstance(result["parameter"], torch.nn.Parameter)
    sparse = back(torch.eye(3).to_sparse())
    assert sparse.is_coalesced()
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    assert type(back(torch.ones(2, 3).max(0))) is torch.return_types.max


def test_a_state_dict_keeps_its_versions() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    result = back(state)
    assert result._metadata == state._metadata
    assert all(torch.equal(result[name], tensor) for name, tensor in state.items())


def test_attributes_of_tensors_shadow_nothing() -> None:
    tensor = torch.ones(2)
    tensor.label, tensor.item, tensor._sky = "mine", "not yours", 1  # type: ignore[attr-defined, method-assign, assignment]
    result = back(tensor)
    assert vars(result) == {"label": "mine"}


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        KeyError("k"),
        OwnError(3),
        OSError(2, "no", "file"),
        ImportError("x", name="n", path="p"),
        UnicodeDecodeError("utf8", b"a", 0, 1, "reason"),
        torch.OutOfMemoryError("oom"),
        torch.linalg.LinAlgError("singular"),
        json.JSONDecodeError("no", "[", 1),
        ExceptionGroup("g", [ValueError("a"), ExceptionGroup("h", [OwnError(4)])]),
        FrozenError(3),
        SlotsError(3),
        OwnGroup(3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_come_back_with_class_text_and_attributes(error: Exception) -> None:
    add_note(error, "a note")
    result = back(error)
    assert type(result) is type(error)
    assert str(result) == str(error)
    assert result.__notes__ == ["a note"]
    names = ("code", "errno", "filename", "name", "path", "reason", "doc", "pos")
    assert [getattr(result, name, None) for name in names] == [getattr(error, name, None) for name in names]


def test_an_exception_that_holds_more_than_plain_data_comes_without_it() -> None:
    error = OwnError(5)
    error.model, error.itself = torch.nn.Linear(1, 1), error  # type: ignore[attr-defined]
    result = back(error)
    assert vars(result) == {"code": 5}
    assert back(ValueError(object)).args == (str(object),)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (object(), "a object"),
        (len, "builtin"),
        ([1, {"x": torch.nn.Linear(1, 1)}], r"torch.nn.modules.linear.Linear at \[1\]\['x'\]"),
        (numpy.array([object()]), "Python objects"),
        (int, "a type"),
        (collections.defaultdict(lambda: 1), "function"),
        (Temporary("x"), "Temporary"),
        (types.MappingProxyType({}), "mappingproxy"),
    ],
)
def test_what_is_not_plain_is_named_with_its_place(value: Any, what: str) -> None:
    with pytest.raises(NotPlainError, match=what):
        to_plain(value, lambda tensor: None)


def test_very_deep_values_are_not_plain() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(NotPlainError, match="nested too deeply"):
        to_plain(deep, lambda tensor: None)


# --- bytes of a hostile worker ----------------------------------------------------------------------------------------

NAMED = [
    ("os", "system"),  # no class
    ("builtins", "exec"),
    ("subprocess", "Popen"),  # a class, and no exception
    ("builtins", "SystemExit"),
    ("builtins", "KeyboardInterrupt"),
    ("builtins", "StopIteration"),
    ("builtins", "BaseExceptionGroup"),
    (__name__, "ErrorWithEnd"),  # runs code when it dies
    ("never_imported_by_anybody", "Error"),
    ("antigravity", "Error"),  # which importing it would open a browser
    ("builtins", "ValueError.__init__"),
]


@pytest.mark.parametrize(("module", "name"), NAMED)
def test_only_exceptions_that_the_program_knows_are_made(module: str, name: str) -> None:
    with pytest.raises(UnknownClassError):
        document([Code.EXCEPTION, Code.ATOM_TUPLE, 1, 0], [module, name, "", "true"])
    assert "antigravity" not in sys.modules


def test_an_exception_is_made_without_code_of_its_class() -> None:
    error = document([Code.EXCEPTION, Code.ATOM_TUPLE, 1, 0], [__name__, "ErrorWithNew", "", "true"])
    assert (type(error), error.args) == (ErrorWithNew, ("true",))


@pytest.mark.parametrize("name", ["Temporary", "Point.__init__", "Colour", "OwnError", "Missing"])
def test_only_records_of_the_program_are_made(name: str) -> None:
    with pytest.raises(UnknownClassError):
        document([Code.DATACLASS, 0], [__name__, name])


def test_dataclasses_of_libraries_are_not_made() -> None:
    from torch.distributed.checkpoint.metadata import Metadata

    with pytest.raises(UnknownClassError):
        document([Code.DATACLASS, 0], [Metadata.__module__, "Metadata"])


def test_a_dataclass_gets_its_fields_and_nothing_else() -> None:
    with pytest.raises(UnknownClassError, match="__class__"):
        document([Code.DATACLASS, 1, Code.ATOM], [__name__, "Point", "__class__", 1])


@pytest.mark.parametrize(
    ("codes", "atoms"),
    [
        ([], []),
        ([Code.ATOM], []),
        ([Code.LIST, 2**40], []),
        ([Code.ATOM_LIST, 2**40], []),
        ([Code.ATOM_LIST, -1], [1]),
        ([Code.REF, 0], []),
        ([Code.REF, -1], []),
        ([Code.TENSOR, 5], []),
        ([Code.TENSOR, -1], []),
        ([Code.LARGE_BYTES, 0], []),
        ([999], []),
        ([[[[]]]], []),
        ([Code.ATOM], [[1]]),
        ([Code.ATOM], [{"a": 1}]),
        ([Code.ATOM, Code.ATOM], [1, 2]),
        ([Code.ATOM], [1, 2]),
        ([Code.LIST, 1] * 5000 + [Code.ATOM], [1]),
        ([Code.DICT, 1, Code.LIST, 0, Code.ATOM], [1]),
        ([Code.RANGE, Code.ATOM, Code.ATOM, Code.ATOM], ["a", 1, 1]),
        ([Code.PATH], ["Path", "/x"]),
        ([Code.DEFAULT_DICT, 0], ["exec"]),
        ([Code.SIZE, 1], ["x"]),
        ([Code.DTYPE], ["load"]),
        ([Code.DEVICE], ["nonsense", 0]),
        ([Code.NUMPY_SCALAR, Code.ATOM], [b"12345678", "O"]),
        ([Code.ARRAY, 0, 1, 3, Code.ATOM], [False, "f8"]),
        ([Code.FRACTION], ["1/2/3"]),
        ([Code.ENUM], ["__main__", "x"]),
    ],
)
def test_bytes_that_are_no_plain_data_are_refused(codes: list[Any], atoms: list[Any]) -> None:
    with pytest.raises((ProtocolError, UnknownClassError)):
        document(codes, atoms)


def test_a_key_is_not_hashed_beyond_its_own_size() -> None:
    codes: list[Any] = [Code.LIST, 60, Code.ATOM_TUPLE, 0]
    for number in range(59):
        codes += [Code.TUPLE, 2, Code.REF, number + 1, Code.REF, number + 1]
    assert len(document(codes, [])) == 60  # which is a list of 2**59 tuples, if one counts so
    with pytest.raises(ProtocolError):
        document([Code.LIST, 2, *codes, Code.SET, 1, Code.REF, 60], [])


def test_a_description_does_not_make_memory_grow() -> None:
    pickled = to_plain(torch.ones(4), lambda tensor: None)
    pieces = received(pickled)
    row = pickled.tensors[0]
    for size, stride, offset in (([2**40], [1], 0), ([4], [1], 1), ([4], [-1], 3), ([2], [2**40], 0), ([2, 2], [1], 0)):
        row[1] = ["float32", size, stride, offset]
        with pytest.raises(ProtocolError):
            from_plain(pieces, pickled.tables, no_reference)


def test_mutilated_documents_give_values_or_clear_errors() -> None:
    chance = random.Random(5)
    for value in (VALUES[20:], {"e": ExceptionGroup("g", [OwnError(1)])}, [numpy.arange(4), torch.ones(3)]):
        pickled = to_plain(value, lambda tensor: None)
        whole = received(pickled)
        for _ in range(300):
            content = bytearray(whole[0])
            for _ in range(chance.randint(1, 3)):
                content[chance.randrange(len(content))] = chance.randrange(256)
            try:
                from_plain([content, *whole[1:]], pickled.tables, no_reference)
            except (ProtocolError, UnknownClassError):
                pass
