"""What is said of versions of PyTorch that were tried, and of others."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from skyproxy import torch_versions
from skyproxy.cli import doctor
from skyproxy.kubernetes.address import ClusterAddress

VERSION_OF_TORCH = """
import warnings
import torch
torch.__version__ = {version!r}
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import skyproxy
    import skyproxy.tensor.activation
    skyproxy.tensor.activation.activate()
    print((torch.arange(4, device="sky:0") + 1).sum().item())
print([str(warning.message) for warning in seen if "was tested with torch" in str(warning.message)])
"""


def output_with_torch(version: str) -> list[str]:
    """Return the lines that a program prints whose torch says it is of this version."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SKYPROXY_")}
    done = subprocess.run(
        [sys.executable, "-c", VERSION_OF_TORCH.format(version=version)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=variables,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.0+cu132", "2.15.1", "2.12.0a0+git12"])
def test_a_tried_version_needs_no_caution(version: str) -> None:
    assert torch_versions.caution(version) is None


@pytest.mark.parametrize("version", ["2.16.0", "3.0.0+cpu", "2.10.1", "unknown"])
def test_another_version_is_named_beside_the_tried_ones(version: str) -> None:
    text = torch_versions.caution(version)
    assert text is not None
    assert version in text
    assert torch_versions.TRIED in text


def test_a_torch_that_was_never_tried_warns_once_and_works() -> None:
    total, warned = output_with_torch("2.99.0")
    assert total == "10"
    assert warned.count("this is 2.99.0") == 1


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("2.11.0", "ok"),
        ("2.15.0+cu132", "ok"),
        ("2.16.0", "warning"),
        ("2.16.0.dev20261101", "warning"),
        ("2.10.1", "warning"),
    ],
)
def test_doctor_says_whether_this_torch_was_tried(version: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: {"torch": version}[name])
    found = next(finding for finding in doctor.examine(ClusterAddress()) if finding.check == "torch")
    assert found.state == state
    assert version in found.message
    assert found.hint == (torch_versions.caution(version) or "")


def test_the_extras_refuse_no_newer_torch() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in ("torch", "server"):
        (line,) = [line for line in project["optional-dependencies"][extra] if line.startswith("torch")]
        specifiers = SpecifierSet(line.removeprefix("torch"))
        assert all(version in specifiers for version in ("2.11.0", "2.15.0", "2.16.0", "3.0.0"))
