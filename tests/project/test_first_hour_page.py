"""The table of docs/howto/first-hour.md is written by a script, from what a run prints."""

from __future__ import annotations

import datetime
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DAY = datetime.date(2026, 12, 31)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_first_hour", ROOT / "docs" / "write_first_hour.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_that_were_measured_replace_those_of_the_page(script: ModuleType) -> None:
    text = script.PAGE.read_text(encoding="utf-8")
    row = "| a machine over ssh | 5 | 1 | 2.0 | `skyproxy down` 2.0 |"
    written = script.page(text, {"a machine over ssh": row}, 2, 0.1, DAY)
    assert row in written
    rows = {found[1]: found[0] for found in script._ROW.finditer(text)}
    assert len(rows) == 4
    assert all(other in written for way, other in rows.items() if way != "a machine over ssh")
    assert "Taken on 2026-12-31 by `make firsthour` on a machine with 2 cores; the cluster's row" in written
    assert "busy" in script.page(text, {}, 2, 4.0, DAY)
    assert len(script._TAKEN.findall(written)) == 1
