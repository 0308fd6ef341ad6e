"""Kubeconfigs, read as kubectl reads them: of several files, the first that says something is right."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skyproxy.errors import ConfigurationError


@dataclass(frozen=True)
class Kubeconfig:
    """The content of kubeconfigs, put together.

    Attributes:
        files: those that are there and say something.
        contexts: the cluster, user and namespace of each context, by its name.
        current: the context that counts where nobody names one; an empty text where none does.
    """

    files: tuple[Path, ...]
    contexts: Mapping[str, Mapping[str, object]]
    current: str


def split(named: str) -> list[Path]:
    """The files that KUBECONFIG or an option names."""
    return [Path(item).expanduser().absolute() for item in named.split(os.pathsep) if item]


def is_there(file: Path) -> bool:
    """Return whether there is such a file, also one that we may not look at."""
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def read(named: str) -> Kubeconfig:
    """Read files; those that are not there are left out.

    Args:
        named: their paths, in the form of KUBECONFIG.

    Raises:
        ConfigurationError: one cannot be read, or is no kubeconfig.
    """
    files: list[Path] = []
    contexts: dict[str, Mapping[str, object]] = {}
    current = ""
    for file in split(named):
        content = _content(file)
        if content:
            files.append(file)
            current = current or str(content.get("current-context") or "")
            for name, row in _contexts(content, file):
                contexts.setdefault(name, row)
    return Kubeconfig(tuple(files), contexts, current)


def _content(file: Path) -> Mapping[str, object]:
    """Return what a file says; nothing where it is empty or not there."""
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigurationError(f"the kubeconfig {file} cannot be read: {error}") from error
    if content is not None and not isinstance(content, Mapping):
        raise _make_form_error(file, "it is no object")
    return content or {}


def _contexts(content: Mapping[str, object], file: Path) -> list[tuple[str, Mapping[str, object]]]:
    rows = content.get("contexts") or []
    if not isinstance(rows, list):
        raise _make_form_error(file, "its contexts are no list")
    found = []
    for row in rows:
        if not isinstance(row, Mapping) or not row.get("name") or not isinstance(row.get("context"), Mapping):
            raise _make_form_error(file, "a context has no name, or says nothing")
        found.append((str(row["name"]), row["context"]))
    return found


def _make_form_error(file: Path, problem: str) -> ConfigurationError:
    return ConfigurationError(
        f"the kubeconfig {file} cannot be used: {problem}. See: kubectl config view --kubeconfig {file}"
    )
