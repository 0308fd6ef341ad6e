"""Events of Kubernetes, as they are made of announcements."""

from __future__ import annotations

import datetime
import json
import logging

import pytest

from skyproxy_operator.announcements import Announcement, event_of
from tests.operator.makers import NOW, make_compute
from tests.operator.world import World, run

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


def test_a_workers_last_lines_forge_none_of_the_operators_log_and_command_no_terminal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(restartPolicy={"backoffSeconds": 1})
    caplog.set_level(logging.INFO, "skyproxy.operator")
    forged = "\x1b]52;c;x\x07\nERROR other/compute: everything is lost\n\u202e\ud800"

    async def scenario(world: World) -> None:
        await world.settle()
        world.cluster.fail("dev-0", forged)
        await world.settle()

    run(scenario, world)
    told = [record.getMessage() for record in caplog.records if "everything is lost" in record.getMessage()]
    written = json.dumps([world.cluster.all("Event"), world.status], ensure_ascii=False)
    assert told
    assert "everything is lost" in written
    for text in (*told, written):
        assert not any(character in text for character in "\x1b\x07\u202e\n")
        text.encode()
