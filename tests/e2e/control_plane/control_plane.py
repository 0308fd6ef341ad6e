"""A Kubernetes control plane on loopback: etcd, API server, controller manager, scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.e2e.control_plane.addresses import Slot
from tests.e2e.control_plane.binaries import Binaries
from tests.e2e.control_plane.certificates import Authority, write_kubeconfig
from tests.e2e.control_plane.processes import Process
from tests.e2e.control_plane.readiness import wait_ready


class ControlPlane:
    """A control plane as small as it can be: one of each, no audit log.

    Attributes:
        directory: certificates, kubeconfigs, data and logs.
        server: the API server's URL.
        kubeconfig: an administrator's.
        authority: who signed every certificate.
    """

    def __init__(self, binaries: Binaries, directory: Path, slot: Slot, address: str = "") -> None:
        """
        Args:
            binaries: of the four.
            directory: for everything that they write.
            slot: whose addresses to use.
            address: of this machine, where real nodes and their Pods reach it; loopback otherwise.
        """
        self.directory = directory
        self.slot = slot
        self._address = address or slot.loopback
        # An Endpoints object may not name loopback. The stand-in knows where the server is; real nodes ask.
        self._endpoints = [] if address else ["--endpoint-reconciler-type=none"]
        # A busy machine is no dead node; where nodes are to die, they are to be missed within a test's time.
        self._grace_seconds = 40 if address else 300
        self.server = f"https://{self._address}:6443"
        self.authority = Authority(directory / "certificates")
        self._binaries = binaries
        self._processes: list[Process] = []
        self.kubeconfig = self.user_kubeconfig("admin", group="system:masters")

    def user_kubeconfig(self, user: str, *, group: str | None = None) -> Path:
        """A kubeconfig for a user with a certificate, who may do what RBAC gives them."""
        certificate, key = self.authority.issue(user.replace(":", "-"), user=user, group=group)
        return write_kubeconfig(
            self.directory / f"{user.replace(':', '-')}.kubeconfig",
            self.server,
            self.authority.certificate,
            {"client-certificate": str(certificate), "client-key": str(key)},
        )

    def start(self) -> None:
        """Starts the four and waits until the API server is ready.

        Raises:
            RuntimeError: one of them ended, or it took too long; with the end of its log.
        """
        ca, host = self.authority.certificate, self._address
        serving = self.authority.issue(
            "kube-apiserver",
            host,
            "localhost",
            self.slot.api_service,
            *("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"),
        )
        # A real kubelet asks whether its caller may do what it asks for.
        kubelet_client = self.authority.issue(
            "kube-apiserver-kubelet-client", user="kube-apiserver", group="system:masters"
        )
        signing_key = self.authority.signing_key("service-accounts")
        client, peer = f"http://{host}:2379", f"http://{host}:2380"
        self._run(
            "etcd",
            f"--data-dir={self.directory / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )
        self._run(
            "kube-apiserver",
            f"--etcd-servers={client}",
            f"--bind-address={host}",
            f"--advertise-address={host}",
            "--secure-port=6443",
            f"--tls-cert-file={serving[0]}",
            f"--tls-private-key-file={serving[1]}",
            f"--client-ca-file={ca}",
            f"--kubelet-certificate-authority={ca}",
            f"--kubelet-client-certificate={kubelet_client[0]}",
            f"--kubelet-client-key={kubelet_client[1]}",
            "--kubelet-preferred-address-types=InternalIP",
            *self._endpoints,
            f"--service-cluster-ip-range={self.slot.services}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={signing_key}",
            f"--service-account-key-file={signing_key}",
        )
        self._wait_ready()
        self._run(
            "kube-controller-manager",
            f"--kubeconfig={self.user_kubeconfig('system:kube-controller-manager')}",
            f"--root-ca-file={ca}",
            f"--service-account-private-key-file={signing_key}",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            "--port=0",
            "--secure-port=0",
            f"--node-monitor-grace-period={self._grace_seconds}s",
            f"--flex-volume-plugin-dir={self.directory / 'volume-plugins'}",  # it makes the folder
            "--controllers=*,-nodeipam,-cloud-node-lifecycle,-route,-service",
        )
        self._run(
            "kube-scheduler",
            f"--kubeconfig={self.user_kubeconfig('system:kube-scheduler')}",
            "--leader-elect=false",
            "--port=0",
            "--secure-port=0",
        )

    def restart_server(self) -> None:
        """Kills the API server and starts it again; gives control back when it is ready."""
        index = next(i for i, process in enumerate(self._processes) if process.name == "kube-apiserver")
        self._processes[index] = self._processes[index].again()
        self._wait_ready()

    def check(self) -> None:
        """Raises RuntimeError when a component has ended by itself."""
        for process in self._processes:
            if process.ended:
                raise RuntimeError(f"{process.name} has ended; the end of {process.log}:\n{process.tail()}")

    def stop(self) -> None:
        """Ends the components, the last first. Idempotent."""
        for process in reversed(self._processes):
            process.stop()

    def _run(self, name: str, *arguments: str, argv: Sequence[str] = ()) -> None:
        log = self.directory / f"{name}.log"
        self._processes.append(Process(name, [self._binaries[name], *arguments, *argv], log))

    def _wait_ready(self) -> None:
        wait_ready(self.server, self.authority.certificate, self.check)
