"""What many Computes cost the operator and the API server, and how long a new one waits.

    sudo python benchmarks/operator_scale.py
    sudo python benchmarks/operator_scale.py --computes 200 --quiet-seconds 120

etcd, the API server, the controller manager and the scheduler are the real ones of `make e2e` (built there before); the
operator is a process of this machine. Nobody runs the Pods: this program says of each that has a machine that it is
ready, so what is measured is the operator and not a kubelet. Four questions: what it takes until all Computes of one
`apply` run; what goes on when nothing does; how long a new one waits for its first look; and the same just after the
leader was killed, while its successor looks at all the others. Requests are the operator's own count of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "operator")]

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from skyproxy_operator.cluster import ApiError, ClusterConnection, path_of  # noqa: E402
from skyproxy_operator.informer import View, view_of  # noqa: E402
from skyproxy_operator.names import API_VERSION  # noqa: E402
from tests.e2e.control_plane import binaries  # noqa: E402
from tests.e2e.control_plane.addresses import take_slot  # noqa: E402
from tests.e2e.control_plane.control_plane import ControlPlane  # noqa: E402
from tests.e2e.installation import copy_without_rules  # noqa: E402

NAMESPACE = "scale"
NODES = 12
_PORTS = (18080, 18081)
Object = dict[str, Any]


class OperatorProcess:
    """An operator of its own process, with the counts that it serves."""

    def __init__(self, kubeconfig: Path, port: int, log: Path) -> None:
        self._port = port
        environment = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'operator'}",
            "SKYPROXY_OPERATOR_HTTP_HOST": "127.0.0.1",
            "SKYPROXY_OPERATOR_HTTP_PORT": str(port),
            "SKYPROXY_OPERATOR_LEASE_NAMESPACE": "default",
        }
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "skyproxy_operator", "--all-namespaces", "--log-level", "warning"],
                env=environment,
                stdout=output,
                stderr=output,
            )

    def counts(self) -> dict[tuple[str, ...], float]:
        """Values by the metric's name and its labels' values; empty before it serves."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=30) as answer:
                text = answer.read().decode()
        except OSError:
            if self._process.poll() is not None:
                raise RuntimeError("the operator has ended; see its log") from None
            return {}
        return {
            (one.name.removeprefix("skyproxy_operator_"), *one.labels.values()): one.value
            for family in text_string_to_metric_families(text)
            for one in family.samples
        }

    def leads(self) -> bool:
        """Whether it is the one that works."""
        return self.counts().get(("leading",)) == 1

    def end(self, how: signal.Signals) -> None:
        """End it; idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(how)
        self._process.wait(30)


def requests_by_method(counts: dict[tuple[str, ...], float]) -> dict[str, float]:
    """All requests to the API server so far, by their method."""
    found: dict[str, float] = {}
    for (name, *labels), value in counts.items():
        if name == "api_requests_total":
            found[labels[0]] = found.get(labels[0], 0.0) + value
    return found


def looks(operator: OperatorProcess) -> float:
    """How many looks an operator has made."""
    return operator.counts().get(("reconciles_total", "done"), 0.0)


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What was added."""
    return {key: after[key] - before.get(key, 0.0) for key in sorted(after) if after[key] > before.get(key, 0.0)}


async def until(holds: Callable[[], bool], what: str, seconds: float) -> float:
    """Wait until something holds; how long it took."""
    begun = time.monotonic()
    while not holds():
        if time.monotonic() - begun > seconds:
            raise RuntimeError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.02)
    return time.monotonic() - begun


async def in_parallel(works: list[Callable[[], Awaitable[Any]]], at_once: int = 20) -> None:
    """Run all, so many at a time."""
    turn = asyncio.Semaphore(at_once)

    async def one(work: Callable[[], Awaitable[Any]]) -> None:
        async with turn:
            await work()

    await asyncio.gather(*map(one, works))


class World:
    """The cluster as this program sees and moves it; its Pods are ready as soon as they have a machine."""

    def __init__(self, cluster: ClusterConnection) -> None:
        self.cluster = cluster
        self.view: View = view_of(cluster, (), self._changed)
        self._works: set[asyncio.Task[None]] = set()

    def _changed(self, kind: str, change: str, item: Object, _listed: bool) -> None:
        waits = kind == "Pod" and change != "DELETED" and item["spec"].get("nodeName")
        if waits and item["status"].get("phase") == "Pending":
            work = asyncio.ensure_future(self._make_ready(item))
            self._works.add(work)
            work.add_done_callback(self._works.discard)

    async def _make_ready(self, pod: Object) -> None:
        ready = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Initialized", "Ready")]
        status = {"phase": "Running", "podIP": "127.0.0.1", "conditions": ready}
        name = pod["metadata"]["name"]
        while True:
            try:
                return await self._patch_status("v1", "Pod", NAMESPACE, name, status)
            except ApiError as exc:
                if exc.status not in (0, 429) and exc.status < 500:
                    return  # it is gone
                await asyncio.sleep(1.0)  # the API server is busy

    async def _patch_status(self, api: str, kind: str, namespace: str | None, name: str, status: Object) -> None:
        path = path_of(api, kind, namespace, name, "status") if namespace else f"/api/v1/nodes/{name}/status"
        body, content_type = {"status": status}, "application/merge-patch+json"
        await self.cluster.request("PATCH", path, what=name, body=body, content_type=content_type)

    async def prepare(self) -> None:
        """Make the namespace and machines without end."""
        body: Object = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        await self.cluster.request("POST", "/api/v1/namespaces", what="namespace", body=body)
        for number in range(NODES):
            name = f"machine-{number}"
            body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
            await self.cluster.request("POST", "/api/v1/nodes", what=name, body=body)
            room = {"cpu": "1000", "memory": "1000Gi", "pods": "1000"}
            conditions = [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]
            status = {"capacity": room, "allocatable": room, "conditions": conditions}
            await self._patch_status("v1", "Node", None, name, status)
            spec = {"spec": {"taints": []}}
            path, kind = f"/api/v1/nodes/{name}", "application/merge-patch+json"
            await self.cluster.request("PATCH", path, what=name, body=spec, content_type=kind)

    async def make(self, name: str) -> None:
        """Create a Compute whose worker need not answer."""
        spec = {"command": ["sleep", "inf"], "resources": {"cpu": "1m"}}
        metadata = {"name": name, "namespace": NAMESPACE}
        await self.cluster.create({"apiVersion": API_VERSION, "kind": "Compute", "metadata": metadata, "spec": spec})

    async def end(self, following: asyncio.Task[None]) -> None:
        """Stop to watch, and to make Pods ready."""
        for task in (following, *self._works):
            task.cancel()
        await asyncio.gather(following, *self._works, return_exceptions=True)

    def phase(self, name: str) -> str:
        """The phase of a Compute; empty before its first look."""
        return str(((self.view.compute(NAMESPACE, name) or {}).get("status") or {}).get("phase", ""))

    def running(self) -> int:
        """How many run."""
        return sum(self.phase(name) == "Running" for _, name in self.view.computes())

    async def first_look_seconds(self, name: str) -> float:
        """Create a Compute; how long it takes until its status says something."""
        begun = time.monotonic()
        await self.make(name)
        await until(lambda: bool(self.phase(name)), f"a first look at {name}", 120)
        return time.monotonic() - begun


@asynccontextmanager
async def world_of(kubeconfig: Path) -> AsyncIterator[World]:
    os.environ["KUBECONFIG"] = str(kubeconfig)
    cluster = await ClusterConnection.connect(60)
    world = World(cluster)
    following = asyncio.create_task(world.view.run())
    try:
        await world.prepare()
        yield world
    finally:
        await world.end(following)
        await cluster.close()


async def measure(kubeconfig: Path, folder: Path, computes: int, quiet_seconds: float) -> None:
    """Ask the four questions, and print what is answered."""
    async with world_of(kubeconfig) as world:
        operators = [OperatorProcess(kubeconfig, _PORTS[0], folder / "operator-0.log")]
        try:
            await until(operators[0].leads, "the operator leads", 120)
            before = requests_by_method(operators[0].counts())
            begun = time.monotonic()
            await in_parallel([lambda name=f"many-{number}": world.make(name) for number in range(computes)])
            print(f"{computes} Computes made in {time.monotonic() - begun:.1f} s", flush=True)
            await until(lambda: world.running() == computes, "all run", 1800)
            seconds = time.monotonic() - begun
            # The last events are on their way.
            await asyncio.sleep(5)
            spent = difference(before, requests_by_method(operators[0].counts()))
            each = ", ".join(f"{method} {count / computes:.2f}" for method, count in spent.items())
            print(f"all Running after {seconds:.1f} s; requests for each: {each}", flush=True)

            for place in range(2):
                await asyncio.sleep(40 if place else 0)  # by then even the first questions to workers were repeated
                counts = operators[0].counts()
                await asyncio.sleep(quiet_seconds)
                later = operators[0].counts()
                spent = difference(requests_by_method(counts), requests_by_method(later))
                rate = sum(spent.values()) / quiet_seconds
                processor = (later["process_cpu_seconds_total",] - counts["process_cpu_seconds_total",]) / quiet_seconds
                print(
                    f"nothing happens, for {quiet_seconds:g} s: {rate:.2f} requests/s "
                    f"({', '.join(f'{method} {count:g}' for method, count in spent.items())}), "
                    f"{100 * processor:.0f} % of a processor",
                    flush=True,
                )

            print(f"a new one is looked at after {await world.first_look_seconds('new'):.2f} s", flush=True)
            for number, how in enumerate((signal.SIGTERM, signal.SIGKILL), 1):
                operators.append(OperatorProcess(kubeconfig, _PORTS[number % 2], folder / f"operator-{number}.log"))
                await until(lambda: bool(operators[-1].counts()), "the next operator is up", 120)
                await asyncio.sleep(5)  # it has listed everything
                operators[-2].end(how)
                waited = await until(operators[-1].leads, "the next operator leads", 120)
                first = await world.first_look_seconds(f"after-{number}")
                begun = time.monotonic()
                await until(lambda: looks(operators[-1]) >= computes, "all are looked at", 600)
                print(
                    f"{how.name}: the next one leads after {waited:.1f} s; a new one is looked at after {first:.2f} s, "
                    f"and all others after {first + time.monotonic() - begun:.1f} s",
                    flush=True,
                )
        finally:
            for operator in operators:
                operator.end(signal.SIGKILL)


def main() -> None:
    """Start a control plane, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--computes", type=int, default=1000)
    parser.add_argument("--quiet-seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    folder, slot = Path(tempfile.mkdtemp(prefix="skyproxy-scale-")), take_slot()
    programs = binaries.ensure()
    plane = ControlPlane(programs, folder, slot)
    try:
        plane.start()
        copy_without_rules(folder / "manifests")
        apply = [str(programs["kubectl"]), f"--kubeconfig={plane.kubeconfig}", "apply", "--server-side", "-f"]
        subprocess.run([*apply, str(folder / "manifests" / "base" / "crd.yaml")], check=True)
        print(f"logs are in {folder}", flush=True)
        asyncio.run(measure(plane.kubeconfig, folder, arguments.computes, arguments.quiet_seconds))
    finally:
        plane.stop()
        os.close(slot.lock)


if __name__ == "__main__":
    main()
