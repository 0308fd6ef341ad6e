"""What came of tests, noted one by one, so that a run that was cut short can go on where it was.

A journal is a file of lines of JSON: when a run begins, how many tests it found, what came of each, how long it took.
The last line about a test holds. `journal_plugin.py` writes those about tests.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Outcomes:
    """What a journal says.

    Attributes:
        begun: when its first run began, and of which commit.
        seconds: how long its runs took.
        tests: the outcome of each test: "passed", "failed" or "skipped".
        skips: how many tests were skipped for each reason.
        waiting: how many tests were found and have not run; None where pytest never got as far as finding them.
    """

    begun: str = ""
    seconds: float = 0.0
    tests: dict[str, str] = field(default_factory=dict)
    skips: Counter[str] = field(default_factory=Counter)
    waiting: int | None = None

    def count(self, outcome: str) -> int:
        return sum(each == outcome for each in self.tests.values())

    @property
    def done(self) -> bool:
        return self.waiting == 0 and not self.count("failed")


def read_journal(path: Path) -> Outcomes:
    """Return what a journal says; nothing where there is none."""
    outcomes, reasons, found, since = Outcomes(), dict[str, str](), None, set[str]()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:  # the last line of a process that was killed
            continue
        if "test" in entry:
            outcomes.tests[entry["test"]] = entry["outcome"]
            reasons[entry["test"]] = entry.get("why", "")
            since.add(entry["test"])
        elif "found" in entry:
            found, since = entry["found"], set()
        elif "seconds" in entry:
            outcomes.seconds += entry["seconds"]
        else:
            outcomes.begun = outcomes.begun or entry["begun"]
            outcomes.tests = {test: outcome for test, outcome in outcomes.tests.items() if outcome != "failed"}
            found = None
    outcomes.skips = Counter(reasons[test] for test, outcome in outcomes.tests.items() if outcome == "skipped")
    outcomes.waiting = None if found is None else found - len(since)
    return outcomes


def note(path: Path, entry: dict[str, Any]) -> None:
    """Add a line to a journal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        print(json.dumps(entry), file=file)
