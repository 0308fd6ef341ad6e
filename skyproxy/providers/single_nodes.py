"""Nodes that come and go one by one, for pools that grow and shrink."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, runtime_checkable

from skyproxy.providers.base import Launched, Provider, Report, WorkerSpec


@runtime_checkable
class NodeSource(Protocol):
    """A place where single nodes of one pool can be had. Each is independent: the end of one ends no other."""

    async def add_node(self, number: int, report: Report) -> Launched:
        """Start one node, or none: what was begun is taken back where this fails or is cancelled.

        Args:
            number: of the node in its pool, from 0; not that of another one that is there.
            report: told of every step.

        Returns:
            Its processes, as those of a pool of one node.
        """

    async def remove_node(self, node: Launched) -> None:
        """End a node, whatever it does; safe where it is gone already."""

    async def close(self) -> None:
        """End what the nodes shared, after the last of them; idempotent."""


class OneByOne:
    """Nodes that are launched as pools of one, which every provider can."""

    def __init__(self, provider: Provider, spec: WorkerSpec) -> None:
        """Make a source of single nodes.

        Args:
            provider: launches them.
            spec: of the whole pool.
        """
        self._provider = provider
        self._spec = spec

    def spec_of(self, number: int) -> WorkerSpec:
        """Return the spec of one node, whose name is the pool's with its number."""
        spec = self._spec
        return replace(spec, name=f"{spec.name}-{number}", nodes=1, first_node=number, of_nodes=spec.nodes)

    async def add_node(self, number: int, report: Report) -> Launched:
        """Launch a pool of one node."""
        return await self._provider.launch(self.spec_of(number), report)

    async def remove_node(self, node: Launched) -> None:
        """End it."""
        await node.close()

    async def close(self) -> None:
        """Nothing: they share nothing."""


def single_nodes(provider: Provider, spec: WorkerSpec) -> NodeSource:
    """Return the source of nodes that a provider has itself, or one that launches pools of one.

    Args:
        provider: one that has a method `single_nodes(spec)` gives its own.
        spec: of the whole pool; its `nodes` is how many there are at most.

    Raises:
        ConfigurationError: this provider can add no nodes.
    """
    own = getattr(provider, "single_nodes", None)
    return own(spec) if own is not None else OneByOne(provider, spec)
