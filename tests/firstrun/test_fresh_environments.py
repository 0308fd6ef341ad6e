"""The documented first steps work from the built wheel in a fresh environment."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = sorted(
    tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
)
# What users install; the others are environments of the tests, and `make environment` installs them all.
USERS_EXTRAS = ("aws", "kubernetes", "operator", "server", "torch")

pytestmark = [pytest.mark.firstrun, pytest.mark.timeout(600)]

Environment = Callable[..., Path]


HOWTO = [
    *(f"docs/howto/{name}.md" for name in ("debugging", "graphs-and-compile", "out-of-memory", "pools", "profile")),
    *(f"docs/howto/{name}.md" for name in ("send-files", "skyproxy-up", "slow-links")),
    *(f"docs/reference/{name}.md" for name in ("errors", "torch-sky")),
]
"""Pages that need no more than torch; tests/integrations and tests/notebook run what others show."""


def blocks(page: str) -> str:
    """All Python blocks of a page, as one program."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


def run(python: Path, home: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), *arguments], env=home, cwd=home["HOME"], capture_output=True, text=True, timeout=300
    )


def test_every_extra_of_a_user_exists() -> None:
    assert set(USERS_EXTRAS) <= set(EXTRAS)


@pytest.mark.parametrize("extra", ["torch", "server"])
@pytest.mark.parametrize("page", ["README.md", "docs/tutorial/first-tensor.md"])
def test_a_page_runs_as_written(environment: Environment, home: dict[str, str], page: str, extra: str) -> None:
    program = blocks(page)
    assert "import skyproxy" in program
    done = run(environment(extra), home, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("page", HOWTO)
def test_a_page_of_how_to_runs_as_written(environment: Environment, home: dict[str, str], page: str) -> None:
    program = blocks(page)
    assert "import skyproxy" in program
    done = run(environment("torch"), home, "-c", program)
    assert done.returncode == 0, done.stderr


def test_a_torch_of_ones_own_is_enough(environment: Environment, home: dict[str, str]) -> None:
    done = run(environment(packages=("torch",)), home, "-c", blocks("README.md"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("extra", [None, *USERS_EXTRAS])
def test_the_command_line_works_with_any_extra(
    environment: Environment, home: dict[str, str], extra: str | None
) -> None:
    python = environment(*([extra] if extra else []))
    doctor = run(python, home, "-m", "skyproxy.cli.main", "doctor")
    assert "Traceback" not in doctor.stderr, doctor.stderr
    # Without torch nothing can run here, and doctor says so; with it, nothing is broken.
    assert doctor.returncode == (0 if extra in ("torch", "server") else 1), doctor.stdout + doctor.stderr
    listed = run(python, home, "-m", "skyproxy.cli.main", "list")
    assert listed.returncode == 0, listed.stderr
