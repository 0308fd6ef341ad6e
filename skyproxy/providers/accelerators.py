"""Accelerators by name, and what is known about each."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from skyproxy.errors import ConfigurationError

# name: (memory in GB, whether CUDA runs on it)
_KNOWN: dict[str, tuple[int, bool]] = {
    "A10": (24, True),
    "A10G": (24, True),
    "A40": (48, True),
    "A100": (40, True),
    "A100-80GB": (80, True),
    "B200": (180, True),
    "GH200": (96, True),
    "H100": (80, True),
    "H200": (141, True),
    "K80": (12, True),
    "L4": (24, True),
    "L40": (48, True),
    "L40S": (48, True),
    "P100": (16, True),
    "RTX3090": (24, True),
    "RTX4090": (24, True),
    "RTX5090": (32, True),
    "RTX6000": (48, True),
    "T4": (16, True),
    "V100": (16, True),
    "GB200": (186, True),
    "MI250X": (128, False),
    "MI300X": (192, False),
    "Gaudi2": (96, False),
    "Inferentia2": (32, False),
    "Trainium": (32, False),
    "Trainium2": (96, False),
    "TPUv4": (32, False),
    "TPUv5e": (16, False),
}
_BY_FOLDED_NAME = {name.casefold(): name for name in _KNOWN}


@dataclass(frozen=True)
class Accelerator:
    """A kind of accelerator and how many of it each node has.

    Attributes:
        name: as its maker calls it, such as "A100"; the case does not matter.
        count: on each node.
        metadata: what is known: "memory_gb", and "cuda" where CUDA runs on it. Filled in for known names; give it for
            others.

    Example:
        ```python
        accelerator = skyproxy.Accelerator("A100", 2)
        assert accelerator == skyproxy.Accelerator.parse("A100:2")
        ```
    """

    name: str
    count: int = 1
    metadata: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigurationError(f"{self.name}:{self.count} asks for {self.count} accelerators. Ask for 1 or more.")
        known = _BY_FOLDED_NAME.get(self.name.casefold())
        metadata = dict(self.metadata)
        if known is not None:
            memory_gb, cuda = _KNOWN[known]
            object.__setattr__(self, "name", known)
            # The value is open: some ask which CUDA an accelerator needs at least, most whether it has CUDA at all.
            metadata = {"memory_gb": memory_gb} | ({"cuda": True} if cuda else {}) | metadata
        elif not metadata:
            near = difflib.get_close_matches(self.name.upper(), _KNOWN, n=3)
            hint = f"Did you mean {', '.join(near)}? " if near else f"Known are: {', '.join(sorted(_KNOWN))}. "
            raise ConfigurationError(
                f"{self.name!r} is not an accelerator that skyproxy knows. {hint}"
                f"Describe any other: Accelerator({self.name!r}, metadata={{'cuda': True}})."
            )
        object.__setattr__(self, "metadata", MappingProxyType(metadata))

    @property
    def cuda(self) -> bool:
        """True if CUDA runs on it."""
        return bool(self.metadata.get("cuda"))

    @classmethod
    def parse(cls, given: Accelerator | str | None) -> Accelerator | None:
        """Return what a user meant: an object, "A100", "A100:8", or nothing.

        Raises:
            ConfigurationError: it is something else, or the text names nothing that is known.

        Example:
            ```python
            assert skyproxy.Accelerator.parse("A100:8") == skyproxy.Accelerator("A100", 8)
            ```
        """
        if given is None or isinstance(given, Accelerator):
            return given
        if not isinstance(given, str):
            raise ConfigurationError(f"accelerator={given!r:.80}: use 'A100', 'A100:8' or an Accelerator.")
        name, colon, count = given.partition(":")
        if colon and not count.strip().isdigit():
            raise ConfigurationError(f"accelerator={given!r}: the number goes after the colon, as in 'A100:8'.")
        return cls(name.strip(), int(count) if colon else 1)

    def __reduce__(self) -> tuple[object, ...]:
        return Accelerator, (self.name, self.count, dict(self.metadata))

    def __str__(self) -> str:
        return self.name if self.count == 1 else f"{self.name}:{self.count}"
