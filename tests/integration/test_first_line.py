"""The first line of a program loads what it needs, and no more; in processes of their own."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

import skyproxy
from skyproxy.tensor.dispatch.inference import prepare
from tests.integration.programs import succeed, worker

pytestmark = pytest.mark.timeout(200)

FIRST_VALUE = """
import json, sys
import torch, skyproxy

node = skyproxy.connect({url!r}, token={token!r})
value = (torch.ones(2, device="sky:0") + 1).sum().item()
print(json.dumps([value, "torch._dynamo" in sys.modules, torch.sky.stats()["round_trips"]]))
"""

FIRST_FAKE = """
import sys
import torch, skyproxy

node = skyproxy.connect({url!r}, token={token!r})
x = torch.tensor([[2.0, 1.0], [1.0, 2.0]], device="sky:0")
assert "torch._dynamo" not in sys.modules
with torch.device("sky:0"), torch.inference_mode(), torch.autocast("sky", torch.bfloat16):
    values = torch.linalg.eigvalsh(x.float())
assert "torch._dynamo" in sys.modules
print(values.cpu().round().tolist())
"""


def test_a_first_value_waits_once_and_does_not_load_the_compiler_of_pytorch(tmp_path: Path) -> None:
    with worker(tmp_path) as (url, token):
        assert json.loads(succeed(FIRST_VALUE.format(url=url, token=token), timeout=100)) == [4.0, False, 1]


def test_what_the_first_fake_tensor_needs_is_loaded_as_at_the_top_of_a_program(tmp_path: Path) -> None:
    with worker(tmp_path) as (url, token):
        assert succeed(FIRST_FAKE.format(url=url, token=token), timeout=100) == "[1.0, 3.0]"


def test_nothing_is_loaded_ahead_once_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr("skyproxy.tensor.dispatch.inference.importlib.import_module", loaded.append)
    prepare(until=lambda: len(loaded) == 2)
    assert len(loaded) == 2


def test_a_worker_collects_garbage_but_not_what_it_loaded(sky: str) -> None:
    del sky
    collects, aside = skyproxy.list_nodes()[0].run(lambda: (gc.isenabled(), gc.get_freeze_count()))
    assert collects
    assert aside > 100_000
