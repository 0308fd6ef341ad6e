"""The versions of PyTorch that the device was tried on, for checks, messages and warnings; knows no torch."""

from __future__ import annotations

import platform
from importlib import metadata

OLDEST = (2, 11)
NEWEST = (2, 15)
TRIED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version: (2, 15) for "2.15.0a0+git1234".

    Raises:
        ValueError: if it does not begin with two numbers.
    """
    first, second = version.split("+")[0].split(".")[:2]
    return int(first), int(second)


def caution(version: str) -> str | None:
    """Return what there is to say about a torch that was never tried; None for one that was.

    Args:
        version: as in `torch.__version__`.
    """
    try:
        if OLDEST <= minor(version) <= NEWEST:
            return None
    except ValueError:
        pass
    return (
        f"skyproxy was tested with torch {TRIED}, this is {version}. It relies on parts of torch that may change; if "
        f'something fails, try: pip install "torch=={NEWEST[0]}.{NEWEST[1]}.*"'
    )


def software(torch_version: str) -> dict[str, str]:
    """Return what this side of a session runs on, as client and worker tell it to one another.

    Args:
        torch_version: as in `torch.__version__`.
    """
    try:
        own = metadata.version("skyproxy")
    except metadata.PackageNotFoundError:
        own = "unknown"
    return {"skyproxy": own, "python": platform.python_version(), "torch": torch_version}
