"""The versions of the protocol that this release speaks, and the way in which two sides agree on one."""

from __future__ import annotations

from collections.abc import Iterable

from skyproxy.errors import VersionMismatchError

PROTOCOL_VERSION = 1
SUPPORTED: tuple[int, ...] = (PROTOCOL_VERSION,)
"""The versions that we offer and accept, the preferred one first."""


def choose_version(client_versions: Iterable[int]) -> int:
    """The newest version that both sides speak.

    Args:
        client_versions: what the client's `Hello` offers.

    Raises:
        VersionMismatchError: there is none; names what each side speaks.
    """
    offered = set(client_versions)
    common = offered.intersection(SUPPORTED)
    if not common:
        theirs = ", ".join(map(str, sorted(offered))) or "none"
        ours = ", ".join(map(str, sorted(SUPPORTED)))
        raise VersionMismatchError(
            f"The client speaks protocol versions {theirs}, the worker {ours}. "
            "Install the same release of skyproxy on both sides."
        )
    return max(common)
