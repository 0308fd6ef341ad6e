"""Giving a Compute another token while it runs, so that no client is cut off on the way.

The Secret gets the new token, and keeps the former one beside it. The kubelet brings the new one to the worker a moment
later; the worker then takes both for a while. Until then clients are told apart by asking: see `reach`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from skyproxy.errors import AuthenticationError, ClusterError, ConfigurationError, ConnectError
from skyproxy.kubernetes.client import ClusterClient
from skyproxy.kubernetes.explain import explain
from skyproxy.kubernetes.reach import FORMER, ROTATED, reach
from skyproxy.transport.worker_report import ask_worker

_MERGE = "application/merge-patch+json"
_LOOK_SECONDS = 1.0


async def rotate_token(
    client: ClusterClient,
    name: str,
    *,
    timeout_seconds: float | None,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Give a Compute a new token, and wait until its workers take it.

    Args:
        client: for the cluster.
        name: of the Compute.
        timeout_seconds: how long to wait; None does not.
        say: told what is being waited for.

    Raises:
        ConfigurationError: there is no such Compute, or its last rotation is still on its way.
        ClusterError: the Secret cannot be changed, or the workers did not take the new token in time.
    """
    compute = await client.get(name)
    if compute is None:
        raise ConfigurationError(f"there is no worker {name!r} in {client.address}. See: skyproxy list")
    running = explain(compute, [], []).ready
    secret_path = f"/api/v1/namespaces/{client.namespace}/secrets/{name}-token"
    secret = await client.request("GET", secret_path)
    data = secret.get("data") or {}
    former = base64.b64decode(data.get("token", "")).decode().strip()
    if running and FORMER in data and not await _is_token_taken(client, compute, former):
        raise ConfigurationError(
            f"{name} has not accepted its last new token yet, and another one would lock out clients that have "
            "the previous one. Wait a minute and try again."
        )
    now = datetime.now(UTC).isoformat(timespec="seconds")
    token = secrets.token_urlsafe(32)
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in (("token", token), (FORMER, former))}
    # With the version that we read: if two rotate at the same time, one is refused.
    metadata = {"resourceVersion": secret["metadata"].get("resourceVersion"), "annotations": {ROTATED: now}}
    body = {"metadata": metadata, "data": encoded}
    await client.request("PATCH", secret_path, body=body, content_type=_MERGE)
    if not running:
        return
    # A change of its Pod makes a kubelet look at once, which it does every minute or so otherwise.
    with contextlib.suppress(ClusterError):
        for pod in await client.pods(name):
            path = f"/api/v1/namespaces/{client.namespace}/pods/{pod['metadata']['name']}"
            await client.request("PATCH", path, body={"metadata": {"annotations": {ROTATED: now}}}, content_type=_MERGE)
    if timeout_seconds is None:
        return
    say(f"{name} has a new token; waiting until its workers have read it")
    try:
        async with asyncio.timeout(timeout_seconds):
            while not await _is_token_taken(client, compute, token):
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        raise ClusterError(
            f"{name} has a new token, and its workers have not read it after {timeout_seconds:g} s; clients use "
            f"the previous one until they do. See: skyproxy logs {name}"
        ) from None


async def _is_token_taken(client: ClusterClient, compute: dict[str, Any], token: str) -> bool:
    """Return whether every process of a Compute takes a token; one that cannot be asked counts as one that does not."""
    spec = compute.get("spec") or {}
    for node in range(int(spec.get("nodes", 1))):
        for local_rank in range(int(spec.get("procsPerNode", 1))):
            way = await reach(client, compute, node=node, local_rank=local_rank, settled=True)
            try:
                await asyncio.to_thread(
                    ask_worker, way.url, token, certificate=way.certificate, server_name=way.server_name
                )
            except (AuthenticationError, ConnectError):
                return False
            finally:
                await asyncio.to_thread(way.close)
    return True
