"""Looks at one Compute after the other, and brings each a step nearer to what is wanted."""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any

from skyproxy_operator import status as state
from skyproxy_operator.announcements import Announcement, event_of
from skyproxy_operator.causes import Cause, has_ended, is_ready, is_scheduled, namespace_cause
from skyproxy_operator.child_reconciler import ChildReconciler, ChildStatus
from skyproxy_operator.cluster import ApiError, ClusterConnection
from skyproxy_operator.cluster_view import ClusterView
from skyproxy_operator.compute_spec import ComputeSpec, problem_of
from skyproxy_operator.decisions import (
    ObservedState,
    Plan,
    decide,
    is_over,
    is_unjudged,
    is_untouched,
    namespace_is_going,
    node_of,
    owned_pods,
    refuse,
)
from skyproxy_operator.metrics import METRICS
from skyproxy_operator.names import API_VERSION, KIND
from skyproxy_operator.options import Options
from skyproxy_operator.ownership import name_taken
from skyproxy_operator.pod_builder import build_pod
from skyproxy_operator.probing import ENDING, ProbeCredentials, Prober
from skyproxy_operator.questions import Questions, should_answer, silence_cause
from skyproxy_operator.queueing import KUEUE_GROUP, QUEUE_LABEL, WORKLOAD, is_gated
from skyproxy_operator.reaping import IDLE, LIFETIME, SUSPENDED_IDLE, Report, next_check_seconds
from skyproxy_operator.runtimes import Resolution, change_message, lifetime_seconds, resolve
from skyproxy_operator.work_queue import CHANGED, NEW, ROUTINE, WorkQueue

Object = dict[str, Any]
Key = tuple[str, str]
"""Namespace and name of a Compute."""

logger = logging.getLogger("skyproxy.operator")

_FIRST_RETRY_SECONDS = 0.5
_MAX_RETRY_SECONDS = 60.0
_FIRST_REFUSAL_SECONDS = 10.0
"""A quota has room again when something else ends, which nobody tells us."""
_LEFTOVER_SECONDS = 1.0
_NEVER_TAKEN = (400, 413, 422)
"""Answers to what would be refused another time, too."""
_PATIENCE_SECONDS = 20.0
"""For how long a watch may be lost before nothing is decided any more."""
_FIRST_EVENTS_SECONDS = 10.0
_MAX_EVENTS_SECONDS = 300.0
_SILENT_PROBES = 3
"""A worker that has not answered that often in a row is worth a word; one that computes may miss a question."""


@dataclass(frozen=True)
class _Events:
    """Events about a pod, or Kueue's object about it, and when to ask again, in the time of `time.monotonic`."""

    ask_at: float
    pause_seconds: float = 15.0
    found: Sequence[Object] = ()


@dataclass
class _Memory:
    """The memory of a Compute between two passes; all of it can be found out again.

    Attributes:
        uid: of the Compute.
        generation: of its spec.
        phase: its last one.
        failures: looks in a row that failed.
        probe_at: when its workers are asked again, in the time of `time.monotonic`.
        unanswered: how often in a row not all of its workers answered.
        silence: why one of them did not, the last time.
        events: those about pods that wait on their machine, by the pod's uid.
        ending: how its workers are told that they are ended for good, and their ports; None where they were told, or
            keep nothing for whoever comes back.
        workload: what Kueue said last about pods in its queue; None where none is.
        refused: why the last pods were not made.
        refused_until: when it is tried again, in the time of `time.monotonic`.
        refusals: tries in a row that were refused.
    """

    uid: str = ""
    generation: int = 0
    phase: str = ""
    failures: int = 0
    probe_at: float = 0.0
    unanswered: int = 0
    silence: Report = field(default_factory=Report)
    events: Mapping[str, _Events] = field(default_factory=dict)
    ending: tuple[ProbeCredentials, Sequence[int]] | None = None
    workload: _Events | None = None
    refused: Sequence[Cause] = ()
    refused_until: float = 0.0
    refusals: int = 0


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Controller:
    """Looks at the Computes in its queue; `run` does so until it is cancelled."""

    def __init__(
        self,
        cluster: ClusterConnection,
        view: ClusterView,
        prober: Prober,
        options: Options,
        clock: Callable[[], datetime.datetime] = _utc_now,
    ) -> None:
        self.queue: WorkQueue[Key] = WorkQueue(group_of=itemgetter(0))
        self._cluster = cluster
        self._view = view
        self._prober = prober
        self._questions = Questions(prober)
        self._options = options
        self._clock = clock
        self._children = ChildReconciler(cluster, view, options)
        self._memories: dict[Key, _Memory] = {}
        self._new_since: dict[Key, float] = {}
        self._running = False
        self._is_current = True
        METRICS.computes.read = self._count_phases
        METRICS.queued.set_function(lambda: len(self.queue))

    async def run(self, catch_up: Callable[[], Awaitable[None]] | None = None) -> None:
        """Looks at every Compute, and then at what the queue says, several at a time.

        Args:
            catch_up: ends once the view shows all that another operator has written before. Meanwhile only Computes are
                looked at that nobody has ever looked at, by what the API server says of them now.
        """
        self._running, self._is_current = True, catch_up is None
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(max(self._options.concurrency, 1)):
                    group.create_task(self._work(), name=f"skyproxy-reconciler-{number}")
                self._touch_all()
                if catch_up is not None:
                    await catch_up()
                    self._is_current = True
                    self._touch_all()
        finally:
            self._running = False
            self.queue.close()
            await self._questions.close()

    def _touch_all(self) -> None:
        for key in self._view.computes():
            self.touch(key, routine=True)

    def touch(self, key: Key, *, children: bool = False, routine: bool = False) -> None:
        """Look at a Compute soon: something happened to it or to a pod of it. Nothing, as long as this does not run.

        Args:
            key: the Compute.
            children: look at its other children, too.
            routine: nothing happened; it may wait until all others were looked at.
        """
        if children and key in self._memories:
            self._children.recheck(self._memories[key].uid)
        compute = self._view.compute(*key)
        if not self._running or not (self._is_current or is_untouched(compute)):
            return
        if is_unjudged(compute):
            self._new_since.setdefault(key, time.monotonic())
            self.queue.add(key, NEW)
        else:
            self.queue.add(key, ROUTINE if routine else CHANGED)

    async def _work(self) -> None:
        while True:
            key = await self.queue.get()
            try:
                await self._reconcile_once(key)
            finally:
                self.queue.done(key)

    async def _reconcile_once(self, key: Key) -> None:
        """One look; a failure means another one, later and later."""
        memory = self._memories.setdefault(key, _Memory())
        begun = time.monotonic()
        try:
            again = await self.reconcile(key)
        except Exception as exc:
            memory.failures += 1
            pause = min(_FIRST_RETRY_SECONDS * 2 ** (memory.failures - 1), _MAX_RETRY_SECONDS)
            self.queue.add_later(key, pause)
            METRICS.reconciles.labels(result="failed").inc()
            if isinstance(exc, ApiError):
                logger.warning("%s/%s: %s; next try in %.1f s", *key, exc, pause)
            else:
                logger.exception("%s/%s: internal error; next try in %.1f s", *key, pause)
        else:
            memory.failures = 0
            if again is not None:
                self.queue.add_later(key, again)
            METRICS.reconciles.labels(result="done").inc()
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
        # A plan that is based on an old state could undo what another operator has done.
        self._view.check_current(_PATIENCE_SECONDS)
        compute = self._view.compute(namespace, name)
        if not self._is_current and not await self._is_nobodys(compute):
            return None
        if (since := self._new_since.pop(key, None)) is not None:
            METRICS.first_look.observe(time.monotonic() - since)
        memory = self._memories.get(key)
        if memory is not None and (compute is None or is_over(compute, memory.uid)):
            await self._tell_end(key, memory)
        if compute is None:
            memory = self._memories.pop(key, None)
            if memory is not None:
                self._forget_uid(memory.uid)
            self.queue.forget(key)
            self._new_since.pop(key, None)
            return None
        memory = self._memories.setdefault(key, _Memory())
        uid, generation = compute["metadata"]["uid"], int(compute["metadata"].get("generation", 0))
        if (memory.uid, memory.generation) != (uid, generation):
            if memory.uid != uid:
                self._forget_uid(memory.uid)
            # With another spec, such as a shorter idleTimeout, it may be time to ask the workers already.
            memory.uid, memory.generation, memory.probe_at = uid, generation, 0.0
            memory.refused_until, memory.refusals = 0.0, 0
        pods = self._view.pods(namespace, name)
        observed = ObservedState(compute, pods, self._clock())
        try:
            made = resolve(compute, self._view.runtimes(), has_pods=bool(owned_pods(observed)), options=self._options)
            spec = ComputeSpec.parse(name, made.compute["spec"])
            # A podTemplate that does not fit shows when it is applied.
            build_pod(made.compute, spec, 0, 0, self._options)
        except Exception as exc:
            problem = problem_of(exc)
            if not isinstance(exc, ValueError | RecursionError):
                logger.exception("%s/%s: %s", namespace, name, problem)
            plan = refuse(observed, problem, lifetime_seconds(compute))
        else:
            await self._note_runtime(compute, made)
            observed = replace(observed, compute=made.compute)
            plan = await self._plan(observed, spec, memory)
        await self._carry_out(observed, plan)
        memory.phase = plan.status["phase"]
        resync = self._options.resync_seconds
        return resync if plan.look_again_seconds is None else min(plan.look_again_seconds, resync)

    def _forget_uid(self, uid: str) -> None:
        """Keep nothing of a Compute that is gone, also where another one has its name."""
        self._children.forget(uid)
        self._questions.forget(uid)

    async def _is_nobodys(self, compute: Object | None) -> bool:
        """Tell whether nobody has looked at a Compute yet: what another operator has done does not matter then."""
        if compute is None:
            return False
        metadata = compute["metadata"]
        now = await self._cluster.read(API_VERSION, KIND, metadata["namespace"], metadata["name"])
        return is_untouched(now) and now["metadata"]["uid"] == metadata["uid"]

    async def _note_runtime(self, compute: Object, made: Resolution) -> None:
        """Write down what pods are made of before they are, so that it stays theirs when the runtime changes."""
        if (compute.get("status") or {}).get("runtime") == made.record:
            return
        await self._cluster.patch_status(compute, {"runtime": made.record})
        if made.is_news and made.record is not None:
            text = change_message(made.record["name"])
            await self._announce(compute, Announcement("Normal", "RuntimeChanged", text))

    async def _tell_end(self, key: Key, memory: _Memory) -> None:
        """Tell the workers of a Compute that is going, once, that nobody can come back to them: its volume goes, too.

        Otherwise their clients, when the Pods are told to end, would write snapshots for nobody.
        """
        ending, memory.ending = memory.ending, None
        if ending is None:
            return
        access, ports = ending
        hosts = [
            (pod.get("status") or {}).get("podIP", "")
            for pod in self._view.pods(*key)
            if not has_ended(pod)
            and any(row["uid"] == memory.uid for row in pod["metadata"].get("ownerReferences", ()))
        ]
        await self._prober.ask([(host, port) for host in hosts for port in ports], access, ENDING)

    # --- what is seen -------------------------------------------------------------------------------------------------

    async def _plan(self, observed: ObservedState, spec: ComputeSpec, memory: _Memory) -> Plan:
        compute = observed.compute
        if "deletionTimestamp" in compute["metadata"]:
            return decide(observed, spec, self._options)
        if namespace_is_going(compute):
            return decide(replace(observed, refusals=(namespace_cause(),)), spec, self._options)
        has_read = self._children.has_read(compute["metadata"]["uid"])
        children = await self._children.reconcile(compute, spec, observed.now)
        refusals = [*([children.blocking] if children.blocking else ()), *children.refusals]
        if children.access is not None:
            memory.ending = (children.access, spec.ports) if spec.keeps_sessions else None
        reports = await self._reports(observed, spec, children, memory)
        if memory.unanswered >= _SILENT_PROBES and should_answer(spec, compute):
            refusals.append(silence_cause(spec, memory.silence))
        events = await self._events(observed, memory)
        workload = await self._workload(observed, memory)
        observed = ObservedState(compute, observed.pods, self._clock(), reports, events, tuple(refusals), workload)
        plan = decide(observed, spec, self._options)
        if not plan.create:
            return plan
        if has_read:
            # Pods read them as they are now; what is remembered may have been replaced, or deleted.
            self._children.reread_secrets(compute["metadata"]["uid"])
            children = await self._children.reconcile(compute, spec, observed.now)
        if children.blocking is not None:
            # A pod without its Secrets would only fail.
            pause = _LEFTOVER_SECONDS if not children.blocking.actionable else plan.look_again_seconds
            return replace(plan, create=(), look_again_seconds=pause)
        refused = await self._create(plan.create, memory)
        if not refused:
            return replace(plan, create=())
        observed = replace(observed, refusals=(*refused, *refusals))
        plan = decide(observed, spec, self._options)
        return replace(plan, create=())

    async def _create(self, pods: Sequence[Object], memory: _Memory) -> Sequence[Cause]:
        """Makes pods; what the API server said against it.

        What it has refused it will most likely refuse again: it is asked once, for one pod of several, and then less
        often.
        """
        if time.monotonic() < memory.refused_until:
            return memory.refused
        memory.refused, refusals, memory.refusals = (), memory.refusals, 0
        for pod in pods:
            try:
                if await self._cluster.create(pod):
                    METRICS.pods.labels(action="created").inc()
                    continue
                # One of ours would have been seen, or will be at the next look.
                cause = name_taken(f"Pod {pod['metadata']['name']}")
            except ApiError as exc:
                if exc.status == 0 or exc.status >= 500 or exc.status == 429:
                    raise
                cause = exc.cause
            pause = min(_FIRST_REFUSAL_SECONDS * 2**refusals, _MAX_RETRY_SECONDS)
            memory.refused, memory.refusals = (cause,), refusals + 1
            memory.refused_until = time.monotonic() + pause
            break
        return memory.refused

    async def _reports(
        self, observed: ObservedState, spec: ComputeSpec, children: ChildStatus, memory: _Memory
    ) -> list[Report]:
        """Return what the workers are doing; empty where it is not time to ask."""
        ready = {node_of(pod): pod["status"].get("podIP", "") for pod in owned_pods(observed) if is_ready(pod)}
        if len(ready) < spec.nodes:
            memory.unanswered = 0
        if not ready or children.access is None or spec.suspend or time.monotonic() < memory.probe_at:
            return []
        addresses = [(ready.get(node, ""), port) for node in range(spec.nodes) for port in spec.ports]
        uid, answered = observed.compute["metadata"]["uid"], partial(self.touch, _key(observed.compute), routine=True)
        reports = await self._questions.ask(uid, addresses, children.access, answered)
        if reports is None:
            return []
        # What somebody has to act on comes first.
        problems = sorted((report for report in reports if report.problem), key=lambda report: not report.reason)
        if len(ready) == spec.nodes:
            memory.unanswered = memory.unanswered + 1 if problems else 0
            memory.silence = problems[0] if problems else Report()
        if problems and problems[0].reason:
            # Its Secrets were replaced, it seems: they are read again at the next look.
            self._children.forget(uid)
        started = state.moment((observed.compute.get("status") or {}).get("startTime"))
        pause = next_check_seconds(spec, started, reports, self._clock(), self._options)
        # A little early, because the look that is planned for then must not find that it is not time yet.
        memory.probe_at = time.monotonic() + pause - 0.5
        return reports

    async def _events(self, observed: ObservedState, memory: _Memory) -> Mapping[str, Sequence[Object]]:
        """Events about pods that have a machine, and no container yet.

        They are asked for once a pod has waited for a while, and then less and less often.
        """
        found, asked = {}, {}
        for pod in owned_pods(observed):
            statuses = (pod.get("status") or {}).get("containerStatuses") or ()
            begun = any((item.get("state") or {}).get("running") for item in statuses)
            if is_scheduled(pod) and not begun and not has_ended(pod) and not is_ready(pod):
                uid = pod["metadata"]["uid"]
                latest = memory.events.get(uid) or _Events(time.monotonic() + _FIRST_EVENTS_SECONDS)
                if time.monotonic() >= latest.ask_at:
                    pause = min(2 * latest.pause_seconds, _MAX_EVENTS_SECONDS)
                    events = await self._cluster.events(pod["metadata"]["namespace"], pod)
                    latest = _Events(time.monotonic() + latest.pause_seconds, pause, events)
                asked[uid] = latest
                found[pod["metadata"]["name"]] = latest.found
        memory.events = asked
        return found

    async def _workload(self, observed: ObservedState, memory: _Memory) -> Object | None:
        """Kueue's object about pods that wait in its queue; asked for less and less often."""
        queued = [pod for pod in owned_pods(observed) if is_gated(pod) and QUEUE_LABEL in pod["metadata"]["labels"]]
        version = (await self._children.served_kinds(KUEUE_GROUP)).get(WORKLOAD) if queued else None
        if version is None:
            memory.workload = None
            return None
        latest = memory.workload or _Events(time.monotonic())
        if time.monotonic() >= latest.ask_at:
            found = await self._cluster.workload(version, queued[0])
            pause = min(2 * latest.pause_seconds, _MAX_EVENTS_SECONDS)
            latest = _Events(time.monotonic() + latest.pause_seconds, pause, [found] if found else [])
        memory.workload = latest
        return latest.found[0] if latest.found else None

    # --- the plan ----------------------------------------------------------------------------------------------------

    async def _carry_out(self, observed: ObservedState, plan: Plan) -> None:
        compute = observed.compute
        patch = state.patch_between(compute.get("status") or {}, plan.status)
        unwritten: ApiError | None = None
        if patch:
            try:
                await self._cluster.patch_status(compute, patch)
            except ApiError as exc:
                if exc.status not in _NEVER_TAKEN:
                    raise
                # It will be refused the next time, too, and must not keep the pods of an ended Compute.
                unwritten = exc
        for pod in plan.delete:
            await self._cluster.delete(pod)
            METRICS.pods.labels(action="deleted").inc()
        for pod in plan.force:
            logger.warning(
                "%s/%s: pod %s is removed by force: its machine does not answer",
                *_key(compute),
                pod["metadata"]["name"],
            )
            await self._cluster.delete(pod, force=True)
            METRICS.pods.labels(action="forced").inc()
        for pod, changes in plan.annotate:
            await self._cluster.annotate(pod, changes)
        if patch.get("endedReason") in (IDLE, LIFETIME, SUSPENDED_IDLE):
            METRICS.reaped.labels(reason=patch["endedReason"]).inc()
        for announcement in plan.announce:
            logger.info("%s/%s: %s: %s", *_key(compute), announcement.reason, announcement.message.replace("\n", " "))
            await self._announce(compute, announcement)
        if unwritten is not None:
            raise unwritten

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


def _key(compute: Object) -> Key:
    return compute["metadata"]["namespace"], compute["metadata"]["name"]
