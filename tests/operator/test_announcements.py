"""Events of Kubernetes, as they are made of announcements."""

from __future__ import annotations

import datetime

from skyproxy_operator.announcements import Announcement, event_of
from tests.operator.makers import NOW, make_compute

READY = Announcement("Normal", "Ready", "All workers are ready.")


def test_the_same_words_twice_in_a_second_are_one_event() -> None:
    compute = make_compute(uid="compute-1")
    first = event_of(compute, READY, NOW)
    assert event_of(compute, READY, NOW + datetime.timedelta(microseconds=1)) == first
    others = [
        event_of(compute, READY, NOW + datetime.timedelta(seconds=1)),
        event_of(compute, Announcement("Normal", "Ready", "Other words."), NOW),
        event_of(make_compute(uid="compute-2"), READY, NOW),
    ]
    assert len({first["metadata"]["name"], *(event["metadata"]["name"] for event in others)}) == 4


def test_an_event_lies_beside_its_compute_and_is_no_longer_than_kubernetes_takes() -> None:
    event = event_of(make_compute(uid="compute-1"), Announcement("Warning", "Failed", "x" * 5000), NOW)
    about = event["involvedObject"]
    assert (about["kind"], about["name"], about["uid"]) == ("Compute", "dev", "compute-1")
    assert event["metadata"]["namespace"] == about["namespace"] == "lab"
    assert len(event["message"]) <= 1024
