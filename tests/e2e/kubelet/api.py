"""The Kubernetes API as the stand-in uses it: plain objects over HTTPS."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

logger = logging.getLogger("kubelet.api")

Object = dict[str, Any]


class ApiError(Exception):
    """The API server said no.

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """Requests to one API server. Use it as an async context manager."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text(encoding="utf-8"))
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self.server: str = cluster["server"]
        self._ssl = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._ssl.load_cert_chain(user["client-certificate"], user["client-key"])

    async def __aenter__(self) -> Api:
        self._http = aiohttp.ClientSession(
            base_url=self.server,
            connector=aiohttp.TCPConnector(ssl=self._ssl, limit=64),
            timeout=aiohttp.ClientTimeout(total=60),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def request(self, method: str, path: str, body: Object | None = None, **params: str) -> Object:
        """One request.

        Raises:
            ApiError: with the status and the server's message.
        """
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        data = None if body is None else json.dumps(body)
        async with self._http.request(
            method, path, data=data, params=params, headers={"Content-Type": kind}
        ) as response:
            answer: Object = await response.json(content_type=None)
            if response.status >= 400:
                raise ApiError(response.status, str(answer.get("message", answer)))
            return answer

    async def wait_ready(self) -> None:
        """Waits until the server answers, for ever: whoever started it ends us when it does not."""
        while True:
            try:
                async with self._http.get("/readyz") as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.2)

    async def get(self, path: str, **params: str) -> Object:
        """Reads."""
        return await self.request("GET", path, **params)

    async def post(self, path: str, body: Object) -> Object:
        """Creates."""
        return await self.request("POST", path, body)

    async def patch(self, path: str, body: Object) -> Object:
        """Merges."""
        return await self.request("PATCH", path, body)

    async def delete(self, path: str, body: Object | None = None) -> None:
        """Deletes; what is not there any more is as good as deleted."""
        try:
            await self.request("DELETE", path, body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def watch(self, path: str, **params: str) -> AsyncIterator[tuple[str, Object]]:
        """Everything there is and every change to it, for ever: ("ADDED" | "MODIFIED" | "DELETED", object).

        After a broken watch everything is listed again: objects may come twice, and what was deleted meanwhile comes
        as DELETED.
        """
        known: dict[str, Object] = {}
        while True:
            try:
                listed = await self.get(path, **params)
                items = {item["metadata"]["uid"]: item for item in listed["items"]}
                for uid in known.keys() - items.keys():
                    yield "DELETED", known.pop(uid)
                for uid, item in items.items():
                    known[uid] = item
                    yield "ADDED", item
                async for kind, item in self._changes(path, params, listed["metadata"]["resourceVersion"]):
                    if kind == "DELETED":
                        known.pop(item["metadata"]["uid"], None)
                    else:
                        known[item["metadata"]["uid"]] = item
                    yield kind, item
            except (ApiError, aiohttp.ClientError, TimeoutError) as error:
                logger.info("watching %s again: %r", path, error)
                await asyncio.sleep(0.5)

    async def _changes(self, path: str, params: dict[str, str], version: str) -> AsyncIterator[tuple[str, Object]]:
        query = {**params, "watch": "1", "resourceVersion": version, "timeoutSeconds": "300"}
        timeout = aiohttp.ClientTimeout(total=None, sock_read=330)
        async with self._http.get(path, params=query, timeout=timeout) as response:
            if response.status >= 400:
                raise ApiError(response.status, await response.text())
            # Lines are longer than aiohttp's own limit for a line.
            buffer = b""
            async for chunk in response.content.iter_any():
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in filter(None, lines):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise ApiError(int(event["object"].get("code", 500)), str(event["object"].get("message")))
                    yield event["type"], event["object"]


def key(item: Object) -> tuple[str, str]:
    """(namespace, name) of an object."""
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]
