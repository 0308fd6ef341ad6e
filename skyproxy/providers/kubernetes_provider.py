"""Workers in a Kubernetes cluster, made by skyproxy's operator."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from skyproxy.errors import ClusterError, ConfigurationError, WorkerStartError
from skyproxy.kubernetes.accelerators import WHOLE_GPU
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.kubernetes.api_server import Manifest
from skyproxy.kubernetes.client import ClusterClient
from skyproxy.kubernetes.explain import Explanation
from skyproxy.kubernetes.gpus import placement
from skyproxy.kubernetes.reach import VIA, Way, credentials_by_name, reach, run_apart
from skyproxy.kubernetes.resources import compute_manifest
from skyproxy.kubernetes.waiting import apply_and_wake, wait_until_ready
from skyproxy.providers.base import Endpoint, Progress, Report, WorkerSpec
from skyproxy.providers.environments import install_steps
from skyproxy.providers.image import Image
from skyproxy.providers.locked_requirements import LOCK_FILE, packed

if TYPE_CHECKING:
    from typing import Unpack

    from skyproxy.kubernetes.resources import SpecFields

logger = logging.getLogger("skyproxy.providers")

_DELETE_SECONDS = 60.0
_LOG_LINES = 200
_CONTAINER = "worker"
"""The operator's name for the container of a worker."""


class Kubernetes:
    """Workers as a Compute in a cluster.

    Attributes:
        name: "kubernetes".
        address: cluster and namespace.

    Example:
        ```python
        where = skyproxy.Kubernetes(namespace="team")
        with skyproxy.Compute(provider=where, resources={"nvidia.com/gpu": 1}) as pool:
            train() >> pool
        ```
    """

    name = "kubernetes"

    def __init__(
        self,
        namespace: str | None = None,
        context: str | None = None,
        kubeconfig: str | None = None,
        *,
        via: str = "auto",
        **spec: Unpack[SpecFields],
    ) -> None:
        """Says where; asks nothing of the cluster yet.

        Args:
            namespace: the kubeconfig's by default.
            context: of the kubeconfig; its current one by default.
            kubeconfig: the file; as kubectl finds it by default, or the Pod's own account inside a cluster.
            via: how workers are reached: "auto", "service", "gateway" or "port-forward".
            spec: fields of the Compute's spec for every worker: tolerations=[...], nodeSelector={...}, ...

        Raises:
            ConfigurationError: `via` is none of those.
        """
        if via not in VIA:
            raise ConfigurationError(f"via={via!r} is not one of: {', '.join(VIA)}.")
        self.address = ClusterAddress(namespace, context, kubeconfig)
        self._via = via
        self._spec: dict[str, Any] = {**spec}

    async def launch(self, spec: WorkerSpec, report: Report) -> KubernetesLaunched:
        """Makes the Compute and waits until all its processes can be reached; takes it back where that fails.

        Raises:
            ConfigurationError: the cluster cannot give what is asked for, or a worker of that name exists.
            WorkerStartError: it did not come up; says why.
            ClusterError: the cluster refused.
        """
        async with ClusterClient(self.address) as client:
            manifest = await self._manifest(client, spec)
            made, woken_from = await self._make(client, manifest, spec)
            launched = KubernetesLaunched(client.address, spec, self._via, own=made and not spec.keep)
            try:
                report(Progress("provisioning", None, f"created Compute {spec.name} in {client.address}"))
                compute = await wait_until_ready(
                    client,
                    spec.name,
                    spec.timeout_seconds,
                    lambda found: report(_progress(found)),
                    woken_from=woken_from,
                )
                report(Progress("bootstrapping", None, "connecting to its worker processes"))
                await launched.connect(client, compute)
            except BaseException:
                # A second interruption must not stop us from taking back what was begun.
                launched.own = made
                await asyncio.shield(launched.close())
                raise
            report(Progress("running", None, f"{spec.world_size} worker process(es) of {spec.name} can be reached"))
            return launched

    async def _manifest(self, client: ClusterClient, spec: WorkerSpec) -> Manifest:
        more = {**self._spec, **spec.options}
        resources = dict(spec.resources)
        if spec.accelerator is not None:
            resource = WHOLE_GPU
            if "affinity" not in more:
                found = await placement(client, spec.accelerator.name)
                resource, more["affinity"] = found.resource, found.affinity
            resources.setdefault(resource, str(spec.accelerator.count))
        image, image_env = _container_image(spec.image)
        if isinstance(spec.image, Image) and (spec.image.pip or spec.image.requirements):
            more["podTemplate"] = with_packages(more.get("podTemplate"), spec.image)
        return compute_manifest(
            spec.name,
            namespace=client.namespace,
            image=image,
            resources=resources,
            nodes=spec.nodes,
            procs_per_node=spec.procs_per_node,
            volumes=[{"name": v.name, "storage": v.storage, "path": v.path, **v.options} for v in spec.volumes],
            env={**image_env, **spec.env},
            idle_timeout_seconds=spec.idle_timeout_seconds,
            max_lifetime_seconds=spec.max_lifetime_seconds,
            **more,
        )

    async def _make(self, client: ClusterClient, manifest: Manifest, spec: WorkerSpec) -> tuple[bool, str | None]:
        """Make the Compute; return whether there was none of that name before, and what `wait_until_ready` should know
        of its past.
        """
        if spec.keep and await client.get(spec.name) is not None:
            return False, await apply_and_wake(client, manifest)
        try:
            await client.create(manifest)
        except ClusterError as error:
            if error.reason != "AlreadyExists":
                raise
            raise ConfigurationError(
                f"a worker {spec.name!r} already exists in {client.address}. Use another name; or keep=True, to use it "
                f"and leave it there; or end it: skyproxy down {spec.name}"
            ) from error
        return True, None


class KubernetesLaunched:
    """The worker processes of a Compute.

    Attributes:
        endpoints: one a process, in the order of ranks.
        own: whether the Compute goes when we go.
        unbuilt_image: packages that nobody installed; the pool checks that the container image has them.
    """

    def __init__(self, address: ClusterAddress, spec: WorkerSpec, via: str, *, own: bool) -> None:
        self.endpoints: list[Endpoint] = []
        self.own = own
        self.unbuilt_image = spec.image if isinstance(spec.image, Image) else None
        self._address = address
        self._spec = spec
        self._via = via
        self._ways: list[Way] = []
        self._closed = False

    async def connect(self, client: ClusterClient, compute: Manifest) -> None:
        """Finds a way to every process."""
        spec = self._spec
        rows = {int(row.get("rank", 0)): row for row in compute.get("status", {}).get("nodes", ())}
        for node in range(spec.nodes):
            for local_rank in range(spec.procs_per_node):
                way = await reach(client, compute, node=node, local_rank=local_rank, via=self._via)
                self._ways.append(way)
                peer = f"{spec.name}-{node}.{spec.name}-nodes.{client.namespace}.svc" if spec.nodes > 1 else ""
                self.endpoints.append(
                    Endpoint(
                        way.url,
                        way.token,
                        node=node,
                        rank=node * spec.procs_per_node + local_rank,
                        local_rank=local_rank,
                        address=peer or rows.get(node, {}).get("podIP") or "127.0.0.1",
                        certificate=way.certificate,
                        server_name=way.server_name,
                        renew=partial(_renew, self._address, spec.name, pinned=way.certificate is not None),
                    )
                )

    async def close(self) -> None:
        """Ends the ways, and the Compute unless it is to be kept; idempotent."""
        if self._closed:
            return
        self._closed = True
        for way in self._ways:
            await asyncio.to_thread(way.close)
        if not self.own:
            return
        async with ClusterClient(self._address) as client:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DELETE_SECONDS):
                    await client.delete(self._spec.name)
                    return
            logger.warning(
                "the worker %s is still being deleted after %.0f s; see: skyproxy status %s",
                self._spec.name,
                _DELETE_SECONDS,
                self._spec.name,
            )

    async def logs(self, rank: int) -> str:
        """The end of what a node's workers wrote."""
        async with ClusterClient(self._address) as client:
            try:
                pod = self._pod(rank)
                return "\n".join([line async for line in client.logs(pod, tail=_LOG_LINES)])
            except ClusterError as error:
                return f"(no log: {error})"

    async def restart(self, rank: int) -> Endpoint:
        """Ends the Pod of a worker process; the operator makes a new one, and the ways to it stay the same.

        Raises:
            WorkerStartError: it did not come up, or shares its Pod with other processes.
        """
        if self._spec.procs_per_node > 1:
            raise WorkerStartError(
                f"rank {rank} shares its Pod with {self._spec.procs_per_node - 1} others, which a restart would "
                "end too. Use procs_per_node=1, or start the pool again."
            )
        async with ClusterClient(self._address) as client:
            path = f"/api/v1/namespaces/{client.namespace}/pods/{self._pod(rank)}"
            before = await client.find(path)
            if before is not None:
                with contextlib.suppress(ClusterError):
                    await client.request("DELETE", path)
                await self._wait_for_another(client, path, before["metadata"]["uid"])
            await wait_until_ready(client, self._spec.name, self._spec.timeout_seconds, lambda _: None)
        return self.endpoints[rank]

    async def _wait_for_another(self, client: ClusterClient, path: str, uid: str) -> None:
        folder, _, name = path.rpartition("/")
        try:
            async with asyncio.timeout(self._spec.timeout_seconds):
                async for kind, pod in client.watch(folder, field_selector=f"metadata.name={name}"):
                    if kind in ("ADDED", "MODIFIED") and pod["metadata"]["uid"] != uid:
                        return
        except TimeoutError:
            raise WorkerStartError(f"{name} was not recreated within {self._spec.timeout_seconds:.0f} s.") from None

    def _pod(self, rank: int) -> str:
        return f"{self._spec.name}-{rank // self._spec.procs_per_node}"


def _progress(found: Explanation) -> Progress:
    phase = "failed" if found.failed else "bootstrapping" if found.phase == "Running" else "provisioning"
    hint = f". {found.hint}" if found.hint else ""
    return Progress(phase, None, f"{found.text}{hint}")  # type: ignore[arg-type]


def _container_image(image: Image | str | None) -> tuple[str | None, dict[str, str]]:
    """The name of the container image, and the variables that its description adds.

    Raises:
        ConfigurationError: what is described cannot be added to a container without rights.
    """
    if image is None or isinstance(image, str):
        return image, {}
    wanted = [name for name in ("python", "apt", "includes") if getattr(image, name)]
    if wanted:
        raise ConfigurationError(
            f"Image({', '.join(wanted)}=...): in a cluster, workers run container images that are built already, and "
            "only pip=[...] is added at their start. Build one on skyproxy's worker image, push it, and pass its name: "
            "Image(base='registry.example/worker:1', pip=[...])."
        )
    return image.base, dict(image.env)


def with_packages(pod_template: Mapping[str, Any] | None, image: Image) -> dict[str, Any]:
    """A Pod template whose workers install what an image asks for before they start; what they have stays theirs.

    Args:
        pod_template: the user's own, which is kept.
        image: with requirements.

    Raises:
        ConfigurationError: the user's own says what the worker runs.
    """
    template = copy.deepcopy(dict(pod_template or {}))
    containers = template.setdefault("spec", {}).setdefault("containers", [])
    worker = next((row for row in containers if row.get("name") == _CONTAINER), None)
    if worker is None:
        worker = {"name": _CONTAINER}
        containers.append(worker)
    if "command" in worker:
        raise ConfigurationError(
            "podTemplate says what the worker runs, so Image(pip=[...]) cannot be added. Drop one."
        )
    wanted: dict[str, object] = {"requirements": list(image.pip), "steps": install_steps(image, isolated=False)}
    if image.requirements is not None:
        wanted["lock"] = {"name": LOCK_FILE, "text": packed(str(image.requirements))}
    worker["command"] = ["python", "-m", "skyproxy_server.bootstrap", json.dumps(wanted)]
    return template


def _renew(address: ClusterAddress, name: str, *, pinned: bool) -> tuple[str, str | None]:
    """Ask for a worker's token after a rotation, and its authority; at a gateway, the system's are trusted instead."""
    token, authority = run_apart(credentials_by_name(address, name))
    return token, authority if pinned else None
