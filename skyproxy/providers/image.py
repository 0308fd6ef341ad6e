"""The software of a worker: described, not built."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from skyproxy.errors import ConfigurationError
from skyproxy.providers.locked_requirements import lock_text

_PYTHON_VERSION = re.compile(r"3\.\d+(\.\d+)?")
_NAME = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)")
_APT_NAME = re.compile(r"[a-z0-9][a-z0-9+.:=~-]*", re.IGNORECASE)


@dataclass(frozen=True)
class PipIndex:
    """A package index that serves some packages and no others.

    Attributes:
        url: of the index, as pip's --index-url takes it.
        packages: the names it is for. Whatever else is installed, their dependencies included, comes from PyPI.

    Example:
        ```python
        cpu = skyproxy.PipIndex("https://wheels.example/cpu", packages=["torch"])
        image = skyproxy.Image(pip=["torch", "einops"], pip_indexes=[cpu])
        ```
    """

    url: str
    packages: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.url.startswith(("https://", "http://", "file://")):
            raise ConfigurationError(f"PipIndex(url={self.url!r}) is not the address of an index. Use https://...")
        object.__setattr__(self, "packages", _texts("packages", self.packages))
        if not self.packages:
            raise ConfigurationError(
                f"PipIndex(url={self.url!r}) names no packages. It is for those you name: packages=['torch']."
            )


@dataclass(frozen=True)
class Image:
    """The environment of a worker: equal descriptions are built once.

    Attributes:
        python: the version of the interpreter, such as "3.12"; the client's own by default, for functions that travel
            by value need the same one.
        pip: requirements, as pip reads them.
        requirements: a file of exact versions with their hashes, in place of `pip`, such as `uv pip compile
            --generate-hashes` writes; nothing else is installed. The image holds the file's text.
        pip_indexes: where some of them come from.
        apt: Debian packages; only places that build a machine or a container can install them.
        env: environment variables.
        includes: files and folders of this machine that functions import from, relative to the working directory.
        base: the container image to begin with, for places that run containers.

    Example:
        ```python
        image = skyproxy.Image(pip=["transformers"], python="3.12")
        ```
    """

    python: str | None = None
    pip: Sequence[str] = ()
    pip_indexes: Sequence[PipIndex] = ()
    apt: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    includes: Sequence[str] = ()
    base: str | None = None
    requirements: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("pip", "apt", "includes"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        indexes = (self.pip_indexes,) if isinstance(self.pip_indexes, PipIndex) else tuple(self.pip_indexes)
        object.__setattr__(self, "pip_indexes", indexes)
        object.__setattr__(self, "env", MappingProxyType({str(k): str(v) for k, v in self.env.items()}))
        if self.python is not None and not _PYTHON_VERSION.fullmatch(self.python):
            raise ConfigurationError(f"Image(python={self.python!r}) is not a Python version. Use one such as '3.12'.")
        for name in self.apt:
            if not _APT_NAME.fullmatch(name):
                raise ConfigurationError(f"Image(apt=[{name!r}]) is not the name of a Debian package.")
        for requirement in self.pip:
            if requirement.startswith("-"):
                raise ConfigurationError(
                    f"Image(pip=[{requirement!r}]) is an option, not a requirement. "
                    "For an index use pip_indexes=[PipIndex(...)]."
                )
        if self.requirements is not None:
            if self.pip:
                raise ConfigurationError(
                    f"Image(pip={list(self.pip)}, requirements=...): what is installed by its hashes is in the file "
                    "only. Lock these requirements, too, and leave out pip."
                )
            object.__setattr__(self, "requirements", lock_text(self.requirements))

    def replace(self, **changes: Any) -> Image:
        """A copy with other values in some places; this one stays as it is.

        Example:
            ```python
            image = skyproxy.Image(pip=["torch"])
            other = image.replace(pip=[*image.pip, "einops"])
            ```
        """
        return replace(self, **changes)

    def index_of(self, requirement: str) -> str | None:
        """The url of the index that a requirement comes from, the last that names it; None is the default one."""
        name = requirement_name(requirement)
        chosen = None
        for index in self.pip_indexes:
            if name in {requirement_name(package) for package in index.packages}:
                chosen = index.url
        return chosen

    def content_hash(self, *more: str) -> str:
        """A name for what would be built, 16 characters; equal for equal environments, whatever the order of packages.

        The files of `includes` are not part of it: they are copied whenever a worker starts. Variables are not either.

        Args:
            more: whatever else tells two builds apart, such as the platform.
        """
        told = [
            self.python,
            sorted(self.pip),
            sorted([index.url, sorted(index.packages)] for index in self.pip_indexes),
            sorted(self.apt),
            self.base,
            *([self.requirements] if self.requirements is not None else []),
            list(more),
        ]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]

    def included_paths(self) -> list[Path]:
        """The files and folders of `includes`, absolute.

        Raises:
            ConfigurationError: one of them does not exist.
        """
        found = []
        for text in self.includes:
            path = Path(text).expanduser().resolve()
            if not path.exists():
                raise ConfigurationError(f"Image(includes=[{text!r}]): there is no {path}.")
            found.append(path)
        return found

    def __reduce__(self) -> tuple[object, ...]:
        values = (self.python, self.pip, self.pip_indexes, self.apt, dict(self.env), self.includes, self.base)
        return Image, (*values, self.requirements)


def requirement_name(requirement: str) -> str:
    """The normal form of the package's name in a requirement; the text itself where it has none (a URL, a path)."""
    found = _NAME.match(requirement)
    if found is None or "://" in requirement.split("@")[0]:
        return requirement
    return re.sub(r"[-_.]+", "-", found[1]).lower()


def _texts(name: str, given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise ConfigurationError(f"{name}={given!r} is a string where a list is expected. Write {name}=[{given!r}].")
    return tuple(given)
