"""shard: nothing lost, nothing twice, everything of its own type."""

from __future__ import annotations

import array
import collections
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyproxy.errors import ConfigurationError
from skyproxy.runtime import CallContext, InstanceInfo, entered_call, shard


class Batch(NamedTuple):
    x: Any
    y: Any


class Tagged(np.ndarray):
    pass


class Words(list[str]):
    pass


class Squares(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return index * index


def shares(*arrays: Any, world_size: int = 2, **options: Any) -> list[Any]:
    return [shard(*arrays, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


@given(st.lists(st.integers()), st.integers(1, 9), st.booleans(), st.integers(0, 3))
def test_nothing_is_lost_and_nothing_comes_twice(items: list[int], world: int, shuffle: bool, seed: int) -> None:
    parts = shares(items, world_size=world, shuffle=shuffle, seed=seed)
    assert sorted(chain.from_iterable(parts)) == sorted(items)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(0, 50), st.integers(1, 9), st.booleans())
def test_drop_last_makes_equal_shares(total: int, world: int, shuffle: bool) -> None:
    parts = shares(list(range(total)), world_size=world, shuffle=shuffle, drop_last=True)
    assert {len(part) for part in parts} == {total // world}
    assert len(set(chain.from_iterable(parts))) == total // world * world


def test_the_stride_is_the_world() -> None:
    assert shares(list(range(7)), world_size=3) == [[0, 3, 6], [1, 4], [2, 5]]


@pytest.mark.parametrize("shuffle", [False, True])
def test_what_belonged_together_still_does(shuffle: bool) -> None:
    x, y, z = list(range(11)), np.arange(11) * 10, torch.arange(11) * 100
    for a, b, c in shares(x, y, z, world_size=4, shuffle=shuffle, seed=7):
        assert [v * 10 for v in a] == b.tolist()
        assert [v * 100 for v in a] == c.tolist()


def test_the_same_seed_gives_the_same_order_and_another_one_another() -> None:
    items = list(range(100))
    assert shares(items, shuffle=True, seed=3) == shares(items, shuffle=True, seed=3)
    assert shares(items, shuffle=True, seed=3) != shares(items, shuffle=True, seed=4)
    assert shares(items, shuffle=True)[0] != shares(items)[0]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "items",
    [
        list(range(5)),
        tuple(range(5)),
        "abcde",
        b"abcde",
        bytearray(b"abcde"),
        Words("abcde"),
        np.arange(5),
        np.arange(10).reshape(5, 2).view(Tagged),
        np.ma.masked_array(np.arange(5), [0, 1, 0, 1, 0]),
        torch.arange(5),
        torch.arange(10).reshape(5, 2),
        torch.nn.Parameter(torch.arange(5.0), requires_grad=False),
        array.array("d", range(5)),
        collections.deque(range(5), maxlen=9),
        Batch(np.arange(5), list(range(5))),
        {"x": torch.arange(5), "y": list(range(5))},
        collections.OrderedDict(x=[1, 2, 3]),
    ],
    ids=lambda items: type(items).__name__,
)
def test_the_type_is_kept(items: Any, shuffle: bool) -> None:
    for part in shares(items, shuffle=shuffle):
        assert type(part) is type(items)


def test_a_named_tuple_and_a_mapping_are_tables_of_columns() -> None:
    assert shares(Batch([1, 2, 3], "abc"))[0] == Batch([1, 3], "ac")
    assert shares({"x": [1, 2, 3], "y": (4, 5, 6)})[1] == {"x": [2], "y": (5,)}


def test_a_parameter_keeps_its_flag_and_is_a_leaf() -> None:
    parameter = torch.nn.Parameter(torch.arange(5.0))
    part = shard(parameter, rank=0, world_size=2)
    assert part.requires_grad
    assert part.is_leaf
    assert part.tolist() == [0.0, 2.0, 4.0]


def test_a_deque_keeps_its_bound() -> None:
    assert shard(collections.deque([1, 2, 3], maxlen=3), rank=0, world_size=2).maxlen == 3


def test_tables_and_datasets_keep_their_type() -> None:
    pandas = pytest.importorskip("pandas")
    datasets = pytest.importorskip("datasets")
    frame = pandas.DataFrame({"x": range(5)}, index=list("abcde"))
    assert list(shard(frame, rank=1, world_size=2).index) == ["b", "d"]
    for shuffle in (False, True):
        rows = shares(datasets.Dataset.from_dict({"x": list(range(5))}), shuffle=shuffle)
        assert {type(part) for part in rows} == {datasets.Dataset}
        assert sorted(chain.from_iterable(part["x"] for part in rows)) == [0, 1, 2, 3, 4]


def test_a_map_style_dataset_of_torch_is_shared_lazily() -> None:
    part = shard(Squares(), rank=1, world_size=2)
    assert isinstance(part, torch.utils.data.Subset)
    assert [part[i] for i in range(len(part))] == [1, 9]


@pytest.mark.parametrize("items", [[], torch.zeros(0, 3), np.zeros((0, 3)), (), ""])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_share_can_be_empty(items: Any, shuffle: bool) -> None:
    for part in shares(items, world_size=3, shuffle=shuffle):
        assert len(part) == 0
        assert type(part) is type(items)
        assert getattr(part, "shape", ())[1:] == getattr(items, "shape", ())[1:]


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"argument 1 has 3 items, argument 2 has 4 items"):
        shard([1, 2, 3], [1, 2, 3, 4])
    with pytest.raises(ConfigurationError, match="not equally long"):
        shard({"x": [1], "y": [1, 2]})


@pytest.mark.parametrize("items", [{1, 2}, iter([1]), 5, torch.tensor(1.0)], ids=lambda items: type(items).__name__)
def test_what_has_no_order_or_length_is_refused(items: Any) -> None:
    with pytest.raises(ConfigurationError):
        shard(items)


def test_outside_of_a_pool_the_share_is_the_whole() -> None:
    assert shard([1, 2, 3]) == [1, 2, 3]


def test_inside_a_call_it_is_that_process_s_share() -> None:
    with entered_call(CallContext("1", "f", {"pool": InstanceInfo(node=1, total_nodes=2, rank=1, world_size=2)})):
        assert shard([1, 2, 3], "abc") == ([2], "b")
