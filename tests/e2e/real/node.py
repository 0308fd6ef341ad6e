"""One real node: a process in namespaces of its own, below which containerd, kubelet, kube-proxy and all Pods run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.control_plane.processes import bound
from tests.e2e.kubelet.network import Network, run
from tests.e2e.real import control_groups
from tests.e2e.real.configuration import Place, write

logger = logging.getLogger("real.node")

_FIRST = Path(__file__).with_name("node.sh")
_JOIN = 'for group in "$@"; do echo $$ >"$group/cgroup.procs"; shift; [ "$1" != -- ] || break; done; shift; exec "$@"'
_NAMESPACES = ("--pid", "--fork", "--kill-child", "--net", "--mount", "--uts", "--ipc", "--cgroup")
_LOOK_SECONDS = 0.2
LOST = "lost"
"""The file in a node's directory that says that the node has lost its power, until the file is gone."""


class Node:
    """A node that starts, is lost, and starts again, as its directory says."""

    def __init__(self, place: Place, others: Sequence[Place], images: Path, binaries: Path, network: Network) -> None:
        """
        Args:
            place: where it is.
            others: where the other nodes are.
            images: a containerd's store with the images; it is left as it is.
            binaries: the folder of kubelet and kube-proxy.
            network: the bridge to join.
        """
        self._place = place
        self._others = others
        self._images = images
        self._binaries = binaries
        self._network = network
        self._group = f"{network.run_name}-{place.name}"

    async def serve(self) -> None:
        """Run it until cancelled.

        Raises:
            RuntimeError: it has ended by itself.
        """
        place = self._place
        write(place)
        await self._fill_store()
        lost = place.directory / LOST
        try:
            while True:
                while lost.exists():
                    await asyncio.sleep(_LOOK_SECONDS)
                await self._run_until_lost(lost)
        finally:
            await run("rm", "-rf", str(place.store), str(place.directory / "kubelet"), check=False)

    async def _run_until_lost(self, lost: Path) -> None:
        """Start it, and end it when the file is there."""
        process = await self._start()
        try:
            await self._join_network(process.pid)
            assert process.stdin is not None
            process.stdin.write(b"\n")
            while not lost.exists():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _LOOK_SECONDS)
                    raise RuntimeError(f"the node {self._place.name} has ended; see {self._place.directory}")
        finally:
            # All at once, as a machine that loses its power.
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.wait()
            await asyncio.to_thread(control_groups.remove, self._group)

    async def _start(self) -> asyncio.subprocess.Process:
        control_groups.remove(self._group)
        groups = control_groups.make(self._group)
        place = self._place
        command = [str(_FIRST), place.name, str(place.directory), str(self._binaries)]
        with (place.directory / "node.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *bound(["sh", "-c", _JOIN, "sh", *map(str, groups), "--", "unshare", *_NAMESPACES, "--", *command]),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def _join_network(self, process_id: int) -> None:
        children = Path(f"/proc/{process_id}/task/{process_id}/children")
        while not (found := children.read_text().split()):
            await asyncio.sleep(0.02)
        await self._network.attach(int(found[0]), self._place.address)
        inside = "".join(f"route replace {other.pods} via {other.address}\n" for other in self._others)
        await run("nsenter", f"--net=/proc/{found[0]}/ns/net", "ip", "-batch", "-", text=inside)

    async def _fill_store(self) -> None:
        """Give its containerd the images: the same files, which nothing writes to, and databases of its own."""
        store = self._place.store
        await run("rm", "-rf", str(store))
        store.parent.mkdir(parents=True, exist_ok=True)
        await run("cp", "--archive", "--link", str(self._images), str(store))
        for database in store.glob("*/*.db"):
            original = self._images / database.relative_to(store)
            database.unlink()
            shutil.copyfile(original, database)
            os.chmod(database, 0o600)
