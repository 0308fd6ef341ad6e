"""Handlers that kopf calls: every change of a Compute or of a child becomes a look at the Compute. Nothing is decided.

kopf begins, ends and logs; it watches nothing. Its watches do not tell what went while they were interrupted, so what
it would keep of them could be wrong forever; `informer.py` has ours. Its handlers of changes would moreover put
finalizers on Computes, so that no Compute could be deleted while no operator runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import kopf

from skyproxy_operator.cluster import ClusterConnection
from skyproxy_operator.controller import Controller
from skyproxy_operator.http_server import HttpServer
from skyproxy_operator.informer import RUNTIME, View, compute_of, view_of
from skyproxy_operator.leadership import Leadership, LeaseLostError
from skyproxy_operator.options import Options, load
from skyproxy_operator.probing import Prober

Object = dict[str, Any]

logger = logging.getLogger("skyproxy.operator")

REGISTRY = kopf.get_default_registry()
"""The handlers below; importing this module is what fills it."""


class Operator:
    """The parts of the process, from its beginning to its end."""

    def __init__(self, options: Options, namespaces: Sequence[str] = ()) -> None:
        """Make an operator.

        Args:
            options: those of the installation.
            namespaces: those to look after; empty for all.
        """
        self._options = options
        self._namespaces = namespaces
        self.controller: Controller | None = None
        self._cluster: ClusterConnection | None = None
        self._prober = Prober(options.probe_timeout_seconds)
        self._http = HttpServer(options.http_host, options.http_port, self._is_alive, self._is_ready)
        self._view: View | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Connects, and begins to work when it is our turn."""
        options = self._options
        self._cluster = cluster = await ClusterConnection.connect(options.request_timeout_seconds)
        view = self._view = view_of(cluster, self._namespaces, self.changed, options.lease_namespace)
        self.controller = controller = Controller(cluster, view, self._prober, options)
        host = os.environ.get("HOSTNAME") or socket.gethostname()
        leadership = Leadership(cluster, options, f"{host}_{options.lease_identity or uuid.uuid4().hex[:8]}")
        self._tasks = [
            asyncio.create_task(view.run(), name="skyproxy-view"),
            asyncio.create_task(leadership.run(partial(controller.run, view.catch_up)), name="skyproxy-operator"),
        ]
        for task in self._tasks:
            task.add_done_callback(_check_end)
        if options.http_host:
            await self._http.start()
            logger.info("health and metrics on port %d", self._http.port)

    async def stop(self) -> None:
        """Ends the work and all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()
        await self._prober.close()
        if self._cluster is not None:
            await self._cluster.close()

    def _is_alive(self) -> bool:
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    def _is_ready(self) -> bool:
        return self._is_alive() and self.controller is not None

    def changed(self, kind: str, change: str, item: Object, listed: bool) -> None:
        """Look at a Compute to which something happened, or that was listed.

        Args:
            kind: of what has changed.
            change: ADDED, MODIFIED or DELETED.
            item: as it is now, or was at last.
            listed: it came with a list, so it may have been so for long.
        """
        key = item["metadata"]["namespace"], compute_of(item)
        if self.controller is None:
            return
        if kind == RUNTIME and self._view is not None:
            for place in self._view.computes():
                if ((self._view.compute(*place) or {}).get("spec") or {}).get("runtime") == item["metadata"]["name"]:
                    self.controller.touch(place, routine=True)
        elif kind in ("Compute", "Pod"):
            self.controller.touch(key, routine=listed and change != "DELETED")
        elif change != "ADDED":
            # A child of ours that has just been created is as it should be.
            self.controller.touch(key, children=True)


def _check_end(work: asyncio.Task[None]) -> None:
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
    settings.posting.enabled = False
    settings.scanning.disabled = True
    # Secrets are in the answers that this logger writes at its most talkative.
    logging.getLogger("kubernetes_asyncio.client.rest").setLevel(logging.INFO)
    # A line for each event that says that nothing was wrong with it.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    memo.operator = Operator(load(), getattr(memo, "namespaces", ()))
    await memo.operator.start()


@kopf.on.cleanup()
async def stop(memo: object, **_: object) -> None:
    """After everything."""
    if hasattr(memo, "operator"):
        await memo.operator.stop()
