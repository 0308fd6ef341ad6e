"""Ways to a worker: plain or TLS, directly or through the delaying proxy, with yardsticks that take the same way."""

from __future__ import annotations

import contextlib
import os
import secrets
import ssl
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _figures import Row, Table, Target
from _helper_process import HelperProcess
from _scale import Scale
from _yardsticks import Yardsticks, YardstickServers
from delay_proxy import Conditions

import skyproxy


@dataclass(frozen=True)
class LinkSpec:
    """What lies between this process and the worker.

    Attributes:
        name: as tables show it.
        tls: whether it is wss://.
        conditions: of the proxy between; None for a direct connection over loopback.
    """

    name: str
    tls: bool = False
    conditions: Conditions | None = None

    @property
    def rtt_seconds(self) -> float:
        """The round-trip time that the proxy adds."""
        return self.conditions.rtt_seconds if self.conditions is not None else 0.0


DIRECT = LinkSpec("ws")
TLS = LinkSpec("wss", tls=True)
RECHUNKED = LinkSpec("ws, re-chunked", conditions=Conditions(rechunk=True))
HOME = LinkSpec("ws, 20 ms, 50/200 Mbit/s", conditions=Conditions(0.020, mbit_up=50, mbit_down=200))


def delayed(rtt_ms: float) -> LinkSpec:
    """A link of that round-trip time; of 0, a direct one."""
    return LinkSpec(f"ws, {rtt_ms:g} ms", conditions=Conditions(rtt_ms / 1e3)) if rtt_ms else DIRECT


@dataclass
class Bench:
    """What every benchmark works with.

    Attributes:
        link: the way to the worker.
        device: the remote device, "sky:0".
        local: what it is compared with, "cpu" or "cuda".
        process_ids: our own and the worker's.
        yardsticks: bare round trips and raw transfers the same way.
        scale: how much to do.
        table: where figures go.
    """

    link: LinkSpec
    device: str
    process_ids: list[int]
    yardsticks: Yardsticks
    scale: Scale
    table: Table
    local: str = "cpu"

    @property
    def direct(self) -> bool:
        """Whether nothing lies between."""
        return self.link.conditions is None

    def add(
        self,
        group: str,
        name: str,
        unit: str,
        sky: list[float],
        other: list[float] | None = None,
        against: str = "",
        targets: tuple[Target, ...] = (),
    ) -> Row:
        """One figure of this link."""
        return self.table.add(Row(group, name, self.link.name, unit, sky, other, against, targets))

    def compare(
        self, group: str, name: str, unit: str, figures: dict[str, list[float]], targets: tuple[Target, ...] = ()
    ) -> Row:
        """One figure of this link against the local device, both from `interleaved` under "sky" and "local"."""
        against = "local CPU" if self.local == "cpu" else "local CUDA"
        return self.add(group, name, unit, figures["sky"], figures["local"], against, targets)

    def skip(self, name: str, reason: str) -> None:
        """Notes what this link has no figure for."""
        self.table.skip(name, self.link.name, reason)

    def synchronize(self) -> None:
        """Waits until the worker and the local device are done."""
        torch.sky.synchronize(self.device)
        if self.local == "cuda":
            torch.cuda.synchronize()


class Certificate:
    """A self-signed authority made on the spot, and a certificate of it for loopback.

    Attributes:
        file: PEM, certificate and key.
        client_context: trusts it.
    """

    def __init__(self, folder: Path) -> None:
        """Raises:
        ModuleNotFoundError: `trustme` is not installed.
        """
        import trustme

        authority = trustme.CA()
        self.file = str(folder / "worker.pem")
        authority.issue_cert("127.0.0.1", "localhost").private_key_and_cert_chain_pem.write_to_path(self.file)
        self.client_context = ssl.create_default_context()
        authority.configure_trust(self.client_context)


@dataclass
class _Far:
    """A worker and the yardsticks' servers, all plain or all with TLS."""

    url_port: int
    token: str
    process_id: int
    servers: YardstickServers


class Workers:
    """Starts one plain and one TLS worker when they are first needed, and opens links to them."""

    def __init__(self, device: str = "cpu") -> None:
        """Args:
        device: what the workers offer: "cpu" or "cuda".
        """
        self._device = device
        self._ends: list[Callable[[], Any]] = []
        self._folder = tempfile.TemporaryDirectory()
        self._far: dict[bool, _Far] = {}
        self._certificate: Certificate | None = None

    @property
    def certificate(self) -> Certificate:
        """Made when it is first needed."""
        if self._certificate is None:
            self._certificate = Certificate(Path(self._folder.name))
        return self._certificate

    def _worker(self, tls: bool) -> _Far:
        if tls not in self._far:
            self._far[tls] = self._start(tls)
        return self._far[tls]

    def _start(self, tls: bool) -> _Far:
        file, token = self.certificate.file if tls else None, secrets.token_urlsafe(32)
        # As skyproxy starts an embedded worker: the token goes through standard input, and it ends when we do.
        command = ["-P", "-m", "skyproxy_server", "--embedded", "--host", "127.0.0.1", "--port", "0"]
        command += ["--device", self._device, "--log-level", "warning", *(["--tls-cert", file] if file else [])]
        worker = HelperProcess(*command, first_line=token)
        self._ends.append(worker.close)
        servers = YardstickServers(file)
        self._ends.append(servers.close)
        return _Far(worker.announced["port"], token, worker.process_id, servers)

    @contextlib.contextmanager
    def open(self, spec: LinkSpec, scale: Scale, table: Table, local: str = "cpu") -> Iterator[Bench]:
        """Connects to the worker as `spec` says; the connection ends with the block.

        Raises:
            ModuleNotFoundError: a TLS link needs `trustme`, and it is not installed.
        """
        far = self._worker(spec.tls)
        context = self.certificate.client_context if spec.tls else None
        with contextlib.ExitStack() as stack:
            ports = [far.url_port, far.servers.echo_port, far.servers.raw_port]
            if spec.conditions is not None:
                ports = stack.enter_context(proxied(ports, spec.conditions)).announced["ports"]
            url = f"{'wss' if spec.tls else 'ws'}://127.0.0.1:{ports[0]}"
            node = stack.enter_context(
                skyproxy.connect(url, token=far.token, ssl_context=context, source=f"benchmark over {spec.name}")
            )
            yardsticks = Yardsticks(ports[1], ports[2], context)
            stack.callback(yardsticks.close)
            device = str(node.device(self._device))
            yield Bench(spec, device, [os.getpid(), far.process_id], yardsticks, scale, table, local)

    def close(self) -> None:
        """Ends the workers and everything around them."""
        while self._ends:
            self._ends.pop()()
        self._folder.cleanup()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def proxied(ports: list[int], conditions: Conditions) -> HelperProcess:
    """A delaying proxy in a process of its own, before ports on loopback; its own are `announced["ports"]`."""
    command = ["delay_proxy.py", "--rtt-ms", str(conditions.rtt_seconds * 1e3), "--seed", str(conditions.seed)]
    for port in ports:
        command += ["--to", f"127.0.0.1:{port}"]
    for option, value in (("--mbit-up", conditions.mbit_up), ("--mbit-down", conditions.mbit_down)):
        if value is not None:
            command += [option, str(value)]
    if conditions.rechunk:
        command.append("--rechunk")
    return HelperProcess(*command)


__all__ = ["DIRECT", "HOME", "RECHUNKED", "TLS", "Bench", "Certificate", "LinkSpec", "Workers", "delayed", "proxied"]
