"""The objects of the API server, kept here: each kind is listed once and then watched, so that a look costs no request.

Versions: resourceVersions are numbers that grow with every change of a cluster, and a stream of one kind brings its
changes in their order. So a store whose stream has come to version N shows everything up to N; what we wrote ourselves
and got a higher version for is laid over it until the stream has come there. No look sees less than this process did.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from skyproxy_operator.cluster import UNORDERED, UNREADABLE, ApiError, ClusterConnection, version_of
from skyproxy_operator.metrics import METRICS
from skyproxy_operator.names import API_VERSION, COMPUTE_LABEL, RUNTIME_LABEL
from skyproxy_operator.runtimes import RUNTIME_KEY

logger = logging.getLogger("skyproxy.operator")

Object = dict[str, Any]
Place = tuple[str, str]
"""Namespace and name."""
OnChange = Callable[[str, Object, bool], None]
"""Gets ADDED, MODIFIED or DELETED, the object, and whether it came with a list and not as a change."""

_FIRST_PAUSE_SECONDS = 0.5
_MAX_PAUSE_SECONDS = 30.0
_WATCH_SECONDS = 600
"""A watch ends after that long by itself, and goes on with another request."""
SILENCE_SECONDS = 150.0
"""A server sends bookmarks now and then; a watch without a word for so long may have lost its connection."""
_SHORTEST_WATCH_SECONDS = 1.0
_GONE = 410
_TOO_LARGE = 504
"""Some servers say so of a version that they do not have yet."""
_TRIES_OF_A_VERSION = 3
"""A server that can go on from a version at none of so many tries is asked for a list."""


def place_of(item: Mapping[str, Any]) -> Place:
    """Return the namespace and the name of an object."""
    return item["metadata"]["namespace"], item["metadata"]["name"]


class ObjectStore:
    """The objects of one stream. Pure: it is told what the server said, and what we wrote.

    Attributes:
        version: the stream has come so far; 0 before the first list.
    """

    def __init__(self, group_of: Callable[[Object], str], on_change: OnChange) -> None:
        """Make an empty store.

        Args:
            group_of: names what an object belongs to, such as its Compute.
            on_change: called for each change.
        """
        self.version = 0
        self._listed_version = 0
        self._group_of = group_of
        self._on_change = on_change
        self._items: dict[Place, Object] = {}
        self._groups: dict[Place, dict[Place, Object]] = {}
        self._written: dict[Place, Object] = {}

    def __len__(self) -> int:
        return len(self._items)

    def places(self) -> list[Place]:
        """Return where the objects are."""
        return list(self._items)

    def objects(self) -> list[Object]:
        """Return all objects, not to be changed."""
        return list(self._items.values())

    def get(self, namespace: str, name: str) -> Object | None:
        """Return an object, not to be changed; None where there is none."""
        place = namespace, name
        return self._written.get(place) or self._items.get(place)

    def group(self, namespace: str, name: str) -> list[Object]:
        """Return the objects of a group in a namespace, not to be changed, in the order of their names."""
        found = dict(self._groups.get((namespace, name), {}))
        for place, item in self._written.items():
            if place[0] == namespace and self._group_of(item) == name:
                found[place] = item
        return [found[place] for place in sorted(found)]

    def replace(self, items: list[Object], version: int) -> None:
        """Take a whole list: what it lacks is gone. One that cannot be understood changes nothing.

        Raises:
            ApiError: an object has no version.
            LookupError: one has no name.
        """
        for item in items:
            self._check(item)
        if version < self.version:
            # The server was set back, so what was written since is not there.
            self._written = {}
        before, self._items, self._groups = self._items, {}, {}
        for item in items:
            self._put(item)
        self._listed_version = version
        self._advance_to(version)
        for place, item in self._items.items():
            old = before.pop(place, None)
            if old is None or version_of(old) != version_of(item):
                self._on_change("ADDED" if old is None else "MODIFIED", item, True)
        for item in before.values():
            self._on_change("DELETED", item, True)

    def change(self, kind: str, item: Object) -> None:
        """Take a change from the stream: ADDED, MODIFIED, DELETED or BOOKMARK; older ones than the list are in it."""
        if kind not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK") or version_of(item) <= self._listed_version:
            return
        if kind != "BOOKMARK":
            self._check(item)
        if kind == "DELETED":
            self._remove(place_of(item))
        elif kind != "BOOKMARK":
            self._put(item)
        self._advance_to(max(version_of(item), self.version))
        if kind != "BOOKMARK":
            self._on_change(kind, item, False)

    def wrote(self, item: Object) -> None:
        """Remember what the server answered to a write of ours, as long as the stream has not come there."""
        if version_of(item) > self.version:
            self._written[place_of(item)] = item

    def _check(self, item: Object) -> None:
        """Raise what storing or telling of this object would raise, before anything is changed."""
        place_of(item)
        self._group_of(item)
        version_of(item)

    def _put(self, item: Object) -> None:
        place = place_of(item)
        self._remove(place)
        self._items[place] = item
        self._groups.setdefault((place[0], self._group_of(item)), {})[place] = item

    def _remove(self, place: Place) -> None:
        old = self._items.pop(place, None)
        if old is None:
            return
        key = place[0], self._group_of(old)
        self._groups[key].pop(place)
        if not self._groups[key]:
            del self._groups[key]

    def _advance_to(self, version: int) -> None:
        self.version = version
        if self._written:
            self._written = {place: item for place, item in self._written.items() if version_of(item) > version}


class Informer:
    """Keeps one store up to date: a list, then a watch that goes on where the last one ended."""

    def __init__(
        self,
        cluster: ClusterConnection,
        store: ObjectStore,
        api_version: str,
        kind: str,
        namespace: str | None = None,
        label: str = "",
    ) -> None:
        """Make an informer; `run` does the work.

        Args:
            cluster: who is asked.
            store: what is kept up to date.
            api_version: of the objects.
            kind: theirs.
            namespace: where; None for everywhere.
            label: a label that they bear; empty for all.
        """
        self.store = store
        self.kind = kind
        self.namespace = namespace
        self._cluster = cluster
        self._api_version = api_version
        self._query = {"labelSelector": label} if label else {}
        self._synced = asyncio.Event()
        self._failures = 0
        self._lost_at: float | None = None

    async def synced(self) -> None:
        """Wait until the store holds a list of now, or one that is being watched."""
        await self._synced.wait()

    def stale_seconds(self) -> float:
        """Return for how long nothing has kept the store up to date; 0 while something does."""
        return 0.0 if self._lost_at is None else time.monotonic() - self._lost_at

    async def catch_up(self) -> None:
        """Wait until the store shows everything that was there when this was called; the watch goes on meanwhile."""
        await self.synced()
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                items, version = await self._list()
            except Exception as exc:
                logger.warning("%s are not listed: %s", self.kind, exc)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)
            else:
                if version > self.store.version:
                    self.store.replace(items, version)
                return

    async def _list(self) -> tuple[list[Object], int]:
        METRICS.lists.labels(kind=self.kind).inc()
        return await self._cluster.list_version(self._api_version, self.kind, self.namespace, self._query)

    async def run(self) -> None:
        """Keep the store up to date until cancelled."""
        while True:
            try:
                await self._follow()
            except Exception as exc:
                await self._pause(exc)

    async def _follow(self) -> None:
        """List if the store may be behind what the server remembers, then watch as long as it goes well."""
        if not self._synced.is_set():
            self.store.replace(*await self._list())
            self._is_current()
            self._synced.set()
        while True:
            self._lost_at = self._lost_at or time.monotonic()
            begun = asyncio.get_running_loop().time()
            events = self._cluster.watch(
                self._api_version,
                self.kind,
                self.namespace,
                {**self._query, "resourceVersion": str(self.store.version), "timeoutSeconds": str(_WATCH_SECONDS)},
                silence_seconds=SILENCE_SECONDS,
                opened=self._is_current,
            )
            async with aclosing(events):
                async for event in events:
                    self._take(event)
            if asyncio.get_running_loop().time() - begun < _SHORTEST_WATCH_SECONDS:
                raise ApiError(f"watch of {self.kind}", 0, "Ended", "the server ended it at once")
            self._failures = 0

    def _take(self, event: Object) -> None:
        kind, item = str(event.get("type")), event.get("object") or {}
        if kind == "ERROR":
            code = int(item.get("code") or 0)
            raise ApiError(f"watch of {self.kind}", code, str(item.get("reason", "")), str(item.get("message", "")))
        if kind != "BOOKMARK":
            item = {"apiVersion": self._api_version, "kind": self.kind, **item}
        self.store.change(kind, item)
        self._failures = 0

    def _is_current(self) -> None:
        self._lost_at = None

    async def _pause(self, error: Exception) -> None:
        """Wait before the next try, longer each time; a version that the server has forgotten needs a list."""
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        if isinstance(error, ApiError) and self._needs_list(error):
            logger.info("%s are listed again: %s", self.kind, error)
            self._synced.clear()
        elif isinstance(error, ApiError):
            logger.warning("%s are not watched: %s", self.kind, error)
        else:
            logger.error("%s are not watched", self.kind, exc_info=error)
            self._synced.clear()
        pause = min(_FIRST_PAUSE_SECONDS * 2**self._failures, _MAX_PAUSE_SECONDS)
        self._failures = min(self._failures + 1, 16)
        await asyncio.sleep(pause)

    def _needs_list(self, error: ApiError) -> bool:
        """Tell whether another watch from the same version would bring the same error."""
        if error.status in (_GONE, _TOO_LARGE) or error.reason == UNORDERED:
            return True
        # What is on the way to the server, or its end, has nothing to do with a version.
        answered = error.status != 0 or error.reason == UNREADABLE
        return answered and self._failures + 1 >= _TRIES_OF_A_VERSION


class View:
    """The objects of a cluster of the kinds that the operator watches; the way in which decisions see it."""

    def __init__(self, informers: Mapping[str, list[Informer]]) -> None:
        """Put informers together.

        Args:
            informers: those of each kind: one for everywhere, or one for each namespace.
        """
        self._informers = informers

    def computes(self) -> list[Place]:
        """Return the places of all Computes."""
        return [place for informer in self._informers["Compute"] for place in informer.store.places()]

    def compute(self, namespace: str, name: str) -> Object | None:
        """Return a Compute; None where there is none."""
        return self.child("Compute", namespace, name)

    def pods(self, namespace: str, compute: str) -> list[Object]:
        """Return all pods that bear a Compute's label."""
        store = self._store("Pod", namespace)
        return store.group(namespace, compute) if store is not None else []

    def runtimes(self) -> dict[str, str]:
        """Return the texts of the installation's runtimes by their names."""
        found = (item for informer in self._informers.get(RUNTIME, ()) for item in informer.store.objects())
        return {item["metadata"]["name"]: str((item.get("data") or {}).get(RUNTIME_KEY, "")) for item in found}

    def watches(self, kind: str) -> bool:
        """Tell whether objects of a kind are kept here, those with our label."""
        return kind in self._informers

    def child(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return an object of a kind that is watched; None where there is none that bears our label."""
        store = self._store(kind, namespace)
        return store.get(namespace, name) if store is not None else None

    def wrote(self, item: Object) -> None:
        """Remember what the server answered to a write of ours."""
        if item.get("kind") not in self._informers:
            return
        store = self._store(item["kind"], item["metadata"].get("namespace", ""))
        if store is not None:
            store.wrote(item)

    def check_current(self, patience_seconds: float) -> None:
        """Refuse to be looked at while a watch is lost.

        Raises:
            ApiError: something has not been watched for longer than that.
        """
        for informer in self._all_informers():
            stale = informer.stale_seconds()
            if stale > patience_seconds:
                message = f"nothing has been heard about them for {stale:.0f} s"
                raise ApiError(f"watch of {informer.kind}", 0, "Stale", message)

    async def synced(self) -> None:
        """Wait until everything was listed."""
        for informer in self._all_informers():
            await informer.synced()

    async def catch_up(self) -> None:
        """List everything anew: another process has written, and a watch may be behind it."""
        # One after the other: who is new is looked at meanwhile.
        for informer in self._all_informers():
            await informer.catch_up()

    async def run(self) -> None:
        """Keep everything up to date until cancelled."""
        async with asyncio.TaskGroup() as group:
            for informer in self._all_informers():
                group.create_task(informer.run(), name=f"skyproxy-informer-{informer.kind}")

    def _all_informers(self) -> Iterator[Informer]:
        return (informer for each in self._informers.values() for informer in each)

    def _store(self, kind: str, namespace: str) -> ObjectStore | None:
        for informer in self._informers.get(kind, ()):
            if informer.namespace in (None, namespace):
                return informer.store
        return None


RUNTIME = "Runtime"
"""Kind of ConfigMaps that are runtimes: others are not watched."""
_WATCHED = {
    "Compute": API_VERSION,
    "Pod": "v1",
    "Service": "v1",
    "PersistentVolumeClaim": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
}
"""Not Secrets: who may watch them may read all of a cluster."""


def view_of(
    cluster: ClusterConnection,
    namespaces: Sequence[str],
    on_change: Callable[[str, str, Object, bool], None],
    runtimes_in: str = "",
) -> View:
    """Make the view of a cluster that an operator needs; it is told of what we write from then on.

    Args:
        cluster: the cluster.
        namespaces: those to look after; empty for all.
        on_change: gets the kind, ADDED, MODIFIED or DELETED, the object, and whether it came with a list.
        runtimes_in: the namespace of the installation's runtimes; empty where there are none.
    """
    informers: dict[str, list[Informer]] = {}
    for kind, api_version in _WATCHED.items():
        for namespace in namespaces or (None,):
            store = ObjectStore(compute_of, partial(on_change, kind))
            label = "" if kind == "Compute" else COMPUTE_LABEL
            informers.setdefault(kind, []).append(Informer(cluster, store, api_version, kind, namespace, label))
    if runtimes_in:
        store = ObjectStore(compute_of, partial(on_change, RUNTIME))
        informers[RUNTIME] = [Informer(cluster, store, "v1", "ConfigMap", runtimes_in, RUNTIME_LABEL)]
    view = View(informers)
    cluster.wrote = view.wrote
    return view


def compute_of(item: Object) -> str:
    """Name the Compute that an object belongs to; a Compute belongs to itself."""
    if item.get("kind") == "Compute":
        return str(item["metadata"]["name"])
    return str((item["metadata"].get("labels") or {}).get(COMPUTE_LABEL, ""))
