"""A Kubernetes control plane on loopback: etcd, API server, controller manager, scheduler."""

from __future__ import annotations

import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.control_plane.addresses import Slot
from tests.e2e.control_plane.binaries import Binaries
from tests.e2e.control_plane.certificates import Authority, write_kubeconfig
from tests.e2e.control_plane.processes import Process

_READY_SECONDS = 120.0


class ControlPlane:
    """A control plane as small as it can be: one of each, RBAC on, no audit log, no admission beyond the default.

    Attributes:
        directory: certificates, kubeconfigs, data and logs.
        server: the API server's URL.
        kubeconfig: an administrator's.
        authority: who signed every certificate.
    """

    def __init__(self, binaries: Binaries, directory: Path, slot: Slot) -> None:
        self.directory = directory
        self.slot = slot
        self.server = f"https://{slot.loopback}:6443"
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
        ca, host = self.authority.certificate, self.slot.loopback
        serving = self.authority.issue(
            "kube-apiserver",
            host,
            "localhost",
            self.slot.api_service,
            *("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"),
        )
        kubelet_client = self.authority.issue("kube-apiserver-kubelet-client", user="kube-apiserver")
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
            # The address is loopback, which an Endpoints object may not name; the stand-in knows where the server is.
            "--endpoint-reconciler-type=none",
            f"--service-cluster-ip-range={self.slot.services}",
            "--authorization-mode=RBAC",
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
            # A busy machine is no dead node.
            "--node-monitor-grace-period=300s",
            "--controllers=*,-nodeipam,-cloud-node-lifecycle,-route,-service",
        )
        self._run(
            "kube-scheduler",
            f"--kubeconfig={self.user_kubeconfig('system:kube-scheduler')}",
            "--leader-elect=false",
            "--port=0",
            "--secure-port=0",
        )

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
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        deadline = time.monotonic() + _READY_SECONDS
        pause = threading.Event()
        while True:
            self.check()
            try:
                with urllib.request.urlopen(f"{self.server}/readyz", timeout=5, context=context):
                    return
            except (OSError, urllib.error.URLError) as error:
                if time.monotonic() > deadline:
                    server = self._processes[-1]
                    raise RuntimeError(
                        f"the API server was not ready within {_READY_SECONDS:g} s: {error}\n{server.tail()}"
                    ) from error
                pause.wait(0.1)
