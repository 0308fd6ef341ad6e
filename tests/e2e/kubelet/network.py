"""The Pods' network: a bridge on this machine, a network namespace a Pod, Service addresses, names in /etc/hosts."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import logging
from collections import defaultdict
from pathlib import Path

from tests.e2e.control_plane.addresses import Slot
from tests.e2e.kubelet.api import Api, Object, key

logger = logging.getLogger("kubelet.network")


async def run(*argv: str, text: str = "", check: bool = True) -> int:
    """Runs a program with `text` as its input.

    Raises:
        RuntimeError: it failed and `check` is set; with what it wrote.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate(text.encode())
    if check and process.returncode:
        raise RuntimeError(f"{' '.join(argv)} failed ({process.returncode}): {output.decode(errors='replace')}")
    return process.returncode or 0


class Network:
    """The bridge and the addresses of Pods. Use it as an async context manager.

    Attributes:
        run_name: what belongs to this run on this machine begins with it.
        gateway: this machine's address on the bridge.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self.run_name = slot.bridge
        hosts = ipaddress.ip_network(slot.pods).hosts()
        self.gateway = str(next(hosts))
        self._length = ipaddress.ip_network(slot.pods).prefixlen
        # Oldest first: an address is not used again while somebody may still take it for the Pod that had it.
        self._free = list(map(str, hosts))
        self._links = itertools.count(1)

    async def __aenter__(self) -> Network:
        bridge = self._slot.bridge
        # Left by a run that was killed; the slot is ours, so nobody uses it.
        await run("ip", "link", "del", bridge, check=False)
        batch = [
            # With an address of its own: else it takes that of a port, another one when the port goes, and Pods would
            # send to the old one for a minute.
            f"link add {bridge} address 02:00:c6:12:00:{self._slot.index:02x} type bridge",
            f"addr add {self.gateway}/{self._length} dev {bridge}",
            f"link set {bridge} up",
        ]
        await run("ip", "-batch", "-", text="\n".join(batch) + "\n")
        return self

    async def __aexit__(self, *_: object) -> None:
        await run("ip", "link", "del", self._slot.bridge, check=False)

    async def attach(self, process_id: int, address: str = "") -> str:
        """Joins the network namespace of a process to the bridge.

        Args:
            process_id: any in the namespace.
            address: which to give it, from the caller's own part of the range; the next free one otherwise.

        Returns:
            The address it got.
        """
        address = address or self._free.pop(0)
        link = f"{self._slot.bridge}p{next(self._links)}"
        outside = [
            f"link add {link} type veth peer name eth0 netns {process_id}",
            f"link set {link} master {self._slot.bridge} up",
        ]
        inside = [
            "link set lo up",
            f"addr add {address}/{self._length} dev eth0",
            "link set eth0 up",
            f"route add default via {self.gateway}",
        ]
        await run("ip", "-batch", "-", text="\n".join(outside) + "\n")
        await run("nsenter", f"--net=/proc/{process_id}/ns/net", "ip", "-batch", "-", text="\n".join(inside) + "\n")
        return address

    def release(self, address: str) -> None:
        """Gives an address back; the link has gone with the namespace."""
        self._free.append(address)

    async def add_service_address(self, address: str) -> None:
        """Makes a Service's address one of this machine."""
        await run("ip", "addr", "add", f"{address}/32", "dev", self._slot.bridge, check=False)

    async def remove_service_address(self, address: str) -> None:
        """The opposite."""
        await run("ip", "addr", "del", f"{address}/32", "dev", self._slot.bridge, check=False)


async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Moves bytes until the source ends, then ends the target."""
    try:
        while chunk := await source.read(1 << 16):
            target.write(chunk)
            await target.drain()
        if target.can_write_eof():
            target.write_eof()
    except OSError:
        target.close()


class ServiceProxy:
    """What kube-proxy and the cluster's DNS do: Service addresses lead to ready Pods, names are in the hosts files."""

    def __init__(self, api: Api, network: Network, slot: Slot, directory: Path) -> None:
        self._api = api
        self._network = network
        self._api_service = slot.api_service
        self._api_server = (slot.loopback, 6443)
        self._directory = directory
        self._services: dict[tuple[str, str], Object] = {}
        self._endpoints: dict[tuple[str, str], Object] = {}
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._addresses: set[str] = set()
        self._turn = itertools.count()
        self._applying = asyncio.Lock()
        self._files: dict[Path, tuple[str, str]] = {}  # namespace and own line of each hosts file
        directory.mkdir(parents=True, exist_ok=True)

    async def follow(self) -> None:
        """Keeps addresses and names in step, for ever."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow("/api/v1/services", self._services))
                tasks.create_task(self._follow("/api/v1/endpoints", self._endpoints))
        finally:
            for server in self._servers.values():
                server.close()

    async def _follow(self, path: str, table: dict[tuple[str, str], Object]) -> None:
        async for kind, item in self._api.watch(path):
            if kind == "DELETED":
                table.pop(key(item), None)
            else:
                table[key(item)] = item
            async with self._applying:
                await self._apply()

    async def _apply(self) -> None:
        wanted: dict[tuple[str, int], tuple[tuple[str, str], str]] = {}
        for name, service in self._services.items():
            address = service["spec"].get("clusterIP", "None")
            if address and address != "None":
                for port in service["spec"].get("ports", []):
                    wanted[address, port["port"]] = (name, port.get("name", ""))
        for address in {at for at, _ in wanted} - self._addresses:
            self._addresses.add(address)
            await self._network.add_service_address(address)
        for place in self._servers.keys() - wanted.keys():
            if server := self._servers.pop(place, None):
                server.close()
        for place in wanted.keys() - self._servers.keys():
            service, port_name = wanted[place]
            try:
                self._servers[place] = await asyncio.start_server(
                    lambda r, w, s=service, p=port_name: self._serve(s, p, r, w), *place
                )
            except OSError as error:
                logger.warning("service %s at %s: %s", service, place, error)
        for address in self._addresses - {at for at, _ in wanted}:
            self._addresses.discard(address)
            await self._network.remove_service_address(address)
        self._write_hosts()

    def targets(self, service: tuple[str, str], port_name: str) -> list[tuple[str, int]]:
        """Where connections to a port of a Service may go."""
        if service == ("default", "kubernetes"):
            return [self._api_server]
        return [
            (address["ip"], port["port"])
            for subset in self._endpoints.get(service, {}).get("subsets") or []
            for port in subset.get("ports") or []
            if port.get("name", "") == port_name
            for address in subset.get("addresses") or []
        ]

    async def _serve(
        self, service: tuple[str, str], port_name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        targets = self.targets(service, port_name)
        with contextlib.suppress(OSError):
            if targets:
                host, port = targets[next(self._turn) % len(targets)]
                other_reader, other_writer = await asyncio.open_connection(host, port)
                await asyncio.gather(pump(reader, other_writer), pump(other_reader, writer))
                other_writer.close()
        writer.close()

    def hosts_file(self, namespace: str, name: str, address: str) -> Path:
        """The file that is /etc/hosts in a Pod; it is rewritten in place."""
        path = self._directory / f"{namespace}_{name}"
        if path not in self._files:
            self._files[path] = (namespace, f"{address} {name}")
            path.touch()
            self._write_hosts()
        return path

    def forget_hosts_file(self, namespace: str, name: str) -> None:
        """Removes the file of a Pod that is gone."""
        path = self._directory / f"{namespace}_{name}"
        self._files.pop(path, None)
        path.unlink(missing_ok=True)

    @property
    def resolver_file(self) -> Path:
        """What is /etc/resolv.conf in Pods: there is no name server, and looking for one should not take seconds."""
        path = self._directory / "resolv.conf"
        if not path.exists():
            path.write_text("nameserver 127.0.0.1\n", encoding="utf-8")
        return path

    def _write_hosts(self) -> None:
        names: dict[str, list[tuple[str, str]]] = defaultdict(list)  # address, short name; by namespace
        for (namespace, name), service in self._services.items():
            address = service["spec"].get("clusterIP", "None")
            if address and address != "None":
                names[namespace].append((address, name))
                continue
            for subset in self._endpoints.get((namespace, name), {}).get("subsets") or []:
                for entry in subset.get("addresses") or []:
                    names[namespace].append((entry["ip"], name))
                    if entry.get("hostname"):
                        names[namespace].append((entry["ip"], f"{entry['hostname']}.{name}"))
        for path, (own, line) in self._files.items():
            text = ["127.0.0.1 localhost", line]
            for namespace, entries in names.items():
                for address, name in entries:
                    full = f"{name}.{namespace}"
                    short = [name] if namespace == own else []
                    text.append(" ".join([address, f"{full}.svc.cluster.local", f"{full}.svc", full, *short]))
            content = "\n".join(text) + "\n"
            if path.read_text(encoding="utf-8") != content:
                path.write_text(content, encoding="utf-8")
