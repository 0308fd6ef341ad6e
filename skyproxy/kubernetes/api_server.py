"""Requests to the API server, and what its refusals mean."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from skyproxy.errors import ClusterError
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.kubernetes.answers import parse
from skyproxy.settings import SETTINGS

GROUP = "skyproxy.dev"

Manifest = dict[str, Any]
Query = Sequence[tuple[str, str]]


class ApiServer:
    """One user's access to one API server; belongs to the event loop on which it was entered.

    Attributes:
        address: the cluster and the namespace, resolved.
    """

    def __init__(self, address: ClusterAddress) -> None:
        self.address = address
        self._api: Any = None

    async def __aenter__(self) -> Self:
        self.address = await self.address.resolved()
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._api.close()

    async def _open(self) -> None:
        import kubernetes_asyncio

        self._api = kubernetes_asyncio.client.ApiClient(await self.address.configuration())

    @property
    def namespace(self) -> str:
        """The namespace of our objects."""
        return self.address.namespace or "default"

    async def find(self, path: str) -> Manifest | None:
        """An object; None where there is none.

        Raises:
            ClusterError: the kind of object is unknown there, or the request failed otherwise.
        """
        try:
            return await self.request("GET", path)
        except ClusterError as error:
            if error.status == 404 and error.reason == "NotFound":
                return None
            raise

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Query = (),
        body: object = None,
        content_type: str = "application/json",
    ) -> Manifest:
        """One request and its answer.

        Raises:
            ClusterError: the server refused it, or did not answer; says what to do.
        """
        response = await self._send(method, path, query, body, content_type, SETTINGS.cluster_timeout_seconds)
        async with response:
            try:
                text = await response.read()
            except (OSError, TimeoutError, self._client_error) as error:
                raise self._unreachable(error) from error
        try:
            answer: Manifest = parse(text)
        except ValueError as error:
            said = text[:500].decode(errors="replace")
            raise refused(response.status, path, {"message": said}, self.address) from error
        return answer

    async def stream(
        self,
        path: str,
        *,
        query: Query = (),
        silence_seconds: float | None = None,
        longest_bytes: int | None = None,
    ) -> AsyncIterator[bytes]:
        """The lines of an answer that goes on.

        Args:
            path: what to ask for.
            query: its parameters.
            silence_seconds: after which the connection counts as dead; None: never.
            longest_bytes: a line that is longer comes in parts; None: it is waited for.

        Raises:
            ClusterError: the server refused it; the connection was lost, with status 0.
        """
        response = await self._send("GET", path, query, None, "application/json", None, silence_seconds)
        rest = b""
        async with response:
            try:
                async for piece in response.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        yield line
                    if longest_bytes is not None and len(rest) > longest_bytes:
                        yield rest
                        rest = b""
            except (OSError, TimeoutError, self._client_error) as error:
                raise self._unreachable(error) from error
        if rest:
            yield rest

    async def open_websocket(self, path: str, query: Query, protocol: str) -> Any:
        """A WebSocket to the API server, in aiohttp's terms.

        Raises:
            ClusterError: the server refused it, or did not answer.
        """
        import aiohttp

        url = self._url(path, query)
        rest = self._api.rest_client
        # The kubelet's streaming server produces no JSON: it refuses a handshake that accepts nothing else with 406.
        headers = await self._headers(None, accept="*/*")
        options: dict[str, object] = {"headers": headers, "protocols": (protocol,), "max_msg_size": 0}
        options |= {"proxy": rest.proxy} if rest.proxy else {}
        options |= {"server_hostname": rest.server_hostname} if getattr(rest, "server_hostname", None) else {}
        try:
            async with asyncio.timeout(SETTINGS.cluster_timeout_seconds):
                return await rest.pool_manager.ws_connect(url, **options)
        except aiohttp.WSServerHandshakeError as error:
            raise refused(error.status, path, {"message": error.message}, self.address) from error
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            raise self._unreachable(error) from error

    async def _send(
        self,
        method: str,
        path: str,
        query: Query,
        body: object,
        content_type: str,
        total_seconds: float | None,
        silence_seconds: float | None = None,
    ) -> Any:
        import aiohttp

        limits = aiohttp.ClientTimeout(
            total=total_seconds, sock_connect=SETTINGS.connect_timeout_seconds, sock_read=silence_seconds
        )
        for renewed in (False, True):
            rest = self._api.rest_client
            options: dict[str, Any] = {
                "timeout": limits,
                "headers": await self._headers(content_type if body else None),
            }
            options |= {"proxy": rest.proxy} if rest.proxy else {}
            options |= {"server_hostname": rest.server_hostname} if getattr(rest, "server_hostname", None) else {}
            data = None if body is None else json.dumps(body)
            try:
                response = await rest.pool_manager.request(method, self._url(path, query), data=data, **options)
                if response.status < 300:
                    return response
                async with response:
                    text = await response.text()
            except (OSError, TimeoutError, aiohttp.ClientError) as error:
                raise self._unreachable(error) from error
            if response.status == 401 and not renewed:
                # Credentials that a plugin made have expired: made anew, once.
                await self._api.close()
                await self._open()
                continue
            try:
                status = json.loads(text)
            except ValueError:
                status = {"message": text[:500]}
            raise refused(response.status, path, status, self.address)
        raise AssertionError("the second round returns or raises")

    async def _headers(self, content_type: str | None, accept: str = "application/json") -> dict[str, str]:
        headers = {"Accept": accept, "User-Agent": "skyproxy"}
        if content_type:
            headers["Content-Type"] = content_type
        waiting = self._api.update_params_for_auth(headers, [], ["BearerToken"])
        if waiting is not None:  # older versions of the library do it at once
            await waiting
        return headers

    def _url(self, path: str, query: Query) -> str:
        from urllib.parse import urlencode

        return str(self._api.configuration.host).rstrip("/") + path + (f"?{urlencode(list(query))}" if query else "")

    @property
    def _client_error(self) -> type[Exception]:
        import aiohttp

        return aiohttp.ClientError

    def _unreachable(self, error: BaseException) -> ClusterError:
        host = self._api.configuration.host
        if isinstance(error, TimeoutError):
            reason = "it did not answer in time"
        elif isinstance(getattr(error, "certificate_error", error), ssl.SSLError):
            reason = f"its certificate was not accepted ({error})"
        else:
            reason = str(error) or type(error).__name__
        return ClusterError(
            f"the Kubernetes API server {host} cannot be asked: {reason}. Check the network, and: kubectl version"
        )


def refused(status: int, path: str, answer: Mapping[str, Any], address: ClusterAddress) -> ClusterError:
    """Return the error for a request that the API server refused, with what to do."""
    message = str(answer.get("message") or answer.get("reason") or "no reason was given").strip()
    reason = str(answer.get("reason") or "")
    if status == 401:
        text = f"the cluster does not accept your credentials ({address}). Log in again, as for kubectl."
    elif status == 403:
        text = f"you may not do that ({address}): {message}. Ask the cluster's administrator for permission."
    elif status == 404 and f"/{GROUP}/" in path and reason != "NotFound":
        text = _explain_missing_operator(address)
    elif status == 404 and f"/{GROUP}/" in path and not (answer.get("details") or {}).get("name"):
        text, reason = _explain_missing_operator(address), ""
    else:
        text = f"the cluster refused the request: {message} (HTTP {status})"
    error = ClusterError(text)
    error.status, error.reason = status, reason
    return error


def _explain_missing_operator(address: ClusterAddress) -> str:
    where = f" ({address.context})" if address.context else ""
    return f"the cluster{where} does not know skyproxy's Compute. An administrator installs it: skyproxy install"
