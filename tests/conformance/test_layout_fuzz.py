"""The fuzzer of layouts, on a sample of operators and a seed that never changes, and on rules that lie."""

from __future__ import annotations

import zlib

import pytest
import torch

from skyproxy.tensor.core.metadata import plain_meta
from skyproxy.tensor.dispatch.op_info import info_of
from tests.conformance.conftest import Judge
from tests.conformance.layout_fuzz import fuzz, main
from tests.conformance.op_checks import Tally
from tests.operator_database import op_db

_SAMPLED = [op for op in op_db if zlib.crc32(op.name.encode()) % 12 == 0]


@pytest.mark.usefixtures("sky_devices")
def test_results_look_as_pytorchs_in_drawn_orders_of_memory(judge: Judge) -> None:
    def check() -> Tally:
        report = fuzz(_SAMPLED, seed=17)
        assert report.checked, "the fuzzer compared nothing"
        problems = [f"{name}: {line}" for name, found in report.wrong.items() for line in found]
        tally = Tally()
        tally.ran, tally.problems = sum(report.checked.values()), [*problems, *report.failed]
        return tally

    judge("operations in drawn layouts", check, None)


@pytest.mark.usefixtures("sky_devices")
def test_a_rule_that_is_wrong_about_transposed_tensors_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(info_of(torch.ops.aten.sin.default), "rule", lambda x: [(plain_meta(x.size, x.dtype), None)])
    assert main(["--only", "sin", "--tries", "8"]) == 1
    assert "aten::sin: " in capsys.readouterr().out
