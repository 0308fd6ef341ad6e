"""How the sweep reports: what an entry may be excused for, and how many entries pass."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.conformance.op_checks import Tally

_GROUP = "conformance"
Judge = Callable[[str, Callable[[], Tally], str | None], None]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if "conformance" in item.path.parts]
    for item in ours:
        item.add_marker(pytest.mark.conformance)
    # `make matrix` takes a sample: by a digest of the name, so that a run on another torch takes the same entries.
    one_in = int(os.environ.get("SKYPROXY_SWEEP_ONE_IN", "1"))
    left_out = {item for item in ours if zlib.crc32(item.name.encode()) % one_in}
    if left_out:
        config.hook.pytest_deselected(items=sorted(left_out, key=lambda item: item.nodeid))
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def judge(record_property: Callable[[str, object], None]) -> Judge:
    """Runs an entry's checks and decides: passed, failed, excused, or nothing to compare.

    The function takes the group that the entry is counted in, the checks, and the reason of its exception if any.
    """

    def run(group: str, checks: Callable[[], Tally], excuse: str | None) -> None:
        tally = checks()
        if tally.ran == 0:
            pytest.skip("nothing of this entry runs on the local device")
        record_property(_GROUP, group)
        if excuse is not None:
            if not tally.problems:
                pytest.fail(f"passes, but stands in the table of exceptions; remove the row: {excuse}")
            pytest.xfail(excuse)
        if tally.problems:
            lines = "\n  ".join(tally.problems[:20])
            pytest.fail(f"{len(tally.problems)} of {tally.ran} checks differ:\n  {lines}", pytrace=False)

    return run


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line a group: how many of the entries that run locally pass."""
    passed: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    for outcome in ("passed", "failed", "xfailed"):
        for report in terminalreporter.stats.get(outcome, []):
            group = dict(report.user_properties).get(_GROUP)
            if report.when == "call" and group is not None:
                ran[group] += 1
                passed[group] += outcome == "passed"
    if ran:
        terminalreporter.section("conformance")
    for group in sorted(ran):
        terminalreporter.line(f"{group}: {passed[group]} of {ran[group]} ({100 * passed[group] / ran[group]:.2f} %)")
