"""A worker's answer, whatever it says, has the shape that the page reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skyproxy.errors import ConnectError
from skyproxy.webview.spans import bounded_spans
from skyproxy.webview.workers import ask_worker_status, normalize, workers_status

SHAPE = {"is_admin", "worker", "sessions", "jobs", "log"}


@pytest.mark.parametrize(
    "answer",
    [
        None,
        7,
        [],
        {"worker": [], "sessions": {}, "log": "x"},
        {"worker": {"devices": 3, "software": []}, "sessions": [1, {"failures": 3, "calls": [7], "running": "x"}]},
        json.loads('{"worker": {"commands": 1e999}, "sessions": [{"commands": NaN}], "log": [1, null]}'),
        {"jobs": [7, {"tail": "x"}, {"tail": [1, "line"], "state": []}]},
        {"sessions": [{"failures": [[[[[[[[["deep"]]]]]]]]]}] * 1000, "log": ["x" * 10_000] * 1000},
    ],
)
def test_whatever_a_worker_says_has_the_shape_of_an_answer(answer: Any) -> None:
    found = normalize(answer)
    assert set(found) == SHAPE
    text = json.dumps(found, allow_nan=False)
    assert len(text) < 400_000
    assert isinstance(found["worker"]["devices"], list)
    for row in found["sessions"]:
        assert all(isinstance(row[name], list) for name in ("calls", "failures"))
        assert isinstance(row["running"], dict)
    for lines in (found["log"], *(row["tail"] for row in found["jobs"])):
        assert all(isinstance(line, str) for line in lines)


def test_a_worker_that_does_not_answer_says_why_and_spoils_nothing() -> None:
    def refuse() -> dict[str, Any]:
        raise ConnectError("nobody there")

    status = workers_status("two", {"good": lambda: {"is_admin": True}, "bad": refuse})
    good, bad = status["workers"]
    assert (good["name"], good["is_admin"]) == ("good", True)
    assert (bad["name"], bad["problem"], bad["sessions"]) == ("bad", "nobody there", [])
    assert status["program"] is None


def test_a_worker_does_not_choose_its_name() -> None:
    assert ask_worker_status("mine", lambda: {"name": "another"})["name"] == "mine"


def test_of_a_profile_the_longest_spans_are_kept() -> None:
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "client"}},
        *({"ph": "X", "pid": 1, "tid": 5, "ts": float(n), "dur": n / 10, "name": "op" * 100} for n in range(1000)),
        *({"ph": "X", "pid": 2, "tid": n, "ts": 0.0, "dur": 1.0, "name": "other"} for n in range(50)),
        {"ph": "s", "pid": 1, "tid": 5, "ts": 0.0, "name": "arrow"},
    ]
    found = bounded_spans({"traceEvents": events})
    assert len(found["rows"]) == 12
    assert found["rows"][0]["name"] == "client, thread 5"
    assert len(found["rows"][0]["spans"]) == 200
    assert found["rows"][0]["spans"][0][1] == 99.9
    assert max(len(span[2]) for span in found["rows"][0]["spans"]) == 80
    assert (found["shown"], found["all"]) == (211, 1049)
    assert bounded_spans({}) == {"total": 0.0, "rows": [], "shown": 0, "all": 0}
