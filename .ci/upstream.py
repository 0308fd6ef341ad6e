"""The test suites of libraries that name a device, on the CPU and on `sky:0`: `make upstream`.

Each library's tests come from its source distribution, its code from its wheel. Both runs take the same sample; what
differs is listed test by test. Known differences stand in `tests/upstream/differences.py`, with a reason each. The
environment and the sources are kept outside of the tree, in `$SKYPROXY_CACHE/upstream`, by default
`~/.cache/skyproxy/upstream`. Nothing is downloaded at run time: tests that need a model of the hub fail on both sides.

    python .ci/upstream.py                                # the usual samples
    python .ci/upstream.py --only peft --sample 2000      # another one
    python .ci/upstream.py --only accelerate -- -k hooks  # with arguments of pytest
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]

from environments import cache_folder, make_environment  # noqa: E402
from limits import end_with_processes, run_limited  # noqa: E402

from tests.upstream.comparison import Comparison, Result, compare, read_results  # noqa: E402
from tests.upstream.differences import DIFFERENCES  # noqa: E402


@dataclass(frozen=True)
class Library:
    """A library whose tests are run.

    Attributes:
        version: the one whose tests `DIFFERENCES` is about.
        tests: files and folders in its source distribution.
        sample: how many of the tests are run where nothing else is asked for; 0 for all.
        needs_apart: True if it imports packages that must not be importable elsewhere.
    """

    version: str
    tests: list[str]
    sample: int
    needs_apart: bool = False


LIBRARIES = {
    "timm": Library(
        "1.0.31",
        ["tests/test_models.py", "tests/test_layers.py", "tests/test_layers_pool.py", "tests/test_optim.py"],
        40,
        needs_apart=True,
    ),
    "peft": Library("0.21.2", ["tests/test_custom_models.py"], 600),
    "accelerate": Library(
        "1.15.0",
        [
            f"tests/test_{name}.py"
            for name in (
                "accelerator",
                "big_modeling",
                "data_loader",
                "hooks",
                "kwargs_handlers",
                "memory_utils",
                "modeling_utils",
                "offload",
                "optimizer",
                "scheduler",
                "state_checkpointing",
                "utils",
            )
        ],
        0,
    ),
}
PACKAGES = ["datasets==5.2.*", "diffusers==0.42.*", "expecttest", "numpy", "parameterized", "pytest>=9", "pytest-order"]
PACKAGES += ["pytest-timeout", "pytest-xdist", "safetensors", "scikit-learn", "scipy", "sentencepiece", "tqdm"]
PACKAGES += ["transformers==5.23.*", *(f"{name}=={it.version}" for name, it in LIBRARIES.items() if not it.needs_apart)]


def prepare_environment(torch: str, cache: Path) -> Path:
    """Return the interpreter of the environment for this torch; make it where it is not there yet.

    Raises:
        subprocess.CalledProcessError: if pip cannot install it.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    minor = int(torch.partition("==")[2].split(".")[1])
    apart = [f"timm=={LIBRARIES['timm'].version}", f"torchvision==0.{minor + 15}.*"]
    packages = [*project["dependencies"], *PACKAGES]
    key = hashlib.sha256("\n".join([torch, *packages, *apart]).encode()).hexdigest()[:8]
    folder = cache / f"{torch.replace('==', '-')}-python-{sys.version_info[0]}.{sys.version_info[1]}-{key}"
    return make_environment(folder, torch, packages, apart)


def fetch_source(name: str, version: str, cache: Path) -> Path:
    """Return the folder of a library's source distribution; download it where it is not there yet.

    Raises:
        subprocess.CalledProcessError: if pip cannot find it.
    """
    folder = cache / f"{name}-{version}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache) as download:
            wanted = ["--no-deps", "--no-binary", name, f"{name}=={version}", "--dest", download]
            subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *wanted], check=True)
            with tarfile.open(next(Path(download).glob("*.tar.gz"))) as archive:
                archive.extractall(download, filter="data")
            (Path(download) / folder.name).rename(folder)
    return folder


def run_tests(
    name: str, python: Path, source: Path, device: str, options: argparse.Namespace
) -> tuple[dict[str, Result], str, bool]:
    """Run a library's tests on one device.

    Returns:
        The outcomes by test, the end of pytest's output, and True if it came to its own end.
    """
    library = LIBRARIES[name]
    with tempfile.TemporaryDirectory() as folder:
        place, report, settings = Path(folder, "source"), Path(folder, "report"), Path(folder, "pytest.ini")
        shutil.copytree(source, place)
        (place / "tests" / "__init__.py").touch()  # peft's tests are a package, and its distribution does not say so
        report.touch()
        settings.write_text("[pytest]\n", encoding="utf-8")  # their own asks for plugins that measure coverage
        variables = {key: value for key, value in os.environ.items() if not key.startswith("SKYPROXY_")}
        paths = [ROOT, ROOT / "tests" / "upstream"]
        paths += [python.parents[1] / "apart"] if library.needs_apart else []
        variables |= {
            "HF_HOME": str(Path(folder, "hub")),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "SKYPROXY_CONTEXT": "",
            "TMPDIR": folder,
            "UPSTREAM_DEVICE": device,
            "UPSTREAM_LIBRARY": name,
            "UPSTREAM_REPORT": str(report),
            "UPSTREAM_SAMPLE": str(library.sample if options.sample is None else options.sample),
            "UPSTREAM_SEED": options.seed,
        }
        command = [str(python), "-m", "pytest", "-q", "-c", str(settings), f"--rootdir={place}", "-p", "device_plugin"]
        command += ["-p", "no:cacheprovider", "--timeout=300", "--tb=short", "-n", str(options.jobs)]
        command += [*options.arguments, *library.tests]
        with Path(folder, "output").open("w+", encoding="utf-8", errors="replace") as output:
            status = run_limited(command, variables, options.limit_seconds, place, output)
            output.seek(0)
            text = output.read()
        if options.logs:
            Path(options.logs, f"{name}-{device.partition(':')[0]}.log").write_text(text, encoding="utf-8")
        return read_results(report.read_text(encoding="utf-8").splitlines()), text[-2000:], status is not None


def summary(rows: dict[str, tuple[Comparison, float]], torch: str) -> str:
    """Return the table of all libraries."""
    lines = [
        "| library | tests | passed on both | failed on both | on the device only | allowed | unexpected | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (found, seconds) in rows.items():
        counts = found.counts
        better = sum(counts.get(pair, 0) for pair in (("failed", "passed"), ("skipped", "passed")))
        numbers = [
            sum(counts.values()),
            counts.get(("passed", "passed"), 0),
            counts.get(("failed", "failed"), 0),
            better,
        ]
        numbers += [found.allowed, len(found.unexpected), round(seconds)]
        lines.append(f"| {name} {LIBRARIES[name].version} | {' | '.join(f'{number:,}' for number in numbers)} |")
    return "\n".join([f"{torch}, Python {sys.version_info[0]}.{sys.version_info[1]}", "", *lines])


def main() -> int:
    """Run the suites, and print the table.

    Returns:
        1 if a run found what is not known, or did not come to its end.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(LIBRARIES), help="a library; all of them by default")
    parser.add_argument("--sample", type=int, help="how many tests of each library; 0 for all of them")
    parser.add_argument("--seed", default="1", help="what the sample depends on")
    parser.add_argument("--device", default="sky:0", help="what is compared with the CPU")
    parser.add_argument("--jobs", type=int, default=2, help="test processes at a time")
    parser.add_argument("--limit-seconds", type=float, default=1800, help="for one library on one device")
    parser.add_argument("--torch", default="torch==2.13.0", help="as pip reads it")
    parser.add_argument("--logs", help="a folder for pytest's output")
    parser.add_argument("arguments", nargs="*", help="of pytest")
    options = parser.parse_args()
    cache = cache_folder("upstream")
    cache.mkdir(parents=True, exist_ok=True)
    python = prepare_environment(options.torch, cache)
    rows: dict[str, tuple[Comparison, float]] = {}
    for name in options.only or LIBRARIES:
        source, begin = fetch_source(name, LIBRARIES[name].version, cache), time.monotonic()
        runs = [run_tests(name, python, source, device, options) for device in ("cpu", options.device)]
        found = compare(runs[0][0], runs[1][0], DIFFERENCES[name])
        for device, (_, _, in_time) in zip(("cpu", options.device), runs, strict=True):
            if not in_time:
                found.unfinished.append(f"the run on {device} did not end within {options.limit_seconds:.0f} s")
        rows[name] = found, time.monotonic() - begin
        for line in found.unexpected:
            print(f"{name}: {line}")
        for pattern in found.outlived:
            print(f"{name}: known as different, and is not: {pattern}")
        for test in found.unfinished:
            print(f"{name}: not run on both sides: {test}")
        for message, count in found.useless.most_common(5):
            print(f"{name}: {count} tests fail on both sides: {message}")
        if not found.counts:
            print(f"{name}: no test ran on both sides\n{runs[0][1]}\n{runs[1][1]}")
    print(f"\n{summary(rows, options.torch)}")
    return 0 if all(found.good for found, _ in rows.values()) else 1


if __name__ == "__main__":
    end_with_processes()
    sys.exit(main())
