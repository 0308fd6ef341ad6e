"""Requirements that plugins add to an image."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from skyproxy.errors import ConfigurationError

if TYPE_CHECKING:
    from skyproxy.pools.specification import PlannedPool
    from skyproxy.providers.image import Image, PipIndex


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


def with_requirements(image: Image, packages: Sequence[str], indexes: Sequence[PipIndex] = ()) -> Image:
    """A copy of the image with more packages and indexes behind those it has; equal ones are not repeated.

    Raises:
        ConfigurationError: the image has locked requirements, and these are not among them.
    """
    if image.requirements is not None:
        assert isinstance(image.requirements, str), "an Image reads its file when it is made"
        from skyproxy.providers.locked_requirements import unmet

        lacking = unmet(image.requirements, packages)
        if lacking:
            raise ConfigurationError(
                f"Image(requirements=...): a plugin needs {', '.join(lacking)}. Add that to what you lock, and lock it "
                "again."
            )
        packages = ()
    return replace(
        image,
        pip=(*image.pip, *(package for package in packages if package not in image.pip)),
        pip_indexes=(*image.pip_indexes, *(index for index in indexes if index not in image.pip_indexes)),
    )


def has_cuda(cluster: PlannedPool) -> bool:
    """Return whether the nodes that are to be launched have an accelerator that CUDA runs on."""
    accelerator = cluster.spec.accelerator
    return bool(accelerator is not None and accelerator.metadata.get("cuda"))
