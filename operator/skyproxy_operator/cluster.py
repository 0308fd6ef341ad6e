"""The API server, as the operator talks to it: objects are plain dicts, and every request has an end.

Requests go below the generated client's own methods: those make typed objects, which lose what they do not know, and
log the bodies of answers, in which Secrets are.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any
from urllib.parse import quote

import aiohttp

from skyproxy.errors import visible
from skyproxy.kubernetes.answers import parse
from skyproxy.kubernetes.versions import check_version
from skyproxy_operator.causes import Cause
from skyproxy_operator.metrics import METRICS
from skyproxy_operator.names import API_VERSION, FIELD_MANAGER, PLURAL
from skyproxy_operator.queueing import KUEUE_GROUP, WORKLOAD, workload_query
from skyproxy_operator.refusals import refusal_cause

Object = dict[str, Any]

logger = logging.getLogger("skyproxy.operator")

_PAGE = 100
"""Objects of an answer: reading a much larger one would keep all else from its turn for some tenths of a second."""
MAX_ANSWER_BYTES = 32 << 20
"""Of an answer, and of one line of a watch. An object has a few MiB at most, and whoever makes many large ones must not
take the memory in which all others are looked after: then there are fewer in an answer."""
TOO_LONG = "TooLong"
"""Reason of an error: an answer with more bytes."""
UNREADABLE = "Unreadable"
"""Reason of an error: an answer that is no object."""
UNORDERED = "Unordered"
"""Reason of an error: a version of which nothing can be said."""

_PLURALS = {
    "BackendTLSPolicy": "backendtlspolicies",
    "Certificate": "certificates",
    "Compute": PLURAL,
    "ConfigMap": "configmaps",
    "Event": "events",
    "HTTPRoute": "httproutes",
    "Lease": "leases",
    "NetworkPolicy": "networkpolicies",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "Pod": "pods",
    "PodGroup": "podgroups",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "ResourceClaimTemplate": "resourceclaimtemplates",
    "Secret": "secrets",
    "Service": "services",
    "Workload": "workloads",
}


class ApiError(Exception):
    """The API server refused a request, or did not answer.

    Attributes:
        status: the HTTP status; 0 where there was no answer.
        reason: the server's word for it, such as AlreadyExists; empty where it had none.
    """

    def __init__(self, what: str, status: int, reason: str, message: str) -> None:
        # It is logged, and has words of users and of webhooks.
        super().__init__(visible(f"{what}: {message}").replace("\n", " "))
        self.what = what
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def cause(self) -> Cause:
        """The same for a Compute's status."""
        return refusal_cause(self.what, self.status, self.message)


def path_of(api_version: str, kind: str, namespace: str | None, name: str | None = None, part: str = "") -> str:
    """The path of an object, or of all of its kind in a namespace.

    Args:
        api_version: such as v1 or apps/v1.
        kind: one that we know the plural of.
        namespace: None for all namespaces.
        name: None for all objects.
        part: a part of the object, such as status.
    """
    root = "/api/" if "/" not in api_version else "/apis/"
    pieces = [*(("namespaces", namespace) if namespace else ()), _PLURALS[kind], *((name,) if name else ())]
    return root + "/".join([api_version, *(quote(piece, safe="") for piece in (*pieces, *((part,) if part else ())))])


def refusal(what: str, status: int, text: bytes) -> ApiError:
    """The error that an answer of the server with such a status is."""
    try:
        answer: Any = parse(text)
    except ValueError:
        answer = {"message": text[:500].decode("utf-8", "replace")}
    answer = answer if isinstance(answer, dict) else {}
    message = str(answer.get("message") or f"HTTP {status}")
    return ApiError(what, status, str(answer.get("reason", "")), message)


async def _read(what: str, response: Any) -> bytes:
    """Return the body of an answer.

    Raises:
        ApiError: it is too long.
    """
    text = bytearray()
    async for piece in response.content.iter_any():
        text += piece
        if len(text) > MAX_ANSWER_BYTES:
            response.close()  # else the rest of it would be read
            raise _length_error(what)
    return bytes(text)


def _object_in(what: str, text: bytes) -> Object:
    """Return the object that an answer or a line of a watch is.

    Raises:
        ApiError: it is none. A proxy on the way may answer for the server, and an answer may end before its end.
    """
    try:
        answer = parse(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        begin = text[:200].decode("utf-8", "replace")
        raise ApiError(what, 0, UNREADABLE, f"the API server answered with what is no object: {begin!r}")
    return answer


def _length_error(what: str) -> ApiError:
    return ApiError(what, 0, TOO_LONG, f"the API server's answer has more than {MAX_ANSWER_BYTES} bytes")


def _is_gone(error: ApiError) -> bool:
    """Return whether a change was refused because the object is gone, and another one may have its name."""
    return error.status in (404, 409) or (error.status == 422 and "uid" in error.message)


def version_of(item: Mapping[str, Any]) -> int:
    """Return the resourceVersion of an object or a list as the number that it is.

    Raises:
        ApiError: it is none, so that nothing can be said about what is newer.
    """
    text = str((item.get("metadata") or {}).get("resourceVersion", ""))
    if not (text.isascii() and text.isdigit()):
        raise ApiError("resourceVersion", 0, UNORDERED, f"the API server's resourceVersion {text!r} is not a number")
    return int(text)


class ClusterConnection:
    """A connection to the API server; `connect` makes one, and `close` ends it."""

    def __init__(self, client: Any, timeout_seconds: float) -> None:
        self._client = client
        self._timeout_seconds = timeout_seconds
        self.wrote: Callable[[Object], None] = lambda _: None
        """Told of each object that a write of ours left behind."""

    @classmethod
    async def connect(cls, timeout_seconds: float) -> ClusterConnection:
        """A connection as the pod's service account where we are in a pod, else as KUBECONFIG says.

        Args:
            timeout_seconds: for each request.
        """
        # Late: it takes a second, and pure code is used without it.
        from kubernetes_asyncio import client, config

        if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
            config.load_incluster_config()  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config(config_file=os.environ.get("KUBECONFIG"))
        return cls(client.ApiClient(), timeout_seconds)

    async def close(self) -> None:
        """Ends the connection."""
        await self._client.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        what: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """Sends a request; the answer.

        Raises:
            ApiError: the server refused it, or did not answer in time.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                response = await self._send(method, path, query, body, content_type, None)
                try:
                    text = await _read(what, response)
                finally:
                    response.release()
        except TimeoutError:
            METRICS.requests.labels(method=method, status="timeout").inc()
            message = f"the API server did not answer within {self._timeout_seconds:g} s"
            raise ApiError(what, 0, "Timeout", message) from None
        except (aiohttp.ClientError, OSError) as exc:
            METRICS.requests.labels(method=method, status="error").inc()
            raise ApiError(what, 0, "Unreachable", f"the API server cannot be reached: {exc}") from exc
        METRICS.requests.labels(method=method, status=str(response.status)).inc()
        if not 200 <= response.status <= 299:
            raise refusal(what, response.status, text)
        return _object_in(what, text)

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Object | None,
        content_type: str,
        limits: aiohttp.ClientTimeout | None,
    ) -> Any:
        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": FIELD_MANAGER}
        parameters = list((query or {}).items())
        client = self._client
        await client.update_params_for_auth(headers, parameters, ["BearerToken"])
        return await client.rest_client.request(
            method,
            client.configuration.host + path,
            query_params=parameters,
            headers=headers,
            body=body,
            _preload_content=False,
            _request_timeout=limits,
        )

    async def check_version(self) -> None:
        """Find out whether we can work on this cluster; where it does not tell its version, we try.

        Raises:
            ClusterError: it is too old.
        """
        try:
            answer = await self.request("GET", "/version", what="version")
        except ApiError as exc:
            logger.warning("the version of the cluster cannot be read: %s", exc)
        else:
            logger.info("Kubernetes %s", check_version(answer))

    # --- objects -----------------------------------------------------------------------------------------------------

    async def read(self, api_version: str, kind: str, namespace: str, name: str) -> Object | None:
        """An object; None where there is none."""
        try:
            return await self.request("GET", path_of(api_version, kind, namespace, name), what=f"{kind} {name}")
        except ApiError as exc:
            if exc.status == 404:
                return None
            raise

    async def list_all(
        self, api_version: str, kind: str, namespace: str | None, query: Mapping[str, str]
    ) -> list[Object]:
        """All objects of a kind that a query chooses. In each answer their kind is left out, so it is put back."""
        answer = await self.request("GET", path_of(api_version, kind, namespace), what=f"list of {kind}", query=query)
        return [{"apiVersion": api_version, "kind": kind, **item} for item in answer.get("items") or ()]

    async def list_version(
        self, api_version: str, kind: str, namespace: str | None, query: Mapping[str, str]
    ) -> tuple[list[Object], int]:
        """All objects of a kind that a query chooses, and the version of the cluster that they were read at.

        Raises:
            ApiError: see `request`; 410: it took so long that the server has forgotten that version.
        """
        items: list[Object] = []
        limit = _PAGE
        parameters = {**query, "limit": str(limit)}
        while True:
            try:
                answer = await self.request(
                    "GET",
                    path_of(api_version, kind, namespace),
                    what=f"list of {kind}",
                    query=parameters,
                )
            except ApiError as exc:
                if exc.reason != TOO_LONG or limit == 1:
                    raise
                limit //= 4
                parameters["limit"] = str(limit)
                continue
            items += [{"apiVersion": api_version, "kind": kind, **item} for item in answer.get("items") or ()]
            metadata = answer["metadata"]
            if not metadata.get("continue"):
                return items, version_of(answer)
            parameters["continue"] = metadata["continue"]

    async def watch(
        self,
        api_version: str,
        kind: str,
        namespace: str | None,
        query: Mapping[str, str],
        *,
        silence_seconds: float,
        opened: Callable[[], None],
    ) -> AsyncGenerator[Object, None]:
        """The changes of a kind, until the server ends the stream or is silent for too long.

        Args:
            api_version: of the objects.
            kind: theirs.
            namespace: where; None for everywhere.
            query: which of them, and from which version on.
            silence_seconds: after which it ends, because the connection may be lost.
            opened: called when the server has agreed.

        Raises:
            ApiError: the server refused it; with status 0, the connection was lost.
        """
        what, path = f"watch of {kind}", path_of(api_version, kind, namespace)
        query = {**query, "watch": "true", "allowWatchBookmarks": "true"}
        has_opened = False
        limits = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_seconds, sock_read=silence_seconds)
        try:
            response = await self._send("GET", path, query, None, "application/json", limits)
            try:
                METRICS.requests.labels(method="WATCH", status=str(response.status)).inc()
                if response.status != 200:
                    raise refusal(what, response.status, await _read(what, response))
                has_opened = True
                opened()
                rest = bytearray()
                async for piece in response.content.iter_any():
                    rest += piece
                    if b"\n" in piece:
                        *lines, rest = rest.split(b"\n")
                        for line in lines:
                            yield _object_in(what, bytes(line))
                    if len(rest) > MAX_ANSWER_BYTES:
                        raise _length_error(what)
            finally:
                response.close()
        except TimeoutError:
            if not has_opened:
                raise ApiError(what, 0, "Timeout", "the API server did not answer in time") from None
        except (aiohttp.ClientError, OSError) as exc:
            raise ApiError(what, 0, "Unreachable", f"the connection was lost: {exc}") from exc

    async def apply(self, wanted: Object) -> Object:
        """Server-side apply: creates an object, or changes what we say of it."""
        metadata = wanted["metadata"]
        return await self._write(
            "PATCH",
            path_of(wanted["apiVersion"], wanted["kind"], metadata["namespace"], metadata["name"]),
            what=f"{wanted['kind']} {metadata['name']}",
            query={"fieldManager": FIELD_MANAGER, "force": "true"},
            body=wanted,
            content_type="application/apply-patch+yaml",
        )

    async def create(self, wanted: Object) -> bool:
        """Creates an object; False where there is one of that name already."""
        metadata = wanted["metadata"]
        try:
            await self._write(
                "POST",
                path_of(wanted["apiVersion"], wanted["kind"], metadata["namespace"]),
                what=f"{wanted['kind']} {metadata['name']}",
                # Strict: a field that the server does not know is an error and not left out, but on old ones.
                query={"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"},
                body=wanted,
            )
        except ApiError as exc:
            if exc.reason == "AlreadyExists":
                return False
            raise
        return True

    async def delete(self, item: Object, *, force: bool = False) -> None:
        """Delete this object and not another one that has got its name meanwhile; one that is gone is fine.

        Args:
            item: the object.
            force: removes a pod although its machine does not confirm that it has ended.
        """
        metadata = item["metadata"]
        options = {"gracePeriodSeconds": 0} if force else {}
        try:
            await self._write(
                "DELETE",
                path_of(item["apiVersion"], item["kind"], metadata["namespace"], metadata["name"]),
                what=f"{item['kind']} {metadata['name']}",
                body={
                    "apiVersion": "v1",
                    "kind": "DeleteOptions",
                    "preconditions": {"uid": metadata["uid"]},
                    "propagationPolicy": "Background",
                    **options,
                },
            )
        except ApiError as exc:
            # 409: the name belongs to another one now.
            if exc.status not in (404, 409):
                raise

    async def annotate(self, item: Object, changes: Mapping[str, str | None]) -> None:
        """Changes annotations of this object and not of another one that has got its name; one that is gone is fine.

        Args:
            item: the object.
            changes: the annotations; None takes one away.
        """
        metadata = item["metadata"]
        try:
            await self._write(
                "PATCH",
                path_of(item["apiVersion"], item["kind"], metadata["namespace"], metadata["name"]),
                what=f"annotations of {item['kind']} {metadata['name']}",
                query={"fieldManager": FIELD_MANAGER},
                body={"metadata": {"uid": metadata["uid"], "annotations": dict(changes)}},
                content_type="application/merge-patch+json",
            )
        except ApiError as exc:
            if not _is_gone(exc):
                raise

    async def _write(self, method: str, path: str, **more: Any) -> Object:
        answer = await self.request(method, path, **more)
        if answer.get("kind") not in (None, "Status"):
            self.wrote(answer)
        return answer

    # --- what belongs to Computes ------------------------------------------------------------------------------------

    async def events(self, namespace: str, pod: Object) -> list[Object]:
        """The events about a pod, oldest first."""
        found = await self.list_all(
            "v1", "Event", namespace, {"fieldSelector": f"involvedObject.uid={pod['metadata']['uid']}", "limit": "50"}
        )
        return sorted(found, key=lambda item: item.get("lastTimestamp") or item.get("eventTime") or "")

    async def workload(self, version: str, pod: Object) -> Object | None:
        """Kueue's object about a pod; None where it has made none, or we may not see it."""
        try:
            found = await self.list_all(
                f"{KUEUE_GROUP}/{version}", WORKLOAD, pod["metadata"]["namespace"], workload_query(pod)
            )
        except ApiError as exc:
            if exc.status in (403, 404):
                return None
            raise
        return found[0] if found else None

    async def patch_status(self, compute: Object, patch: Object) -> None:
        """Changes a Compute's status; one that is gone is fine."""
        metadata = compute["metadata"]
        try:
            await self._write(
                "PATCH",
                path_of(API_VERSION, "Compute", metadata["namespace"], metadata["name"], "status"),
                what=f"status of Compute {metadata['name']}",
                query={"fieldManager": FIELD_MANAGER},
                # The uid keeps us from writing to a new Compute of the same name.
                body={"metadata": {"uid": metadata["uid"]}, "status": patch},
                content_type="application/merge-patch+json",
            )
        except ApiError as exc:
            if not _is_gone(exc):
                raise

    async def served_kinds(self, group: str) -> dict[str, str]:
        """The kinds of an API group that the cluster serves, each with the best version; empty without the group."""
        try:
            answer = await self.request("GET", f"/apis/{group}", what=f"API group {group}")
        except ApiError as exc:
            if exc.status == 404:
                return {}
            raise
        found: dict[str, str] = {}
        for row in answer["versions"]:
            listed = await self.request("GET", f"/apis/{row['groupVersion']}", what=f"API {row['groupVersion']}")
            for resource in listed["resources"]:
                found.setdefault(resource["kind"], row["version"])
        return found
