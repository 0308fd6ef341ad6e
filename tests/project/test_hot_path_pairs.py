"""The paired measurement of two checkouts: it divides within each pair, and measures the checkout that it is given."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
pairs: Any = importlib.import_module("hot_path_pairs")


def test_ratios_are_those_of_the_pairs_and_not_of_the_medians() -> None:
    before = [{"add": 1.0, "cat": 2.0}, {"add": 10.0, "cat": 2.0}, {"add": 2.0, "cat": 2.0}]
    after = [{"add": 2.0, "cat": 1.0}, {"add": 5.0, "cat": 1.0}, {"add": 2.0, "cat": 3.0}]
    _, add, cat, every = pairs.table(before, after)
    assert add.split() == ["add", "2.00", "2.00", "1.00", "0.50", "to", "2.00"]
    assert cat.split() == ["cat", "2.00", "1.00", "0.50", "0.50", "to", "1.50"]
    assert every.split()[3:] == ["0.75", "0.50", "to", "1.00"]


def test_sides_take_turns_and_each_is_measured_in_its_checkout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    measured: list[Path] = []

    def measured_in(checkout: Path, rounds: int) -> dict[str, float]:
        measured.append(checkout)
        return {"add": 2.0 if checkout == tmp_path else 4.0}

    monkeypatch.setattr(pairs, "_measured_in", measured_in)
    monkeypatch.setattr(sys, "argv", ["hot_path_pairs.py", str(tmp_path), str(ROOT), "--pairs", "2"])
    assert pairs.main() == 0
    assert measured == [tmp_path, ROOT, ROOT, tmp_path]
    assert "2.00   2.00 to 2.00" in capsys.readouterr().out


def test_a_process_that_would_measure_another_checkout_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["hot_path_pairs.py", "--measure", str(tmp_path)])
    with pytest.raises(AssertionError, match="is of another checkout"):
        pairs.main()


def test_twelve_operations_are_measured(sky: str) -> None:
    operations = pairs._operations()
    assert len(operations) == 12
    for call in operations.values():
        call()


def test_two_checkouts_are_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["hot_path_pairs.py", "."])
    with pytest.raises(SystemExit):
        pairs.main()
    assert "two checkouts" in capsys.readouterr().err
