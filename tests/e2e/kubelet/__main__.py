"""`python -m tests.e2e.kubelet`: nodes whose Pods are processes on this machine. Needs root on Linux."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tests.e2e.control_plane.addresses import Slot
from tests.e2e.kubelet.api import Api
from tests.e2e.kubelet.containers import image_mounts
from tests.e2e.kubelet.memory_limits import remove_leftovers
from tests.e2e.kubelet.network import Network, ServiceProxy
from tests.e2e.kubelet.node import Kubelet, named
from tests.e2e.kubelet.pods import Node
from tests.e2e.kubelet.provisioner import Provisioner

_IMAGES = Path(__file__).resolve().parents[3] / "manifests" / "images"


def entry_points(directory: Path) -> Callable[[str], list[str]]:
    """What an image starts when a Pod names no command: the ENTRYPOINT of its Containerfile.

    Args:
        directory: holds Containerfile.NAME for the images whose names end with NAME.
    """
    known: dict[str, list[str]] = {}
    for path in directory.glob("Containerfile.*"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("ENTRYPOINT "):
                text = line.removeprefix("ENTRYPOINT ").strip()
                known[path.suffix[1:]] = json.loads(text) if text.startswith("[") else shlex.split(text)

    def entry_point(image: str) -> list[str]:
        name = image.partition("@")[0].rpartition("/")[2].partition(":")[0]
        return next((command for suffix, command in known.items() if name.endswith(suffix)), [])

    return entry_point


async def main(arguments: argparse.Namespace) -> None:
    """Serves the nodes until SIGTERM or SIGINT."""
    slot, run = Slot(arguments.slot, -1), arguments.directory
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    remove_leftovers(slot.bridge)
    async with Api(arguments.kubeconfig) as api, Network(slot) as network:
        services = ServiceProxy(api, network, slot, run / "hosts")
        provisioner = Provisioner(api, run / "claims")
        await provisioner.install()
        node = Node(
            name="",
            host_address=slot.loopback,
            api=api,
            network=network,
            services=services,
            directory=run / "pods",
            logs=run / "pod-logs",
            masked=image_mounts([run, Path.home() / ".kube", Path.home() / ".config" / "skyproxy"]),
            api_service=slot.api_service,
            entry_point=entry_points(_IMAGES),
        )
        certificate = arguments.certificate, arguments.key
        tasks = [asyncio.create_task(services.follow()), asyncio.create_task(provisioner.follow())]
        for text in arguments.node:
            name, _, gpus = text.partition("=")
            kubelet = Kubelet(named(node, name), int(gpus or 0), certificate, arguments.authority)
            tasks.append(asyncio.create_task(kubelet.serve()))
        stop = asyncio.create_task(ended.wait())
        done, _ = await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in done - {stop}:
            task.result()  # it ended by itself: say why


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    result = argparse.ArgumentParser(prog="python -m tests.e2e.kubelet", description=__doc__)
    add = result.add_argument
    add("--kubeconfig", type=Path, required=True, help="an administrator's, with a client certificate")
    add("--slot", type=int, required=True, help="whose addresses to use; the caller holds its lock")
    add("--directory", type=Path, required=True, help="for volumes, containers and logs")
    add("--certificate", type=Path, required=True, help="of the nodes' HTTPS endpoints")
    add("--key", type=Path, required=True, help="its private key")
    add("--authority", type=Path, required=True, help="who signs the API server's client certificate")
    add("--node", action="append", required=True, metavar="NAME=GPUS", help="a node; repeatable")
    return result


if __name__ == "__main__":
    logging.basicConfig(level="INFO", stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(main(parser().parse_args()))
