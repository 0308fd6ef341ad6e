"""The GPUs that a cluster has, and those that are free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skyproxy.errors import ClusterError, ConfigurationError
from skyproxy.kubernetes.accelerators import WHOLE_GPU, is_accelerator
from skyproxy.kubernetes.client import ClusterClient
from skyproxy.kubernetes.objects import NodeObject, PodContainer, PodObject
from skyproxy.units import quantity

_PRODUCT_LABELS = ("nvidia.com/gpu.product", "amd.com/gpu.product-name", "gpu.intel.com/product")
_MEMORY_LABEL = "nvidia.com/gpu.memory"
_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True)
class NodeGpus:
    """The GPUs of one kind on one node.

    Attributes:
        node: its name.
        resource: by which a Pod asks for them, such as "nvidia.com/gpu".
        product: as the node's labels call it; an empty string where they do not.
        memory_mib: of each; None where no label says it.
        total: how many Pods can have.
        used: how many they have.
        schedulable: whether the node takes new Pods.
    """

    node: str
    resource: str
    product: str
    memory_mib: int | None
    total: int
    used: int
    schedulable: bool

    @property
    def free(self) -> int:
        """The number of GPUs that a new Pod could have."""
        return max(0, self.total - self.used) if self.schedulable else 0


def inventory(nodes: Iterable[NodeObject], pods: Sequence[PodObject]) -> list[NodeGpus]:
    """The GPUs of nodes, from what the API server says of nodes and Pods; pure."""
    rows = []
    for node in nodes:
        name, labels = node["metadata"]["name"], node["metadata"].get("labels", {})
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", ()))
        own = [p for p in pods if p["spec"].get("nodeName") == name and p.get("status", {}).get("phase") not in _ENDED]
        for resource, amount in sorted(node["status"].get("allocatable", {}).items()):
            if not is_accelerator(resource):
                continue
            product = next((labels[key] for key in _PRODUCT_LABELS if key in labels), "")
            memory = labels.get(_MEMORY_LABEL)
            rows.append(
                NodeGpus(
                    node=name,
                    resource=resource,
                    product=product,
                    memory_mib=int(memory) if memory and memory.isdigit() else None,
                    total=_count(amount),
                    used=sum(_count_requested(pod, resource) for pod in own),
                    schedulable=ready and not node["spec"].get("unschedulable", False),
                )
            )
    return rows


async def cluster_gpus(client: ClusterClient) -> list[NodeGpus]:
    """The GPUs of the cluster.

    Raises:
        ClusterError: we may not look at nodes. Where we may not look at all Pods, those of our namespace count.
    """
    nodes = (await client.request("GET", "/api/v1/nodes")).get("items", [])
    try:
        pods = (await client.request("GET", "/api/v1/pods")).get("items", [])
    except ClusterError as error:
        if error.status != 403:
            raise
        pods = (await client.request("GET", f"/api/v1/namespaces/{client.namespace}/pods")).get("items", [])
    return inventory(nodes, pods)


@dataclass(frozen=True)
class WantedGpus:
    """GPUs of a kind, as a Pod asks for them.

    Attributes:
        resource: by which a Pod asks for them.
        affinity: of the Pod.
    """

    resource: str
    affinity: dict[str, object]


async def placement(client: ClusterClient, gpu_type: str) -> WantedGpus:
    """GPUs of a kind, and the place where they are.

    Args:
        client: for the cluster.
        gpu_type: "A100", or the whole text of the product's label.

    Raises:
        ConfigurationError: no node has such GPUs; says which the cluster has.
    """
    try:
        rows = await cluster_gpus(client)
    except ClusterError as error:
        if error.status != 403:
            raise
        # We may not look, so the text must be the label's own.
        return WantedGpus(WHOLE_GPU, affinity(_PRODUCT_LABELS[0], [gpu_type]))
    return matching_placement(rows, gpu_type)


def matching_placement(rows: Sequence[NodeGpus], gpu_type: str) -> WantedGpus:
    """The place that a short name stands for.

    Raises:
        ConfigurationError: there is none.
    """
    wanted = _fold(gpu_type)
    products = sorted({row.product for row in rows if row.product})
    found = [product for product in products if _fold(product) == wanted]
    # By whole words, so that A10 does not find an A100.
    found = found or [item for item in products if f"-{wanted}-" in f"-{_fold(item)}-"]
    if not found:
        has = ", ".join(products) or "none that is labelled"
        raise ConfigurationError(f"no node of the cluster has GPUs of the type {gpu_type!r}. It has: {has}.")
    row = next(row for row in rows if row.product in found)
    maker = row.resource.split("/")[0]
    label = next((key for key in _PRODUCT_LABELS if key.split("/")[0] == maker), _PRODUCT_LABELS[0])
    # Of NVIDIA's, a whole one: a node that is cut has slices beside it.
    resource = WHOLE_GPU if maker == WHOLE_GPU.split("/")[0] else row.resource
    return WantedGpus(resource, affinity(label, found))


def affinity(label: str, products: Sequence[str]) -> dict[str, object]:
    """The affinity to nodes whose label is one of the products."""
    term = {"matchExpressions": [{"key": label, "operator": "In", "values": list(products)}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


def _fold(text: str) -> str:
    return text.casefold().replace(" ", "-").replace("_", "-")


def _count_requested(pod: PodObject, resource: str) -> int:
    def of(containers: Iterable[PodContainer]) -> list[int]:
        return [_count((c.get("resources", {}).get("requests") or {}).get(resource, 0)) for c in containers]

    return max(sum(of(pod["spec"].get("containers", ()))), *of(pod["spec"].get("initContainers", ())), 0)


def _count(amount: object) -> int:
    """Return the number of devices in a quantity: a thousand shares of a GPU are written `1k`."""
    return int(quantity(amount))
