"""What kopf calls: every change of a Compute or of a child becomes a look at the Compute. Nothing is decided here.

Only event handlers are used. Handlers of other kinds would make kopf keep its progress in annotations and put
finalizers on Computes, so that no Compute could be deleted while no operator runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import uuid
from typing import Any

import kopf

from skyproxy_operator.cluster import Cluster
from skyproxy_operator.controller import Controller
from skyproxy_operator.http_server import HttpServer
from skyproxy_operator.leadership import Leadership, LeaseLostError
from skyproxy_operator.names import COMPUTE_LABEL, GROUP, PLURAL, VERSION
from skyproxy_operator.options import Options, load
from skyproxy_operator.probing import Prober

logger = logging.getLogger("skyproxy.operator")

REGISTRY = kopf.get_default_registry()
"""The handlers below; importing this module is what fills it."""

_LABEL = {COMPUTE_LABEL: kopf.PRESENT}


class Operator:
    """The parts of the process, from its beginning to its end."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.controller: Controller | None = None
        self._cluster: Cluster | None = None
        self._prober = Prober(options.probe_timeout_seconds)
        self._http = HttpServer(options.http_host, options.http_port, self._alive, self._ready)
        self._work: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connects, and begins to work when it is our turn."""
        options = self._options
        self._cluster = cluster = await Cluster.connect(options.request_timeout_seconds)
        self.controller = controller = Controller(cluster, self._prober, options)
        host = os.environ.get("HOSTNAME") or socket.gethostname()
        leadership = Leadership(cluster, options, f"{host}_{options.lease_identity or uuid.uuid4().hex[:8]}")
        self._work = asyncio.create_task(leadership.run(controller.run), name="skyproxy-operator")
        self._work.add_done_callback(_ended)
        if options.http_host:
            await self._http.start()
            logger.info("health and metrics on port %d", self._http.port)

    async def stop(self) -> None:
        """Ends the work and all connections."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
        await self._http.close()
        await self._prober.close()
        if self._cluster is not None:
            await self._cluster.close()

    def _alive(self) -> bool:
        return self._work is not None and not self._work.done()

    def _ready(self) -> bool:
        return self._alive() and self.controller is not None

    def touch(self, namespace: str | None, name: str, *, children: bool = False) -> None:
        """Something happened to a Compute or to what belongs to it."""
        if self.controller is not None and namespace:
            self.controller.touch((namespace, name), children=children)


def _ended(work: asyncio.Task[None]) -> None:
    """Without its work the process is of no use. In a cluster it is started again, and takes its turn."""
    if work.cancelled():
        return
    error = work.exception()
    if isinstance(error, LeaseLostError):
        logger.error("%s; this operator ends", error)
    elif error is not None:
        logger.error("the operator failed", exc_info=error)
    os.kill(os.getpid(), signal.SIGTERM)


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, memo: Any, **_: object) -> None:
    """Before anything is watched."""
    # What happens to a pod of someone else is nothing to us, so the server should not send it.
    for kind in ("pods", "services", "networkpolicies", "persistentvolumeclaims"):
        settings.watching.label_selectors[kind] = COMPUTE_LABEL
    settings.posting.enabled = False
    # Secrets are in the answers that this logger writes at its most talkative.
    logging.getLogger("kubernetes_asyncio.client.rest").setLevel(logging.INFO)
    # A line for each event that says that nothing was wrong with it.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    memo.operator = Operator(load())
    await memo.operator.start()


@kopf.on.cleanup()
async def stop(memo: Any, **_: object) -> None:
    """After everything."""
    if hasattr(memo, "operator"):
        await memo.operator.stop()


@kopf.on.event(GROUP, VERSION, PLURAL)
async def compute_changed(namespace: str | None, name: str, memo: Any, **_: object) -> None:
    """A Compute came, changed or went; or we have just begun to watch."""
    memo.operator.touch(namespace, name)


@kopf.on.event("v1", "pods", labels=_LABEL)
async def pod_changed(namespace: str | None, labels: Any, memo: Any, **_: object) -> None:
    """A pod of a Compute came, changed or went."""
    memo.operator.touch(namespace, labels[COMPUTE_LABEL])


@kopf.on.event("v1", "services", labels=_LABEL)
@kopf.on.event("v1", "persistentvolumeclaims", labels=_LABEL)
@kopf.on.event("networking.k8s.io", "v1", "networkpolicies", labels=_LABEL)
async def child_changed(type: str | None, namespace: str | None, labels: Any, memo: Any, **_: object) -> None:
    """Another child of a Compute went, or was changed by someone."""
    if type in ("MODIFIED", "DELETED"):
        memo.operator.touch(namespace, labels[COMPUTE_LABEL], children=True)
