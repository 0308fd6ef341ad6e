"""The command to type where an optional dependency is missing."""

from __future__ import annotations

import shlex


def install_command(extra: str) -> str:
    """Return the pip command that installs what an extra of skyproxy stands for.

    It names the packages themselves, not `skyproxy[extra]`: skyproxy is on no package index, where a stranger could
    register the name.

    Args:
        extra: as in pyproject.toml, for example "kubernetes".
    """
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement

    try:
        texts = requires("skyproxy") or []
    except PackageNotFoundError:  # a source tree on PYTHONPATH
        texts = []
    wanted = [
        f"{requirement.name}{requirement.specifier}"
        for requirement in map(Requirement, texts)
        if requirement.marker is not None
        and requirement.marker.evaluate({"extra": extra})
        and not requirement.marker.evaluate({"extra": ""})
    ]
    if not wanted:
        return f'pip install ".[{extra}]" in a checkout of skyproxy'
    return f"pip install {shlex.join(wanted)}"
