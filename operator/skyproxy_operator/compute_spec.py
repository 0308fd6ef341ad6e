"""The specification of a Compute, parsed and checked.

The API server has checked a spec against the schema before we see it. What the schema says with rules (CEL), which
older servers do not know, is checked here again, and what no schema can say.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import NotRequired, TypedDict, TypeVar

from skyproxy.errors import ConfigurationError
from skyproxy.kubernetes.accelerators import is_accelerator, is_device
from skyproxy.units import limit_seconds, quantity
from skyproxy_operator.device_claims import ClaimItem, DeviceClaim, claim_problems
from skyproxy_operator.names import claim_name
from skyproxy_operator.pod_schema import form_problems
from skyproxy_operator.topology import Topology

_T = TypeVar("_T")

MAX_NAME = 50
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_RESERVED_VARIABLES = ("COMPUTE_POOL", "SKYPROXY_TOKEN")
_RESERVED_PATHS = ("/dev/shm", "/tmp", "/var/run/skyproxy")
_RESERVED_VOLUMES = ("home", "shm", "tls", "tmp", "token")
SNAPSHOTS = "snapshots"
"""The name of the volume for snapshots of sessions."""
_MAX_SPEC_CHARACTERS = 1 << 19
"""Of JSON. An API server stores three times as much, and what the status says has to fit beside it."""
_MAX_GRACE_SECONDS = 3600
SNAPSHOTS_FOLDER = "/var/lib/skyproxy-snapshots"


@dataclass(frozen=True)
class ComputeVolume:
    """Storage that outlives the pods."""

    name: str
    storage: str
    path: str
    access_mode: str
    storage_class: str | None = None
    retain: bool = False


@dataclass(frozen=True)
class RestartPolicy:
    """The reaction to a worker that ends by itself."""

    max_restarts: int = 3
    backoff_seconds: int = 5
    reset_seconds: int = 600


@dataclass(frozen=True)
class Gateway:
    """A way in from outside the cluster; what is None, the operator's options say."""

    hostname: str | None = None
    parent: Mapping[str, str] | None = None


class VolumeItem(TypedDict):
    """A volume in a Compute's spec, as the schema of the custom resource has it."""

    name: str
    storage: str | int
    path: str
    accessMode: NotRequired[str | None]
    storageClassName: NotRequired[str | None]
    reclaimPolicy: NotRequired[str]


class VariableItem(TypedDict):
    """A variable in a Compute's spec; has a value, or says where one is from."""

    name: str
    value: NotRequired[str]
    valueFrom: NotRequired[Mapping[str, object]]


class SnapshotsItem(TypedDict):
    """The volume for snapshots in a Compute's spec."""

    storage: str | int
    storageClassName: NotRequired[str | None]


class RestartItem(TypedDict, total=False):
    """The restart policy in a Compute's spec."""

    maxRestarts: int
    backoffSeconds: int
    resetSeconds: int


class GatewayItem(TypedDict, total=False):
    """The gateway in a Compute's spec."""

    enabled: bool
    hostname: str | None
    parentRef: Mapping[str, str] | None


class TopologyItem(TypedDict):
    """The domain of nodes that are near to each other, in a Compute's spec."""

    key: str
    required: NotRequired[bool]


class SecretItem(TypedDict):
    """A reference to a secret of the Compute's namespace."""

    name: str


class SpecItem(TypedDict, total=False):
    """The spec of a Compute, as the API server lets it through: the schema of the custom resource holds these types."""

    runtime: str | None
    image: str | None
    resources: Mapping[str, str | int] | None
    resourceClaims: list[ClaimItem] | None
    nodes: int
    procsPerNode: int
    port: int
    volumes: list[VolumeItem] | None
    env: list[VariableItem] | None
    envFrom: list[Mapping[str, object]] | None
    command: list[str] | None
    args: list[str] | None
    tolerations: list[Mapping[str, object]] | None
    nodeSelector: Mapping[str, str] | None
    affinity: Mapping[str, object] | None
    priorityClassName: str | None
    serviceAccountName: str | None
    imagePullSecrets: list[SecretItem] | None
    sharedMemory: str | int
    podTemplate: Mapping[str, object] | None
    idleTimeout: float | str | None
    maxLifetime: float | str | None
    queue: str | None
    schedulerName: str | None
    gang: str | None
    topology: TopologyItem | None
    topologySpreadConstraints: list[Mapping[str, object]] | None
    suspend: bool
    suspendAfter: float | str | None
    snapshots: SnapshotsItem | None
    restartPolicy: RestartItem | None
    gateway: GatewayItem | None


@dataclass(frozen=True)
class ComputeSpec:
    """A checked spec. Fields keep the form that pods have for them where nothing has to be known about them."""

    image: str | None = None
    resources: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1
    procs_per_node: int = 1
    port: int = 8765
    volumes: tuple[ComputeVolume, ...] = ()
    env: tuple[VariableItem, ...] = ()
    env_from: tuple[Mapping[str, object], ...] = ()
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    tolerations: tuple[Mapping[str, object], ...] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    affinity: Mapping[str, object] = field(default_factory=dict)
    priority_class: str | None = None
    service_account: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    shared_memory: str = "2Gi"
    pod_template: Mapping[str, object] = field(default_factory=dict)
    queue: str | None = None
    scheduler: str | None = None
    gang: str | None = None
    topology: Topology | None = None
    topology_spread: tuple[Mapping[str, object], ...] = ()
    claims: tuple[DeviceClaim, ...] = ()
    # What follows can change while the pods run.
    idle_timeout_seconds: float | None = field(default=None, metadata={"pod": False})
    max_lifetime_seconds: float | None = field(default=None, metadata={"pod": False})
    suspend: bool = field(default=False, metadata={"pod": False})
    suspend_after_seconds: float | None = field(default=None, metadata={"pod": False})
    restart: RestartPolicy = field(default=RestartPolicy(), metadata={"pod": False})
    gateway: Gateway | None = field(default=None, metadata={"pod": False})

    @classmethod
    def parse(cls, name: str, spec: SpecItem) -> ComputeSpec:
        """The spec of the Compute called `name`.

        Raises:
            ConfigurationError: it cannot work; the text has a line for each problem.
        """
        found = list(problems(name, spec))
        if found:
            raise ConfigurationError("\n".join(found))
        nodes = spec.get("nodes", 1)
        return cls(
            image=spec.get("image"),
            resources={key: str(value) for key, value in (spec.get("resources") or {}).items()},
            nodes=nodes,
            procs_per_node=spec.get("procsPerNode", 1),
            port=spec.get("port", 8765),
            volumes=tuple(_volume(item, nodes) for item in [*(spec.get("volumes") or ()), *_snapshots(spec)]),
            env=tuple(spec.get("env") or ()),
            env_from=tuple(spec.get("envFrom") or ()),
            command=tuple(spec.get("command") or ()),
            args=tuple(spec.get("args") or ()),
            tolerations=tuple(spec.get("tolerations") or ()),
            node_selector=spec.get("nodeSelector") or {},
            affinity=spec.get("affinity") or {},
            priority_class=spec.get("priorityClassName") or None,
            service_account=spec.get("serviceAccountName") or None,
            image_pull_secrets=tuple(item["name"] for item in spec.get("imagePullSecrets") or ()),
            shared_memory=str(spec.get("sharedMemory", "2Gi")),
            pod_template=spec.get("podTemplate") or {},
            queue=spec.get("queue") or None,
            scheduler=spec.get("schedulerName") or None,
            gang=spec.get("gang") or None,
            topology=_topology(spec.get("topology")),
            claims=tuple(map(DeviceClaim.parse, spec.get("resourceClaims") or ())),
            topology_spread=tuple(spec.get("topologySpreadConstraints") or ()),
            idle_timeout_seconds=limit_seconds(spec.get("idleTimeout")),
            max_lifetime_seconds=limit_seconds(spec.get("maxLifetime")),
            suspend=spec.get("suspend", False),
            suspend_after_seconds=limit_seconds(spec.get("suspendAfter")),
            restart=_restart(spec.get("restartPolicy") or {}),
            gateway=_gateway(spec.get("gateway") or {}),
        )

    @property
    def accelerators(self) -> dict[str, int]:
        """The number of each kind of accelerator that a node has: whole ones, slices, shares; of whatever make."""
        return {name: int(value) for name, value in self.resources.items() if is_accelerator(name) and int(value) > 0}

    @property
    def keeps_sessions(self) -> bool:
        """True if there is a volume for snapshots of sessions."""
        return any(volume.name == SNAPSHOTS for volume in self.volumes)

    @property
    def ports(self) -> range:
        """The ports of a node's processes."""
        return range(self.port, self.port + self.procs_per_node)

    def pod_hash(self) -> str:
        """Names what pods are made of; another one means other pods.

        Fields with their default do not count: a later version with more fields must not end running workers.
        """
        default = ComputeSpec()
        made_of = {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.metadata.get("pod", True) and getattr(self, item.name) != getattr(default, item.name)
        }
        # What becomes of a volume after the Compute does not concern the pod.
        if self.volumes:
            made_of["volumes"] = [(volume.name, volume.path) for volume in self.volumes]
        text = json.dumps(made_of, sort_keys=True, default=list)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def problem_of(error: Exception) -> str:
    """Return what is wrong with a spec of which nothing could be made, in words for whoever wrote it."""
    if isinstance(error, ValueError):
        return str(error)
    if isinstance(error, RecursionError):
        return "spec: something in it is nested too deeply"
    return f"spec: something in it has another form than this operator expects ({type(error).__name__})"


def problems(name: str, spec: SpecItem) -> Iterator[str]:
    """Everything that is wrong with a spec that the schema lets through, a line each."""
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        yield (
            f"metadata.name: {name!r} must begin with a lower-case letter, have only lower-case letters, digits "
            f"and '-', end with a letter or digit, and be no longer than {MAX_NAME} characters"
        )
    size = len(json.dumps(spec, default=str))
    if size > _MAX_SPEC_CHARACTERS:
        yield f"spec: it has {size} characters of JSON, and may have {_MAX_SPEC_CHARACTERS}; use ConfigMaps and volumes"
    port, processes = spec.get("port", 8765), spec.get("procsPerNode", 1)
    if port + processes > 65536:
        yield f"spec.port: {port} + procsPerNode {processes} must not exceed 65536: process i listens on port + i"
    yield from _resource_problems(spec.get("resources") or {})
    yield from claim_problems(spec.get("resourceClaims") or ())
    yield from _volume_problems(name, spec.get("volumes") or (), keeps_sessions=bool(spec.get("snapshots")))
    yield from _variable_problems(spec.get("env") or ())
    yield from _problem("spec.sharedMemory", quantity, spec.get("sharedMemory", "2Gi"))
    limits = {
        "idleTimeout": spec.get("idleTimeout"),
        "maxLifetime": spec.get("maxLifetime"),
        "suspendAfter": spec.get("suspendAfter"),
    }
    for key, limit in limits.items():
        yield from _problem(f"spec.{key}", limit_seconds, limit)
    if spec.get("suspendAfter") and not spec.get("snapshots"):
        yield "spec.suspendAfter: it needs snapshots, a volume for what the sessions hold"
    snapshots = spec.get("snapshots")
    if snapshots:
        yield from _problem("spec.snapshots.storage", quantity, snapshots["storage"])
    yield from form_problems(spec.get("affinity"), "V1Affinity", "spec.affinity")
    yield from _template_problems(spec.get("podTemplate") or {})


def _problem(where: str, check: Callable[[_T], object], value: _T) -> Iterator[str]:
    try:
        check(value)
    except ValueError as exc:
        yield f"{where}: {exc}"


def _resource_problems(resources: Mapping[str, object]) -> Iterator[str]:
    for name, value in resources.items():
        where = f"spec.resources[{name}]"
        bad = list(_problem(where, quantity, value))
        yield from bad
        if not bad and is_device(name) and not re.fullmatch(r"[0-9]+", str(value)):
            yield f"{where}: {value!r} is not whole, and devices come in whole numbers"


def _volume_problems(compute: str, volumes: Iterable[VolumeItem], *, keeps_sessions: bool) -> Iterator[str]:
    seen: dict[str, str] = {SNAPSHOTS_FOLDER: SNAPSHOTS} if keeps_sessions else {}
    for volume in volumes:
        where = f"spec.volumes[{volume['name']}]"
        path = volume["path"].rstrip("/")
        if volume["name"] in _RESERVED_VOLUMES or (keeps_sessions and volume["name"] == SNAPSHOTS):
            yield f"{where}: this name is used by the operator; choose another"
        if len(claim_name(compute, volume["name"])) > 63:
            yield f"{where}: the name is too long; with that of the Compute it may have 62 characters"
        yield from _problem(f"{where}.storage", quantity, volume["storage"])
        if any(path == taken or path.startswith(taken + "/") for taken in _RESERVED_PATHS) or not path:
            yield f"{where}.path: {volume['path']} is used by the worker itself; choose another"
        elif path in seen:
            yield f"{where}.path: {path} is that of volume {seen[path]} too; volumes must have different paths"
        seen.setdefault(path, volume["name"])


def _variable_problems(variables: Iterable[VariableItem]) -> Iterator[str]:
    for variable in variables:
        where = f"spec.env[{variable['name']}]"
        if "value" in variable and "valueFrom" in variable:
            yield f"{where}: an environment variable has either value or valueFrom"
        if variable["name"] in _RESERVED_VARIABLES:
            yield f"{where}: it is set by the operator"


def _template_problems(template: Mapping[str, object]) -> Iterator[str]:
    for key in sorted(template.keys() - {"metadata", "spec"}):
        yield f"spec.podTemplate.{key}: a pod template has metadata and spec only"
    wrong = [key for key in ("metadata", "spec") if not isinstance(template.get(key, {}), Mapping | None)]
    for key in wrong:
        yield f"spec.podTemplate.{key}: it must be an object"
    if wrong:
        return
    found = [
        *form_problems(template.get("metadata"), "V1ObjectMeta", "spec.podTemplate.metadata"),
        *form_problems(template.get("spec"), "V1PodSpec", "spec.podTemplate.spec"),
    ]
    yield from found
    spec = template.get("spec")
    grace = spec.get("terminationGracePeriodSeconds") if isinstance(spec, Mapping) else None
    if isinstance(grace, int) and grace > _MAX_GRACE_SECONDS:
        yield (
            f"spec.podTemplate.spec.terminationGracePeriodSeconds: {grace} is more than {_MAX_GRACE_SECONDS}, and a "
            "worker whose time is over could go on for that long"
        )


def _volume(item: VolumeItem, nodes: int) -> ComputeVolume:
    return ComputeVolume(
        name=item["name"],
        storage=str(item["storage"]),
        path=item["path"],
        access_mode=item.get("accessMode") or ("ReadWriteOnce" if nodes == 1 else "ReadWriteMany"),
        storage_class=item.get("storageClassName"),
        retain=item.get("reclaimPolicy") == "Retain",
    )


def _topology(item: TopologyItem | None) -> Topology | None:
    return Topology(item["key"], item.get("required", True)) if item else None


def _snapshots(spec: SpecItem) -> list[VolumeItem]:
    """Return the volume for snapshots, where one is asked for; it goes with the Compute."""
    item = spec.get("snapshots")
    if not item:
        return []
    return [
        {
            "name": SNAPSHOTS,
            "storage": item["storage"],
            "path": SNAPSHOTS_FOLDER,
            "storageClassName": item.get("storageClassName"),
        }
    ]


def _restart(item: RestartItem) -> RestartPolicy:
    default = RestartPolicy()
    return RestartPolicy(
        max_restarts=item.get("maxRestarts", default.max_restarts),
        backoff_seconds=item.get("backoffSeconds", default.backoff_seconds),
        reset_seconds=item.get("resetSeconds", default.reset_seconds),
    )


def _gateway(item: GatewayItem) -> Gateway | None:
    return Gateway(item.get("hostname"), item.get("parentRef")) if item.get("enabled") else None
