"""Checks of requirements against what this interpreter has."""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import InvalidRequirement, Requirement


def is_satisfied(text: str, seen: frozenset[str] = frozenset()) -> bool:
    """Return whether a requirement is met by what is installed, its extras too.

    Args:
        text: as pip reads it.
        seen: extras that are being looked at already.
    """
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return False  # a path, or something that only pip understands
    if requirement.url is not None:
        return False
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    try:
        distribution = importlib.metadata.distribution(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    if not requirement.specifier.contains(distribution.version, prereleases=True):
        return False
    # An extra is there when what it asks for is.
    for extra in requirement.extras - seen:
        for needed in distribution.requires or ():
            wanted = Requirement(needed)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                continue  # not of this extra
            if not wanted.marker.evaluate({"extra": extra}):
                continue
            wanted.marker = None
            if not is_satisfied(str(wanted), seen | requirement.extras):
                return False
    return True
