"""Ways to reach a worker in a cluster: its Service from inside, its gateway's URL, or a port-forward of our own."""

from __future__ import annotations

import asyncio
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from skyproxy.errors import AuthenticationError, ClusterError, ConfigurationError, ConnectError, visible
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.kubernetes.api_server import GROUP, Manifest
from skyproxy.kubernetes.client import ClusterClient
from skyproxy.kubernetes.port_forward import PortForward
from skyproxy.transport.worker_report import ask_worker

__all__ = ["ClusterAddress", "Way", "reach", "reach_in_thread", "run_apart"]

logger = logging.getLogger("skyproxy.kubernetes")

DEFAULT_PORT = 8765
FORMER = "former"
"""In the Secret with the token: the one before it, after a rotation."""
ROTATED = f"{GROUP}/rotated"
"""On that Secret and on Pods: when the token was last replaced."""
VIA = ("auto", "service", "gateway", "port-forward")
_PROBE_SECONDS = 5.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class Way:
    """A way to one worker process.

    Attributes:
        url: for this machine.
        token: what the worker wants to hear.
        certificate: the authorities to trust (PEM); None for the system's.
        server_name: the name in its certificate, where the url says another.
        via: "service", "gateway" or "port-forward".
        close: ends what the way goes through; idempotent.
        check: raises ConnectError while the way is away; None, for it never says so.
    """

    url: str
    token: str = field(repr=False)
    certificate: str | None = field(default=None, repr=False)
    server_name: str | None = None
    via: str = "service"
    close: Callable[[], None] = field(default=lambda: None, repr=False)
    check: Callable[[], object] | None = field(default=None, repr=False)


def _takes(way: Way) -> bool:
    """Return whether the worker takes the token of a way; one that cannot be asked at all is taken to do so."""
    try:
        ask_worker(way.url, way.token, certificate=way.certificate, server_name=way.server_name)
    except AuthenticationError:
        return False
    except (ConfigurationError, ConnectError):
        return True
    return True


async def reach(
    client: ClusterClient,
    compute: Manifest,
    *,
    node: int = 0,
    local_rank: int = 0,
    via: str = "auto",
    local_port: int = 0,
    settled: bool = False,
) -> Way:
    """A way to a worker process of a Compute that runs.

    Args:
        client: for the cluster.
        compute: the object as the server has it.
        node: which of its nodes.
        local_rank: which process of the node; each has a port of its own.
        via: one of `VIA`; "auto" takes the Service from inside the cluster, else a gateway that answers, else a
            port-forward.
        local_port: where a port-forward listens; 0 takes a free one.
        settled: whether to take the Secret's token in any case. Else, after a rotation, the worker is asked whether it
            takes the new one already.

    Raises:
        ConnectError: the way that was asked for does not exist.
        ClusterError: the token cannot be read.
    """
    name, namespace = compute["metadata"]["name"], compute["metadata"].get("namespace", client.namespace)
    token, former, authority = await _credentials(client, name)
    way = await _way(client, compute, token, authority, name, namespace, node, local_rank, via, local_port)
    if former and not settled and not await asyncio.to_thread(_takes, way):
        # The kubelet has not brought the new one there yet. Once it has, the worker takes both for a while.
        logger.info("the worker %s does not accept its new token yet; using the previous one", name)
        return replace(way, token=former)
    return way


async def _way(
    client: ClusterClient,
    compute: Manifest,
    token: str,
    authority: str | None,
    name: str,
    namespace: str,
    node: int,
    local_rank: int,
    via: str,
    local_port: int,
) -> Way:
    status = compute.get("status", {})
    port = int(compute.get("spec", {}).get("port", DEFAULT_PORT)) + local_rank
    scheme = "wss" if authority else "ws"
    # The certificate is made for the Service, whichever way we come.
    server_name = f"{name}.{namespace}.svc" if authority else None
    if via == "service" or (via == "auto" and client.address.in_cluster):
        host = f"{name}.{namespace}.svc" if node == 0 else f"{name}-{node}.{name}-nodes.{namespace}.svc"
        return Way(f"{scheme}://{host}:{port}", token, authority, server_name, "service")
    external = str(status.get("externalUrl") or "")
    if via in ("auto", "gateway") and external and (node, local_rank) == (0, 0):
        if via == "gateway" or await asyncio.to_thread(_answers, external):
            return Way(external, token, None, None, "gateway")
        logger.warning("the gateway at %s does not answer; using a port-forward", visible(external))
    elif via == "gateway":
        raise ConnectError(f"{name} has no gateway url. Leave --via out, or enable spec.gateway of the Compute.")
    pod = next((row["podName"] for row in status.get("nodes", ()) if row.get("rank") == node), f"{name}-{node}")
    forward = await asyncio.to_thread(PortForward, client.address, pod, port, local_port=local_port)
    return Way(f"{scheme}://127.0.0.1:{forward.port}", token, authority, server_name, "port-forward", forward.close)


async def _credentials(client: ClusterClient, name: str) -> tuple[str, str, str | None]:
    """The token, the one before it or nothing, and the authority that signed the worker's certificate if it has one."""
    secret = await client.secret(f"{name}-token")
    token, former = secret.get("token", "").strip(), secret.get(FORMER, "").strip()
    if not token:
        raise ClusterError(
            f"the Secret {name}-token holds no token. Start the worker again, after: skyproxy down {name}"
        )
    try:
        return token, former, (await client.secret(f"{name}-tls")).get("ca.crt")
    except ClusterError as error:
        if error.status != 404:
            raise
        return token, former, None


def _answers(url: str) -> bool:
    """Return whether the worker behind a gateway says that it is ready."""
    if not url.startswith(("ws://", "wss://")):
        return False  # a status says so, and there are addresses that mean files of this machine
    address = url.replace("wss://", "https://", 1).replace("ws://", "http://", 1).rstrip("/") + "/readyz"
    try:
        with urllib.request.urlopen(address, timeout=_PROBE_SECONDS) as answer:
            return int(answer.status) == 200
    except (OSError, urllib.error.URLError, ValueError):
        return False


async def reach_by_name(address: ClusterAddress, name: str, *, via: str = "auto") -> Way:
    """A way to the first process of a Compute.

    Raises:
        ConnectError: there is no such Compute, or it does not run; says why.
    """
    from skyproxy.kubernetes.explain import explain

    async with ClusterClient(address) as client:
        compute = await client.get(name)
        if compute is None:
            raise ConnectError(
                f"there is no worker {name!r} in {client.address}. See: skyproxy list; or start it: skyproxy up {name}"
            )
        found = explain(compute, await client.pods(name), [])
        if not found.ready:
            raise ConnectError(f"the worker {name!r} is not ready: {found.text}. See: skyproxy status {name}")
        return await reach(client, compute, via=via)


async def credentials_by_name(address: ClusterAddress, name: str) -> tuple[str, str | None]:
    """Return the token of a Compute as its Secret has it now, and the authority of its certificate if it has one.

    Raises:
        ClusterError: they cannot be read.
    """
    async with ClusterClient(address) as client:
        token, _, authority = await _credentials(client, name)
        return token, authority


def reach_in_thread(address: ClusterAddress, name: str, *, via: str = "auto") -> Way:
    """`reach_by_name` for code that may or may not run on an event loop."""
    return run_apart(reach_by_name(address, name, via=via))


def run_apart(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine to its end on a loop and a thread of its own; blocks."""
    outcome: list[_T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(work))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="skyproxy-cluster", daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
