"""A Compute's status."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyproxy_operator import status as state
from skyproxy_operator.causes import Cause
from skyproxy_operator.reaping import Report
from tests.operator.makers import NOW, at, make_compute, make_pod, spec_of

COMPUTE = make_compute(nodes=2)
SPEC = spec_of(COMPUTE)


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {item["type"]: (item["status"], item["reason"]) for item in status["conditions"]}


def built(verdict: state.Verdict, now: Any = NOW, compute: Any = COMPUTE, **more: Any) -> dict[str, Any]:
    return state.build_status(compute, verdict, now, carried={}, spec=SPEC, **more)


def test_all_nodes_ready() -> None:
    pods = [make_pod(COMPUTE, node, ready=True) for node in (1, 0)]
    status = built(state.judge(SPEC, pods, {}, NOW), pods=pods)
    assert (status["phase"], status["readyNodes"], status["url"]) == ("Running", 2, "wss://dev.lab.svc:8765")
    assert conditions(status) == {
        "Scheduled": ("True", "Scheduled"),
        "Ready": ("True", "Ready"),
        "Progressing": ("False", "Ready"),
        "Degraded": ("False", "AsExpected"),
    }
    assert [(row["podName"], row["podIP"], row["rank"]) for row in status["nodes"]] == [
        ("dev-0", "10.0.0.0", 0),
        ("dev-1", "10.0.0.1", 1),
    ]


def test_one_node_missing() -> None:
    pods = [make_pod(COMPUTE, 0, ready=True)]
    verdict = state.judge(SPEC, pods, {}, NOW)
    assert (verdict.phase, verdict.ready, verdict.scheduled, verdict.progressing) == (
        "Provisioning",
        False,
        False,
        True,
    )
    assert verdict.cause.message.startswith("1 of 2 nodes are ready.")


def test_what_needs_somebody_goes_before_what_passes() -> None:
    waiting = make_pod(COMPUTE, 0)
    stuck = make_pod(
        COMPUTE,
        1,
        conditions=[
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "Insufficient cpu"}
        ],
    )
    verdict = state.judge(SPEC, [waiting, stuck], {}, NOW)
    assert verdict.cause.reason == "Unschedulable"
    assert conditions(built(verdict))["Degraded"] == ("True", "Unschedulable")
    assert verdict.phase == "Pending"


def test_a_pod_that_is_being_deleted_is_not_ready() -> None:
    pods = [make_pod(COMPUTE, node, ready=True) for node in (0, 1)]
    pods[1]["metadata"]["deletionTimestamp"] = "2026-05-01T12:00:00Z"
    assert not state.judge(SPEC, pods, {}, NOW).ready


def test_conditions_keep_the_time_of_their_last_change() -> None:
    ready = state.judge(SPEC, [make_pod(COMPUTE, node, ready=True) for node in (0, 1)], {}, NOW)
    first = built(ready)
    later = built(ready, at(60), {**COMPUTE, "status": first})
    assert state.patch_between(first, later) == {}
    stopped = built(state.judge_stopped("Suspended", Cause("Suspended", "x")), at(60), {**COMPUTE, "status": first})
    times = {item["type"]: item["lastTransitionTime"] for item in stopped["conditions"]}
    assert times["Ready"] == "2026-05-01T12:01:00Z"
    assert times["Degraded"] == "2026-05-01T12:00:00Z"


def test_a_single_node_is_named_by_its_gpus() -> None:
    answer = {
        "software": {"skyproxy": "1", "torch": "2.13", "python": "3.12", "secret": "no"},
        "devices": [
            {"type": "cuda", "index": 0, "name": "NVIDIA H200", "total_memory_bytes": 10},
            {"type": "cuda", "index": 1, "name": "NVIDIA H200", "total_memory_bytes": 10},
            {"type": "cpu", "index": 0, "name": "x86_64", "total_memory_bytes": 20},
        ],
    }
    facts = state.worker_facts(answer)
    assert facts["summary"] == "2x NVIDIA H200"
    assert (facts["torch"], "secret" in facts) == ("2.13", False)
    assert facts["devices"][2] == {"type": "cpu", "index": 0, "name": "x86_64", "memoryBytes": 20}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from(["software", "devices", "name", "torch"]), inner)
        ),
    )
)
def test_a_strange_answer_of_a_container_harms_nobody(answer: Any) -> None:
    facts = state.worker_facts({"software": answer, "devices": answer} if not isinstance(answer, dict) else answer)
    assert isinstance(facts["summary"], str)
    assert len(facts["devices"]) <= 64


def test_lists_within_lists_are_no_text() -> None:
    deep: Any = []
    for _ in range(sys.getrecursionlimit() * 3):
        deep = [deep]
    facts = state.worker_facts({"software": {"torch": deep}, "devices": [{"name": deep, "type": {"a": deep}}]})
    assert facts["torch"] == facts["devices"][0]["name"] == ""


def test_the_last_activity_moves_in_steps() -> None:
    once = state.with_activity({}, [Report(5.0, {}), Report(50.0, {})], NOW)
    assert once["lastActivityTime"] == "2026-05-01T11:59:55Z"
    assert state.with_activity(once, [Report(0.0, {})], at(10)) == once
    later = state.with_activity(once, [Report(0.0, {})], at(60))
    assert later["lastActivityTime"] == "2026-05-01T12:01:00Z"
    # Who did not answer was not active, for all we know.
    assert state.with_activity(once, [Report(problem="silent")], at(90)) == once


OBJECTS = st.dictionaries(
    st.sampled_from("abc"),
    st.integers() | st.dictionaries(st.sampled_from("xy"), st.integers(), max_size=2),
    max_size=3,
)


@given(OBJECTS, OBJECTS)
def test_the_patch_makes_the_old_into_the_new(old: dict[str, Any], new: dict[str, Any]) -> None:
    def apply(target: Any, patch: Any) -> Any:
        """RFC 7396."""
        if not isinstance(patch, dict):
            return patch
        target = dict(target) if isinstance(target, dict) else {}
        for key, value in patch.items():
            if value is None:
                target.pop(key, None)
            else:
                target[key] = apply(target.get(key), value)
        return target

    assert apply(old, state.patch_between(old, new)) == new


@pytest.mark.parametrize("phase", ["Suspended", "Expired", "Failed"])
def test_pods_on_their_way_out_are_progress(phase: str) -> None:
    leaving = state.judge_stopped(phase, Cause("X", "So it is."), leaving=2)
    assert (leaving.progressing, leaving.cause.message) == (True, "So it is. 2 pods are on their way out.")
    assert not state.judge_stopped(phase, Cause("X", "So it is.")).progressing


def test_what_a_worker_says_of_itself_can_always_be_written() -> None:
    """Numbers that the API server would not take, characters without UTF-8, escape sequences."""
    row = {"type": "cuda\x1b]52;c;x\x07", "name": "\ud800", "index": -1, "total_memory_bytes": 10**30}
    facts = state.worker_facts({"software": {"torch": "2\x1b[31m"}, "devices": [row, {"index": True}]})
    json.dumps(facts, ensure_ascii=False).encode()
    assert "\x1b" not in json.dumps(facts, ensure_ascii=False)
    assert [(item["index"], item["memoryBytes"]) for item in facts["devices"]] == [(0, 0), (0, 0)]
