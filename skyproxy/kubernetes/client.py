"""Computes and what belongs to them, asked of the API server: watches that survive drops, logs that follow."""

from __future__ import annotations

import asyncio
import base64
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from skyproxy.errors import ClusterError
from skyproxy.kubernetes.answers import parse
from skyproxy.kubernetes.api_server import GROUP, ApiServer, Manifest, refused
from skyproxy.kubernetes.objects import EventObject, PodObject

logger = logging.getLogger("skyproxy.kubernetes")

VERSION = "v1alpha1"
PLURAL = "computes"
FIELD_MANAGER = "skyproxy"
COMPUTE_LABEL = "skyproxy.dev/compute"
APPLY = "application/apply-patch+yaml"

_WATCH_SECONDS = 60
_MAX_PAUSE_SECONDS = 8.0
_LOOK_SECONDS = 0.5
_LONGEST_LINE = 1 << 20
_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d) ?(.*)", re.DOTALL)


class ClusterClient(ApiServer):
    """The requests that skyproxy makes of a cluster."""

    # --- Computes ----------------------------------------------------------------------------------------------------

    def computes_path(self, name: str = "") -> str:
        """The path of the namespace's Computes, or of one."""
        return f"/apis/{GROUP}/{VERSION}/namespaces/{self.namespace}/{PLURAL}" + (f"/{name}" if name else "")

    async def create(self, manifest: Manifest) -> Manifest:
        """Makes a Compute that must not exist yet."""
        return await self.request("POST", self.computes_path(), body=manifest, query=[("fieldManager", FIELD_MANAGER)])

    async def apply(self, manifest: Manifest) -> Manifest:
        """Makes a Compute, or changes it to what we want of it; what others set stays."""
        path = self.computes_path(manifest["metadata"]["name"])
        query = [("fieldManager", FIELD_MANAGER), ("force", "true")]
        return await self.request("PATCH", path, body=manifest, query=query, content_type=APPLY)

    async def get(self, name: str) -> Manifest | None:
        """A Compute; None where there is none."""
        return await self.find(self.computes_path(name))

    async def list_computes(self, *, all_namespaces: bool = False) -> list[Manifest]:
        """The Computes of the namespace, or of all."""
        path = f"/apis/{GROUP}/{VERSION}/{PLURAL}" if all_namespaces else self.computes_path()
        return list((await self.request("GET", path)).get("items", ()))

    async def delete(self, name: str, *, wait: bool = True) -> bool:
        """Deletes a Compute and what belongs to it.

        Args:
            name: of the Compute.
            wait: until it is gone, with its Pods; without a bound, so put a timeout around it.

        Returns:
            Whether there was one.
        """
        try:
            deleted = await self.request("DELETE", self.computes_path(name), body={"propagationPolicy": "Foreground"})
        except ClusterError as error:
            if error.status == 404 and error.reason == "NotFound":
                return False
            raise
        if wait:
            uid = deleted.get("metadata", {}).get("uid") or deleted.get("details", {}).get("uid")
            async for kind, item in self.watch(self.computes_path(), field_selector=f"metadata.name={name}"):
                if kind in ("DELETED", "ABSENT") or (uid and item.get("metadata", {}).get("uid") != uid):
                    break
            await self._wait_for_pods_to_end(name, uid)
        return True

    async def _wait_for_pods_to_end(self, name: str, uid: str | None) -> None:
        """Until none of a Compute's Pods is left; at once where we may not look at Pods."""
        while True:
            try:
                pods = await self.pods(name)
            except ClusterError as error:
                if error.status == 403:
                    return
                raise
            owners = {row.get("uid") for pod in pods for row in pod["metadata"].get("ownerReferences", ())}
            if uid not in owners:
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def pods(self, name: str) -> list[PodObject]:
        """The Pods of a Compute."""
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        return list((await self.request("GET", path, query=[("labelSelector", f"{COMPUTE_LABEL}={name}")]))["items"])

    async def events(self, name: str) -> list[EventObject]:
        """The events on a Compute and its Pods, oldest first."""
        path = f"/api/v1/namespaces/{self.namespace}/events"
        found: list[EventObject] = []
        for item in (await self.request("GET", path)).get("items", ()):
            target = item.get("involvedObject", {})
            own = target.get("kind") == "Compute" and target.get("name") == name
            below = target.get("kind") in ("Pod", "PersistentVolumeClaim", "Service")
            if own or (below and str(target.get("name", "")).startswith(f"{name}-")):
                found.append(item)
        return sorted(found, key=lambda item: str(item.get("lastTimestamp") or item.get("eventTime") or ""))

    async def secret(self, name: str) -> dict[str, str]:
        """The texts of a Secret, decoded.

        Raises:
            ClusterError: there is none, or we may not read it.
        """
        row = await self.request("GET", f"/api/v1/namespaces/{self.namespace}/secrets/{name}")
        return {key: base64.b64decode(value).decode() for key, value in (row.get("data") or {}).items()}

    # --- what goes on ------------------------------------------------------------------------------------------------

    async def watch(
        self, path: str, *, field_selector: str | None = None, label_selector: str | None = None
    ) -> AsyncGenerator[tuple[str, Manifest], None]:
        """Yield what happens to objects from now on, across dropped connections and expired histories; never ends by
        itself.

        Args:
            path: of the list.
            field_selector: which of them.
            label_selector: which of them.

        Yields:
            ("ADDED" | "MODIFIED" | "DELETED", object), beginning with those that are there; ("ABSENT", {}) when a
            list comes back empty, so that whoever waits for a deletion never waits in vain.

        Raises:
            ClusterError: the server refuses; a server that is away for a while is waited for.
        """
        selectors = [("fieldSelector", field_selector), ("labelSelector", label_selector)]
        base = [(key, value) for key, value in selectors if value]
        known: dict[str, Manifest] = {}
        version = ""
        pause = 0.0
        while True:
            try:
                if not version:
                    listed = await self.request("GET", path, query=base)
                    version = listed["metadata"]["resourceVersion"]
                    now = {_key(item): item for item in listed.get("items", ())}
                    for key in known.keys() - now.keys():
                        yield "DELETED", known.pop(key)
                    for key, item in now.items():
                        if known.get(key) != item:
                            kind = "MODIFIED" if key in known else "ADDED"
                            known[key] = item
                            yield kind, item
                    if not now:
                        yield "ABSENT", {}
                query = [*base, ("watch", "true"), ("resourceVersion", version), ("allowWatchBookmarks", "true")]
                query += [("timeoutSeconds", str(_WATCH_SECONDS))]
                async for line in self.stream(path, query=query, silence_seconds=_WATCH_SECONDS + 15):
                    event = parse(line) if line.strip() else None
                    if event is None:
                        continue
                    item = event["object"]
                    if event["type"] == "ERROR":
                        raise refused(int(item.get("code", 0)), path, item, self.address)
                    pause = 0.0
                    version = item["metadata"]["resourceVersion"]
                    if event["type"] == "BOOKMARK":
                        continue
                    if event["type"] == "DELETED":
                        known.pop(_key(item), None)
                    else:
                        known[_key(item)] = item
                    yield event["type"], item
            except ClusterError as error:
                if error.status == 410:
                    # The history that we had has been compacted away: begin with a list again.
                    version = ""
                elif error.status == 0 or error.status >= 500 or error.status == 429:
                    logger.debug("the watch of %s was interrupted: %s", path, error)
                else:
                    raise
            except ValueError:
                version = ""  # half a line: the connection broke in the middle of it
            await asyncio.sleep(pause)
            pause = min(_MAX_PAUSE_SECONDS, pause * 2 or 0.25)

    async def logs(
        self, pod: str, *, follow: bool = False, tail: int | None = None, container: str | None = None
    ) -> AsyncIterator[str]:
        """The lines that a Pod wrote; while it follows, a dropped connection loses none and repeats none.

        Raises:
            ClusterError: there is no such Pod, or it has no log.
        """
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        last, at_last = "", 0
        while True:
            query = [("timestamps", "true")] + ([("follow", "true")] if follow else [])
            query += [("container", container)] if container else []
            if last:
                # Whole seconds only: what we had of that second is left out below.
                query.append(("sinceTime", f"{last[:19]}{last[29:]}"))
            elif tail is not None:
                query.append(("tailLines", str(tail)))
            resumed_at, to_skip = last, at_last
            try:
                async for line in self.stream(path, query=query, longest_bytes=_LONGEST_LINE):
                    whole = line.decode(errors="replace")
                    found = _STAMPED.fullmatch(whole)
                    if found is None:
                        # Not every kubelet knows how to add them.
                        yield whole
                        continue
                    # Of one length, for some leave out zeros at the end.
                    stamp, text = f"{found[1]}.{found[2] or '':0<9}{found[3]}", found[4]
                    if stamp < resumed_at:
                        continue
                    if stamp == resumed_at and to_skip:
                        to_skip -= 1
                        continue
                    last, at_last = stamp, at_last + 1 if stamp == last else 1
                    yield text
                if not follow or not await self._still_runs(pod):
                    return
            except ClusterError as error:
                if not follow or error.status != 0:
                    raise
            await asyncio.sleep(1.0)

    async def _still_runs(self, pod: str) -> bool:
        found = await self.find(f"/api/v1/namespaces/{self.namespace}/pods/{pod}")
        return found is not None and found.get("status", {}).get("phase") in ("Pending", "Running")


def _key(item: Mapping[str, Any]) -> str:
    return str(item["metadata"].get("uid") or item["metadata"]["name"])
