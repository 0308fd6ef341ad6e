"""What the operator does next, step by step."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from skyproxy_operator.causes import Cause
from skyproxy_operator.compute_spec import RestartPolicy
from skyproxy_operator.decisions import ObservedState, Plan, backoff_seconds, decide, refuse
from skyproxy_operator.names import WAKE
from skyproxy_operator.reaping import Report
from tests.operator.makers import NOW, OPTIONS, at, condition, make_compute, make_pod, spec_of

CRASH = {"exitCode": 1, "reason": "Error", "message": "boom"}


def plan_for(compute: dict[str, Any], pods: Any = (), now: Any = NOW, **more: Any) -> Plan:
    before = copy.deepcopy((compute, pods))
    plan = decide(ObservedState(compute, pods, now, **more), spec_of(compute), OPTIONS)
    assert (compute, pods) == before, "what was observed is not changed"
    return plan


def carried_on(compute: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The Compute after the plan's status was written."""
    return {**compute, "status": plan.status}


def names(pods: Any) -> list[str]:
    return [pod["metadata"]["name"] for pod in pods]


def attempts(pods: Any) -> set[int]:
    return {int(pod["metadata"]["annotations"]["skyproxy.dev/attempt"]) for pod in pods}


def ready(status: dict[str, Any]) -> tuple[str, str]:
    (row,) = [item for item in status["conditions"] if item["type"] == "Ready"]
    return row["status"], row["reason"]


def trouble(status: dict[str, Any]) -> str:
    (row,) = [item for item in status["conditions"] if item["type"] == "Degraded"]
    return row["reason"] if row["status"] == "True" else ""


# --- making -----------------------------------------------------------------------------------------------------------


def test_all_nodes_are_made_at_once() -> None:
    plan = plan_for(make_compute(nodes=3))
    assert names(plan.create) == ["dev-0", "dev-1", "dev-2"]
    assert plan.delete == ()
    assert (plan.status["phase"], plan.status["observedGeneration"]) == ("Pending", 1)


def test_what_was_made_before_an_interruption_is_not_made_again() -> None:
    compute = make_compute(nodes=3)
    assert names(plan_for(compute, [make_pod(compute, 1)]).create) == ["dev-0", "dev-2"]


def test_when_all_is_there_nothing_is_done() -> None:
    compute = make_compute(nodes=2)
    plan = plan_for(compute, [make_pod(compute, node, ready=True) for node in (0, 1)])
    assert (plan.create, plan.delete, plan.status["phase"]) == ((), (), "Running")
    again = plan_for(carried_on(compute, plan), [make_pod(compute, node, ready=True) for node in (0, 1)], at(1))
    assert again.status == plan.status
    assert again.announce == ()


def test_pods_of_an_earlier_compute_of_this_name_are_waited_for_and_left_alone() -> None:
    compute = make_compute()
    earlier = make_pod(make_compute(uid="uid-0"))
    plan = plan_for(compute, [earlier])
    assert (plan.create, plan.delete) == ((), ())
    assert ready(plan.status) == ("False", "ReplacingPods")


def test_a_member_that_is_deleted_ends_the_start_of_all() -> None:
    """A drain, an eviction, somebody: the process group of the others is dead, and a newcomer would wait for it."""
    compute = make_compute(nodes=3, restartPolicy={"backoffSeconds": 10})
    pods = [make_pod(compute, node, ready=True) for node in range(3)]
    compute = carried_on(compute, plan_for(compute, pods))
    for gone in (
        pods[:1] + pods[2:],
        [*pods[:2], {**pods[2], "metadata": pods[2]["metadata"] | {"deletionTimestamp": "x"}}],
    ):
        plan = plan_for(compute, gone, at(1))
        assert plan.create == ()
        assert names(plan.delete) == [
            pod["metadata"]["name"] for pod in gone if "deletionTimestamp" not in pod["metadata"]
        ]
        assert (plan.status["restarts"], plan.status["failuresInARow"]) == (1, 1)
        assert plan.status["lastFailure"].startswith("PodDeleted: ")
        plan = plan_for(carried_on(compute, plan), [], at(12))
        assert names(plan.create) == ["dev-0", "dev-1", "dev-2"]
        assert attempts(plan.create) == {1}
        assert "formed" not in plan.status


def test_members_that_we_take_away_ourselves_are_not_lost() -> None:
    compute = make_compute(nodes=2)
    pods = [make_pod(compute, node, ready=True) for node in (0, 1)]
    compute = carried_on(compute, plan_for(compute, pods))
    suspended = carried_on(compute | {"spec": {"nodes": 2, "suspend": True}}, plan_for(compute, pods))
    plan = plan_for(suspended, pods)
    resumed = plan_for(carried_on(compute, plan), [])
    assert names(resumed.create) == ["dev-0", "dev-1"]
    assert "lastFailure" not in resumed.status
    changed = plan_for(compute | {"spec": {"nodes": 2, "image": "other"}}, pods)
    assert len(changed.delete) == 2
    assert "lastFailure" not in changed.status


def silent(pod: dict[str, Any], seconds: float, ready: str = "False") -> dict[str, Any]:
    """A pod as the node controller leaves it when its machine went silent so long ago."""
    since = at(-seconds).isoformat().replace("+00:00", "Z")
    conditions = [condition("Ready", ready) | {"lastTransitionTime": since}, condition("ContainersReady", "True")]
    return {**pod, "status": pod["status"] | {"conditions": conditions}}


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("said", ["False", "Unknown"])
def test_a_machine_that_is_silent_is_named_and_left_after_a_while(nodes: int, said: str) -> None:
    compute = make_compute(nodes=nodes)
    pods = [make_pod(compute, node, ready=True) for node in range(nodes)]
    compute = carried_on(compute, plan_for(compute, pods))
    soon = plan_for(compute, [silent(pods[0], 60, said), *pods[1:]])
    assert (soon.delete, soon.force, soon.create) == ((), (), ())
    assert trouble(soon.status) == "NodeNotResponding"
    (row,) = [item for item in soon.status["conditions"] if item["type"] == "Ready"]
    assert "machine machine" in row["message"]
    assert "has not answered for 60 s" in row["message"]
    late = plan_for(compute, [silent(pods[0], 301, said), *pods[1:]])
    assert names(late.delete) == [f"dev-{node}" for node in range(nodes)]
    assert late.status["lastFailure"].startswith("NodeLost: ")
    # Nobody on that machine confirms that a pod has ended.
    leaving = silent(
        {**pods[0], "metadata": pods[0]["metadata"] | {"deletionTimestamp": "2026-05-01T12:00:30Z"}}, 302, said
    )
    stuck = plan_for(carried_on(compute, late), [leaving], at(1))
    assert names(stuck.force) == ["dev-0"]
    assert stuck.create == ()


def test_a_pod_that_is_leaving_a_machine_that_answers_is_given_its_time() -> None:
    compute = make_compute()
    pod = make_pod(compute, ready=True)
    pod["metadata"]["deletionTimestamp"] = "2026-05-01T12:00:00Z"
    assert plan_for(compute, [pod], at(10_000)).force == ()


def test_a_pod_that_somebody_deletes_before_all_were_ready_is_made_again_alone() -> None:
    compute = make_compute(nodes=2)
    pods = [make_pod(compute, node, ready=True) for node in (0, 1)]
    pods[1]["metadata"]["deletionTimestamp"] = "x"
    # Its name is taken until it is gone, and its end is no failure.
    pods[1]["status"]["phase"] = "Failed"
    plan = plan_for(compute, pods)
    assert (plan.create, plan.delete, "lastFailure" in plan.status) == ((), (), False)
    assert names(plan_for(compute, pods[:1]).create) == ["dev-1"]


# --- changing ---------------------------------------------------------------------------------------------------------


def test_another_spec_means_other_pods_after_the_old_ones_are_gone() -> None:
    old, new = make_compute(nodes=2), make_compute(nodes=2, image="new")
    pods = [make_pod(old, node, ready=True) for node in (0, 1)]
    plan = plan_for(new, pods)
    assert (names(plan.delete), plan.create) == (["dev-0", "dev-1"], ())
    pods[0]["metadata"]["deletionTimestamp"] = "x"
    plan = plan_for(new, pods[:1])
    assert (plan.delete, plan.create) == ((), ())
    plan = plan_for(new, [])
    assert names(plan.create) == ["dev-0", "dev-1"]


def test_fewer_nodes_are_other_pods_too() -> None:
    old, new = make_compute(nodes=3), make_compute(nodes=2)
    plan = plan_for(new, [make_pod(old, node, ready=True) for node in range(3)])
    assert (len(plan.delete), plan.create) == (3, ())


def test_a_change_that_is_nothing_to_pods_leaves_them() -> None:
    old, new = make_compute(), make_compute(idleTimeout="1h", restartPolicy={"maxRestarts": 1})
    plan = plan_for(new, [make_pod(old, ready=True)])
    assert (plan.delete, plan.create, plan.status["phase"]) == ((), (), "Running")


# --- failing ----------------------------------------------------------------------------------------------------------


def test_a_failure_restarts_all_nodes_after_a_pause() -> None:
    compute = make_compute(nodes=2, restartPolicy={"backoffSeconds": 10})
    pods = [make_pod(compute, 0, ready=True), make_pod(compute, 1, terminated=CRASH)]
    plan = plan_for(compute, pods)
    assert (names(plan.delete), plan.create) == (["dev-0", "dev-1"], ())
    assert (plan.status["restarts"], plan.status["failuresInARow"]) == (1, 1)
    assert "boom" in plan.status["lastFailure"]
    compute = carried_on(compute, plan)

    # The failed pods are still there: nothing is counted twice.
    plan = plan_for(compute, pods, at(1))
    assert (plan.status["restarts"], plan.status["failuresInARow"], plan.create) == (1, 1, ())
    compute = carried_on(compute, plan)

    plan = plan_for(compute, [], at(4))
    assert (plan.create, plan.look_again_seconds) == ((), 6)
    assert ready(plan.status) == ("False", "BackOff")
    compute = carried_on(compute, plan)

    plan = plan_for(compute, [], at(10))
    assert names(plan.create) == ["dev-0", "dev-1"]
    assert {pod["metadata"]["annotations"]["skyproxy.dev/attempt"] for pod in plan.create} == {"1"}


def test_the_cause_is_the_node_that_failed_not_the_one_that_followed() -> None:
    compute = make_compute(nodes=2)
    pods = [
        make_pod(compute, 0, terminated={"exitCode": 0, "reason": "Completed"}),
        make_pod(compute, 1, terminated={"exitCode": 137, "reason": "OOMKilled"}),
    ]
    assert plan_for(compute, pods).status["lastFailure"].startswith("OOMKilled")


@pytest.mark.parametrize(("failures", "seconds"), [(0, 0), (1, 5), (2, 10), (3, 20), (7, 300), (1000, 300)])
def test_pauses_grow_and_have_an_end(failures: int, seconds: float) -> None:
    assert backoff_seconds(RestartPolicy(), failures) == seconds


def test_after_too_many_failures_it_has_failed_and_its_logs_stay() -> None:
    compute = make_compute(nodes=2, restartPolicy={"maxRestarts": 0})
    pods = [make_pod(compute, 0, ready=True), make_pod(compute, 1, terminated=CRASH)]
    plan = plan_for(compute, pods)
    assert (names(plan.delete), plan.create, plan.status["phase"]) == (["dev-0"], (), "Failed")
    assert ready(plan.status) == ("False", "WorkerExited")
    assert trouble(plan.status) == "WorkerExited"
    compute = carried_on(compute, plan)
    plan = plan_for(compute, pods[1:], at(1000))
    assert (plan.create, plan.delete, plan.status["phase"]) == ((), (), "Failed")
    assert "boom" in plan.status["endedMessage"]


def test_a_long_good_run_ends_the_row_of_failures() -> None:
    compute = make_compute(restartPolicy={"maxRestarts": 1, "resetSeconds": 600})
    past = {"failuresInARow": 1, "restarts": 1, "readySince": "2026-05-01T12:00:00Z"}
    failed = [make_pod(compute, attempt=1, terminated=CRASH)]
    assert plan_for({**compute, "status": past}, failed, at(599)).status["phase"] == "Failed"
    plan = plan_for({**compute, "status": past}, failed, at(600))
    assert (plan.status["failuresInARow"], plan.status["restarts"]) == (1, 2)


def test_a_lost_status_does_not_bring_back_an_earlier_start() -> None:
    compute = make_compute()
    plan = plan_for(compute, [make_pod(compute, attempt=4, ready=True)])
    assert (plan.delete, plan.create, plan.status["phase"]) == ((), (), "Running")
    failed = plan_for(compute, [make_pod(compute, attempt=4, terminated=CRASH)])
    assert failed.status["restarts"] == 5


@pytest.mark.parametrize("change", ["spec", "wake"])
def test_somebody_who_wants_it_again_gets_it_again(change: str) -> None:
    compute = make_compute(restartPolicy={"maxRestarts": 0})
    pods = [make_pod(compute, terminated=CRASH)]
    compute = carried_on(compute, plan_for(compute, pods))
    if change == "spec":
        compute["metadata"]["generation"] = 2
    else:
        compute["metadata"]["annotations"] = {WAKE: "now"}
    plan = plan_for(compute, pods, at(5))
    assert (names(plan.delete), plan.create) == (["dev-0"], ())
    assert not {"endedFor", "lastFailure", "failuresInARow", "expiryTime"} & plan.status.keys()
    compute = carried_on(compute, plan)
    assert names(plan_for(compute, [], at(6)).create) == ["dev-0"]


# --- suspending, expiring ---------------------------------------------------------------------------------------------


def test_suspending_removes_the_pods_and_resuming_makes_them() -> None:
    compute = make_compute(suspend=True, status={"startTime": "2026-05-01T11:00:00Z", "restarts": 2})
    pods = [make_pod(compute, attempt=2, ready=True)]
    plan = plan_for(compute, pods)
    assert (names(plan.delete), plan.create, plan.status["phase"]) == (["dev-0"], (), "Suspended")
    # The lifetime begins anew; the count of starts does not.
    assert ("startTime" in plan.status, plan.status["restarts"]) == (False, 2)
    compute = carried_on(compute, plan)
    compute["spec"] = {"suspend": False}
    plan = plan_for(compute, [])
    assert names(plan.create) == ["dev-0"]


def test_an_idle_worker_goes_and_stays_away() -> None:
    compute = make_compute(idleTimeout="10m")
    pods = [make_pod(compute, ready=True)]
    busy = plan_for(compute, pods, reports=[Report(599.0, {})])
    assert (busy.delete, busy.status["phase"], busy.look_again_seconds) == ((), "Running", 1.0)
    plan = plan_for(carried_on(compute, busy), pods, at(1), reports=[Report(600.0, {})])
    assert (names(plan.delete), plan.status["phase"]) == (["dev-0"], "Expired")
    assert ready(plan.status) == ("False", "IdleTimeout")
    assert trouble(plan.status) == ""
    assert plan.status["expiryTime"] == "2026-05-01T12:00:01Z"
    compute = carried_on(compute, plan)
    plan = plan_for(compute, [], at(9999))
    assert (plan.create, plan.status["phase"]) == ((), "Expired")
    # An operator that was interrupted before it deleted the pods does so now.
    assert names(plan_for(compute, pods, at(9999)).delete) == ["dev-0"]


def test_an_idle_worker_is_suspended_until_somebody_wakes_it() -> None:
    compute = make_compute(suspendAfter="15m", snapshots={"storage": "20Gi"})
    pods = [make_pod(compute, ready=True)]
    busy = plan_for(compute, pods, reports=[Report(899.0, {})])
    assert (busy.delete, busy.status["phase"], busy.look_again_seconds) == ((), "Running", 1.0)
    for held in ({"detached": 1}, {"named": 2}):  # what such a session holds would be lost
        assert plan_for(compute, pods, reports=[Report(9999.0, held)]).status["phase"] == "Running"
    plan = plan_for(carried_on(compute, busy), pods, at(1), reports=[Report(900.0, {"detached": 0, "named": 0})])
    assert (names(plan.delete), plan.status["phase"]) == (["dev-0"], "Suspended")
    assert ready(plan.status) == ("False", "SuspendedIdle")
    compute = carried_on(compute, plan)
    plan = plan_for(compute, [], at(9999))
    assert (plan.create, plan.status["phase"]) == ((), "Suspended")
    compute["metadata"]["annotations"] = {"skyproxy.dev/wake": "now"}
    assert names(plan_for(compute, [], at(9999)).create) == ["dev-0"]


def test_a_worker_that_cannot_be_asked_stays() -> None:
    compute = make_compute(idleTimeout="10m")
    plan = plan_for(compute, [make_pod(compute, ready=True)], reports=[Report(problem="silent")])
    assert (plan.delete, plan.status["phase"]) == ((), "Running")


def test_a_lifetime_counts_from_the_first_time_that_it_was_ready() -> None:
    compute = make_compute(maxLifetime="1h")
    plan = plan_for(compute, [make_pod(compute)], at(9999))
    assert "startTime" not in plan.status
    pods = [make_pod(compute, ready=True)]
    plan = plan_for(carried_on(compute, plan), pods)
    assert plan.status["startTime"] == "2026-05-01T12:00:00Z"
    compute = carried_on(compute, plan)
    assert plan_for(compute, pods, at(3599)).status["phase"] == "Running"
    plan = plan_for(compute, pods, at(3600))
    assert (names(plan.delete), plan.status["phase"]) == (["dev-0"], "Expired")


# --- others -----------------------------------------------------------------------------------------------------------


def test_a_compute_that_is_being_deleted_gets_no_pods() -> None:
    compute = make_compute()
    compute["metadata"]["deletionTimestamp"] = "x"
    plan = plan_for(compute, [])
    assert (plan.create, plan.delete, plan.status["phase"]) == ((), (), "Terminating")


def test_a_bad_spec_is_told_and_running_pods_are_left_alone() -> None:
    compute = make_compute()
    plan = refuse(ObservedState(compute, [make_pod(compute, ready=True)], NOW), "spec.port: no")
    assert (plan.delete, plan.create, plan.status["phase"]) == ((), (), "Failed")
    assert ready(plan.status) == ("False", "InvalidSpec")
    assert [(item.kind, item.reason, item.message) for item in plan.announce] == [
        ("Warning", "Failed", "spec.port: no")
    ]


def test_a_refusal_is_the_cause_until_it_runs() -> None:
    compute = make_compute()
    refusal = [Cause("QuotaExceeded", "no more", actionable=True)]
    plan = plan_for(compute, [], refusals=refusal)
    assert (ready(plan.status), trouble(plan.status)) == (("False", "QuotaExceeded"), "QuotaExceeded")
    running = plan_for(compute, [make_pod(compute, ready=True)], refusals=refusal)
    assert (ready(running.status), trouble(running.status)) == (("True", "Ready"), "QuotaExceeded")


def test_news_are_announced_once() -> None:
    compute = make_compute()
    stuck = make_pod(compute, conditions=[condition("PodScheduled", "False", "Unschedulable", "1 Insufficient cpu.")])
    first = plan_for(compute, [stuck])
    assert [(item.kind, item.reason) for item in first.announce] == [
        ("Normal", "Pending"),
        ("Warning", "Unschedulable"),
    ]
    assert plan_for(carried_on(compute, first), [stuck], at(5)).announce == ()
    running = plan_for(carried_on(compute, first), [make_pod(compute, ready=True)], at(9))
    assert [(item.kind, item.reason) for item in running.announce] == [("Normal", "Running")]
    assert trouble(running.status) == ""


def test_spoilt_labels_and_annotations_mean_other_pods_and_no_crash() -> None:
    compute = make_compute()
    pod = make_pod(compute, ready=True)
    pod["metadata"]["labels"]["skyproxy.dev/node"] = "x"
    pod["metadata"]["annotations"] = {"skyproxy.dev/attempt": "²"}
    plan = plan_for(compute, [pod])
    assert (names(plan.delete), plan.create) == (["dev-0"], ())
