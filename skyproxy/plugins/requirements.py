"""Requirements that plugins add to an image."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from skyproxy.errors import ConfigurationError

I = TypeVar("I")  # noqa: E741 - an Image; its class is not imported here, for workers load this module too

_CONSTRAINT = re.compile(r"\s*(===|==|~=|!=|<=|>=|<|>)\s*[\w.]")
_VERSION = re.compile(r"\s*v?\d[\w.!+*-]*\s*")


def requirement(name: str, version: str) -> str:
    """A requirement as pip reads it.

    Args:
        name: of the package, with its extras.
        version: "latest", a bare version such as "2.3.0", or a constraint of PEP 440 such as ">=2.3,<3".

    Raises:
        ConfigurationError: the version is none of these.
    """
    if version == "latest":
        return name
    if _CONSTRAINT.match(version):
        return name + version.strip()
    if _VERSION.fullmatch(version):
        return f"{name}=={version.strip()}"
    raise ConfigurationError(
        f'{version!r} is not a version of {name}. Use "latest", a version such as "2.3.0", or a constraint: ">=2.3".'
    )


def with_requirements(image: I, packages: Sequence[str], indexes: Sequence[object] = ()) -> I:
    """A copy of the image with more packages and indexes behind those it has; equal ones are not repeated.

    Raises:
        ConfigurationError: the image has locked requirements, and these are not among them.
    """
    have: Any = image
    if have.requirements is not None:
        from skyproxy.providers.locked_requirements import unmet

        lacking = unmet(have.requirements, packages)
        if lacking:
            raise ConfigurationError(
                f"Image(requirements=...): a plugin needs {', '.join(lacking)}. Add that to what you lock, and lock it "
                "again."
            )
        packages = ()
    return replace(  # type: ignore[no-any-return]
        have,
        pip=(*have.pip, *(package for package in packages if package not in have.pip)),
        pip_indexes=(*have.pip_indexes, *(index for index in indexes if index not in have.pip_indexes)),
    )


def has_cuda(cluster: Any) -> bool:
    """Return whether the nodes that are to be launched have an accelerator that CUDA runs on."""
    accelerator = cluster.spec.accelerator
    return bool(accelerator is not None and accelerator.metadata.get("cuda"))
