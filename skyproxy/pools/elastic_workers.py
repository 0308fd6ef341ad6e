"""The workers of a pool that grows and shrinks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from skyproxy.errors import ConfigurationError, SessionLostError, WorkerStartError
from skyproxy.pools.call_options import Retry
from skyproxy.pools.elastic_group import ElasticGroup
from skyproxy.pools.elastic_scheduler import ElasticScheduler
from skyproxy.pools.growth import Nodes
from skyproxy.pools.membership import Membership, PoolNode
from skyproxy.pools.workers import really
from skyproxy.providers.base import Endpoint, Launched, Progress, Provider, WorkerSpec
from skyproxy.providers.single_nodes import single_nodes
from skyproxy.runtime.plugin import Plugin, name_of

if TYPE_CHECKING:
    from skyproxy.node import Node


class ElasticWorkers:
    """The nodes that are there at a moment, and what changes them.

    Attributes:
        spec: what was asked for; its `nodes` is how many there are at most.
        limits: of the pool's size.
        group: the connections, by rank.
        membership: starts and ends nodes.
    """

    def __init__(self, spec: WorkerSpec, limits: Nodes, group: ElasticGroup, membership: Membership) -> None:
        self.spec = spec
        self.limits = limits
        self.group = group
        self.membership = membership

    @classmethod
    async def launch(
        cls,
        provider: Provider,
        spec: WorkerSpec,
        limits: Nodes,
        plugins: Sequence[Plugin],
        report: Callable[[Progress], None],
        concurrency: int,
    ) -> ElasticWorkers:
        """Start the first nodes; takes them back where one of them fails, or this is cancelled.

        Raises:
            ConfigurationError: the provider can add no nodes, or a plugin cannot live with that.
        """
        for plugin in plugins:
            if getattr(plugin, "restarts_ranks", False):
                raise ConfigurationError(
                    f"the plugin {name_of(plugin)} sets up all processes together once in their life, and nodes=Nodes("
                    f"{limits.minimum}, {limits.maximum}) lets them come and go. Give a fixed number of nodes."
                )
        if spec.keep:
            raise ConfigurationError("keep=True is for pools of a fixed size: nodes that come and go have no name.")
        report(Progress("provisioning", None, f"asking {provider.name} for {limits} nodes"))
        source = single_nodes(provider, spec)
        group = ElasticGroup(f"{spec.name}-{secrets.token_hex(3)}", spec.procs_per_node, plugins)
        slots = spec.procs_per_node * concurrency
        membership = Membership(source, spec, limits, group, slots, report)
        group.on_broken, group.on_need = membership.condemn, membership.look_soon
        try:
            await membership.start()
        except BaseException:
            await really(membership.close())
            raise
        return cls(spec, limits, group, membership)

    def begin(
        self,
        concurrency: int,
        retry: Retry | None,
        *,
        is_held: Callable[[int], bool],
        on_node: Callable[[Node], object],
    ) -> ElasticScheduler:
        """Return the queue of the pool, which it follows from now on.

        Args:
            concurrency: single calls that a process runs at a time.
            retry: the rule of the pool.
            is_held: tells whether something beside the queue keeps a rank, such as an actor.
            on_node: told of every process that comes, and of those that are there.
        """
        membership = self.membership
        scheduler = ElasticScheduler(
            self.group,
            concurrency=concurrency,
            retry=retry,
            max_processes=self.spec.world_size,
            on_demand=membership.look_soon,
        )

        def on_join(node: PoolNode) -> None:
            for member in node.members:
                on_node(member.node)

        membership.is_held = is_held
        membership.begin(scheduler, on_join)
        return scheduler

    @property
    def launched(self) -> Launched:
        """The nodes that are there, as one launch."""
        return self

    @property
    def endpoints(self) -> list[Endpoint]:
        """The addresses of the processes that are there, in the order of ranks."""
        return self.group.endpoints

    async def logs(self, rank: int) -> str:
        """The end of what a worker process itself wrote.

        Raises:
            SessionLostError: it is not there.
        """
        node = self.membership.nodes.get(rank // self.spec.procs_per_node)
        if node is None:
            raise SessionLostError(f"rank {rank} is not there.")
        return await node.launched.logs(rank % self.spec.procs_per_node)

    async def restart(self, rank: int) -> Endpoint:
        """Refuse: single nodes are replaced, not restarted.

        Raises:
            WorkerStartError: always; another node comes where one is needed.
        """
        raise WorkerStartError(f"rank {rank} of an elastic pool is not restarted; another node takes its place.")

    async def close(self) -> None:
        """End all nodes, also those that are starting."""
        await self.membership.close()
