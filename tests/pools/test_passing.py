"""The way of a payload through the processes of a pool."""

from __future__ import annotations

from skyproxy.pools.passing import Place, plan_ways


def test_machines_form_a_tree_with_two_below_each() -> None:
    places = plan_ways({rank: f"10.0.0.{rank}" for rank in range(7)})
    assert [places[rank].parent for rank in range(7)] == [None, 0, 0, 1, 1, 2, 2]
    assert not any(place.near for place in places.values())


def test_the_processes_of_a_machine_get_it_from_one_of_them() -> None:
    places = plan_ways({0: "a", 1: "a", 2: "b", 3: "b", 4: "a", 5: "c"})
    assert places == {
        0: Place(None),
        1: Place(0, near=True),
        4: Place(0, near=True),
        2: Place(0),
        3: Place(2, near=True),
        5: Place(0),
    }


def test_who_reaches_nobody_is_sent_it_and_passes_it_on_beside_itself_only() -> None:
    addresses = {0: "a", 1: "b", 2: "b", 3: "c", 4: "d", 5: "d"}
    assert plan_ways(addresses, alone=[1, 5]) == {
        0: Place(None),
        1: Place(None),
        2: Place(1, near=True),
        3: Place(0),
        4: Place(0),
        5: Place(None),
    }


def test_nobody_and_one_alone() -> None:
    assert plan_ways({}) == {}
    assert plan_ways({3: "a"}) == {3: Place(None)}
