"""Images: equal descriptions have equal names; an index is for its packages."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy.providers import Image, PipIndex

CPU = PipIndex(url="https://download.pytorch.org/whl/cpu", packages=["torch", "torch_vision"])


def test_the_order_of_packages_does_not_matter() -> None:
    assert Image(pip=["a", "b"]).content_hash() == Image(pip=["b", "a"]).content_hash()


@pytest.mark.parametrize(
    "other",
    [
        Image(pip=["a==1"]),
        Image(pip=["a"], python="3.12"),
        Image(pip=["a"], apt=["git"]),
        Image(pip=["a"], pip_indexes=[PipIndex(url="https://example.org", packages=["a"])]),
        Image(pip=["a"], base="debian"),
    ],
)
def test_what_is_installed_makes_the_name(other: Image) -> None:
    assert other.content_hash() != Image(pip=["a"]).content_hash()


def test_variables_and_files_do_not_need_another_build() -> None:
    assert Image(env={"A": "1"}, includes=["x"]).content_hash() == Image().content_hash()


@pytest.mark.parametrize(
    ("requirement", "index"),
    [
        ("torch", CPU.url),
        ("torch==2.13.0", CPU.url),
        ("Torch[extra]>=2 ; python_version > '3'", CPU.url),
        ("torch-vision~=1", CPU.url),
        ("torchmetrics", None),
        ("numpy", None),
        ("https://example.org/torch.whl", None),
    ],
)
def test_an_index_is_for_its_packages_only(requirement: str, index: str | None) -> None:
    assert Image(pip=[requirement], pip_indexes=[CPU]).index_of(requirement) == index


@pytest.mark.parametrize(
    "make",
    [
        lambda: Image(pip="torch"),
        lambda: Image(pip=["--index-url https://x"]),
        lambda: Image(python="2.7"),
        lambda: Image(apt=["a; rm -rf /"]),
        lambda: PipIndex(url="download.pytorch.org", packages=["torch"]),
        lambda: PipIndex(url="https://example.org"),
    ],
)
def test_what_cannot_work_is_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_a_missing_include_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nothing-here"):
        Image(includes=[str(tmp_path / "nothing-here")]).included_paths()


def test_an_image_can_be_pickled_and_hashed() -> None:
    image = Image(pip=["torch"], pip_indexes=[CPU], env={"A": "1"})
    assert pickle.loads(pickle.dumps(image)) == image
    assert hash(image) == hash(Image(pip=["torch"], pip_indexes=[CPU], env={"A": "1"}))
