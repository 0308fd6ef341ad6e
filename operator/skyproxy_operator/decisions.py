"""Decisions about what to do next for a Compute, from what is wanted and what is there. Pure: the same state, the same
plan.

The plan brings the cluster one step nearer, and every step leaves a state from which the next one follows. So it does
not matter where an operator is interrupted, or how often it looks.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from skyproxy.units import duration_text
from skyproxy_operator import status as state
from skyproxy_operator.announcements import Announcement
from skyproxy_operator.causes import (
    LOG_MARK,
    NAMESPACE_TERMINATING,
    Cause,
    ended_cause,
    has_ended,
    namespace_cause,
    node_lost_seconds,
    pull_failures,
)
from skyproxy_operator.children import gateway_host
from skyproxy_operator.compute_spec import ComputeSpec, RestartPolicy
from skyproxy_operator.disruption import annotations_to_change
from skyproxy_operator.names import ATTEMPT, NODE_LABEL, SPEC_HASH, WAKE, pod_name
from skyproxy_operator.options import Options
from skyproxy_operator.pod_builder import build_pod
from skyproxy_operator.queueing import EVICTED, eviction, ignored_queue
from skyproxy_operator.reaping import IDLE, LIFETIME, SUSPENDED_IDLE, Report, next_check_seconds, reaping

Object = dict[str, Any]

MAX_BACKOFF_SECONDS = 300
_MAX_DIGITS = 9
_DELETED = Cause("Deleted", "The Compute is being deleted.")
_LOOK_AGAIN_SECONDS = 15.0
"""While pods are on their way: what keeps a volume from being mounted is told by events, which we do not watch."""


@dataclass(frozen=True)
class ObservedState:
    """The state of a Compute and its pods, as observed.

    Attributes:
        compute: the Compute, as the API server gave it.
        pods: all that bear its label.
        now: the time, with a zone.
        reports: what its workers said just now, one for each process; empty where nobody was asked.
        events: those about pods, oldest first, by the pod's name.
        refusals: what the API server refused, the most important first.
        workload: Kueue's object about its pods; None where it is not known.
    """

    compute: Object
    pods: Sequence[Object]
    now: datetime.datetime
    reports: Sequence[Report] = ()
    events: Mapping[str, Sequence[Object]] = dataclasses.field(default_factory=dict)
    refusals: Sequence[Cause] = ()
    workload: Object | None = None


@dataclass(frozen=True)
class Plan:
    """The steps to take, in this order: write the status, delete, annotate, create, announce, and look again.

    The status goes first: it remembers the failures of pods that are deleted next. Pods in `force` are deleted without
    waiting for their machine, which does not answer any more.
    """

    status: Object
    delete: tuple[Object, ...] = ()
    force: tuple[Object, ...] = ()
    annotate: tuple[tuple[Object, Mapping[str, str | None]], ...] = ()
    create: tuple[Object, ...] = ()
    announce: tuple[Announcement, ...] = ()
    look_again_seconds: float | None = None


def decide(observed: ObservedState, spec: ComputeSpec, options: Options) -> Plan:
    """The plan for a Compute with a spec that can be used.

    Raises:
        ValueError: the spec's podTemplate cannot be applied.
    """
    return _Decision(observed, spec, options).plan()


def refuse(observed: ObservedState, problem: str, lifetime_seconds: float | None = None) -> Plan:
    """The plan for a Compute whose spec cannot be used: it says why, and its pods are left alone until their lifetime
    is over.

    Args:
        observed: its state.
        problem: what is wrong with the spec.
        lifetime_seconds: of its pods; None for no end.
    """
    carried = state.past(observed.compute.get("status") or {}, observed.now)
    started = state.moment(carried.get("startTime"))
    there = [pod for pod in owned_pods(observed) if not has_ended(pod)]
    left = None
    if lifetime_seconds is not None and started is not None and there:
        left = lifetime_seconds - (observed.now - started).total_seconds()
    has_expired = left is not None and left <= 0
    if has_expired:
        message = f"The pods were removed: their lifetime of {duration_text(lifetime_seconds or 0.0)} is over."
        problem = f"{problem}\n{message}"
        carried |= {
            "endedFor": current_key(observed.compute),
            "endedReason": LIFETIME,
            "endedMessage": message,
            "expiryTime": state.timestamp(observed.now),
        }
    cause = Cause("InvalidSpec", problem, actionable=True)
    verdict = state.Verdict(state.FAILED, False, cause, False, False, cause)
    if "deletionTimestamp" in observed.compute["metadata"]:
        leaving = sum(not has_ended(pod) for pod in owned_pods(observed))
        verdict = state.judge_stopped(state.TERMINATING, _DELETED, leaving=leaving)
    pods = [pod for pod in owned_pods(observed) if node_of(pod) >= 0]
    new = state.build_status(observed.compute, verdict, observed.now, carried=carried, pods=pods)
    return Plan(
        new,
        delete=tuple(pod for pod in there if not is_leaving(pod)) if has_expired else (),
        announce=announcements(observed.compute.get("status") or {}, new),
        look_again_seconds=max(left, 1.0) if left is not None else None,
    )


def owned_pods(observed: ObservedState) -> list[Object]:
    """The pods that this Compute made. One of the same name, long deleted, may have left others."""
    uid = observed.compute["metadata"]["uid"]
    return [pod for pod in observed.pods if any(item["uid"] == uid for item in _owners(pod))]


def _owners(item: Object) -> Sequence[Object]:
    return item["metadata"].get("ownerReferences") or ()


def attempt_of(pod: Object) -> int:
    """Return which start of its Compute a pod belongs to."""
    return _number((pod["metadata"].get("annotations") or {}).get(ATTEMPT, ""), 0)


def node_of(pod: Object) -> int:
    """The number of a pod's node; -1 where its label was spoilt."""
    return _number((pod["metadata"].get("labels") or {}).get(NODE_LABEL, ""), -1)


def _number(text: str, otherwise: int) -> int:
    """Return the number that a pod bears; users may have written another one, which no status could hold."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else otherwise


def is_leaving(pod: Object) -> bool:
    """Return whether a pod is being deleted."""
    return "deletionTimestamp" in pod["metadata"]


def _is_stuck(pod: Object, now: datetime.datetime, patience_seconds: float) -> bool:
    """Return whether a pod that is being deleted waits for a machine that is gone: nobody there confirms its end."""
    silent = node_lost_seconds(pod, now)
    return is_leaving(pod) and silent is not None and silent >= patience_seconds


def current_key(compute: Object) -> str:
    """Names what somebody last wanted of a Compute: another spec or another wake-up is another wish."""
    metadata = compute["metadata"]
    return f"{metadata.get('generation', 0)}/{(metadata.get('annotations') or {}).get(WAKE, '')}"


def backoff_seconds(policy: RestartPolicy, failures: int) -> float:
    """The pause before the next start, after that many failures in a row."""
    return float(min(policy.backoff_seconds * 2 ** min(failures - 1, 16), MAX_BACKOFF_SECONDS)) if failures else 0.0


class _Decision:
    def __init__(self, observed: ObservedState, spec: ComputeSpec, options: Options) -> None:
        self._observed = observed
        self._compute = observed.compute
        self._now = observed.now
        self._spec = spec
        self._options = options
        self._before: Object = observed.compute.get("status") or {}
        self._carried = state.past(self._before, self._now)
        self._pods = owned_pods(observed)
        self._attempt = max([int(self._carried.get("restarts", 0)), *map(attempt_of, self._pods)])

    def plan(self) -> Plan:
        if "deletionTimestamp" in self._compute["metadata"]:
            return self._plan_stop(state.TERMINATING, _DELETED, delete=())
        if any(cause.reason == NAMESPACE_TERMINATING for cause in self._observed.refusals):
            return self._plan_stop(state.TERMINATING, namespace_cause(), delete=())
        if self._carried.get("endedFor") not in (None, current_key(self._compute)):
            self._start_over()
        if "endedFor" in self._carried:
            return self._plan_end()
        if self._spec.suspend:
            self._forget("startTime", "readySince", "formed", "failuresInARow", "lastFailure", "lastFailureTime")
            return self._plan_stop(state.SUSPENDED, Cause("Suspended", "spec.suspend is true."), self._pods)
        return self._plan_running()

    # --- not running -------------------------------------------------------------------------------------------------

    def _start_over(self) -> None:
        """Somebody wants something new of a Compute that had ended."""
        self._forget("endedFor", "endedReason", "endedMessage", "expiryTime", "startTime", "readySince")
        self._forget("failuresInARow", "lastFailure", "lastFailureTime", "lastActivityTime")
        self._attempt += 1
        self._carried["restarts"] = self._attempt

    def _end(self, reason: str, message: str) -> Plan:
        self._forget("readySince")
        self._carried |= {
            "endedFor": current_key(self._compute),
            "endedReason": reason,
            "endedMessage": message,
            "expiryTime": state.timestamp(self._now),
        }
        return self._plan_end()

    def _plan_end(self) -> Plan:
        reason, message = self._carried.get("endedReason", ""), self._carried.get("endedMessage", "")
        if reason in (IDLE, LIFETIME):
            return self._plan_stop(state.EXPIRED, Cause(reason, message), self._pods)
        if reason == SUSPENDED_IDLE:
            return self._plan_stop(state.SUSPENDED, Cause(reason, message), self._pods)
        # A failed Pod stays, for its log; it no longer holds a machine.
        running = [pod for pod in self._pods if not has_ended(pod)]
        return self._plan_stop(state.FAILED, Cause(reason, message, actionable=True), running)

    def _plan_stop(self, phase: str, cause: Cause, delete: Sequence[Object]) -> Plan:
        self._forget("readySince")
        leaving = sum(not has_ended(pod) for pod in self._pods)
        verdict = state.judge_stopped(phase, cause, leaving=leaving)
        return self._make_plan(
            verdict, self._pods, delete=[pod for pod in delete if not is_leaving(pod)], look_again=None
        )

    # --- running -----------------------------------------------------------------------------------------------------

    def _plan_running(self) -> Plan:
        current = self._current_pods()
        failed = [ended_cause(pod) for pod in current if has_ended(pod) and not is_leaving(pod)]
        failed += self._causes_of_loss(current)
        if failed:
            cause = self._note_failure(failed)
            if self._carried["failuresInARow"] > self._spec.restart.max_restarts:
                count = self._carried["failuresInARow"]
                often = "It failed" if count == 1 else f"It failed {count} times in a row, the last time so"
                return self._end(cause.reason, f"{often}: {cause.message}")
            self._attempt += 1
            self._carried["restarts"] = self._attempt
            current = []
        stale = [pod for pod in self._pods if all(pod is not item for item in current)]
        foreign = len(self._observed.pods) > len(self._pods)
        if stale or foreign:
            return self._plan_replacement(current, stale)
        pause = self._pause_seconds()
        if not current and pause > 0:
            return self._plan_pause(pause)
        return self._plan_start(current)

    def _current_pods(self) -> list[Object]:
        """The pods of this start and this spec."""
        wanted = self._spec.pod_hash()
        return [
            pod
            for pod in self._pods
            if (pod["metadata"].get("annotations") or {}).get(SPEC_HASH) == wanted
            and attempt_of(pod) == self._attempt
            and 0 <= node_of(pod) < self._spec.nodes
        ]

    def _group(self) -> str:
        """Names the nodes that started together: those of another start or another spec are another group."""
        return f"{self._attempt}/{self._spec.pod_hash()}"

    def _causes_of_loss(self, current: Sequence[Object]) -> list[Cause]:
        """Return why the group of nodes has lost a member, and with it the process group of the others.

        A node alone has no group: it is simply made again.
        """
        lost = []
        for pod in current:
            silent = node_lost_seconds(pod, self._now)
            if silent is not None and silent >= self._options.lost_node_seconds and not is_leaving(pod):
                machine = (pod.get("spec") or {}).get("nodeName", "")
                text = f"The machine {machine} of pod {pod['metadata']['name']} has not answered for {silent:.0f} s."
                lost.append(Cause("NodeLost", text, actionable=True))
        if self._spec.nodes > 1:
            leaving = {node_of(pod) for pod in current if is_leaving(pod)}
            here = {node_of(pod) for pod in current} - leaving
            # Kueue keeps what is left of a group until all of it has ended, so no member of it is replaced alone.
            gone = leaving if self._spec.queue is not None else set()
            if self._carried.get("formed") == self._group():
                gone = set(range(self._spec.nodes)) - here
            for node in sorted(gone):
                name = pod_name(self._compute["metadata"]["name"], node)
                lost.append(Cause("PodDeleted", f"Pod {name} was deleted: by a drain, an eviction or a user."))
            lost += filter(None, map(eviction, current if gone else ()))
        return lost

    def _note_failure(self, causes: list[Cause]) -> Cause:
        # An orderly exit of one node is what the others' failure brought about, more often than the reverse; and what a
        # queue takes back ends in any way.
        causes.sort(key=lambda item: (item.reason != EVICTED, "exit status 0" in item.message))
        since = state.moment(self._carried.get("readySince"))
        stable = since is not None and (self._now - since).total_seconds() >= self._spec.restart.reset_seconds
        row = 0 if stable else int(self._carried.get("failuresInARow", 0))
        # Making room for others is no failure: it may happen any number of times.
        row += causes[0].reason != EVICTED
        self._forget("readySince")
        self._carried |= {
            "failuresInARow": row,
            "lastFailure": f"{causes[0].reason}: {causes[0].message}",
            "lastFailureTime": state.timestamp(self._now),
        }
        return causes[0]

    def _pause_seconds(self) -> float:
        """For how long nothing is started yet, after failures."""
        failure = state.moment(self._carried.get("lastFailureTime"))
        if failure is None:
            return 0.0
        pause = backoff_seconds(self._spec.restart, int(self._carried.get("failuresInARow", 0)))
        return pause - (self._now - failure).total_seconds()

    def _plan_replacement(self, current: Sequence[Object], stale: Sequence[Object]) -> Plan:
        """Nothing is made before everything of the start before is gone: nodes of two starts must not meet."""
        if any(attempt_of(pod) < self._attempt for pod in stale) and "lastFailure" in self._carried:
            cause = Cause("Restarting", f"The nodes start again. {self._last_failure()}")
        else:
            cause = Cause("ReplacingPods", "Pods of an earlier spec, or of an earlier Compute, must be deleted first.")
        # Before they are deleted: members that we remove ourselves are not lost.
        self._forget("readySince", "formed")
        verdict = state.Verdict(state.PROVISIONING, False, cause, True, False, self._first_refusal())
        return self._make_plan(
            verdict, current, delete=[pod for pod in stale if not is_leaving(pod)], look_again=_LOOK_AGAIN_SECONDS
        )

    def _plan_pause(self, pause: float) -> Plan:
        again = state.timestamp(self._now + datetime.timedelta(seconds=pause))
        cause = Cause("BackOff", f"It starts again at {again}. {self._last_failure()}", actionable=True)
        verdict = state.Verdict(state.PENDING, False, cause, True, False, cause)
        return self._make_plan(verdict, (), look_again=pause)

    def _plan_start(self, current: Sequence[Object]) -> Plan:
        """Makes what is missing, and watches over what is there."""
        metadata = self._compute["metadata"]
        taken = {pod["metadata"]["name"] for pod in current}
        missing = [node for node in range(self._spec.nodes) if pod_name(metadata["name"], node) not in taken]
        create = [build_pod(self._compute, self._spec, node, self._attempt, self._options) for node in missing]
        failures = pull_failures(current, self._observed.events, self._carried.get("pullFailures", {}))
        self._forget("pullFailures")
        self._carried |= {"pullFailures": failures} if failures else {}
        verdict = state.judge(self._spec, current, self._observed.events, self._now, failures, self._observed.workload)
        refusal, ignored = self._first_refusal(), ignored_queue(self._spec, current)
        if verdict.ready:
            now = state.timestamp(self._now)
            self._carried = {"startTime": now, "readySince": now} | self._carried | {"formed": self._group()}
            verdict = dataclasses.replace(verdict, trouble=refusal or ignored)
        else:
            self._forget("readySince")
            if refusal is not None:
                verdict = dataclasses.replace(verdict, cause=refusal, trouble=refusal, progressing=False)
            elif verdict.trouble is None:
                verdict = dataclasses.replace(verdict, trouble=ignored)
        self._carried = state.with_activity(self._carried, self._observed.reports, self._now)
        started = state.moment(self._carried.get("startTime"))
        end = reaping(self._spec, started, self._observed.reports, self._now)
        if end is not None:
            return self._end(end.reason, f"The pods were removed: {end.message}.")
        if verdict.ready:
            again = next_check_seconds(self._spec, started, self._observed.reports, self._now, self._options)
        else:
            again = _LOOK_AGAIN_SECONDS
        return self._make_plan(verdict, current, create=create, look_again=again)

    # --- common ------------------------------------------------------------------------------------------------------

    def _last_failure(self) -> str:
        """Without the end of its log, which is in the status elsewhere."""
        return str(self._carried.get("lastFailure", "")).partition(LOG_MARK)[0]

    def _first_refusal(self) -> Cause | None:
        return self._observed.refusals[0] if self._observed.refusals else None

    def _forget(self, *keys: str) -> None:
        for key in keys:
            self._carried.pop(key, None)

    def _make_plan(
        self,
        verdict: state.Verdict,
        pods: Sequence[Object],
        *,
        delete: Sequence[Object] = (),
        create: Sequence[Object] = (),
        look_again: float | None,
    ) -> Plan:
        if not verdict.ready and "inUse" in self._carried:
            self._carried["inUse"] = False
        changes = [
            (pod, annotations_to_change(pod, self._spec, self._carried, self._options))
            for pod in pods
            if not is_leaving(pod)
        ]
        new = state.build_status(
            self._compute,
            verdict,
            self._now,
            carried=self._carried,
            pods=[pod for pod in pods if node_of(pod) >= 0],
            spec=self._spec,
            external_host=gateway_host(self._compute, self._spec, self._options),
        )
        stuck = [pod for pod in self._pods if _is_stuck(pod, self._now, self._options.lost_node_seconds)]
        if look_again is None and any(is_leaving(pod) for pod in self._pods):
            look_again = _LOOK_AGAIN_SECONDS
        return Plan(
            new,
            tuple(delete),
            tuple(stuck),
            tuple((pod, change) for pod, change in changes if change),
            tuple(create),
            announcements(self._before, new),
            look_again,
        )


def announcements(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Announcement, ...]:
    """Return the changes that people should be told of."""
    result = []
    ready = {kind: _condition(new, kind) for kind in ("Ready", "Degraded")}
    if new.get("lastFailureTime") != old.get("lastFailureTime") and new.get("lastFailure"):
        reason, _, message = str(new["lastFailure"]).partition(": ")
        result.append(Announcement("Warning", reason, message))
    if new["phase"] != old.get("phase"):
        kind = "Warning" if new["phase"] == state.FAILED else "Normal"
        result.append(Announcement(kind, str(new["phase"]), str(ready["Ready"].get("message", ""))))
    before, after = _condition(old, "Degraded"), ready["Degraded"]
    news = after.get("status") == "True" and (before.get("status"), before.get("reason")) != ("True", after["reason"])
    if news and new["phase"] != state.FAILED and after["reason"] != "BackOff":
        result.append(Announcement("Warning", after["reason"], after["message"]))
    return tuple(result)


def namespace_is_going(compute: Object) -> bool:
    """Return whether the status remembers that the API server refused new objects because the namespace is being
    deleted.
    """
    return bool(_condition(compute.get("status") or {}, "Ready").get("reason") == NAMESPACE_TERMINATING)


def is_unjudged(compute: Object | None) -> bool:
    """Tell whether a Compute is new or has a new spec, so that somebody waits for its first look."""
    if compute is None:
        return False
    return bool((compute.get("status") or {}).get("observedGeneration") != compute["metadata"].get("generation", 0))


def is_untouched(compute: Object | None) -> TypeGuard[Object]:
    """Tell whether a Compute is there, and no look at it has come to its end."""
    return compute is not None and not compute.get("status")


def is_over(compute: Object, uid: str) -> bool:
    """Return whether the Compute of this uid is being deleted, or another one has its name."""
    return "deletionTimestamp" in compute["metadata"] or compute["metadata"]["uid"] != uid


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((item for item in status.get("conditions") or () if item["type"] == kind), {})
