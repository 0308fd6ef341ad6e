"""One Pod on one node: from bound to gone."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.kubelet import probes
from tests.e2e.kubelet.api import Api, ApiError, Object
from tests.e2e.kubelet.containers import Container, Mount, Sandbox, User
from tests.e2e.kubelet.environment import MissingError, References, container_mounts, expand
from tests.e2e.kubelet.memory_limits import MemoryGroup
from tests.e2e.kubelet.network import Network, ServiceProxy

logger = logging.getLogger("kubelet.pods")

# A name that says so stands for an image that no registry has.
_UNPULLABLE = re.compile(r"(^|[/:.-])(missing|does-not-exist|invalid)($|[/:.-])")
# "CONTAINER=REASON": ends the container at once and reports that reason, as OOMKilled.
KILL_ANNOTATION = "e2e.skyproxy.dev/kill"
_RETRY_SECONDS = 1.0
# Shorter than a kubelet's 10 s, so that a suite can wait for it.
_BACK_OFF_SECONDS = 2.0
_BACK_OFF_LIMIT_SECONDS = 60.0


def now() -> str:
    """The time as Kubernetes writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Node:
    """What the Pods of one node share.

    Attributes:
        directory: for volumes and containers.
        logs: for the output of containers; it is kept.
        masked: directories that containers may not see.
        entry_point: the command of an image, for Pods that name none.
    """

    name: str
    host_address: str
    api: Api
    network: Network
    services: ServiceProxy
    directory: Path
    logs: Path
    masked: list[Mount]
    api_service: str
    entry_point: Callable[[str], list[str]]


class ContainerState:
    """What the API shows of one container."""

    def __init__(self, spec: Object) -> None:
        self.spec = spec
        self.restarts = 0
        self.ready = False
        self.started = False
        self.state: Object = {"waiting": {"reason": "ContainerCreating"}}
        self.last: Object = {}
        self.running: Container | None = None
        self.started_at = ""
        self.killed_as = ""

    def status(self) -> Object:
        """Its ContainerStatus."""
        identity = self.running.first_process if self.running is not None else None
        return {
            "name": self.spec["name"],
            "image": self.spec["image"],
            "imageID": f"local://{self.spec['image']}" if self.running is not None else "",
            "containerID": f"process://{identity}" if identity else "",
            "restartCount": self.restarts,
            "ready": self.ready,
            "started": self.started,
            "state": self.state,
            "lastState": self.last,
        }


class Pod:
    """Runs a Pod and tells the API server how it is."""

    def __init__(self, node: Node, pod: Object) -> None:
        self.node = node
        self.pod = pod
        self.namespace: str = pod["metadata"]["namespace"]
        self.name: str = pod["metadata"]["name"]
        self.uid: str = pod["metadata"]["uid"]
        self.sandbox: Sandbox | None = None
        self._spec: Object = pod["spec"]
        self._path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"
        self._directory = node.directory / self.uid
        self.containers = {c["name"]: ContainerState(c) for c in self._spec["containers"]}
        self._inits = {c["name"]: ContainerState(c) for c in self._spec.get("initContainers") or []}
        self._initialized = not self._inits
        self._start_time = now()
        self._publishing = asyncio.Lock()
        self._published: Object = {}
        self._since: dict[str, tuple[str, str]] = {}
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"pod {self.name}")
        self._ending: asyncio.Task[None] | None = None

    # ----------------------------------------------------------------------------------------------------- from outside

    def update(self, pod: Object) -> None:
        """Takes note of a change: a deletion, or a request to kill a container."""
        self.pod = pod
        request = pod["metadata"].get("annotations", {}).get(KILL_ANNOTATION, "")
        name, _, reason = request.partition("=")
        state = self.containers.get(name)
        if state is not None and state.running is not None and not state.killed_as:
            state.killed_as = reason
            state.running.signal(signal.SIGKILL)
        if pod["metadata"].get("deletionTimestamp"):
            self.end(float(pod["metadata"].get("deletionGracePeriodSeconds", 30)))

    def end(self, grace_seconds: float) -> asyncio.Task[None]:
        """Ends the Pod and removes it from the API server."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(grace_seconds), name=f"end of {self.name}")
        return self._ending

    @property
    def address(self) -> str:
        """The Pod's address; empty before it has one."""
        return self.sandbox.address if self.sandbox is not None else ""

    def log_of(self, container: str, previous: bool) -> Path | None:
        """The log of a container's present or previous run."""
        state = self.containers.get(container) or self._inits.get(container)
        if state is None:
            return None
        path = self._log(state, state.restarts - int(previous))
        if not previous and not path.exists():  # between two runs
            path = self._log(state, state.restarts - 1)
        return path if path.exists() else None

    # ------------------------------------------------------------------------------------------------------------- life

    async def _run(self) -> None:
        try:
            self.sandbox = await Sandbox.create(self.node.network)
            references = References(
                self.node.api, self.pod, {"status.podIP": self.address, "status.hostIP": self.node.host_address}
            )
            volumes = await self._retried(lambda: self._volumes(references))
            for state in self._inits.values():
                if not await self._supervise(state, references, volumes, to_success=True):
                    await self._publish()
                    return
            self._initialized = True
            async with asyncio.TaskGroup() as tasks:
                for state in self.containers.values():
                    tasks.create_task(self._supervise(state, references, volumes))
        except Exception:
            logger.exception("pod %s", self.name)
            await self._event("Warning", "FailedCreatePodSandBox", "the stand-in failed; see its log")

    async def _volumes(self, references: References) -> dict[str, Path]:
        result = {}
        group = self._spec.get("securityContext", {}).get("fsGroup")
        for volume in self._spec.get("volumes") or []:
            path = result[volume["name"]] = await references.volume(volume, self._directory / "volumes")
            if group is not None and "hostPath" not in volume:
                for part in [path, *path.rglob("*")]:
                    os.chown(part, -1, group)
                path.chmod(path.stat().st_mode | 0o2070)
        return result

    async def _retried(self, attempt: Any) -> Any:
        told = ""
        while True:
            try:
                return await attempt()
            except MissingError as error:
                if str(error) != told:
                    told = str(error)
                    await self._event("Warning", "FailedMount", f"MountVolume.SetUp failed: {told}")
                    await self._publish()
                await asyncio.sleep(_RETRY_SECONDS)

    async def _supervise(
        self, state: ContainerState, references: References, volumes: dict[str, Path], to_success: bool = False
    ) -> bool:
        """Runs a container as often as the Pod's policy wants; whether its last run succeeded."""
        if (self._spec.get("securityContext") or {}).get("runAsNonRoot") and not self._user(state.spec).uid:
            # Every image here runs as root if nobody says otherwise.
            message = "container has runAsNonRoot and image will run as root"
            state.state = {"waiting": {"reason": "CreateContainerConfigError", "message": message}}
            await self._publish()
            await asyncio.Event().wait()
        if _UNPULLABLE.search(state.spec["image"]):
            await self._refuse_image(state)
        policy = self._spec.get("restartPolicy", "Always")
        back_off = _BACK_OFF_SECONDS
        while True:
            code = await self._run_once(state, references, volumes)
            again = not self._stopping.is_set() and (
                (policy == "Always" and not to_success) or (policy != "Never" and code != 0)
            )
            if not again:
                await self._publish()
                return code == 0
            state.last, terminated = state.state, state.state["terminated"]
            state.state = {
                "waiting": {
                    "reason": "CrashLoopBackOff",
                    "message": f"back-off {back_off:g}s restarting failed container={state.spec['name']}"
                    f" pod={self.name}_{self.namespace}",
                }
            }
            if terminated["exitCode"] == 0:
                state.state["waiting"]["message"] = state.state["waiting"]["message"].replace("failed ", "")
            await self._event("Warning", "BackOff", "Back-off restarting failed container")
            await self._publish()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), back_off)
                return False
            back_off = min(2 * back_off, _BACK_OFF_LIMIT_SECONDS)
            state.restarts += 1

    async def _run_once(self, state: ContainerState, references: References, volumes: dict[str, Path]) -> int:
        spec = state.spec
        try:
            environment = await references.environment(spec)
        except MissingError as error:
            state.state = {"waiting": {"reason": "CreateContainerConfigError", "message": str(error)}}
            await self._event("Warning", "Failed", f"Error: {error}")
            await self._publish()
            environment = await self._retried(lambda: references.environment(spec))
        environment = {
            "KUBERNETES_SERVICE_HOST": self.node.api_service,
            "KUBERNETES_SERVICE_PORT": "443",
            "HOSTNAME": self.name,
            **environment,
        }
        command = spec.get("command") or self.node.entry_point(spec["image"])
        read_only = {
            v["name"] for v in self._spec.get("volumes") or [] if {"secret", "configMap", "projected"} & v.keys()
        }
        names = [
            Mount("ro", self.node.services.hosts_file(self.namespace, self.name, self.address), "/etc/hosts"),
            Mount("ro", self.node.services.resolver_file, "/etc/resolv.conf"),
        ]
        state.killed_as = ""
        state.started_at = now()
        limit = spec.get("resources", {}).get("limits", {}).get("memory")
        group = f"{self.uid}-{spec['name']}-{state.restarts}"
        memory = MemoryGroup.create(self.node.network.run_name, group, limit) if limit else None
        assert self.sandbox is not None
        state.running = await Container.start(
            [expand(a, environment) for a in [*command, *(spec.get("args") or [])]],
            sandbox=self.sandbox,
            hostname=self.name,
            environment=environment,
            mounts=[*self.node.masked, *names, *container_mounts(spec, volumes, read_only)],
            directory=spec.get("workingDir") or "/",
            user=self._user(spec),
            read_only=bool(spec.get("securityContext", {}).get("readOnlyRootFilesystem")),
            scratch=self._directory / "containers" / f"{spec['name']}.{state.restarts}",
            log=self._log(state, state.restarts),
            memory=memory,
        )
        state.state = {"running": {"startedAt": state.started_at}}
        state.started = "startupProbe" not in spec
        state.ready = state.started and "readinessProbe" not in spec
        await self._event("Normal", "Started", f"Started container {spec['name']}")
        probing = asyncio.create_task(self._probe(state, state.running))
        await self._publish()
        try:
            code = await state.running.wait()
            if memory is not None and memory.ran_out() and code == 137:
                state.killed_as = "OOMKilled"
        finally:
            probing.cancel()
            if memory is not None:
                memory.remove()
        state.ready = state.started = False
        terminated: Object = {
            "exitCode": code,
            "reason": state.killed_as or ("Completed" if code == 0 else "Error"),
            "startedAt": state.started_at,
            "finishedAt": now(),
        }
        policy = spec.get("terminationMessagePolicy", "File")
        if message := state.running.termination_message(policy == "FallbackToLogsOnError"):
            terminated["message"] = message
        state.state = {"terminated": terminated}
        return code

    def _user(self, container: Object) -> User:
        context = {**self._spec.get("securityContext", {}), **container.get("securityContext", {})}
        groups = [*context.get("supplementalGroups", []), *([context["fsGroup"]] if "fsGroup" in context else [])]
        return User(int(context.get("runAsUser", 0)), int(context.get("runAsGroup", 0)), tuple(groups))

    async def _refuse_image(self, state: ContainerState) -> None:
        image = state.spec["image"]
        error = f'failed to resolve reference "{image}": not found'
        await self._event("Warning", "Failed", f'Failed to pull image "{image}": {error}')
        state.state = {"waiting": {"reason": "ErrImagePull", "message": error}}
        await self._publish()
        await asyncio.sleep(_RETRY_SECONDS)
        await self._event("Normal", "BackOff", f'Back-off pulling image "{image}"')
        state.state = {"waiting": {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}"'}}
        await self._publish()
        await asyncio.Event().wait()

    async def _probe(self, state: ContainerState, running: Container) -> None:
        spec = state.spec
        if probe := spec.get("startupProbe"):
            async for ok in probes.outcomes(probe, spec, running, self.address, False):
                if ok:
                    break
            state.started = True
        if "readinessProbe" not in spec:
            state.ready = True
        await self._publish()
        async with asyncio.TaskGroup() as tasks:
            if probe := spec.get("readinessProbe"):
                tasks.create_task(self._probe_ready(state, running, probe))
            if probe := spec.get("livenessProbe"):
                tasks.create_task(self._probe_alive(state, running, probe))

    async def _probe_ready(self, state: ContainerState, running: Container, probe: Object) -> None:
        async for ok in probes.outcomes(probe, state.spec, running, self.address, False):
            state.ready = ok
            await self._publish()

    async def _probe_alive(self, state: ContainerState, running: Container, probe: Object) -> None:
        async for ok in probes.outcomes(probe, state.spec, running, self.address, True):
            if not ok:
                name = state.spec["name"]
                await self._event("Warning", "Unhealthy", "Liveness probe failed")
                await self._event("Normal", "Killing", f"Container {name} failed liveness probe, will be restarted")
                running.signal(signal.SIGKILL)

    async def _end(self, grace_seconds: float) -> None:
        self._stopping.set()
        running = [
            state.running
            for state in [*self._inits.values(), *self.containers.values()]
            if state.running is not None and state.running.exit_code is None
        ]
        for container in running:
            container.signal(signal.SIGTERM)
        if running:
            waits = [asyncio.create_task(container.process.wait()) for container in running]
            await asyncio.wait(waits, timeout=grace_seconds)
            for container in running:
                container.signal(signal.SIGKILL)
            await asyncio.wait(waits)
        # The supervisors end by themselves now; one that still waits for something is ended.
        _, late = await asyncio.wait([self._task], timeout=1.0 if running else 0.0)
        for task in late:
            task.cancel()
            await asyncio.wait([task])
        if self.sandbox is not None:
            await self.sandbox.close()
        self.node.services.forget_hosts_file(self.namespace, self.name)
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
        await self.node.api.delete(
            self._path, {"kind": "DeleteOptions", "gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        )

    # ----------------------------------------------------------------------------------------------------------- status

    def _phase(self) -> str:
        states = list(self.containers.values())
        if any(s.state.get("terminated", {}).get("exitCode") for s in self._inits.values()) and not self._initialized:
            return "Failed" if self._spec.get("restartPolicy") == "Never" else "Pending"
        if all("terminated" in s.state for s in states):
            return "Failed" if any(s.state["terminated"]["exitCode"] for s in states) else "Succeeded"
        if any(s.running is not None for s in states):
            return "Running"
        return "Pending"

    def _condition(self, kind: str, holds: bool) -> Object:
        status = str(holds)
        if self._since.get(kind, ("", ""))[0] != status:
            self._since[kind] = (status, now())
        result: Object = {"type": kind, "status": status, "lastTransitionTime": self._since[kind][1]}
        if not holds and kind in ("Ready", "ContainersReady"):
            lost = [s.spec["name"] for s in self.containers.values() if not s.ready]
            result |= {"reason": "ContainersNotReady", "message": f"containers with unready status: {lost}"}
        return result

    def _status(self) -> Object:
        ready = all(s.ready for s in self.containers.values())
        conditions = [
            c
            for c in self.pod.get("status", {}).get("conditions", [])
            if c["type"] not in ("Initialized", "Ready", "ContainersReady", "PodScheduled")
        ]
        conditions += [
            self._condition("Initialized", self._initialized),
            self._condition("Ready", ready),
            self._condition("ContainersReady", ready),
            self._condition("PodScheduled", True),
        ]
        status: Object = {
            "phase": self._phase(),
            "conditions": conditions,
            "hostIP": self.node.host_address,
            "startTime": self._start_time,
            "containerStatuses": [s.status() for s in self.containers.values()],
        }
        if self._inits:
            status["initContainerStatuses"] = [s.status() for s in self._inits.values()]
        if self.address:
            status |= {"podIP": self.address, "podIPs": [{"ip": self.address}]}
        return status

    async def _publish(self) -> None:
        async with self._publishing:
            status = self._status()
            if status == self._published:
                return
            try:
                await self.node.api.patch(f"{self._path}/status", {"metadata": {"uid": self.uid}, "status": status})
                self._published = status
            except ApiError as error:
                if error.status not in (404, 409):
                    logger.warning("status of %s: %s", self.name, error)

    async def _event(self, kind: str, reason: str, message: str) -> None:
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{self.name}.", "namespace": self.namespace},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": self.namespace,
                "name": self.name,
                "uid": self.uid,
            },
            "type": kind,
            "reason": reason,
            "message": message,
            "source": {"component": "kubelet", "host": self.node.name},
            "firstTimestamp": now(),
            "lastTimestamp": now(),
            "count": 1,
        }
        with contextlib.suppress(ApiError):  # the namespace may be going
            await self.node.api.post(f"/api/v1/namespaces/{self.namespace}/events", event)

    def _log(self, state: ContainerState, run: int) -> Path:
        return self.node.logs / f"{self.namespace}_{self.name}_{self.uid[:8]}_{state.spec['name']}_{run}.log"
