"""Everything for CUDA, on a machine with a GPU: `make gpu`.

Four stages, each ended after its limit, and one summary of them, also as JSON:

    sweep     every entry of PyTorch's operator, module and optimizer databases on a worker, beside local CUDA
    device    tests/gpu without pools: training, memory, graphs, staging, several sessions, profiles, recovery
    figures   benchmarks beside local CUDA: training, decoding, captured and compiled steps, bandwidth; 0, 5 and 30 ms
    pools     ranks on GPUs: nccl, DDP, FSDP2

It runs with the interpreter that has a torch for CUDA. Where packages are missing there and nothing can be fetched,
bring them along:

    python .ci/gpu.py --download .wheels --for-python 3.12       # where there is a network
    make gpu PYTHON=python3 ARGS="--wheels .wheels"              # on the machine with the GPU

`--rehearse` runs the same stages with the CPU in CUDA's place, a small part of each, to see that they can run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".ci"))

from limits import end_with_processes, run_limited, session_timeout  # noqa: E402

LIMIT_SECONDS = 470
"""For a stage: below eight minutes, so that each fits where a command may take ten."""
PACKAGES = {
    "cloudpickle": "cloudpickle",
    "cryptography": "cryptography",
    "expecttest": "expecttest",
    "hypothesis": "hypothesis",
    "msgpack": "msgpack",
    "numpy": "numpy",
    "psutil": "psutil",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "trustme": "trustme",
    "websockets": "websockets",
    "xdist": "pytest-xdist",
}
"""What the stages import, and the packages that have it."""
CARRIED = ("websockets", "expecttest", "trustme", "cryptography", "cffi", "pycparser", "idna", "pytest-timeout")
"""What a machine with torch is likely to lack, with what these need."""
_PLATFORMS = [f"manylinux{tail}_x86_64" for tail in ("_2_34", "_2_28", "_2_17", "2014", "1")]
_SHOWN_CHARACTERS = 300


@dataclass
class Stage:
    """What came of one stage.

    Attributes:
        name: of the stage.
        outcome: "ok", "FAILED", "out of time" or "nothing ran".
        seconds: how long it took.
        passed, failed, skipped: tests; of benchmarks, targets that were met and missed, and figures left out.
        problems: a line for each test that failed or target that was missed.
        rows: figures, as the benchmarks write them.
    """

    name: str
    outcome: str = "ok"
    seconds: float = 0.0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    problems: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)


def missing_packages() -> list[str]:
    """Return the packages that this interpreter lacks."""
    return [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]


def install_wheels(wheels: Path, target: Path) -> None:
    """Install every wheel of a folder into another one, from which this process and its children import.

    Raises:
        SystemExit: there are none, or pip cannot.
    """
    found = sorted(str(path) for path in wheels.glob("*.whl"))
    if not found:
        raise SystemExit(f"{wheels} holds no wheels. Fetch them with: python .ci/gpu.py --download {wheels}")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    done = subprocess.run([*pip, "--target", str(target), *found], check=False)
    if done.returncode:
        raise SystemExit(f"pip could not install the wheels of {wheels} for Python {platform.python_version()}")
    sys.path.insert(0, str(target))
    importlib.invalidate_caches()


def download(wheels: Path, python: str) -> int:
    """Fetch the wheels that a machine without a network will need.

    Args:
        wheels: the folder to fill.
        python: the other machine's version of Python, such as "3.12".
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(wheels)]
    command += ["--python-version", python, "--implementation", "cp"]
    for tag in _PLATFORMS:
        command += ["--platform", tag]
    return subprocess.run([*command, *CARRIED], check=False).returncode


def environment(paths: Sequence[Path], rehearse: bool) -> dict[str, str]:
    """Return the variables of a stage."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SKYPROXY_")}
    variables["PYTHONPATH"] = os.pathsep.join(str(path) for path in (ROOT, ROOT / "operator", *paths))
    variables |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    variables.setdefault("OMP_NUM_THREADS", "1")
    if rehearse:
        variables |= {"SKYPROXY_TEST_GPU_REHEARSAL": "1", "SKYPROXY_SWEEP_ONE_IN": "400"}
    else:
        variables["SKYPROXY_SWEEP_DEVICE"] = "cuda"
    return variables


def read_report(stage: Stage, report: Path) -> None:
    """Take over what pytest wrote down of its tests."""
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = {element.tag: element for element in case}
        broken = outcomes.get("failure", outcomes.get("error"))
        if broken is not None:
            message = " ".join((broken.get("message") or "").split())[:_SHOWN_CHARACTERS]
            stage.problems.append(f"{case.get('classname')}::{case.get('name')}: {message}")
            stage.failed += 1
        elif "skipped" in outcomes:
            stage.skipped += 1
        else:
            stage.passed += 1


def read_figures(stage: Stage, path: Path, *, judge: bool = True) -> None:
    """Take over the figures of the benchmarks; a row counts where it has targets, which are met or missed.

    Args:
        judge: False for a rehearsal, whose figures mean nothing.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    stage.rows = content["rows"]
    stage.skipped = len(content["skipped"])
    for row in stage.rows:
        if not row["targets"] or not judge:
            continue
        if row["met"]:
            stage.passed += 1
        else:
            stage.failed += 1
            found = f"{row['ratio'][1]:.3f} times {row['against']}" if row["ratio"] else f"{row['sky']} {row['unit']}"
            stage.problems.append(f"{row['name']} over {row['link']}: {found}, wanted {', '.join(row['targets'])}")


def run_tests(stage: Stage, paths: Sequence[str], options: argparse.Namespace, variables: dict[str, str]) -> None:
    """Run tests; what they found stands in `stage` afterwards, also of a run that was ended."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
        command += [f"--junitxml={report}", *paths]
        command += [session_timeout(options.limit_seconds)]
        started = time.monotonic()
        status = run_limited(command, variables, options.limit_seconds, ROOT)
        if report.exists():
            read_report(stage, report)
    if status is None or time.monotonic() - started > options.limit_seconds * 0.85:
        stage.outcome = "out of time"
    elif status:
        stage.outcome = "FAILED"


def sweep(stage: Stage, options: argparse.Namespace, variables: dict[str, str]) -> None:
    """Run the conformance sweep."""
    files = [f"tests/conformance/test_{name}.py" for name in ("ops", "modules", "optimizers")]
    run_tests(stage, ["-n", str(options.jobs), "--dist", "worksteal", *files], options, variables)


def device(stage: Stage, options: argparse.Namespace, variables: dict[str, str]) -> None:
    """Run the tests of a CUDA worker."""
    pools = [f"--ignore=tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_pool*.py")]
    run_tests(stage, ["tests/gpu", "tests/server/test_usage.py", *pools], options, variables)


def pools(stage: Stage, options: argparse.Namespace, variables: dict[str, str]) -> None:
    """Run the tests of pools with ranks on GPUs."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_pool*.py"))
    run_tests(stage, files, options, variables)


def figures(stage: Stage, options: argparse.Namespace, variables: dict[str, str]) -> None:
    """Run the benchmarks."""
    with tempfile.TemporaryDirectory() as folder:
        found, plot = Path(folder) / "figures.json", Path(folder) / "figures.png"
        command = [sys.executable, "benchmarks/suite.py", "--json", str(found), "--plot", str(plot)]
        command += ["--rehearse"] if options.rehearse else ["--device", "cuda"]
        command += ["--quick"] if options.quick else []
        status = run_limited(command, variables, options.limit_seconds, ROOT)
        if found.exists():
            read_figures(stage, found, judge=not options.rehearse)
    if status is None:
        stage.outcome = "out of time"
    elif status:
        stage.outcome = "FAILED"


STAGES: dict[str, Callable[[Stage, argparse.Namespace, dict[str, str]], None]] = {
    "sweep": sweep,
    "device": device,
    "figures": figures,
    "pools": pools,
}


def run_stage(name: str, options: argparse.Namespace, variables: dict[str, str]) -> Stage:
    """Run one stage; what goes wrong in it ends no other."""
    print(f"\n== {name}", flush=True)
    stage, started = Stage(name), time.monotonic()
    STAGES[name](stage, options, variables)
    stage.seconds = round(time.monotonic() - started, 1)
    if stage.outcome == "ok" and not (stage.passed or stage.rows):
        stage.outcome = "nothing ran"
    return stage


def summary(stages: Sequence[Stage], facts: dict[str, str]) -> str:
    """Return the summary as Markdown."""
    lines = ["", ", ".join(f"{name} {value}" for name, value in facts.items()), ""]
    lines += ["| stage | outcome | passed | failed | skipped | seconds |", "|---|---|---|---|---|---|"]
    for stage in stages:
        counts = f"{stage.passed} | {stage.failed} | {stage.skipped} | {stage.seconds:.0f}"
        lines.append(f"| {stage.name} | {stage.outcome} | {counts} |")
    lines += [f"- {stage.name}: {problem}" for stage in stages for problem in stage.problems]
    return "\n".join(lines)


def facts() -> dict[str, str]:
    """Return what the run was on; nothing that names the machine."""
    import torch

    found = {"torch": torch.__version__, "Python": platform.python_version(), "cores": str(os.cpu_count())}
    if torch.cuda.is_available():
        found["GPU"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return found


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--stages", nargs="+", choices=list(STAGES), default=list(STAGES), help="some stages; all by default")
    add("--wheels", type=Path, metavar="FOLDER", help="wheels of what this interpreter lacks")
    add("--json", type=Path, metavar="FILE", help="where everything that was found goes")
    add("--limit-seconds", type=float, default=LIMIT_SECONDS, help="for each stage (default: %(default)s)")
    add("--jobs", type=int, default=min(12, os.cpu_count() or 1), help="test processes of the sweep")
    add("--quick", action="store_true", help="fewer figures")
    add("--rehearse", action="store_true", help="with the CPU in CUDA's place, a small part of each stage")
    add("--download", type=Path, metavar="FOLDER", help="fetch the wheels, and do nothing else")
    add("--for-python", default="3.12", metavar="VERSION", help="the version that the wheels are for")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages and print the summary.

    Returns:
        0 if all passed, 1 if something failed, 2 if nothing could run here.
    """
    options = arguments(argv)
    if options.download is not None:
        return download(options.download, options.for_python)
    if importlib.util.find_spec("torch") is None:
        print(f"{sys.executable} has no torch. Name one that has: make gpu PYTHON=/path/to/python3", file=sys.stderr)
        return 2
    import torch

    if not options.rehearse and not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} of {sys.executable} sees no CUDA device. Run this on a machine with a GPU and "
            "a torch for CUDA, or with --rehearse to see that the stages can run.",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory() as folder:
        installed = Path(folder)
        if options.wheels is not None:
            install_wheels(options.wheels, installed)
        lacking = missing_packages()
        if lacking:
            print(
                f"missing: {', '.join(lacking)}. Install them; or where there is no network, carry them along: "
                f"python .ci/gpu.py --download .wheels --for-python {'.'.join(platform.python_version_tuple()[:2])}, "
                "then --wheels .wheels here.",
                file=sys.stderr,
            )
            return 2
        variables = environment([installed] if options.wheels is not None else [], options.rehearse)
        stages = []
        for name in options.stages:
            stages.append(run_stage(name, options, variables))
            print(summary(stages, facts()), flush=True)
            if options.json is not None:  # after each, so that a run which is ended leaves what it has
                content = {"facts": facts(), "stages": [asdict(stage) for stage in stages]}
                options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0 if all(stage.outcome == "ok" and not stage.failed for stage in stages) else 1


if __name__ == "__main__":
    end_with_processes()
    sys.exit(main())
