"""The device's tests on other versions of PyTorch: `make matrix`.

For each version an environment is made once, outside the tree: in `$SKYPROXY_CACHE/matrix`, by default
`~/.cache/skyproxy/matrix`. PyPI's builds are for CUDA; they run without a GPU, and cannot be imported without the five
gigabytes of NVIDIA's libraries that pip brings with them.

    python .ci/matrix.py                       # the oldest and the newest version that skyproxy knows
    python .ci/matrix.py 2.12 2.14             # others
    python .ci/matrix.py --only sweep 2.15     # one group of tests
    python .ci/matrix.py --resume              # go on with runs that were cut short, and again with what failed
    python .ci/matrix.py --table               # what came of the last run of each group

Outcomes are kept beside the environments, test by test.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]

from environments import cache_folder, make_environment  # noqa: E402
from journal import note, read_journal  # noqa: E402
from limits import end_with_processes, run_limited, session_timeout  # noqa: E402

from skyproxy import torch_versions  # noqa: E402

FAST = "not slow and not gpu and not e2e and not notebooks and not firstrun and not conformance"
SAMPLE_ONE_IN = 40
GROUPS: dict[str, tuple[list[str], str]] = {
    "tensor/core": (["tests/tensor/core"], FAST),
    "tensor/dispatch": (["tests/tensor/dispatch"], FAST),
    "tensor/ops": (["tests/tensor/ops"], FAST),
    "tensor/programs": (["tests/tensor/programs", "tests/tensor/test_training.py"], FAST),
    "tensor/shapes": (["tests/tensor/shapes"], FAST),
    "tensor/torch_api": (["tests/tensor/torch_api"], FAST),
    "modes": (["tests/test_torch_modes.py", "tests/test_torch_versions.py", "tests/test_patching.py"], FAST),
    "session": (["tests/session"], FAST),
    "server": (["tests/server"], FAST),
    "security": (["tests/security"], FAST),
    "functions": (["tests/functions"], FAST),
    "integration": (["tests/integration"], FAST),
    "pools": (["tests/pools"], FAST),
    "sweep": (["tests/conformance"], "not gpu"),
    "metadata": (["tests/conformance/test_cuda_metadata.py"], "not gpu"),
}
TOOLS = ["expecttest", "hypothesis", "numpy", "pytest", "pytest-timeout", "pytest-xdist", "safetensors"]
TOOLS += ["scikit-learn", "tqdm", "trustme"]
"""What the tests need beside skyproxy's own dependencies."""


def environment_for(version: str, cache: Path) -> Path:
    """Return the interpreter of the environment with this torch; make the environment where it is not there yet.

    Args:
        version: as pip reads it: "2.15" takes the newest 2.15.x.
        cache: where environments are kept.

    Raises:
        subprocess.CalledProcessError: if pip cannot install it.
    """
    pinned = f"torch=={version}.*" if version.count(".") == 1 else f"torch=={version}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return make_environment(cache / interpreter_tag(version), pinned, [*project["dependencies"], *TOOLS])


def interpreter_tag(version: str) -> str:
    """Return the name of what belongs to a version of torch and the interpreter that runs this."""
    return f"torch-{version}-python-{sys.version_info[0]}.{sys.version_info[1]}"


def journal_of(group: str, version: str, cache: Path) -> Path:
    """Return where the outcomes of a group's tests are noted."""
    return cache / "results" / interpreter_tag(version) / f"{group.replace('/', '-')}.jsonl"


def run_group(python: Path, group: str, journal: Path, jobs: int, limit_seconds: float, resume: bool) -> None:
    """Run one group of tests, and note what comes of them.

    Args:
        journal: gets a line for each test.
        resume: whether tests of which the journal says that they passed or were skipped are left out.
    """
    paths, marks = GROUPS[group]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("SKYPROXY_", "MATRIX_"))}
    variables |= {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / ".ci"))), "PYTHONDONTWRITEBYTECODE": "1"}
    variables["MATRIX_JOURNAL"] = str(journal)
    variables.setdefault("OMP_NUM_THREADS", "1")
    if group == "sweep":
        variables["SKYPROXY_SWEEP_ONE_IN"] = str(SAMPLE_ONE_IN)
    if resume:
        variables["MATRIX_RESUME"] = "1"
    else:
        journal.unlink(missing_ok=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    note(journal, {"begun": f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC {commit.stdout.strip()}".strip()})
    started = time.monotonic()
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "journal_plugin", "-m", marks]
    command += ["-n", str(jobs), "--dist", "worksteal", *paths]  # loadfile runs a test that ends its process again
    try:
        run_limited([*command, session_timeout(limit_seconds)], variables, limit_seconds, ROOT)
    finally:
        note(journal, {"seconds": round(time.monotonic() - started)})


def show(versions: Sequence[str], groups: Sequence[str], cache: Path) -> list[str]:
    """Print a table of the last run of each group, and why tests were skipped.

    Returns:
        A line for each test that failed, and for each group that did not come to its end.
    """
    problems, skips = [], Counter[tuple[str, str]]()
    print(f"\n| tests | {' | '.join(versions)} |\n|---|{'---|' * len(versions)}")
    for group in groups:
        cells = []
        for version in versions:
            outcomes = read_journal(journal_of(group, version, cache))
            if not outcomes.begun:
                cells.append("not run")
                continue
            failed = [test for test, outcome in outcomes.tests.items() if outcome == "failed"]
            problems += [f"torch {version}: {test}" for test in failed]
            for reason, number in outcomes.skips.items():
                skips[version, reason] += number
            cell = f"{outcomes.count('passed'):,}"
            cell += f", {outcomes.count('skipped')} skipped" if outcomes.skips else ""
            cell += f", {len(failed)} failed" if failed else ""
            if outcomes.waiting != 0:
                cell += ", not to the end"
                waiting = "no test ran" if outcomes.waiting is None else f"{outcomes.waiting} tests did not run"
                problems.append(f"torch {version}, {group}: {waiting}; --resume runs them")
            cells.append(f"{cell} ({outcomes.seconds:.0f} s, {outcomes.begun})")
        print(f"| {group} | {' | '.join(cells)} |")
    for (version, reason), number in skips.items():
        print(f"torch {version}, {number} skipped: {reason}")
    return problems


def main() -> int:
    """Run the groups on each version, and print the table.

    Returns:
        1 if a test failed or did not run, or a version could not be installed.
    """
    oldest, newest = (f"{first}.{second}" for first, second in (torch_versions.OLDEST, torch_versions.NEWEST))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=[oldest, newest], metavar="VERSION")
    parser.add_argument(
        "--only", action="append", choices=list(GROUPS), help="a group of tests; all of them by default"
    )
    parser.add_argument("--jobs", type=int, default=2, help="test processes at a time")
    parser.add_argument("--limit-seconds", type=float, default=1800, help="for one group of tests")
    parser.add_argument("--resume", action="store_true", help="leave out tests that passed in the last run")
    parser.add_argument("--table", action="store_true", help="only print what came of the last run of each group")
    options = parser.parse_args()
    cache = cache_folder("matrix")
    groups = options.only or list(GROUPS)
    problems = []
    for version in () if options.table else options.versions:
        try:
            python = environment_for(version, cache)
        except subprocess.CalledProcessError as error:
            problems.append(f"torch {version} could not be installed: {error}")
            continue
        for group in groups:
            journal = journal_of(group, version, cache)
            if not (options.resume and read_journal(journal).done):
                run_group(python, group, journal, options.jobs, options.limit_seconds, options.resume)
    problems += show(options.versions, groups, cache)
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    end_with_processes()
    sys.exit(main())
