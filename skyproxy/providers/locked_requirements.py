"""Locked requirements: files of exact versions with hashes; read, held against what is needed, and installed."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from skyproxy.errors import ConfigurationError

LOCK_FILE = "skyproxy-requirements.lock"
"""Stands for the file in the arguments of an installer."""
_HASH = re.compile(r"\s--hash[=\s]\s*sha(256|384|512):[0-9a-f]{64,128}(?=\s|$)")
_MOST_PACKED_CHARACTERS = 100_000
"""The bytes that a Pod's command can carry beside the rest: Linux takes 128 KiB as one argument."""


def lock_text(given: str | Path) -> str:
    """Return the text of a file of locked requirements.

    Args:
        given: its path; or the text itself, which has a line's end.

    Raises:
        ConfigurationError: there is no such file, or not all of it is locked.
    """
    text = str(given)
    if "\n" not in text:
        path = Path(text).expanduser()
        try:
            text = path.read_text(encoding="utf-8").strip() + "\n"
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"Image(requirements={str(given)!r}) cannot be read: {error}") from error
    locked_packages(text)
    return text


def locked_packages(text: str) -> dict[str, Requirement]:
    """Return the requirements of a file of locked ones, by the normal form of their names.

    Raises:
        ConfigurationError: one of them has no exact version or no hash, or it is none.
    """
    found: dict[str, Requirement] = {}
    for line in _logical_lines(text):
        words, hashes = _HASH.subn("", line)
        words = words.strip()
        if words.startswith("-"):
            raise _make_refusal(words, "is an option; for an index use pip_indexes=[PipIndex(...)]")
        try:
            requirement = Requirement(words)
        except InvalidRequirement:
            raise _make_refusal(words, "is not a requirement with a version and hashes") from None
        exact = [one.operator for one in requirement.specifier] in (["=="], ["==="])
        if requirement.url or not exact or "*" in str(requirement.specifier):
            raise _make_refusal(words, "has no exact version (==)")
        if not hashes:
            raise _make_refusal(words, "has no hash (--hash=sha256:...)")
        found[canonicalize_name(requirement.name)] = requirement
    if not found:
        raise ConfigurationError("Image(requirements=...): the file names no packages.")
    return found


def _logical_lines(text: str) -> list[str]:
    """Return what pip takes for one line each: without comments, continued lines joined."""
    joined = re.sub(r"\\[ \t]*\r?\n", " ", text)
    lines = (re.sub(r"(^|\s)#.*$", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def _make_refusal(words: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"Image(requirements=...): {words[:100]!r} {why}. Write the file with: uv pip compile --generate-hashes "
        "requirements.in -o requirements.lock"
    )


def locked_step(text: str, indexes: Sequence[str], needed: Sequence[str], *, uv: bool) -> list[str]:
    """Return the arguments that have an installer install such a file, and nothing that is not in it.

    Further indexes are asked for all packages, for whatever they answer has to have one of the hashes. Nothing is
    built: a build would fetch what nobody has locked. What is there is installed again, for its hashes are unknown.

    Args:
        text: of the file, which the installer finds as `LOCK_FILE`.
        indexes: further ones.
        needed: requirements that must be in the file.
        uv: whether uv installs; else pip does.

    Raises:
        ConfigurationError: something that is needed is not in the file.
    """
    lacking = unmet(text, needed)
    if lacking:
        raise ConfigurationError(
            f"Image(requirements=...): a worker in an environment of its own also needs {', '.join(lacking)}. "
            "Add that to what you lock, and lock it again."
        )
    arguments = ["--require-hashes", "--only-binary", ":all:"]
    arguments += ["--reinstall", "--index-strategy", "unsafe-best-match"] if uv else ["--ignore-installed"]
    for url in dict.fromkeys(indexes):
        arguments += ["--extra-index-url", url]
    return [*arguments, "-r", LOCK_FILE]


def unmet(text: str, needed: Sequence[str]) -> list[str]:
    """Return those requirements that the text of such a file does not meet."""
    locked = locked_packages(text)
    return [one for one in needed if not _is_met(Requirement(one), locked)]


def _is_met(wanted: Requirement, locked: dict[str, Requirement]) -> bool:
    found = locked.get(canonicalize_name(wanted.name))
    if found is None:
        return False
    (pinned,) = found.specifier
    return wanted.specifier.contains(pinned.version, prereleases=True)


def packed(text: str) -> str:
    """Return such a file as a short text for a command's argument.

    Raises:
        ConfigurationError: it is too long for that.
    """
    result = base64.b64encode(zlib.compress(text.encode(), 9)).decode("ascii")
    if len(result) > _MOST_PACKED_CHARACTERS:
        raise ConfigurationError(
            f"Image(requirements=...): the file takes {len(result)} characters in a Pod's command, which has room for "
            f"{_MOST_PACKED_CHARACTERS}. Build a container image with these packages instead."
        )
    return result
