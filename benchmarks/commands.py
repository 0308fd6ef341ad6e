"""Processor time of the commands that need no torch, beside that of Python itself, in one run.

    python benchmarks/commands.py
    python benchmarks/commands.py --rounds 20

Prints a table for docs/topics/performance.md: medians of user and system time, children included, in rounds that take
each command once. `python -c "import asyncio, ssl"` is what a command that talks to a worker cannot do without.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

_SKYPROXY = (sys.executable, "-c", "from skyproxy.cli.main import main; main()")
_YARDSTICKS: Mapping[str, Sequence[str]] = {
    "python -c pass": (sys.executable, "-c", "pass"),
    'python -c "import asyncio, ssl"': (sys.executable, "-c", "import asyncio, ssl"),
}
COMMANDS: Mapping[str, Sequence[str]] = {
    "skyproxy list": ("list",),
    "skyproxy down": ("down", "nobody"),
    "skyproxy logs": ("logs", "nobody"),
    "skyproxy status": ("status", "nobody"),
    "skyproxy --help": ("--help",),
}


def _cpu_seconds(command: Sequence[str], environment: Mapping[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(rounds: int) -> dict[str, float]:
    """Return the median processor seconds of each row, of processes that take turns."""
    rows = {**_YARDSTICKS, **{name: (*_SKYPROXY, *arguments) for name, arguments in COMMANDS.items()}}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SKYPROXY_", "KUBE"))}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has compiled files
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    with tempfile.TemporaryDirectory() as folder:
        environment |= {"HOME": folder, "XDG_CONFIG_HOME": folder, "XDG_STATE_HOME": folder}
        for number in range(rounds + 1):
            for name, command in rows.items():
                taken = _cpu_seconds(command, environment)
                if number:  # the first compiles, and fills the page cache
                    seconds[name].append(taken)
    return {name: statistics.median(values) for name, values in seconds.items()}


def table(seconds: Mapping[str, float]) -> str:
    """Return the rows in Markdown."""
    bare, loaded = (seconds[name] for name in _YARDSTICKS)
    lines = [
        "| command | seconds of processor time | times `pass` | times `import asyncio, ssl` |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{name}` | {taken:.2f} | {taken / bare:.1f} | {taken / loaded:.1f} |" for name, taken in seconds.items()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="of each command once (default: %(default)s)")
    print(table(measure(parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
