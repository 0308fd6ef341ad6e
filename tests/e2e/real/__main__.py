"""`python -m tests.e2e.real`: real nodes in namespaces of this machine, with DNS and volumes. Needs root on Linux."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from tests.e2e.control_plane.addresses import Slot
from tests.e2e.kubelet.api import Api, ApiError
from tests.e2e.kubelet.network import Network, run
from tests.e2e.kubelet.provisioner import Provisioner
from tests.e2e.real import control_groups
from tests.e2e.real.configuration import Place
from tests.e2e.real.names import Names
from tests.e2e.real.node import Node

logger = logging.getLogger("real")

GPU = "nvidia.com/gpu"


def place_of(arguments: argparse.Namespace, name: str, index: int) -> Place:
    """Where a node is. The first /24 of the run's range has the machine and the nodes, each other one a node's Pods."""
    directory: Path = arguments.directory
    slot = Slot(arguments.slot, -1)
    parts = list(ipaddress.ip_network(slot.pods).subnets(new_prefix=24))
    return Place(
        name=name,
        directory=directory / "nodes" / name,
        store=arguments.stores / f"{slot.bridge}-{name}",
        address=slot.node_address(index),
        pods=str(parts[1 + index]),
        all_pods=slot.pods,
        name_server=slot.node_address(-1),
        authority=directory / "certificates" / "ca.crt",
        certificate=(directory / "certificates" / f"{name}.crt", directory / "certificates" / f"{name}.key"),
        proxy_kubeconfig=directory / "system-kube-proxy.kubeconfig",
    )


async def connect(places: list[Place]) -> None:
    """Let this machine reach the Pods of nodes that are on its bridge."""
    for place in places:
        await run("ip", "route", "replace", place.pods, "via", place.address)


async def add_gpus(api: Api, gpus: dict[str, int]) -> None:
    """Keep up the GPUs of nodes, for ever: numbers that the scheduler counts. The kubelet leaves them as they are."""
    async for kind, node in api.watch("/api/v1/nodes"):
        name = node["metadata"]["name"]
        wanted = str(gpus.get(name, 0))
        if kind == "DELETED" or wanted == "0":
            continue
        status = node.get("status", {})
        amounts = {GPU: wanted}
        try:
            if any(status.get(which, {}).get(GPU) != wanted for which in ("capacity", "allocatable")):
                patch = {"status": {"capacity": amounts, "allocatable": amounts}}
                await api.patch(f"/api/v1/nodes/{name}/status", patch)
            if "nvidia.com/gpu.product" not in node["metadata"].get("labels", {}):
                labels = {"nvidia.com/gpu.present": "true", "nvidia.com/gpu.product": "Stand-In-GPU"}
                await api.patch(f"/api/v1/nodes/{name}", {"metadata": {"labels": labels}})
        except ApiError as error:  # another change came first, and comes as an event, too
            logger.info("no GPUs for %s yet: %s", name, error)


async def serve(api: Api, network: Network, arguments: argparse.Namespace) -> None:
    """Run everything until cancelled, or until a part of it ends."""
    gpus = {name: int(count or 0) for name, _, count in (text.partition("=") for text in arguments.node)}
    places = [place_of(arguments, name, index) for index, name in enumerate(gpus)]
    await connect(places)
    names = Names(api)
    provisioner = Provisioner(api, arguments.directory / "claims", list(gpus))
    resolver = await names.serve(network.gateway)
    try:
        await api.wait_ready()
        await provisioner.install()
        parts: list[Coroutine[Any, Any, None]] = [names.follow(), provisioner.follow(), add_gpus(api, gpus)]
        for place in places:
            others = [other for other in places if other is not place]
            parts.append(Node(place, others, arguments.images, arguments.binaries, network).serve())
        async with asyncio.TaskGroup() as tasks:
            for part in parts:
                tasks.create_task(part)
    finally:
        resolver.close()


async def main(arguments: argparse.Namespace) -> None:
    """Serve the nodes until SIGTERM or SIGINT."""
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    slot = Slot(arguments.slot, -1)
    # Left by a run that was killed; the slot is ours, so nobody uses them.
    for name in control_groups.left(f"{slot.bridge}-"):
        control_groups.remove(name)
    await run("sh", "-c", 'rm -rf "$0"/"$1"-*', str(arguments.stores), slot.bridge)
    async with Network(slot) as network, Api(arguments.kubeconfig) as api:
        serving = asyncio.create_task(serve(api, network, arguments))
        stop = asyncio.create_task(ended.wait())
        await asyncio.wait([stop, serving], return_when=asyncio.FIRST_COMPLETED)
        by_itself = serving.done()
        serving.cancel()
        await asyncio.wait([serving])
        stop.cancel()
        if by_itself:
            serving.result()  # say why


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    result = argparse.ArgumentParser(prog="python -m tests.e2e.real", description=__doc__)
    add = result.add_argument
    add("--kubeconfig", type=Path, required=True, help="an administrator's, with a client certificate")
    add("--slot", type=int, required=True, help="whose addresses to use; the caller holds its lock")
    add("--directory", type=Path, required=True, help="for logs and volumes; it has certificates and kubeconfigs")
    add("--binaries", type=Path, required=True, help="the folder of kubelet and kube-proxy")
    add("--images", type=Path, required=True, help="a containerd's store with the images")
    add("--stores", type=Path, required=True, help="for the nodes' own stores, on the same file system")
    add("--node", action="append", required=True, metavar="NAME=GPUS", help="a node; repeatable")
    return result


if __name__ == "__main__":
    logging.basicConfig(level="INFO", stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(main(parser().parse_args()))
