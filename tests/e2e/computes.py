"""Computes, as the tests make and watch them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.e2e.cluster import Cluster, Object, condition
from tests.e2e.control_plane.processes import bound

LABEL = "skyproxy.dev/compute"
_REPOSITORY = Path(__file__).resolve().parents[2]

# Instead of a worker, where only the operator is of interest: ready at once, and gone when told to.
TRIVIAL: Object = {
    "command": ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 1; done"],
    "podTemplate": {"spec": {"containers": [{"name": "worker", "readinessProbe": None}]}},
}


def collection(namespace: str) -> str:
    """Where the Computes of a namespace are."""
    return f"/apis/skyproxy.dev/v1alpha1/namespaces/{namespace}/computes"


def path_of(namespace: str, name: str) -> str:
    """Where a Compute is."""
    return f"{collection(namespace)}/{name}"


def manifest(name: str, **spec: Any) -> Object:
    """A Compute."""
    return {"apiVersion": "skyproxy.dev/v1alpha1", "kind": "Compute", "metadata": {"name": name}, "spec": spec}


def make(cluster: Cluster, namespace: str, name: str, **spec: Any) -> str:
    """Creates a Compute; gives its path."""
    cluster.create(collection(namespace), manifest(name, **spec))
    return path_of(namespace, name)


def is_in(phase: str) -> Callable[[Object | None], Any]:
    """Whether a Compute is in a phase, and its status about its present spec; gives the Compute."""

    def holds(found: Object | None) -> Object | None:
        status = (found or {}).get("status", {})
        current = found is not None and status.get("observedGeneration") == found["metadata"]["generation"]
        return found if current and status.get("phase") == phase else None

    return holds


def wait_phase(cluster: Cluster, path: str, phase: str, seconds: float = 120) -> Object:
    """Waits until a Compute is in a phase; gives it."""
    found: Object = cluster.wait(path, is_in(phase), f"phase {phase}", seconds)
    return found


def wait_reason(cluster: Cluster, path: str, kind: str, reason: str, seconds: float = 60) -> Object:
    """Waits until a condition has a reason; gives the condition."""

    def holds(found: Object | None) -> Object | None:
        shown = condition(found, kind)
        return shown if shown.get("reason") == reason else None

    shown: Object = cluster.wait(path, holds, f"{kind} with the reason {reason}", seconds)
    return shown


def child_collections(namespace: str) -> list[str]:
    """Where the objects are that the operator makes."""
    core = f"/api/v1/namespaces/{namespace}"
    kinds = ("pods", "services", "secrets", "configmaps", "persistentvolumeclaims")
    return [
        *(f"{core}/{kind}" for kind in kinds),
        f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
    ]


def children(cluster: Cluster, namespace: str, name: str | None = None) -> list[str]:
    """What belongs to a Compute, or to any: "pods/NAME" and so on."""
    selector = LABEL if name is None else f"{LABEL}={name}"
    return sorted(
        f"{path.rpartition('/')[2]}/{item['metadata']['name']}"
        for path in child_collections(namespace)
        for item in cluster.items(path, labelSelector=selector)
    )


def wait_nothing_left(cluster: Cluster, namespace: str, name: str | None = None, seconds: float = 90) -> None:
    """Waits until nothing of a Compute, or of all in a namespace, is left."""
    selector = LABEL if name is None else f"{LABEL}={name}"
    if name is None:
        cluster.wait_all(collection(namespace), lambda found: not found, "no Compute is left", seconds)
    else:
        cluster.wait(path_of(namespace, name), lambda found: found is None, "the Compute is gone", seconds)
    for path in child_collections(namespace):
        cluster.wait_all(path, lambda found: not found, "nothing is left", seconds, labelSelector=selector)


def pods_of(cluster: Cluster, namespace: str, name: str) -> list[Object]:
    """The Pods of a Compute."""
    return cluster.items(f"/api/v1/namespaces/{namespace}/pods", labelSelector=f"{LABEL}={name}")


def killable(spec: Object) -> Object:
    """A spec for a worker that `kill_worker` is to kill.

    The kernel ignores SIGKILL for process 1 of a namespace when it comes from inside, and a container's first process
    is such a one unless its Pod shares one namespace.
    """
    template = spec.get("podTemplate", {})
    shared = {**template.get("spec", {}), "shareProcessNamespace": True}
    return {**spec, "podTemplate": {**template, "spec": shared}}


KILL_FIRST = """
for folder in /proc/[0-9]*; do
  number=${folder#/proc/}
  parent=
  while read -r key value rest; do
    if [ "$key" = PPid: ]; then parent=$value; fi
  done < "$folder/status"
  if [ "$parent" = 0 ] && [ "$number" != 1 ] && [ "$number" != $$ ]; then kill -9 "$number"; fi
done
"""
"""A script that kills the first process of every other container in its namespace of processes: the parents of such
processes, and of what `exec` starts, are outside; process 1 is the Pod's pause."""


def process_of(identity: str) -> int:
    """The process id, on this machine, of the first process of a container on one of this run's nodes.

    Args:
        identity: the container's, as its status has it.

    Raises:
        ProcessLookupError: it has ended.
    """
    kind, _, name = identity.partition("://")
    if kind == "process":
        return int(name)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if name not in (folder / "cgroup").read_text():
                continue
            # Its number in the container is the last of those in all its namespaces.
            status = (folder / "status").read_text()
            numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
            parent = next(line for line in status.splitlines() if line.startswith("PPid:")).split()[1]
            if numbers[-1] == "1" or name not in Path(f"/proc/{parent}/cgroup").read_text():
                return int(folder.name)
    raise ProcessLookupError(identity)


def kill_worker(cluster: Cluster, pod: Object) -> None:
    """Kills the first process of a Pod's worker, as the kernel would when memory runs out; it has to be `killable`."""
    if cluster.local:
        os.kill(process_of(pod["status"]["containerStatuses"][0]["containerID"]), signal.SIGKILL)
    else:
        assert pod["spec"].get("shareProcessNamespace"), "a worker that cannot be killed from inside"
        where = f"--namespace={pod['metadata']['namespace']}"
        cluster.kubectl("exec", where, pod["metadata"]["name"], "--", "sh", "-c", KILL_FIRST)


class User:
    """Someone with a kubeconfig, at a shell of their own.

    Attributes:
        namespace: theirs.
        home: where their files are.
    """

    def __init__(self, cluster: Cluster, namespace: str, home: Path) -> None:
        self._cluster = cluster
        self.home = home
        self.namespace = namespace

    @property
    def environment(self) -> dict[str, str]:
        """Their environment variables: nothing of skyproxy's is set."""
        kept = {k: v for k, v in self._cluster.environment.items() if not k.startswith("SKYPROXY_")}
        folders = {f"XDG_{kind}_HOME": str(self.home / kind.lower()) for kind in ("CONFIG", "STATE", "CACHE", "DATA")}
        return {**kept, **folders, "PYTHONPATH": f"{_REPOSITORY}:{_REPOSITORY / 'operator'}", "OMP_NUM_THREADS": "1"}

    def try_python(self, *arguments: str, seconds: float = 200, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs Python, with more environment variables; gives the ended process with stdout and stderr as text."""
        return subprocess.run(
            [sys.executable, *arguments],
            env={**self.environment, **variables},
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def python(self, program: str, *arguments: str, seconds: float = 200, **variables: str) -> str:
        """Runs a program and gives its output.

        Raises:
            AssertionError: it failed.
        """
        script = self.home / "program.py"
        script.write_text(program, encoding="utf-8")
        return _output(self.try_python(str(script), *arguments, seconds=seconds, **variables))

    @contextlib.contextmanager
    def started(self, program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Starts a program; killed at the end if it still runs."""
        script = self.home / "started.py"
        script.write_text(program, encoding="utf-8")
        with subprocess.Popen(
            bound([sys.executable, str(script), *arguments]),
            env=self.environment,
            cwd=self.home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    @contextlib.contextmanager
    def forwarded(self, worker: str) -> Iterator[str]:
        """`skyproxy port-forward`; gives the url."""
        command = [sys.executable, "-m", "skyproxy.cli.main", "port-forward", worker, "--namespace", self.namespace]
        with subprocess.Popen(
            bound(command),
            env=self.environment,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                assert line.startswith("export SKYPROXY_URL="), line
                yield line.partition("=")[2].strip().strip("'")
            finally:
                process.terminate()

    def try_sky(self, command: str, *arguments: str, seconds: float = 200) -> subprocess.CompletedProcess[str]:
        """Runs a command of skyproxy in the user's namespace."""
        where = [] if command in ("run", "context") else ["--namespace", self.namespace]
        return self.try_python("-m", "skyproxy.cli.main", command, *where, *arguments, seconds=seconds)

    def sky(self, command: str, *arguments: str, seconds: float = 200) -> str:
        """The same, and gives its output.

        Raises:
            AssertionError: it failed.
        """
        return _output(self.try_sky(command, *arguments, seconds=seconds))


def _output(ended: subprocess.CompletedProcess[str]) -> str:
    assert ended.returncode == 0, f"{' '.join(ended.args)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"
    return ended.stdout


def messages(events: Iterable[Object]) -> str:
    """What events say, a line each."""
    return "\n".join(f"{event['reason']}: {event.get('message', '')}" for event in events)
