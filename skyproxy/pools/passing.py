"""The way of a payload through the processes of a pool: who gets it from whom."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """The process from which another one gets a payload.

    Attributes:
        parent: the rank of the process that passes it on; None where the client sends it.
        near: whether both have the same address, and so perhaps the same memory.
    """

    parent: int | None
    near: bool = False


def plan_ways(addresses: Mapping[int, str], alone: Collection[int] = ()) -> dict[int, Place]:
    """Plan a tree of machines, two below each, and beside each process that gets it for a machine the others there.

    Args:
        addresses: of the machines, by rank. Where several machines have one address here, because something between
            them and us translates it, they only fall back to being sent it by the client.
        alone: those that could not reach another process before: they get it from the client. Whoever has the same
            address as one that gets it for a machine still has it from that one.
    """
    machines: dict[str, list[int]] = {}
    for rank, address in addresses.items():
        machines.setdefault(address, []).append(rank)
    leaders = [ranks[0] for ranks in machines.values() if ranks[0] not in alone]
    places: dict[int, Place] = {
        leader: Place(leaders[(at - 1) // 2] if at else None) for at, leader in enumerate(leaders)
    }
    for first, *others in machines.values():
        places.setdefault(first, Place(None))
        places.update({rank: Place(None) if rank in alone else Place(first, near=True) for rank in others})
    return places
