"""Options of an installation, which the operator's Deployment sets in its environment."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from skyproxy.errors import ConfigurationError
from skyproxy.units import settings_from


@dataclass(frozen=True)
class Options:
    """The values in force; each can be set by `SKYPROXY_OPERATOR_` and its name in capitals."""

    worker_image: str = "ghcr.io/skyproxy/worker:0.1.0"
    """For Computes that name no image and ask for no GPU."""
    gpu_worker_image: str = "ghcr.io/skyproxy/worker:0.1.0-cuda"
    """The same for those that ask for GPUs."""
    worker_uid: int | None = 10001
    """The user, group and file-system group of workers; empty where the platform chooses them, as OpenShift does."""
    gateway: str = ""
    """NAMESPACE/NAME of the Gateway for Computes that name none."""
    gateway_domain: str = ""
    """The domain under which Computes that name no host are reached."""
    allow_host_access: bool = False
    """True if pods may share namespaces, ports or folders with their machine, or choose it by name."""
    allow_privilege: bool = False
    """True if pods may be root, be privileged or have capabilities."""
    service_accounts: str = ""
    """Patterns NAMESPACE/NAME, with commas between, of the service accounts that pods may be; `*` is any text."""
    secrets: str = "*"
    """Patterns of the Secrets that pods may be given, of those in their own namespace."""
    resource_claims: str = "*"
    """Patterns of the ResourceClaims and their templates, of those in their own namespace, that pods may name."""
    volume_claims: str = "*"
    """Patterns of the PersistentVolumeClaims, of those in their own namespace, that a podTemplate may mount."""
    device_classes: str = "*"
    """Patterns of the classes of devices for which the operator makes claims."""
    require_runtime: bool = False
    """True if every Compute must name a runtime of the installation."""
    ingress: str = "*"
    """From where workers are reached: `*` from everywhere, `namespace` from that of the Compute, `namespaces/NAME`,
    addresses such as 10.0.0.0/8; several with commas. Nodes of one Compute and the operator always reach them."""
    egress: str = "*"
    """Peers that workers reach, written like `ingress`; its own nodes and the cluster's DNS always. Empty: nobody."""
    protect_sessions: bool = True
    """True if drains and autoscalers must leave workers alone as long as somebody uses them."""
    lost_node_seconds: float = 300.0
    """For how long a machine may be silent until its workers are made again on another one."""
    accelerator_images: str = ""
    """Images for accelerators other than NVIDIA's, such as `amd.com/=IMAGE,habana.ai/=IMAGE`, by the beginning of the
    resource's name."""
    concurrency: int = 8
    """Computes that are looked after at the same time."""
    resync_seconds: float = 300.0
    """The interval at which every Compute is looked at though nothing happened; its children, too."""
    secrets_seconds: float = 14400.0
    """The interval at which Secrets, and children that may not be watched, are read again though nothing changed."""
    probe_seconds: float = 30.0
    """The interval at which a running worker is asked for its activity; more often when an idle timeout comes near."""
    probe_timeout_seconds: float = 5.0
    request_timeout_seconds: float = 30.0
    """A request to the API server that takes longer has failed."""
    lease_namespace: str = ""
    """The namespace of the Lease by which one of several operators leads; without one, every operator works."""
    lease_name: str = "skyproxy-operator"
    lease_identity: str = ""
    """The name of this operator in the Lease: with the uid of its pod, a container that starts again goes on at once,
    for the one before it has ended. Without it, every process is another operator."""
    lease_seconds: float = 15.0
    """A leader that has not renewed its Lease for this long is none any more."""
    http_host: str = "*"
    """The address that serves /healthz, /readyz and /metrics; `*` is all, of IPv4 and of IPv6, and empty is none."""
    http_port: int = 8080
    """Its port; 0 takes a free one."""


def load(environ: Mapping[str, str] | None = None) -> Options:
    """The options that the environment asks for.

    Raises:
        ConfigurationError: a value is not of its option's kind.
    """
    options = settings_from(environ, "SKYPROXY_OPERATOR_", Options)
    network_peers("ingress", options.ingress)
    network_peers("egress", options.egress)
    accelerator_image("", options)
    return options


ADDRESSES, NAMESPACE = "addresses", "namespace"


def network_peers(option: str, text: str) -> list[tuple[str, str]]:
    """Return the peers that `ingress` or `egress` names: ADDRESSES with a range, or NAMESPACE with a name, empty for
    the Compute's own.

    Args:
        option: its name.
        text: its value; `*` names nobody in particular.

    Raises:
        ConfigurationError: it is written otherwise.
    """
    found = []
    for item in [] if text.strip() == "*" else filter(None, (part.strip() for part in text.split(","))):
        kind, _, name = item.partition("/")
        if item == "namespace" or (kind == "namespaces" and name):
            found.append((NAMESPACE, name))
            continue
        try:
            found.append((ADDRESSES, str(ipaddress.ip_network(item))))
        except ValueError:
            raise ConfigurationError(
                f"SKYPROXY_OPERATOR_{option.upper()}: {item!r} is neither *, namespace, namespaces/NAME nor a range of "
                "addresses. Example: namespace,10.0.0.0/8"
            ) from None
    return found


def accelerator_image(resource: str, options: Options) -> str | None:
    """The image for a kind of accelerator that is not NVIDIA's; None where the installation names none.

    Args:
        resource: such as `habana.ai/gaudi`.
        options: those of the installation.

    Raises:
        ConfigurationError: `accelerator_images` is written otherwise than it should be.
    """
    for item in filter(None, (part.strip() for part in options.accelerator_images.split(","))):
        beginning, equals, image = item.partition("=")
        if not beginning or not equals or not image:
            raise ConfigurationError(
                f"SKYPROXY_OPERATOR_ACCELERATOR_IMAGES: {item!r} is not RESOURCE=IMAGE. "
                "Example: amd.com/=registry/worker:rocm"
            )
        if resource.startswith(beginning):
            return image
    return None
