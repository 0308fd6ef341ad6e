"""Writes the locks: every package by its version and the hashes of its files.

What is installed into images and onto instances is taken from these, so that nobody who gets at a package index can put
anything else there. torch is not in them: its build depends on the machine, and is named by its exact version.

    python .ci/lock.py            # takes newer versions only where a lock does not fit any more
    python .ci/lock.py --upgrade
    python .ci/lock.py --check    # says whether the locks still fit pyproject.toml; asks no index
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = {
    "worker": ROOT / "requirements" / "worker.lock",
    "operator": ROOT / "requirements" / "operator.lock",
    "build": ROOT / "requirements" / "build.lock",
    # In the package: instances get it with their start.
    "installer": ROOT / "skyproxy" / "providers" / "installer.lock",
}
PYTHON = "3.11"
_NOT_LOCKED = ("torch",)
# What torch needs on every machine; what its builds for CUDA need besides comes with torch, from its own index.
_OF_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def wanted() -> dict[str, list[str]]:
    """What goes into each lock, by its name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    own = project["project"]["dependencies"]
    return {
        "worker": sorted({*own, *_without(extras["server"]), *_OF_TORCH}),
        "operator": sorted({*own, *extras["operator"]}),
        "build": sorted(project["build-system"]["requires"]),
        "installer": ["boto3>=1.34", "uv>=0.5"],
    }


def _without(requirements: list[str]) -> list[str]:
    return [text for text in requirements if name_of(text) not in _NOT_LOCKED]


def name_of(requirement: str) -> str:
    """The name of what a requirement asks for, as package indexes compare names."""
    found = _NAME.match(requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def locked(text: str) -> dict[str, str]:
    """The versions in a lock, by name; each has a hash at least.

    Raises:
        ValueError: something has no exact version or no hash.
    """
    versions = {}
    for block in re.split(r"\n(?=\S)", "\n".join(line for line in text.splitlines() if not line.startswith("#"))):
        if not block.strip():
            continue
        found = re.match(r"([A-Za-z0-9._-]+)==([^\s;\\]+)", block.strip())
        if found is None or "--hash=sha256:" not in block:
            raise ValueError(f"no exact version with a hash: {block.strip()[:80]}")
        versions[name_of(found[1])] = found[2]
    return versions


def problems() -> list[str]:
    """What does not fit between pyproject.toml and the locks, a line each."""
    from packaging.requirements import Requirement

    found = []
    for name, requirements in wanted().items():
        path = LOCKS[name]
        try:
            versions = locked(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            found.append(f"{path.name}: {error}")
            continue
        for text in requirements:
            requirement = Requirement(text)
            version = versions.get(name_of(text))
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                found.append(f"{path.name} has {name_of(text)} {version or 'not at all'}, and {text} is wanted")
    return found


def write(upgrade: bool) -> None:
    """Resolve and write all locks."""
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    for name, requirements in wanted().items():
        with tempfile.NamedTemporaryFile("w", suffix=".in", encoding="utf-8") as source:
            source.write("\n".join(requirements) + "\n")
            source.flush()
            command = [uv, "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-header"]
            command += ["--no-annotate"]
            command += ["--python-version", PYTHON, "--output-file", str(LOCKS[name]), source.name]
            subprocess.run([*command, *(["--upgrade"] if upgrade else [])], check=True)


def main() -> int:
    """Write the locks, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    parser.add_argument("--check", action="store_true", help="change nothing, and ask no package index")
    arguments = parser.parse_args()
    if not arguments.check:
        write(arguments.upgrade)
    found = problems()
    print("\n".join(found) or "the locks fit")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
