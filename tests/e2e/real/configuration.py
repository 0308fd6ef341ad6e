"""What the programs of a real node are told, as the texts of their files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.real.names import DOMAIN


@dataclass(frozen=True)
class Place:
    """Where a node is, and what it is given.

    Attributes:
        name: of the node.
        directory: for its logs, and for what its programs write.
        store: of its containerd, with the images.
        address: its own.
        pods: the range of its Pods' addresses.
        all_pods: the range of every node's.
        name_server: the address of the cluster's DNS.
        authority: the certificate of who signs the API server's client certificate.
        certificate: for the kubelet's HTTPS endpoint, with its key.
        proxy_kubeconfig: kube-proxy's.
    """

    name: str
    directory: Path
    store: Path
    address: str
    pods: str
    all_pods: str
    name_server: str
    authority: Path
    certificate: tuple[Path, Path]
    proxy_kubeconfig: Path


def write(place: Place) -> None:
    """Write all files of a node into its directory."""
    directory = place.directory
    (directory / "cni").mkdir(parents=True, exist_ok=True)
    (directory / "address").write_text(place.address)
    (directory / "containerd.toml").write_text(containerd(place))
    for name, content in (
        ("cni/10-pods.conflist", pod_network(place)),
        ("kubelet.yaml", kubelet(place)),
        ("kube-proxy.yaml", kube_proxy(place)),
    ):
        (directory / name).write_text(json.dumps(content, indent=1))


def containerd(place: Place) -> str:
    """The configuration of containerd. Its state is in the node's own /run."""
    # Without the right to raise a priority for memory (CAP_SYS_RESOURCE), a container's cannot be what it asks for.
    return f"""\
version = 2
root = "{place.store}"
state = "/run/containerd"
oom_score = 0
[grpc]
  address = "/run/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "skyproxy.local/pause:1"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{place.directory}/cni"
"""


def pod_network(place: Place) -> dict[str, Any]:
    """A bridge of the node's own; Pods of other nodes are reached by routes, with their own addresses."""
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": True,
                "ipMasq": False,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    # As after a restart of a machine, addresses are free when the node starts.
                    "dataDir": "/run/addresses",
                    "ranges": [[{"subnet": place.pods}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def kubelet(place: Place) -> dict[str, Any]:
    """The kubelet's. The limits for evictions are low: a test's machine is nobody's to clean up."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": place.address,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(place.authority)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(place.certificate[0]),
        "tlsPrivateKeyFile": str(place.certificate[1]),
        "cgroupDriver": "cgroupfs",
        "failSwapOn": False,
        # Refuses to start where a sysctl is not as it wants it; see node.sh.
        "protectKernelDefaults": True,
        "oomScoreAdj": 0,
        "clusterDomain": DOMAIN,
        "clusterDNS": [place.name_server],
        "maxPods": 200,
        "serializeImagePulls": False,
        # How soon a Pod sees a changed Secret; a minute by default.
        "syncFrequency": "5s",
        "nodeStatusUpdateFrequency": "5s",
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
    }


def kube_proxy(place: Place) -> dict[str, Any]:
    """kube-proxy's. Limits of the machine's table of connections stay as they are."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(place.proxy_kubeconfig)},
        "hostnameOverride": place.name,
        "mode": "iptables",
        "clusterCIDR": place.all_pods,
        "oomScoreAdj": 0,
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
    }
