"""When a captured stream is run as a list, and when as a CUDA graph: decided without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from skyproxy_server.cuda_graphs import CudaReplayer, Made, replayer_for


class FakeDriver:
    """A device that notes what it is told to do. Inputs are their own addresses."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.breaks = False

    def addresses(self, inputs: list[Any]) -> list[int]:
        return list(inputs)

    def warm_up(self, run: Callable[[], tuple[Made, bool]]) -> tuple[Made, bool]:
        self.log.append("warm up")
        return run()

    def capture(self, inputs: list[Any], run: Callable[[], Made]) -> tuple[Any, Made]:
        self.log.append("capture")
        made = run()
        if self.breaks:
            raise RuntimeError("operation not permitted when stream is capturing")
        return f"graph {len(self.log)}", made

    def launch(self, graph: Any) -> None:
        self.log.append("launch")


class Commands:
    """A stream that makes one value, and counts how often it was run."""

    def __init__(self) -> None:
        self.runs: list[bool] = []
        self.intact = True

    def __call__(self, strict: bool) -> tuple[Made, bool]:
        self.runs.append(strict)
        return {3: f"made {len(self.runs)}"}, self.intact


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


def test_lists_warm_up_then_it_is_captured_and_launched(driver: FakeDriver) -> None:
    replayer, run = CudaReplayer(driver, warm_ups=2), Commands()
    made = [replayer.replay([64], run)[3] for _ in range(5)]
    assert driver.log == ["warm up", "warm up", "capture", "launch", "launch", "launch"]
    assert made == ["made 1", "made 2", "made 3", "made 3", "made 3"]
    assert run.runs == [False, False, True]
    assert replayer.is_live


def test_a_failed_warm_up_is_no_warm_up(driver: FakeDriver) -> None:
    replayer, run = CudaReplayer(driver, warm_ups=1), Commands()
    run.intact = False
    replayer.replay([64], run)
    run.intact = True
    replayer.replay([64], run)
    assert driver.log == ["warm up", "warm up"]
    replayer.replay([64], run)
    assert replayer.is_live


def test_inputs_that_moved_are_captured_anew_and_in_the_end_a_list(driver: FakeDriver) -> None:
    replayer, run = CudaReplayer(driver, warm_ups=0, max_captures=2), Commands()
    replayer.replay([1], run)
    replayer.replay([1], run)
    replayer.replay([2], run)
    assert driver.log == ["capture", "launch", "launch", "capture", "launch"]
    assert replayer.replay([3], run) == {3: "made 3"}
    assert "moving" in replayer.refusal
    assert replayer.replay([3], run) == {3: "made 4"}
    assert driver.log[-1] == "launch"
    assert run.runs == [True, True, False, False]
    assert not replayer.is_live


def test_what_cannot_be_captured_stays_a_list(driver: FakeDriver) -> None:
    replayer, run = CudaReplayer(driver, warm_ups=1), Commands()
    driver.breaks = True
    made = [replayer.replay([1], run)[3] for _ in range(4)]
    assert driver.log == ["warm up", "capture"]
    assert made == ["made 1", "made 3", "made 4", "made 5"]
    assert run.runs == [False, True, False, False, False]
    assert "not permitted" in replayer.refusal


@pytest.mark.parametrize("places", [[], [["cpu", None]], [["cuda", 0], ["cuda", 1]], [["cuda", 0], ["cpu", None]]])
def test_only_recordings_of_one_gpu_become_cuda_graphs(places: list[list[Any]]) -> None:
    recording: Any = type("Recording", (), {"steps": [SimpleNamespace(signature=None)]})()
    random: Any = None
    assert replayer_for(places, recording, random) is None


def test_what_reads_the_outcome_from_the_device_is_never_captured() -> None:
    signatures = [SimpleNamespace(name=name) for name in ("aten::mul.Tensor", "aten::_linalg_eigh")]
    recording: Any = SimpleNamespace(steps=[SimpleNamespace(signature=one) for one in (None, *signatures)])
    assert replayer_for([["cuda", 0]], recording, random=Any) is None
