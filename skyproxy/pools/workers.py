"""The workers of a running pool: what the provider gave, connected and formed into a group."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from skyproxy.errors import ConfigurationError, SkyproxyError, WorkerStartError
from skyproxy.pools.loop_thread import loop_thread
from skyproxy.pools.node_target import POOL_OF_NODE
from skyproxy.providers.all_or_none import run_all_or_none
from skyproxy.providers.base import Endpoint, Launched, Progress, Provider, WorkerSpec
from skyproxy.providers.environments import missing_requirements
from skyproxy.runtime.instance import LOCAL_HEAD_PORT, InstanceInfo, Peer
from skyproxy.runtime.plugin import Plugin

if TYPE_CHECKING:
    from skyproxy.node import Node
    from skyproxy.pools.ranks import RankGroup

logger = logging.getLogger("skyproxy")


class Workers:
    """Launched, connected workers.

    Attributes:
        spec: what was asked for.
        launched: what the provider gave.
        group: the connections, by rank.
    """

    def __init__(self, spec: WorkerSpec, launched: Launched, group: RankGroup) -> None:
        self.spec = spec
        self.launched = launched
        self.group = group

    @classmethod
    async def launch(
        cls, provider: Provider, spec: WorkerSpec, plugins: Sequence[Plugin], report: Callable[[Progress], None]
    ) -> Workers:
        """Launches, connects and forms the group; takes everything back where one of these fails or is cancelled.

        Raises:
            WorkerStartError: it took longer than the spec allows; says what it waited for.
        """
        last = Progress("provisioning", None, f"asking {provider.name}")

        def noting(progress: Progress) -> None:
            nonlocal last
            last = progress
            report(progress)

        try:
            async with asyncio.timeout(spec.timeout_seconds) as limit:
                noting(last)
                launched = await provider.launch(spec, noting)
                try:
                    return await cls._connect_all(spec, launched, plugins, noting)
                except BaseException:
                    await really(launched.close())
                    raise
        except TimeoutError as error:
            if not limit.expired():
                raise
            report(Progress("failed", None, f"not ready within {spec.timeout_seconds:g} s"))
            raise WorkerStartError(
                f"the workers of {spec.name} did not start within {spec.timeout_seconds:g} s. The last step was: "
                f"{last.phase}, {last.message}. Give them more time: Compute(timeout=...)."
            ) from error

    @classmethod
    async def _connect_all(
        cls, spec: WorkerSpec, launched: Launched, plugins: Sequence[Plugin], report: Callable[[Progress], None]
    ) -> Workers:
        # Late: these load torch, and decorating a function should not wait for that.
        from skyproxy.pools.ranks import RankGroup

        endpoints = launched.endpoints
        report(Progress("bootstrapping", None, f"connecting to {len(endpoints)} worker processes"))
        nodes: list[Node] = []
        try:
            # The head first, so that of the pool's devices its own has the lowest number.
            nodes.append(await connect_worker(spec, endpoints[0]))
            nodes += await run_all_or_none(connect_worker(spec, endpoint) for endpoint in endpoints[1:])

            await check_software(launched, nodes)

            def replace_rank(rank: int) -> Node:
                return loop_thread().run(_replace(spec, launched, rank, group.nodes[rank]))

            # A worker may still hold what an earlier pool of this name left there.
            unique = f"{spec.name}-{secrets.token_hex(3)}"
            group = RankGroup(
                unique, nodes, infos_of(spec, endpoints, nodes), plugins=plugins, replace_rank=replace_rank
            )
            if plugins:
                report(Progress("bootstrapping", None, "setting up the plugins on all ranks"))
            await asyncio.to_thread(group.ensure)
        except BaseException:
            await really(close_nodes(nodes))
            raise
        report(Progress("running", None, "all worker processes are ready"))
        return cls(spec, launched, group)

    async def close(self) -> None:
        """Leaves the plugins' hooks, ends the sessions, then the workers."""
        try:
            await asyncio.to_thread(self.group.close)
            await close_nodes(self.group.nodes)
        finally:
            await self.launched.close()


async def connect_worker(spec: WorkerSpec, endpoint: Endpoint) -> Node:
    """Connect to a worker process; a connection that comes too late is closed again."""
    from skyproxy.nodes import connect

    connecting = asyncio.create_task(
        asyncio.to_thread(
            connect,
            endpoint.url,
            token=endpoint.token,
            certificate=endpoint.certificate,
            server_name=endpoint.server_name,
            insecure=endpoint.insecure,
            shares_files=endpoint.shares_files,
            trust_worker=endpoint.trusted,
            explain_end=endpoint.explain_end,
            renew=endpoint.renew,
            source=f"rank {endpoint.rank} of {spec.name}",
            shares_threads=True,
        )
    )
    try:
        node = await asyncio.shield(connecting)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await close_nodes([await connecting])
        raise
    node._session.after_end = "The pool puts another process in its place before the next call, where its provider can."
    return node


async def check_software(launched: Launched, nodes: Sequence[Node]) -> None:
    """Check that workers have what an image asks for that nobody has built.

    Raises:
        ConfigurationError: one of them lacks something; names both.
    """
    image = getattr(launched, "unbuilt_image", None)
    if image is None or not image.pip:
        return
    calls = [node.submit(missing_requirements, image.pip, results="value") for node in nodes]
    for rank, call in enumerate(calls):
        missing = await asyncio.to_thread(call.result)
        if missing:
            raise ConfigurationError(
                f"rank {rank} lacks {', '.join(missing)}, which the image or a plugin asks for, and this provider "
                "installs nothing. Install it where that worker runs, or build it into its container image."
            )


async def _replace(spec: WorkerSpec, launched: Launched, rank: int, old: Node) -> Node:
    await close_nodes([old])
    new = await connect_worker(spec, await launched.restart(rank))
    if (pool := POOL_OF_NODE.pop(old, None)) is not None:
        POOL_OF_NODE[new] = pool
    return new


async def close_nodes(nodes: Sequence[Node]) -> None:
    """Close connections, whatever state they are in."""

    def close(node: Node) -> None:
        with contextlib.suppress(SkyproxyError):
            node.close()

    await asyncio.gather(*(asyncio.to_thread(close, node) for node in nodes))


async def really(cleanup: Awaitable[object]) -> None:
    """Runs a clean-up to its end, also where the task is cancelled once more meanwhile."""
    task = asyncio.ensure_future(cleanup)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def infos_of(spec: WorkerSpec, endpoints: Sequence[Endpoint], nodes: Sequence[Node]) -> list[InstanceInfo]:
    """The topology as each rank sees it; the group fills in the job and its port."""
    peers = tuple(Peer(endpoint.rank, endpoint.node, endpoint.address) for endpoint in endpoints)
    head = endpoints[0].address
    return [
        InstanceInfo(
            node=endpoint.node,
            total_nodes=spec.nodes,
            head_addr=head,
            head_port=LOCAL_HEAD_PORT,
            accelerators=sum(device.row["type"] != "cpu" for device in node._devices),
            peers=peers,
            rank=endpoint.rank,
            world_size=spec.world_size,
            local_rank=endpoint.local_rank,
            procs_per_node=spec.procs_per_node,
            job=spec.name,
        )
        for endpoint, node in zip(endpoints, nodes)
    ]
