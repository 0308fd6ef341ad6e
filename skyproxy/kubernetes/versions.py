"""The versions of Kubernetes that skyproxy works on: pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from skyproxy.errors import ClusterError

MINIMUM = (1, 20)
"""The oldest version on which skyproxy was tried; server-side apply and what custom resources need came before."""


def check_version(answer: Mapping[str, object]) -> str:
    """Check what an API server says at /version.

    Returns:
        The version as the server writes it.

    Raises:
        ClusterError: it is older than MINIMUM. One that cannot be read is taken for a new one.
    """
    text = str(answer.get("gitVersion") or "unknown")
    # Some clouds write the minor version as "27+".
    parts = [re.match(r"\d+", str(answer.get(key, ""))) for key in ("major", "minor")]
    if parts[0] is not None and parts[1] is not None and (int(parts[0][0]), int(parts[1][0])) < MINIMUM:
        oldest = ".".join(map(str, MINIMUM))
        raise ClusterError(
            f"this cluster runs Kubernetes {text}, and skyproxy needs {oldest} or newer. Upgrade the cluster, or name "
            "another with --context"
        )
    return text
