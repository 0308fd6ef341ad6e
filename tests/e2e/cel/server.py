"""An API server that knows custom resources with their CEL rules, and nothing else."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import subprocess
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.e2e.cluster import ApiError, Object, condition
from tests.e2e.control_plane.addresses import Slot
from tests.e2e.control_plane.certificates import Authority, write_kubeconfig
from tests.e2e.control_plane.processes import Process
from tests.e2e.control_plane.readiness import wait_ready

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_SERVED_SECONDS = 60.0
# They ask for objects that this server does not have: namespaces, policies, webhooks.
_WITHOUT = (
    "NamespaceLifecycle",
    "MutatingAdmissionPolicy",
    "MutatingAdmissionWebhook",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionWebhook",
)


def cached_directory() -> Path:
    """Where the binaries are kept, whether they are there or not."""
    return Path(os.environ.get("SKYPROXY_CACHE") or Path.home() / ".cache" / "skyproxy") / "apiextensions"


def is_cached() -> bool:
    """Whether they are there."""
    directory = cached_directory()
    return (directory / "version").exists() and (directory / "bin" / "apiextensions-apiserver").exists()


def build() -> None:
    """Builds the binaries where they are missing, which takes minutes.

    Raises:
        RuntimeError: the build failed; the message holds the end of its log.
    """
    script = Path(__file__).with_name("build.sh")
    built = subprocess.run([script, cached_directory()], capture_output=True, text=True, check=False)
    if built.returncode:
        raise RuntimeError(f"{script} failed:\n{built.stderr}")


class Server:
    """The server with its etcd, on loopback.

    Attributes:
        version: of the library that it is made of; 0.36 is Kubernetes 1.36's.
    """

    def __init__(self, directory: Path, slot: Slot) -> None:
        self.version = (cached_directory() / "version").read_text(encoding="utf-8").strip()
        self._directory = directory
        self._address = slot.loopback
        self._authority = Authority(directory / "certificates")
        self._processes: list[Process] = []
        self._client = ssl.create_default_context(cafile=str(self._authority.certificate))
        self._client.load_cert_chain(*self._authority.issue("admin", user="admin", group="system:masters"))

    def start(self) -> None:
        """Starts both and waits until the server is ready.

        Raises:
            RuntimeError: one of them ended, or it took too long; with the end of its log.
        """
        etcd, peer = f"http://{self._address}:2379", f"http://{self._address}:2380"
        certificate, key = self._authority.issue("server", self._address, "localhost")
        # It asks a core server who may do what, and takes none for an error. Administrators need no asking.
        user = {"client-certificate": str(certificate), "client-key": str(key)}
        itself = write_kubeconfig(
            self._directory / "kubeconfig", f"https://{self._address}:6443", self._authority.certificate, user
        )
        self._run(
            "etcd",
            f"--data-dir={self._directory / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        )
        self._run(
            "apiextensions-apiserver",
            f"--etcd-servers={etcd}",
            f"--bind-address={self._address}",
            "--secure-port=6443",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--client-ca-file={self._authority.certificate}",
            f"--kubeconfig={itself}",
            f"--authentication-kubeconfig={itself}",
            "--authentication-skip-lookup",
            f"--authorization-kubeconfig={itself}",
            f"--disable-admission-plugins={','.join(_WITHOUT)}",
        )
        # Never "ready": it waits for a core server's Services, too, for webhooks that nobody has.
        wait_ready(f"https://{self._address}:6443", self._authority.certificate, self.check, "/livez")

    def check(self) -> None:
        """Raises RuntimeError when one has ended by itself."""
        for process in self._processes:
            if process.ended:
                raise RuntimeError(f"{process.name} has ended; the end of {process.log}:\n{process.tail()}")

    def stop(self) -> None:
        """Ends both. Idempotent."""
        for process in reversed(self._processes):
            process.stop()

    def define(self, definition: Object) -> None:
        """Adds a kind of custom resources, and waits until it is served.

        Raises:
            ApiError: the server refused it.
            RuntimeError: it took too long; with the definition as the server has it.
        """
        path = f"{DEFINITIONS}/{definition['metadata']['name']}"
        self.request("POST", DEFINITIONS, definition)
        deadline = time.monotonic() + _SERVED_SECONDS
        pause = threading.Event()
        while condition(found := self.request("GET", path), "Established").get("status") != "True":
            if time.monotonic() > deadline:
                raise RuntimeError(f"not served within {_SERVED_SECONDS:g} s: {found['status']}")
            pause.wait(0.1)

    def request(self, method: str, path: str, body: Any = None, **params: str) -> Object:
        """One request of an administrator.

        Raises:
            ApiError: with the status and the server's message.
        """
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        query = f"?{urlencode(params)}" if params else ""
        answer: Object = json.loads(self.request_text(method, path + query, json.dumps(body), kind))
        return answer

    def request_text(self, method: str, path: str, body: str = "", kind: str = "application/json") -> bytes:
        """One request of an administrator, as it is, and its answer.

        Raises:
            ApiError: with the status and the server's message.
        """
        connection = http.client.HTTPSConnection(self._address, 6443, timeout=60, context=self._client)
        try:
            connection.request(method, path, body, {"Content-Type": kind})
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status >= 400:
            raise ApiError(response.status, json.loads(answer)["message"])
        return answer

    def _run(self, name: str, *arguments: str) -> None:
        program = str(cached_directory() / "bin" / name)
        self._processes.append(Process(name, [program, *arguments], self._directory / f"{name}.log"))
