"""The part of `skyproxy doctor` that asks the cluster."""

from __future__ import annotations

from skyproxy.cli.findings import Finding
from skyproxy.errors import ClusterError, ConfigurationError
from skyproxy.kubernetes.address import ClusterAddress, LibraryMissingError, NoClusterError
from skyproxy.kubernetes.api_server import GROUP
from skyproxy.kubernetes.client import PLURAL, ClusterClient
from skyproxy.kubernetes.versions import check_version

_NEEDED = [
    (GROUP, PLURAL, "", ("create", "get", "list", "watch", "patch", "delete")),
    ("", "secrets", "", ("get",)),
    ("", "pods", "", ("list", "get")),
    ("", "pods", "log", ("get",)),
    ("", "pods", "portforward", ("create", "get")),
    ("", "events", "", ("list",)),
]
"""The requests that a user of workers makes: API group, resource, subresource, verbs."""


async def examine_cluster(address: ClusterAddress) -> list[Finding]:
    """Check that the cluster answers, has skyproxy installed, and lets us do what we need."""
    try:
        async with ClusterClient(address) as client:
            return await _examine(client)
    except (NoClusterError, LibraryMissingError) as error:
        if address.options:
            return [Finding("cluster", "broken", str(error))]
        return [Finding("cluster", "skipped", "none is configured")]
    except ConfigurationError as error:
        return [Finding("cluster", "broken", str(error))]
    except ClusterError as error:
        return [Finding("cluster", "broken", str(error), "Check with: kubectl get namespaces")]


async def _examine(client: ClusterClient) -> list[Finding]:
    version = check_version(await client.request("GET", "/version"))
    findings = [Finding("cluster", "ok", f"Kubernetes {version}, {client.address}")]
    try:
        count = len(await client.list_computes())
        findings.append(Finding("Compute", "ok", f"installed; {count} in {client.namespace}"))
    except ClusterError as error:
        findings.append(Finding("Compute", "broken", str(error)))
    findings.append(await _operator(client))
    denied = []
    for group, resource, subresource, verbs in _NEEDED:
        for verb in verbs:
            if not await _is_allowed(client, group, resource, subresource, verb):
                denied.append(f"{verb} {resource}" + (f"/{subresource}" if subresource else ""))
    if denied:
        hint = "Ask the cluster's administrator for the cluster role `edit` in this namespace, which has all of it."
        findings.append(Finding("permissions", "broken", f"you may not {', '.join(denied)}", hint))
    else:
        findings.append(Finding("permissions", "ok", f"all that workers in {client.namespace} need"))
    return findings


async def _operator(client: ClusterClient) -> Finding:
    query = [("fieldSelector", "metadata.name=skyproxy-operator")]
    try:
        rows = (await client.request("GET", "/apis/apps/v1/deployments", query=query)).get("items", [])
    except ClusterError as error:
        if error.status == 403:
            return Finding("operator", "skipped", "you may not list deployments in other namespaces")
        return Finding("operator", "broken", str(error))
    if not rows:
        return Finding(
            "operator",
            "warning",
            "its deployment was not found",
            "An administrator installs it: skyproxy install. It may also run outside of the cluster.",
        )
    for row in rows:
        where = f"{row['metadata']['namespace']}/{row['metadata']['name']}"
        if not row.get("status", {}).get("readyReplicas"):
            hint = f"kubectl -n {row['metadata']['namespace']} describe deployment {row['metadata']['name']}"
            return Finding("operator", "broken", f"{where} has no ready Pod", hint)
    return Finding("operator", "ok", where)


async def _is_allowed(client: ClusterClient, group: str, resource: str, subresource: str, verb: str) -> bool:
    attributes = {"namespace": client.namespace, "group": group, "resource": resource, "verb": verb}
    if subresource:
        attributes["subresource"] = subresource
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = await client.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=review)
    return bool(answer.get("status", {}).get("allowed"))
