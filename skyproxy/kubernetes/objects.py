"""The parts of Kubernetes' objects that this package reads, as the API server sends them."""

from __future__ import annotations

from typing import Required, TypedDict


class OwnerReference(TypedDict, total=False):
    """The object that another one belongs to."""

    uid: str


class Metadata(TypedDict, total=False):
    """Metadata of an object."""

    name: Required[str]
    uid: str
    generation: int
    creationTimestamp: str
    deletionTimestamp: str
    finalizers: list[str] | None
    labels: dict[str, str]
    ownerReferences: list[OwnerReference]


class Condition(TypedDict, total=False):
    """A condition of an object."""

    type: Required[str]
    status: str
    reason: str
    message: str


class Waiting(TypedDict, total=False):
    """The state of a container that does not run yet."""

    reason: Required[str]
    message: str


class Terminated(TypedDict, total=False):
    """The state of a container that has ended."""

    reason: str
    message: str
    exitCode: int


class ContainerState(TypedDict, total=False):
    """The state of a container."""

    waiting: Waiting
    terminated: Terminated


class ContainerStatus(TypedDict, total=False):
    """The states of a container, now and before."""

    state: ContainerState
    lastState: ContainerState


class PodStatus(TypedDict, total=False):
    """The status of a Pod."""

    phase: str
    conditions: list[Condition]
    containerStatuses: list[ContainerStatus]


class Resources(TypedDict, total=False):
    """The resources of a container."""

    requests: dict[str, str]


class PodContainer(TypedDict, total=False):
    """A container of a Pod."""

    resources: Resources


class PodSpec(TypedDict, total=False):
    """The spec of a Pod."""

    nodeName: str
    readinessGates: list[object]
    containers: list[PodContainer]
    initContainers: list[PodContainer]


class PodObject(TypedDict, total=False):
    """A Pod."""

    metadata: Required[Metadata]
    spec: Required[PodSpec]
    status: PodStatus


class NodeSpec(TypedDict, total=False):
    """The spec of a node."""

    unschedulable: bool


class NodeStatus(TypedDict, total=False):
    """The status of a node."""

    conditions: list[Condition]
    allocatable: dict[str, str]


class NodeObject(TypedDict):
    """A node of the cluster."""

    metadata: Metadata
    spec: NodeSpec
    status: NodeStatus


class InvolvedObject(TypedDict, total=False):
    """The object that an event is about."""

    kind: str
    name: str


class EventObject(TypedDict, total=False):
    """An event."""

    type: str
    message: str
    count: int | None
    involvedObject: InvolvedObject
    lastTimestamp: str | None
    eventTime: str | None
