"""The device's tests on other versions of PyTorch: `make matrix`.

For each version an environment is made once, outside the tree: in `$SKYPROXY_CACHE/matrix`, by default
`~/.cache/skyproxy/matrix`. PyPI's builds are for CUDA; they run without a GPU, and cannot be imported without the five
gigabytes of NVIDIA's libraries that pip brings with them.

    python .ci/matrix.py                       # the oldest and the newest version that skyproxy knows
    python .ci/matrix.py 2.12 2.14             # others
    python .ci/matrix.py --only sweep 2.15     # one group of tests
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]

from environments import cache_folder, make_environment  # noqa: E402
from limits import run_limited, session_timeout  # noqa: E402

from skyproxy import torch_versions  # noqa: E402

FAST = "not slow and not gpu and not e2e and not notebooks and not firstrun and not conformance"
SAMPLE_ONE_IN = 40
GROUPS: dict[str, tuple[list[str], str]] = {
    "tensor": (["tests/tensor"], FAST),
    "session": (["tests/session"], FAST),
    "server": (["tests/server"], FAST),
    "security": (["tests/security"], FAST),
    "functions": (["tests/functions"], FAST),
    "integration": (["tests/integration"], FAST),
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
    folder = cache / f"torch-{version}-python-{sys.version_info[0]}.{sys.version_info[1]}"
    return make_environment(folder, pinned, [*project["dependencies"], *TOOLS])


def run_group(python: Path, group: str, jobs: int, limit_seconds: float) -> tuple[dict[str, int], list[str], float]:
    """Run one group of tests.

    Returns:
        How many passed, failed and were skipped; the names of those that failed, and what else went wrong; seconds.
    """
    paths, marks = GROUPS[group]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SKYPROXY_")}
    variables |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    variables.setdefault("OMP_NUM_THREADS", "1")
    if group == "sweep":
        variables["SKYPROXY_SWEEP_ONE_IN"] = str(SAMPLE_ONE_IN)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, f"--junitxml={report}"]
        command += ["-n", str(jobs), "--dist", "worksteal" if group == "sweep" else "loadfile", *paths]
        status = run_limited([*command, session_timeout(limit_seconds)], variables, limit_seconds, ROOT)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    seconds = time.monotonic() - started
    problems = [f"{c.get('classname')}::{c.get('name')}" for c in cases if {"failure", "error"} & {e.tag for e in c}]
    skipped = sum(any(e.tag == "skipped" for e in case) for case in cases)
    counts = {"passed": len(cases) - len(problems) - skipped, "failed": len(problems), "skipped": skipped}
    if status is None or seconds > limit_seconds * 0.85:
        problems.append(f"not done after {seconds:.0f} s: the counts are of the tests before")
    elif not cases:
        problems.append("no test ran: see pytest's output")
    return counts, problems, seconds


def main() -> int:
    """Run the groups on each version, and print the table.

    Returns:
        1 if a test failed, or a version could not be installed.
    """
    oldest, newest = (f"{first}.{second}" for first, second in (torch_versions.OLDEST, torch_versions.NEWEST))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=[oldest, newest], metavar="VERSION")
    parser.add_argument(
        "--only", action="append", choices=list(GROUPS), help="a group of tests; all of them by default"
    )
    parser.add_argument("--jobs", type=int, default=2, help="test processes at a time")
    parser.add_argument("--limit-seconds", type=float, default=1800, help="for one group of tests")
    options = parser.parse_args()
    cache = cache_folder("matrix")
    rows, problems = [], []
    for version in options.versions:
        try:
            python = environment_for(version, cache)
        except subprocess.CalledProcessError as error:
            problems.append(f"torch {version} could not be installed: {error}")
            continue
        shown = [str(python), "-c", "import platform, torch; print(torch.__version__, platform.python_version())"]
        torch_version, python_version = subprocess.run(shown, capture_output=True, text=True, check=True).stdout.split()
        for group in options.only or GROUPS:
            counts, failed, seconds = run_group(python, group, options.jobs, options.limit_seconds)
            numbers = " | ".join(str(counts[name]) for name in ("passed", "failed", "skipped"))
            rows.append(f"| {torch_version} | {python_version} | {group} | {numbers} | {seconds:.0f} |")
            problems += [f"torch {torch_version}, {group}: {name}" for name in failed]
    print("\n| torch | Python | tests | passed | failed | skipped | seconds |\n|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
