"""Looks at one Compute after the other, and brings each a step nearer to what is wanted."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skyproxy_operator import status as state
from skyproxy_operator.causes import Cause, has_ended, is_ready, is_scheduled, namespace_cause
from skyproxy_operator.cluster import ApiError, Cluster
from skyproxy_operator.decisions import (
    Announcement,
    Picture,
    Plan,
    decide,
    namespace_is_going,
    node_of,
    owned,
    refuse,
)
from skyproxy_operator.family import Family, FamilyKeeper
from skyproxy_operator.metrics import METRICS
from skyproxy_operator.names import API_VERSION, FIELD_MANAGER, KIND
from skyproxy_operator.options import Options
from skyproxy_operator.pod_builder import build_pod
from skyproxy_operator.probing import TOKEN_REFUSED, Prober
from skyproxy_operator.reaping import IDLE, LIFETIME, Report, next_check_seconds
from skyproxy_operator.work_queue import WorkQueue
from skyproxy_operator.worker_spec import WorkerSpec

Object = dict[str, Any]
Key = tuple[str, str]
"""Namespace and name of a Compute."""

logger = logging.getLogger("skyproxy.operator")

_FIRST_RETRY_SECONDS = 0.5
_MAX_RETRY_SECONDS = 60.0
_LEFTOVER_SECONDS = 1.0
_SILENT_PROBES = 3
"""A worker that has not answered that often in a row is worth a word; one that computes may miss a question."""


@dataclass
class _Memory:
    """What is remembered of a Compute between looks; all of it can be found out again.

    Attributes:
        uid: of the Compute.
        generation: of its spec.
        phase: its last one.
        failures: looks in a row that failed.
        probe_at: when its workers are asked again, in the time of `time.monotonic`.
        unanswered: how often in a row not all of its workers answered.
        silence: why one of them did not, the last time.
    """

    uid: str = ""
    generation: int = 0
    phase: str = ""
    failures: int = 0
    probe_at: float = 0.0
    unanswered: int = 0
    silence: Report = field(default_factory=Report)


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Controller:
    """Looks at the Computes in its queue; `run` does so until it is cancelled."""

    def __init__(
        self,
        cluster: Cluster,
        prober: Prober,
        options: Options,
        clock: Callable[[], datetime.datetime] = _utc_now,
    ) -> None:
        self.queue: WorkQueue[Key] = WorkQueue()
        self._cluster = cluster
        self._prober = prober
        self._options = options
        self._clock = clock
        self._families = FamilyKeeper(cluster, options)
        self._memories: dict[Key, _Memory] = {}
        METRICS.computes.read = self._count_phases
        METRICS.queued.read = lambda: {"": len(self.queue)}

    async def run(self) -> None:
        """Looks at what the queue says, several at a time."""
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(max(self._options.concurrency, 1)):
                    group.create_task(self._work(), name=f"skyproxy-reconciler-{number}")
        finally:
            self.queue.close()

    def touch(self, key: Key, *, children: bool = False) -> None:
        """Something happened to a Compute or a pod of it.

        Args:
            key: the Compute.
            children: whether its other children are to be looked at, too.
        """
        if children and key in self._memories:
            self._families.forget(self._memories[key].uid)
        self.queue.add(key)

    async def _work(self) -> None:
        while True:
            key = await self.queue.get()
            try:
                await self._look(key)
            finally:
                self.queue.done(key)

    async def _look(self, key: Key) -> None:
        """One look; a failure means another one, later and later."""
        memory = self._memories.setdefault(key, _Memory())
        begun = time.monotonic()
        try:
            again = await self.reconcile(key)
        except Exception as exc:
            memory.failures += 1
            pause = min(_FIRST_RETRY_SECONDS * 2 ** (memory.failures - 1), _MAX_RETRY_SECONDS)
            self.queue.add_later(key, pause)
            METRICS.reconciles.add(1, result="failed")
            if isinstance(exc, ApiError):
                logger.warning("%s/%s: %s; next try in %.1f s", *key, exc, pause)
            else:
                logger.exception("%s/%s: internal error; next try in %.1f s", *key, pause)
        else:
            memory.failures = 0
            if again is not None:
                self.queue.add_later(key, again)
            METRICS.reconciles.add(1, result="done")
        finally:
            METRICS.duration.observe(time.monotonic() - begun)

    async def reconcile(self, key: Key) -> float | None:
        """Brings a Compute one step nearer to what is wanted.

        Args:
            key: its namespace and name.

        Returns:
            After how many seconds to look again though nothing happens; None where it is gone.

        Raises:
            ApiError: the API server did not do its part.
        """
        namespace, name = key
        compute = await self._cluster.compute(namespace, name)
        if compute is None:
            memory = self._memories.pop(key, None)
            if memory is not None:
                self._families.forget(memory.uid)
            self.queue.forget(key)
            return None
        memory = self._memories.setdefault(key, _Memory())
        uid, generation = compute["metadata"]["uid"], int(compute["metadata"].get("generation", 0))
        if (memory.uid, memory.generation) != (uid, generation):
            # With another spec, such as a shorter idleTimeout, it may be time to ask the workers already.
            memory.uid, memory.generation, memory.probe_at = uid, generation, 0.0
        pods = await self._cluster.pods(namespace, name)
        picture = Picture(compute, pods, self._clock())
        try:
            spec = WorkerSpec.parse(name, compute.get("spec") or {})
            # A podTemplate that does not fit shows when it is applied.
            build_pod(compute, spec, 0, 0, self._options)
        except ValueError as exc:
            plan = refuse(picture, str(exc))
        else:
            plan = await self._plan(picture, spec, memory)
        await self._carry_out(picture, plan)
        memory.phase = plan.status["phase"]
        resync = self._options.resync_seconds
        return resync if plan.look_again_seconds is None else min(plan.look_again_seconds, resync)

    # --- the picture -------------------------------------------------------------------------------------------------

    async def _plan(self, picture: Picture, spec: WorkerSpec, memory: _Memory) -> Plan:
        compute = picture.compute
        if "deletionTimestamp" in compute["metadata"]:
            return decide(picture, spec, self._options)
        if namespace_is_going(compute):
            return decide(replace(picture, refusals=(namespace_cause(),)), spec, self._options)
        family = await self._families.bring_up(compute, spec, picture.now)
        refusals = [*([family.blocking] if family.blocking else ()), *family.refusals]
        reports = await self._reports(picture, spec, family, memory)
        if memory.unanswered >= _SILENT_PROBES and _should_answer(spec, compute):
            refusals.append(_silence_cause(spec, memory.silence))
        picture = Picture(compute, picture.pods, self._clock(), reports, await self._events(picture), tuple(refusals))
        plan = decide(picture, spec, self._options)
        if not plan.create:
            return plan
        if family.blocking is not None:
            # A pod without its Secrets would only fail.
            pause = _LEFTOVER_SECONDS if not family.blocking.actionable else plan.look_again_seconds
            return replace(plan, create=(), look_again_seconds=pause)
        refused = await self._create(plan.create)
        if not refused:
            return replace(plan, create=())
        picture = Picture(compute, picture.pods, picture.now, reports, picture.events, (*refused, *refusals))
        plan = decide(picture, spec, self._options)
        return replace(plan, create=())

    async def _create(self, pods: Sequence[Object]) -> list[Cause]:
        """Makes pods; what the API server said against it."""
        refused = []
        for pod in pods:
            try:
                if await self._cluster.create(pod):
                    METRICS.pods.add(1, action="created")
            except ApiError as exc:
                if exc.status == 0 or exc.status >= 500 or exc.status == 429:
                    raise
                refused.append(exc.cause)
        return refused

    async def _reports(self, picture: Picture, spec: WorkerSpec, family: Family, memory: _Memory) -> list[Report]:
        """What the workers are doing; empty where it is not time to ask."""
        ready = {node_of(pod): pod["status"].get("podIP", "") for pod in owned(picture) if is_ready(pod)}
        if len(ready) < spec.nodes:
            memory.unanswered = 0
        if not ready or family.access is None or spec.suspend or time.monotonic() < memory.probe_at:
            return []
        addresses = [(ready.get(node, ""), port) for node in range(spec.nodes) for port in spec.ports]
        reports = await self._prober.ask(addresses, family.access)
        # What somebody has to see to goes first.
        problems = sorted((report for report in reports if report.problem), key=lambda report: not report.reason)
        if len(ready) == spec.nodes:
            memory.unanswered = memory.unanswered + 1 if problems else 0
            memory.silence = problems[0] if problems else Report()
        if problems and problems[0].reason:
            # Its Secrets were replaced, it seems: they are read again at the next look.
            self._families.forget(picture.compute["metadata"]["uid"])
        started = state.moment((picture.compute.get("status") or {}).get("startTime"))
        pause = next_check_seconds(spec, started, reports, self._clock(), self._options)
        # A little early, for the look that is planned for then must not find that it is not time yet.
        memory.probe_at = time.monotonic() + pause - 0.5
        return reports

    async def _events(self, picture: Picture) -> Mapping[str, Sequence[Object]]:
        """Events about pods that have a machine, and no container yet."""
        found = {}
        for pod in owned(picture):
            statuses = (pod.get("status") or {}).get("containerStatuses") or ()
            begun = any((item.get("state") or {}).get("running") for item in statuses)
            if is_scheduled(pod) and not begun and not has_ended(pod) and not is_ready(pod):
                found[pod["metadata"]["name"]] = await self._cluster.events(pod["metadata"]["namespace"], pod)
        return found

    # --- the plan ----------------------------------------------------------------------------------------------------

    async def _carry_out(self, picture: Picture, plan: Plan) -> None:
        compute = picture.compute
        patch = state.patch_between(compute.get("status") or {}, plan.status)
        if patch:
            await self._cluster.patch_status(compute, patch)
        for pod in plan.delete:
            await self._cluster.delete(pod)
            METRICS.pods.add(1, action="deleted")
        for pod in plan.force:
            logger.warning(
                "%s/%s: pod %s is removed by force: its machine does not answer",
                *_key(compute),
                pod["metadata"]["name"],
            )
            await self._cluster.delete(pod, force=True)
            METRICS.pods.add(1, action="forced")
        if patch.get("endedReason") in (IDLE, LIFETIME):
            METRICS.reaped.add(1, reason=patch["endedReason"])
        for announcement in plan.announce:
            logger.info("%s/%s: %s: %s", *_key(compute), announcement.reason, announcement.message)
            await self._announce(compute, announcement)

    async def _announce(self, compute: Object, announcement: Announcement) -> None:
        event = event_of(compute, announcement, self._clock())
        try:
            await self._cluster.create(event)
        except ApiError as exc:
            if exc.cause == namespace_cause():
                return
            # An event is for people; what it says is in the status, too.
            logger.warning("%s/%s: an event could not be written: %s", *_key(compute), exc)

    def _count_phases(self) -> dict[str, float]:
        counts: dict[str, float] = {}
        for memory in self._memories.values():
            if memory.phase:
                counts[memory.phase] = counts.get(memory.phase, 0.0) + 1
        return counts


def _should_answer(spec: WorkerSpec, compute: Object) -> bool:
    """Whether a worker that cannot be asked is worth a word: a command of the user's own need not be one of ours."""
    ever_did = "worker" in (compute.get("status") or {})
    return not spec.command or ever_did or spec.idle_timeout_seconds is not None


def _silence_cause(spec: WorkerSpec, silence: Report) -> Cause:
    """Why a worker that takes sessions does not tell what it does."""
    text = f"A worker does not tell whether it is idle: {silence.problem}."
    if silence.reason == TOKEN_REFUSED:
        text += " It does not accept the token of its Secret."
    if silence.reason:
        text += " Secrets that are replaced come to it within two minutes; after that, see its log."
    if spec.idle_timeout_seconds is not None:
        text += " idleTimeout has no effect meanwhile."
    return Cause(silence.reason or "ActivityUnknown", text, actionable=True)


def _key(compute: Object) -> Key:
    return compute["metadata"]["namespace"], compute["metadata"]["name"]


def event_of(compute: Object, announcement: Announcement, now: datetime.datetime) -> Object:
    """An event on a Compute. The same one twice in a second has the same name, and so is one."""
    metadata, stamp = compute["metadata"], state.timestamp(now)
    text = f"{metadata['uid']} {announcement.reason} {announcement.message} {stamp}"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{metadata['name']}.{hashlib.sha256(text.encode()).hexdigest()[:16]}",
            "namespace": metadata["namespace"],
        },
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
            "resourceVersion": metadata.get("resourceVersion", ""),
        },
        "type": announcement.kind,
        "reason": announcement.reason,
        "message": announcement.message[:1000],
        "source": {"component": FIELD_MANAGER},
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }
