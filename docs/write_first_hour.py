"""Writes the table of seconds in docs/howto/first-hour.md from a run.

    make firsthour                      # this machine, two machines, ssh
    make firsthour ARGS=--cluster       # the row of a cluster, too; needs root, and `make e2e` once before

Rows that were not measured now stay. What a run says about its machine goes above the table: how many cores there are,
and how busy they were.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "howto" / "first-hour.md"
_ROW = re.compile(r"^\| (this machine|two machines, TLS|a machine over ssh|a cluster with the operator) \|.*$", re.M)
_TAKEN = re.compile(r"^Taken on .*?\n\n", re.M | re.S)
_BUSY = 0.3
"""Load that others make, per core, above which a machine is called busy: what runs here is mostly one process."""


def measured(*arguments: str) -> dict[str, str]:
    """Return the rows that a run of pytest prints, by their ways.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, "-m", "pytest", "-s", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    return {found[1]: found[0] for found in _ROW.finditer(done.stdout)}


def page(text: str, rows: dict[str, str], cores: int, load: float, day: datetime.date) -> str:
    """Return the page with these rows, and what is to be known about their run.

    Args:
        text: of the page.
        rows: of the table, by their ways.
        cores: of the machine.
        load: what ran on it before, as `os.getloadavg` tells.
        day: of the run.
    """
    busy = f", whose load was {load:.1f} before: busy" if load > _BUSY * cores else ""
    where = (
        "the cluster's row is from an earlier run" if "a cluster with the operator" not in rows else "all in one run"
    )
    taken = (
        f"Taken on {day.isoformat()} by `make firsthour` on a machine with {cores} cores{busy}; {where}. "
        'Workers\nhad no GPU, and "machines" are homes and environments of their own on one machine.\n\n'
    )
    return _TAKEN.sub(lambda _: taken, _ROW.sub(lambda found: rows.get(found[1], found[0]), text), count=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", action="store_true", help="measure the row of a cluster, too")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    rows = measured("tests/firstrun/first_hour.py")
    if arguments.cluster:
        rows |= measured("-m", "e2e", "tests/e2e/first_hour.py")
    day = datetime.datetime.now(datetime.UTC).date()
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page(text, rows, os.cpu_count() or 1, load, day), encoding="utf-8")


if __name__ == "__main__":
    main()
