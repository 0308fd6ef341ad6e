"""The API server, as the operator talks to it: objects are plain dicts, and every request has an end.

Requests go below the generated client's own methods: those make typed objects, which lose what they do not know, and
log the bodies of answers, in which Secrets are.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import aiohttp

from skyproxy.kubernetes.versions import check_version
from skyproxy_operator.causes import Cause, refusal_cause
from skyproxy_operator.metrics import METRICS
from skyproxy_operator.names import API_VERSION, COMPUTE_LABEL, FIELD_MANAGER, PLURAL

Object = dict[str, Any]

logger = logging.getLogger("skyproxy.operator")

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
    "Secret": "secrets",
    "Service": "services",
}


class ApiError(Exception):
    """The API server refused a request, or did not answer.

    Attributes:
        status: the HTTP status; 0 where there was no answer.
        reason: the server's word for it, such as AlreadyExists; empty where it had none.
    """

    def __init__(self, what: str, status: int, reason: str, message: str) -> None:
        super().__init__(f"{what}: {message}")
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


class Cluster:
    """A connection to the API server; `connect` makes one, and `close` ends it."""

    def __init__(self, client: Any, timeout_seconds: float) -> None:
        self._client = client
        self._timeout_seconds = timeout_seconds

    @classmethod
    async def connect(cls, timeout_seconds: float) -> Cluster:
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
        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": FIELD_MANAGER}
        parameters = list((query or {}).items())
        client = self._client
        await client.update_params_for_auth(headers, parameters, ["BearerToken"])
        try:
            async with asyncio.timeout(self._timeout_seconds):
                response = await client.rest_client.request(
                    method,
                    client.configuration.host + path,
                    query_params=parameters,
                    headers=headers,
                    body=body,
                    _preload_content=False,
                )
                try:
                    text = await response.read()
                finally:
                    response.release()
        except TimeoutError:
            METRICS.requests.add(1, method=method, status="timeout")
            message = f"the API server did not answer within {self._timeout_seconds:g} s"
            raise ApiError(what, 0, "Timeout", message) from None
        except (aiohttp.ClientError, OSError) as exc:
            METRICS.requests.add(1, method=method, status="error")
            raise ApiError(what, 0, "Unreachable", f"the API server cannot be reached: {exc}") from exc
        METRICS.requests.add(1, method=method, status=str(response.status))
        try:
            answer: Object = json.loads(text)
        except ValueError:
            answer = {"message": text[:500].decode("utf-8", "replace")}
        if not 200 <= response.status <= 299:
            message = str(answer.get("message") or response.reason)
            raise ApiError(what, response.status, str(answer.get("reason", "")), message)
        return answer

    async def check_version(self) -> None:
        """Find out whether we can work on this cluster; where it does not tell its version, we try.

        Raises:
            ClusterError: it is too old.
        """
        try:
            answer = await self.request("GET", "/version", what="version")
        except ApiError as exc:
            logger.warning("the cluster does not tell its version: %s", exc)
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

    async def apply(self, wanted: Object) -> Object:
        """Server-side apply: creates an object, or changes what we say of it."""
        metadata = wanted["metadata"]
        return await self.request(
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
            await self.request(
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
            await self.request(
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

    # --- what belongs to Computes ------------------------------------------------------------------------------------

    async def compute(self, namespace: str, name: str) -> Object | None:
        """A Compute; None where there is none."""
        return await self.read(API_VERSION, "Compute", namespace, name)

    async def pods(self, namespace: str, compute: str) -> list[Object]:
        """All pods that bear a Compute's label."""
        return await self.list_all("v1", "Pod", namespace, {"labelSelector": f"{COMPUTE_LABEL}={compute}"})

    async def events(self, namespace: str, pod: Object) -> list[Object]:
        """The events about a pod, oldest first."""
        found = await self.list_all(
            "v1", "Event", namespace, {"fieldSelector": f"involvedObject.uid={pod['metadata']['uid']}", "limit": "50"}
        )
        return sorted(found, key=lambda item: item.get("lastTimestamp") or item.get("eventTime") or "")

    async def patch_status(self, compute: Object, patch: Object) -> None:
        """Changes a Compute's status; one that is gone is fine."""
        metadata = compute["metadata"]
        try:
            await self.request(
                "PATCH",
                path_of(API_VERSION, "Compute", metadata["namespace"], metadata["name"], "status"),
                what=f"status of Compute {metadata['name']}",
                query={"fieldManager": FIELD_MANAGER},
                # The uid keeps us from writing to a new Compute of the same name.
                body={"metadata": {"uid": metadata["uid"]}, "status": patch},
                content_type="application/merge-patch+json",
            )
        except ApiError as exc:
            another = exc.status == 422 and "uid" in exc.message
            if exc.status not in (404, 409) and not another:
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
