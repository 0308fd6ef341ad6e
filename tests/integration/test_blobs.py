"""Weights travel once: a program that starts again finds them on the worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyproxy_server.limits import are_sessions_separable
from tests.integration.programs import succeed, worker

PROGRAM = """
import json, sys, time, torch, skyproxy
from torch import nn
node = skyproxy.connect({url!r}, token={token!r})
torch.manual_seed(1)
model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range({mib} // 4)))
expected = [p.detach().clone() for p in model.parameters()]
size = sum(p.nbytes for p in model.parameters())
assert size == {mib} << 20
before = torch.sky.stats()
model.to("sky:0")
node.synchronize()
stats = torch.sky.stats()
row = {{name: stats[name] - before[name] for name in ("bytes_sent", "bytes_saved", "round_trips")}}
for index in range(0, len(expected), max(1, len(expected) // 4)):
    assert torch.equal(model[index].weight.detach().cpu(), expected[index])
with torch.no_grad():
    for parameter in model.parameters():
        parameter.mul_(0)  # what is kept must not change with it
session = node._session
deadline = time.monotonic() + 100
while session.call("blob_stats")["unhashed"] and time.monotonic() < deadline:
    pass
row["kept"] = session.call("blob_stats")
print(json.dumps(row))
"""


def again(mib: int, folder: Path, *arguments: str) -> tuple[dict[str, int], dict[str, int]]:
    """What two runs of one program sent and saved."""
    with worker(folder, *arguments) as (url, token):
        source = PROGRAM.format(url=url, token=token, mib=mib)
        first, second = (json.loads(succeed(source, timeout=110)) for _ in range(2))
    return first, second


@pytest.mark.parametrize("place", ["memory", "folder"])
@pytest.mark.parametrize("sessions", ["--sessions-in-process", "--session-processes"])
def test_a_program_that_starts_again_moves_its_weights_once(tmp_path: Path, place: str, sessions: str) -> None:
    if sessions == "--session-processes" and not are_sessions_separable():
        pytest.skip("session processes need Linux")
    arguments = [sessions, "--blob-bytes", str(256 << 20)]
    if place == "folder":
        arguments += ["--blob-dir", str(tmp_path / "blobs")]
    first, second = again(128, tmp_path, *arguments)
    assert first["bytes_sent"] > 128 << 20
    assert first["bytes_saved"] == 0
    assert second["bytes_sent"] < 1 << 20
    assert second["bytes_saved"] == 128 << 20
    assert second["round_trips"] == first["round_trips"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_gibibyte_of_weights_moves_once(tmp_path: Path) -> None:
    first, second = again(1024, tmp_path, "--blob-bytes", str(2 << 30), "--blob-dir", str(tmp_path / "blobs"))
    assert first["bytes_sent"] > 1 << 30
    assert second["bytes_sent"] < 1 << 20
    assert second["bytes_saved"] == 1 << 30


def test_a_worker_that_keeps_nothing_is_offered_nothing(tmp_path: Path) -> None:
    with worker(tmp_path, "--blob-bytes", "0") as (url, token):
        source = (
            PROGRAM.format(url=url, token=token, mib=8)
            .replace('row["kept"]', "pass #")
            .replace('session.call("blob_stats")["unhashed"]', "False")
        )
        for _ in range(2):
            assert json.loads(succeed(source, timeout=100))["bytes_sent"] > 8 << 20


def test_a_client_that_wants_nothing_kept_leaves_nothing(tmp_path: Path) -> None:
    with worker(tmp_path, "--blob-bytes", str(64 << 20)) as (url, token):
        source = PROGRAM.format(url=url, token=token, mib=8)
        row = json.loads(succeed(source, timeout=100, SKYPROXY_REMEMBER_UPLOADS="0"))
    assert row["kept"]["blobs"] == 0


def test_one_session_moves_the_same_weights_once(tmp_path: Path) -> None:
    source = """
    import json, time, torch, skyproxy
    node = skyproxy.connect({url!r}, token={token!r})
    weights = torch.randn(2 << 20)
    first = weights.to("sky:0")
    node.synchronize()
    while node._session.call("blob_stats")["unhashed"]:
        pass
    before = torch.sky.stats()
    second = weights.to("sky:0")
    second.add_(1)
    third = weights.to("sky:0")
    assert torch.equal(first.cpu(), weights) and torch.equal(third.cpu(), weights)
    assert torch.equal(second.cpu(), weights + 1)
    stats = torch.sky.stats()
    print(json.dumps([stats[name] - before[name] for name in ("bytes_sent", "bytes_saved")]))
    """
    with worker(tmp_path, "--blob-bytes", str(64 << 20)) as (url, token):
        sent, saved = json.loads(succeed(source.format(url=url, token=token)))
    assert sent < 1 << 20
    assert saved == 16 << 20
