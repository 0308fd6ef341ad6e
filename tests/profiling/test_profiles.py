"""`skyproxy.profile` on real workers: everything is there, in order, on one clock."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import skyproxy
from skyproxy.errors import ConfigurationError, RemoteError, SessionLostError
from skyproxy.node import Node

STEPS = 5


def train(device: str) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 128).to(device)
    for _ in range(STEPS):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    large = torch.ones(1 << 18).to(device)
    return loss.item() + large.cpu()[0].item()


class Trace:
    """A trace as a viewer reads it."""

    def __init__(self, trace: dict[str, Any]) -> None:
        self.events: list[dict[str, Any]] = trace["traceEvents"]
        self.clocks = trace["otherData"]["clocks"]
        self.rows = {event["args"]["name"]: event["pid"] for event in self.events if event["name"] == "process_name"}
        self.bound = max(clock["error_bound_ns"] for clock in self.clocks) / 1e3

    def spans(self, row: str, pattern: str = ".*") -> list[dict[str, Any]]:
        found = [
            event
            for event in self.events
            if event["pid"] == self.rows[row] and event["ph"] == "X" and re.fullmatch(pattern, event["name"])
        ]
        return sorted(found, key=lambda event: event["ts"])

    def flights(self, row: str, pattern: str) -> dict[str, tuple[float, float]]:
        """What was on the wire: when it left and came, by name."""
        ends: dict[str, dict[str, Any]] = {}
        for event in self.events:
            if event["pid"] == self.rows[row] and event["ph"] in "be" and re.fullmatch(pattern, event["name"]):
                ends.setdefault(event["id"], {})[event["ph"]] = event
        return {pair["b"]["name"]: (pair["b"]["ts"], pair["e"]["ts"]) for pair in ends.values()}


def end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


@pytest.fixture(scope="module")
def profiled(sky_devices: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, skyproxy.Profile]:
    train("sky:0")
    path = tmp_path_factory.mktemp("profile") / "trace.json"
    with skyproxy.profile(path) as profile:
        train("sky:0")
        train("sky:1")
    trace = json.loads(path.read_text())
    assert trace == json.loads(json.dumps(profile.trace))
    return Trace(trace), profile


@pytest.fixture
def trace(profiled: tuple[Trace, skyproxy.Profile]) -> Trace:
    return profiled[0]


WORKERS = ("sky:0", "sky:1")


def test_each_side_and_each_wire_has_a_row(trace: Trace) -> None:
    expected = {"client (this process)"}
    for name in WORKERS:
        expected |= {f"wire to {name}", f"worker of {name}"}
    assert set(trace.rows) == expected


@pytest.mark.parametrize("name", WORKERS)
def test_operations_are_seen_where_they_are_recorded_and_where_they_run(trace: Trace, name: str) -> None:
    assert len(trace.spans("client (this process)", "aten::addmm|aten::linear")) >= 2 * 2 * STEPS
    assert len(trace.spans(f"worker of {name}", "aten::linear")) == STEPS  # the layer whose input is differentiated
    assert len(trace.spans(f"worker of {name}", "aten::addmm")) == 2 * STEPS
    assert len(trace.spans(f"worker of {name}", "aten::mm")) == 3 * STEPS  # no gradient of the input


@pytest.mark.parametrize("name", WORKERS)
def test_operations_run_inside_of_batches_in_their_order(trace: Trace, name: str) -> None:
    batches = trace.spans(f"worker of {name}", r"batch \d+")
    numbers = [int(event["name"].split()[1]) for event in batches]
    assert numbers == sorted(numbers)
    assert all(end(first) <= second["ts"] for first, second in itertools.pairwise(batches))
    for op in trace.spans(f"worker of {name}", r"aten::.*"):
        assert any(batch["ts"] <= op["ts"] and end(op) <= end(batch) + 0.01 for batch in batches), op["name"]


@pytest.mark.parametrize("name", WORKERS)
def test_a_batch_runs_after_it_was_sent_and_answers_come_after_they_left(trace: Trace, name: str) -> None:
    batches = {event["name"]: event for event in trace.spans(f"worker of {name}", r"batch \d+")}
    sent = {
        event["name"].replace("send", "batch"): event for event in trace.spans("client (this process)", r"send \d+")
    }
    flights = trace.flights(f"wire to {name}", r"batch \d+")
    assert flights
    for batch, (left, came) in flights.items():
        assert left <= came
        assert batches[batch]["ts"] >= left - trace.bound
        assert abs(came - max(batches[batch]["ts"], left)) < 0.01
    assert set(flights) <= set(sent)
    replies = trace.flights(f"wire to {name}", r"reply \d+")
    assert replies
    assert all(came >= left for left, came in replies.values())


@pytest.mark.parametrize("name", WORKERS)
def test_large_transfers_have_their_size(trace: Trace, name: str) -> None:
    assert len(trace.flights(f"wire to {name}", r"upload 1,048,576 bytes")) == 1
    assert len(trace.flights(f"wire to {name}", r"download 1,048,576 bytes")) == 1


def test_waits_are_seen(trace: Trace) -> None:
    waits = trace.spans("client (this process)", r"wait for (fetch|item|numbers)")
    assert len(waits) == 4
    answers = [
        came for name in WORKERS for _, came in trace.flights(f"wire to {name}", r"(reply|download) .*").values()
    ]
    # A quick answer can be here before its asker begins to wait, but not before the wait that came earlier was over.
    for before, wait in itertools.pairwise([None, *waits]):
        earliest = end(before) - 1000 if before is not None else 0.0
        assert any(earliest <= came <= end(wait) + 1000 for came in answers)


def test_the_clock_of_this_machine_is_found_within_the_stated_bound(trace: Trace) -> None:
    """Both workers run here, so the truth is known: their clock is ours."""
    for clock in trace.clocks:
        assert abs(clock["offset_ns"]) <= clock["error_bound_ns"]
        assert abs(clock["offset_at_end_ns"]) <= clock["error_bound_ns"]


def test_arrows_lead_from_the_program_to_the_worker(trace: Trace) -> None:
    starts = {event["id"]: event for event in trace.events if event["ph"] == "s" and event["name"] == "batch"}
    ends = {event["id"]: event for event in trace.events if event["ph"] == "f" and event["name"] == "batch"}
    assert starts
    assert starts.keys() == ends.keys()
    for name, event in starts.items():
        assert event["pid"] == 1
        assert ends[name]["ts"] >= event["ts"]


def test_the_summary_names_the_operations(profiled: tuple[Trace, skyproxy.Profile]) -> None:
    text = profiled[1].summary(rows=100)
    assert re.search(rf"^aten::addmm .* ms +{2 * 2 * STEPS}$", text, re.MULTILINE)
    shares = [float(share) for share in re.findall(r"([\d.]+) %$", text, re.MULTILINE)]
    assert len(shares) == 7
    assert all(0 <= share <= 100.1 for share in shares)


def test_a_profile_can_be_compressed(profiled: tuple[Trace, skyproxy.Profile], tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    profiled[1].save(path)
    assert json.loads(gzip.decompress(path.read_bytes())) == json.loads(json.dumps(profiled[1].trace))


def test_a_profile_is_made_once_and_read_at_its_end(sky: str) -> None:
    profile = skyproxy.profile()
    with pytest.raises(ConfigurationError, match="no trace yet"):
        profile.summary()
    with profile:
        torch.ones(2, device=sky).sum().item()
    with pytest.raises(ConfigurationError, match="already made"):
        profile.__enter__()


def test_the_programs_own_error_comes_out_and_the_next_profile_works(sky: str) -> None:
    with pytest.raises(ZeroDivisionError):
        with skyproxy.profile() as profile:
            torch.ones(2, device=sky).sum().item()
            _ = 1 / 0
    assert profile.trace is not None
    with skyproxy.profile() as again:
        torch.ones(2, device=sky).sum().item()
    assert again.trace is not None


def test_one_session_at_a_time_is_profiled_and_the_end_of_a_session_ends_its_profile(sky: str, tmp_path: Path) -> None:
    from tests.integration.programs import worker

    with worker(tmp_path) as (url, token):
        first, second = (skyproxy.connect(url, token=token) for _ in range(2))
        session_of(first).call("profile_start", False, False)
        with pytest.raises(RemoteError, match="another session"):
            session_of(second).call("profile_start", False, False)
        first.close()
        for _ in range(1000):  # the worker learns of the end a moment later
            try:
                session_of(second).call("profile_start", False, False)
                break
            except RemoteError:
                continue
        else:
            pytest.fail("the first session's profile never ended")
        second.close()


def session_of(node: Node) -> Any:
    return node._session


def test_a_lost_worker_leaves_the_others_in_the_trace(sky: str) -> None:
    node = skyproxy.launch_local("cpu")
    lost = torch.ones(2, device=node.devices[0])
    with skyproxy.profile() as profile:
        torch.ones(2, device=sky).sum().item()
        assert node.process_id is not None
        os.kill(node.process_id, signal.SIGKILL)
        with pytest.raises(SessionLostError):
            while True:
                lost.sum().item()
    assert profile.trace is not None
    rows = Trace(profile.trace).rows
    assert f"worker of {sky}" in rows
    assert f"worker of {node.devices[0]}" not in rows
    assert session_of(node).lost is not None
