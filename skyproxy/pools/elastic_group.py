"""The processes of a pool that grows and shrinks: independent members, who form a group for each broadcast."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from skyproxy.errors import RankErrors, SessionLostError
from skyproxy.pools.ranks import RankGroup
from skyproxy.runtime.instance import LOCAL_HEAD_PORT, InstanceInfo, Peer
from skyproxy.runtime.lifecycle import Task

if TYPE_CHECKING:
    from skyproxy.node import Node
    from skyproxy.providers.base import Endpoint
    from skyproxy.runtime.plugin import Plugin

logger = logging.getLogger("skyproxy")

_FORM_ATTEMPTS = 5


@dataclass(frozen=True)
class Member:
    """A process that is there.

    Attributes:
        endpoint: where it listens, with its rank and node in this pool.
        node: the connection.
    """

    endpoint: Endpoint
    node: Node


class ElasticGroup:
    """The processes that are there. Ranks are stable: a process keeps its own until it goes. Numbers may be missing.

    Programs that talk among all ranks count from 0 without gaps, so a broadcast forms a group of those that are there
    when it begins, and counts them anew in the order of their ranks. That group is kept for as long as nobody comes or
    goes. Members are independent of each other: the loss of one ends what ran there, and broadcasts that it took part
    in.

    Attributes:
        plugins: of the pool.
        on_need: called when somebody waits for a process; must be short.
        on_broken: told of ranks whose process a failure left in a state that no hook can mend.
    """

    def __init__(self, pool: str, procs_per_node: int, plugins: Sequence[Plugin] = ()) -> None:
        """Make a group without processes.

        Args:
            pool: the pool's name, unique among those that share workers.
            procs_per_node: of every node.
            plugins: whose hooks are entered in every process, when it comes and when a group is formed.
        """
        self.plugins = tuple(plugins)
        self.on_broken: Callable[[Sequence[int]], object] = lambda ranks: None
        self.on_need: Callable[[], object] = lambda: None
        self._pool = pool
        self._procs = procs_per_node
        # Replaced as a whole, so that readers need no lock.
        self._present: Mapping[int, Member] = {}
        self._members: Mapping[int, Node] = {}
        self._contexts: dict[int, dict[str, object]] = {}
        self._lock = threading.RLock()  # held while a group is formed
        self._changing = threading.Condition(threading.Lock())
        self._needed = 0
        self._formed: RankGroup | None = None
        self._formed_of: tuple[Node, ...] = ()
        self._homes: dict[int, tuple[RankGroup, int]] = {}
        """The last group that each rank took part in, and its number there."""
        self._generation = 0
        self._closed = False

    @property
    def members(self) -> Mapping[int, Node]:
        """The connections, by rank."""
        return self._members

    @property
    def nodes(self) -> Mapping[int, Node]:
        """The same."""
        return self._members

    @property
    def endpoints(self) -> list[Endpoint]:
        """The addresses of those that are there, in the order of ranks."""
        return [member.endpoint for member in self._present.values()]

    def node_of(self, rank: int) -> Node | None:
        """The connection to a rank's process; None where it is not there, or lost."""
        node = self._members.get(rank)
        return node if node is not None and node.alive else None

    @staticmethod
    def task(function: Callable[..., object]) -> Task:
        """The function as it goes to the processes."""
        return Task(function)

    # --- coming and going ---------------------------------------------------------------------------------------------

    def add(self, members: Sequence[Member]) -> None:
        """The processes of a node have come; plugins' hooks are entered there, as in a pool of this node alone.

        Raises:
            RankErrors: a plugin failed.
        """
        solo = None
        if self.plugins:
            solo = self._new_group(members)
            self._form(solo)
        with self._changing:
            self._change(dict(self._present) | {member.endpoint.rank: member for member in members})
            if solo is not None:
                self._homes |= {member.endpoint.rank: (solo, index) for index, member in enumerate(members)}

    def remove(self, ranks: Sequence[int]) -> None:
        """Processes have gone, or go now."""
        with self._changing:
            self._change({rank: member for rank, member in self._present.items() if rank not in ranks})
            for rank in ranks:
                self._homes.pop(rank, None)

    def _change(self, present: dict[int, Member]) -> None:
        self._present = dict(sorted(present.items()))
        self._members = {rank: member.node for rank, member in self._present.items()}
        self._contexts = {}
        self._changing.notify_all()

    @property
    def needs_member(self) -> bool:
        """True if somebody waits for a process, in vain so far."""
        return self._needed > 0

    def wait_for_rank(self, timeout_seconds: float) -> int:
        """Return the rank of any process that is there; waits for one where none is.

        Raises:
            SessionLostError: none came in time, or the pool ends.
        """
        with self._changing:
            self._needed += 1
            try:
                self.on_need()
                self._changing.wait_for(lambda: self._closed or self._some_rank() is not None, timeout_seconds)
            finally:
                self._needed -= 1
            rank = self._some_rank()
        if rank is None:
            raise SessionLostError(f"no process of pool {self._pool} is there, and none came.")
        return rank

    def _some_rank(self) -> int | None:
        return next((rank for rank, node in self._members.items() if node.alive), None)

    def leave(self, members: Sequence[Member]) -> None:
        """Leave the plugins' hooks in processes that have left the pool and are about to end; bounded in time."""
        if self.plugins:
            self._new_group(members).leave_hooks()

    # --- what goes beside calls ---------------------------------------------------------------------------------------

    def ensure(self) -> None:
        """Nothing: members need no group for calls of their own."""

    def context(self, rank: int) -> dict[str, object]:
        """Return what goes beside a single call: the place of the process among those that are there at this moment.

        With plugins it is the place in the group that they have last set up there.
        """
        home = self._homes.get(rank)
        if home is not None and self.plugins:
            return home[0].context(home[1])
        contexts = self._contexts  # of one membership, which may end meanwhile
        context = contexts.get(rank)
        if context is None:
            present = list(self._present.values())
            index = next((i for i, member in enumerate(present) if member.endpoint.rank == rank), None)
            if index is None:
                raise SessionLostError(f"rank {rank} is not there any more.")
            job = home[0].job if home is not None else f"{self._pool}/0"
            info = replace(infos_of_members(present, self._procs)[index], job=job)
            context = contexts[rank] = {"pool": asdict(info), "ports": {}}
        return context

    def places(self, ranks: Sequence[int]) -> list[InstanceInfo]:
        """Return the places of some processes, as if there were no others, whatever groups they are in.

        Raises:
            SessionLostError: one is not there any more.
        """
        present = self._present
        gone = [rank for rank in ranks if rank not in present]
        if gone:
            raise SessionLostError(f"rank {gone[0]} is not there any more.")
        return infos_of_members([present[rank] for rank in ranks], self._procs)

    # --- broadcasts ---------------------------------------------------------------------------------------------------

    def crew(self, ranks: Sequence[int]) -> RankGroup:
        """Return those of these ranks that are there, formed into a group and counted from 0.

        Raises:
            RankErrors: a plugin failed.
            SessionLostError: none is there any more.
        """
        with self._lock:
            for attempt in range(1, _FORM_ATTEMPTS + 1):
                self._drop_broken()
                present = [self._present[rank] for rank in ranks if rank in self._present and self.node_of(rank)]
                if not present:
                    raise SessionLostError(f"no process of pool {self._pool} is there any more.")
                group = self._group_of(present)
                try:
                    self._form(group)
                except (RankErrors, SessionLostError):
                    if attempt == _FORM_ATTEMPTS or all(member.node.alive for member in present):
                        raise
                    logger.info("skyproxy: pool %s lost a process while it formed a group; once more", self._pool)
                    continue
                with self._changing:
                    self._homes |= {member.endpoint.rank: (group, index) for index, member in enumerate(present)}
                    self._contexts = {}
                return group
        raise AssertionError("unreachable")

    def _group_of(self, present: Sequence[Member]) -> RankGroup:
        nodes = tuple(member.node for member in present)
        if self._formed is None or nodes != self._formed_of:
            if self._formed is not None:
                self._formed.wait_until_stopped()
            self._formed, self._formed_of = self._new_group(present), nodes
        return self._formed

    def _drop_broken(self) -> None:
        group = self._formed
        if group is None:
            return
        group.wait_until_stopped()
        broken = {group.nodes[index] for index in group.broken}
        if broken:
            self._formed = None
            self.on_broken([rank for rank, node in self._members.items() if node in broken])

    def _new_group(self, members: Sequence[Member]) -> RankGroup:
        infos = infos_of_members(members, self._procs)
        return RankGroup(self._pool, [member.node for member in members], infos, plugins=self.plugins)

    def _form(self, group: RankGroup) -> None:
        with self._changing:
            # Each formation has a name of its own among all groups of this pool.
            self._generation += 1
            generation = self._generation
        try:
            group.ensure(generation)
        finally:
            with self._changing:
                self._generation = max(self._generation, group.generation)

    def close(self) -> None:
        """Leaves the plugins' hooks everywhere; bounded in time. Idempotent."""
        with self._changing:
            closed, self._closed = self._closed, True
            self._changing.notify_all()
        if not closed:
            self.leave([member for member in self._present.values() if member.node.alive])


def infos_of_members(members: Sequence[Member], procs_per_node: int) -> list[InstanceInfo]:
    """The topology as each of these processes sees it, counted from 0 without gaps."""
    numbers = {node: index for index, node in enumerate(dict.fromkeys(m.endpoint.node for m in members))}
    places = [(numbers[m.endpoint.node], m.endpoint.address) for m in members]
    peers = tuple(Peer(rank, node, address) for rank, (node, address) in enumerate(places))
    return [
        InstanceInfo(
            node=numbers[member.endpoint.node],
            total_nodes=len(numbers),
            head_addr=members[0].endpoint.address,
            head_port=LOCAL_HEAD_PORT,
            accelerators=sum(device.row["type"] != "cpu" for device in member.node._devices),
            peers=peers,
            rank=rank,
            world_size=len(members),
            local_rank=member.endpoint.local_rank,
            procs_per_node=procs_per_node,
        )
        for rank, member in enumerate(members)
    ]
