"""Classes of the program's main file, there and back."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

import skyproxy

TEXT = """
import __main__
import dataclasses
import enum
import io
import pickle
import typing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

scale = 2
told = []


class Plugin:
    kinds = {}

    def __init_subclass__(cls, *, key):
        told.append(key)
        if key in Plugin.kinds:
            raise ValueError(key)
        Plugin.kinds[key] = cls
        cls.key = key


class Box(Plugin, key="box"):
    def __init__(self, value):
        self.value = value

    def scaled(self):
        return self.value * scale


class Shape:
    def __init_subclass__(cls, *, corners):
        cls.corners = corners


class Square(Shape, corners=4):
    pass


class Slotted:
    __slots__ = ("__hidden", "plain")

    def __init__(self):
        self.__hidden, self.plain = 1, 2

    def both(self):
        return self.__hidden, self.plain


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    width: int


class Planet(enum.Enum):
    EARTH = 5.9, 6.3
    MARS = 0.6, 3.3
    RED = 0.6, 3.3

    def __init__(self, mass, radius):
        self.mass, self.radius = mass, radius


P = typing.ParamSpec("P")
R = typing.TypeVar("R")
Shapes = typing.TypeVarTuple("Shapes")
Rank = typing.NewType("Rank", int)


def decorated(function: Callable[P, R]) -> Callable[P, R]:
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    return inner


def next_rank(rank: Rank, *others: typing.Unpack[Shapes]) -> Rank:
    return Rank(rank + 1)


def box(value):
    return Box(value)


def kinds():
    return Plugin.kinds["box"] is Box, told


def corners():
    return Square.corners


def slotted():
    found = Slotted()
    return hasattr(found, "__dict__"), found


def local():
    class Local:
        pass

    return repr(Local).rpartition(".")[0], Local


def planets():
    return Planet.EARTH.mass, Planet.MARS is Planet.RED, list(Planet.__members__)


def use_types():
    return decorated(next_rank)(Rank(3)), typing.get_type_hints(next_rank)["rank"] is Rank


def pickled(value):
    return pickle.dumps(value), pickle.loads(pickle.dumps(value)) == value


def pickled_in_a_thread(value):
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(pickled, value).result()


def saved(value):
    file = io.BytesIO()
    torch.save({"config": value}, file)
    file.seek(0)
    return torch.load(file, weights_only=False)["config"] == value


def found_in_main():
    return __main__.Config is Config, __main__.box is box


def missing_in_main():
    return __main__.Missing
"""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a script has, which is the main file of this process so long."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(TEXT, "<a script with classes>", "exec", dont_inherit=True), namespace)
    for name, value in namespace.items():
        if not name.startswith("__"):
            monkeypatch.setattr(sys.modules["__main__"], name, value, raising=False)
    return namespace


def test_a_result_leaves_the_class_of_the_program_as_it_is(program: dict[str, Any], node: skyproxy.Node) -> None:
    kind, plain = program["Box"], program["Box"].scaled
    found = node.run(program["box"], 3)
    program["scale"] = 10
    assert type(found) is kind
    assert kind.scaled is plain
    assert found.scaled() == 30


def test_a_function_of_the_program_comes_back_as_itself(monkeypatch: pytest.MonkeyPatch, node: skyproxy.Node) -> None:
    main = vars(sys.modules["__main__"])
    monkeypatch.delitem(main, "__getattr__", raising=False)  # a worker of another test has run in this process
    exec(compile("step = 1\ndef advance(x): return x + step\n", "<a script>", "exec"), names := {})
    advance = types.FunctionType(names["advance"].__code__, main, "advance")
    advance.__module__ = "__main__"
    monkeypatch.setitem(main, "step", 1)
    monkeypatch.setitem(main, "advance", advance)
    found = node.run(lambda value: {"function": value, "sum": value(1)}, advance)
    assert found == {"function": advance, "sum": 2}
    assert advance.__globals__ is main


def test_no_base_is_told_of_a_class_again(program: dict[str, Any], node: skyproxy.Node) -> None:
    node.run(program["box"], 3)
    assert node.run(program["kinds"]) == (True, ["box"])
    assert program["told"] == ["box"]
    assert program["Plugin"].__subclasses__() == [program["Box"]]


def test_a_class_was_defined_with_keywords(program: dict[str, Any], node: skyproxy.Node) -> None:
    assert node.run(program["corners"]) == 4


def test_a_class_keeps_its_slots(program: dict[str, Any], node: skyproxy.Node) -> None:
    has_dict, found = node.run(program["slotted"])
    assert not has_dict
    assert found.both() == (1, 2)


def test_a_local_class_keeps_its_full_name(program: dict[str, Any], node: skyproxy.Node) -> None:
    shown, kind = node.run(program["local"])
    assert shown == "<class '__main__.local.<locals>"
    assert kind.__qualname__ == "local.<locals>.Local"


def test_members_keep_what_their_class_gave_them(program: dict[str, Any], node: skyproxy.Node) -> None:
    assert node.run(program["planets"]) == (5.9, True, ["EARTH", "MARS", "RED"])
    assert node.run(lambda planet: planet, program["Planet"].RED) is program["Planet"].MARS


def test_type_parameters_and_new_types_travel(program: dict[str, Any], node: skyproxy.Node) -> None:
    assert node.run(program["use_types"]) == (4, True)
    assert node.run(lambda kind: kind, program["Rank"]) is program["Rank"]


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("function", ["pickled", "pickled_in_a_thread"])
def test_pickle_finds_a_class_by_its_name(
    function: str, isolate: bool, program: dict[str, Any], node: skyproxy.Node
) -> None:
    config = program["Config"](3)
    content, is_equal = node.submit(program[function], config, isolate=isolate).result()
    assert is_equal
    assert b"__main__" in content
    assert b"cloudpickle" not in content


def test_what_a_function_saves_it_can_load(program: dict[str, Any], node: skyproxy.Node) -> None:
    assert node.run(program["saved"], program["Config"](3))


def test_the_main_module_has_what_functions_brought(program: dict[str, Any], node: skyproxy.Node) -> None:
    assert node.run(program["found_in_main"]) == (True, True)
    with pytest.raises(AttributeError, match="brought no Missing: name it in the function, or pass it"):
        node.run(program["missing_in_main"])
