"""The environment variables that skyproxy knows, and those that look like them and are none. No I/O, no torch."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

from skyproxy.settings import Settings

PREFIX = "SKYPROXY_"
OTHER_VARIABLES = {
    "SKYPROXY_URL": "the address of the worker that `sky:0` is",
    "SKYPROXY_TOKEN": "the token for it; of a worker, the one that clients must present",
    "SKYPROXY_CERTIFICATE": "the certificate to trust: the path of a PEM file, PEM text, or a fingerprint",
    "SKYPROXY_SERVER_NAME": "the name in that certificate, where it is not the host's",
    "SKYPROXY_SNAPSHOTS": "the folder in which a worker keeps snapshots of sessions",
    "SKYPROXY_JOBS": "the folder in which a worker keeps jobs: their records, logs, results and checkpoints",
    "SKYPROXY_CONTEXT": "the saved context that `sky:0` is; empty: none",
    "SKYPROXY_PROVIDER": "the provider of `skyproxy up` and of pools that name none",
    "SKYPROXY_CACHE": "the folder for environments that are made once and found again",
    "SKYPROXY_CONTAINER_ENGINE": "the program that runs containers, such as `podman`",
    "SKYPROXY_TEST_DEVICE": "the device for the test suites of Hugging Face",
}
"""The variables of users that are no settings, and what they say."""
_MARKS = frozenset(
    {
        "SKYPROXY_WORKER_MARK",
        "SKYPROXY_SCRIPT_MARK",
        "SKYPROXY_SCRIPT_DEBUG",
        "SKYPROXY_JOB_MARK",
        "SKYPROXY_JOB",
        "SKYPROXY_JOB_FOLDER",
        "SKYPROXY_RESTART_COUNT",
        "SKYPROXY_CHECKPOINT_DIR",
    }
)
"""Variables that skyproxy sets itself: to find again the processes that it started, and to tell jobs who they are."""
_COMPONENTS = ("SKYPROXY_OPERATOR_", "SKYPROXY_E2E_", "SKYPROXY_TEST_", "SKYPROXY_SWEEP_")
"""Beginnings of the variables of the operator, and of the project's own tests."""
# Kubernetes sets these in every Pod beside a service that is called skyproxy or skyproxy-something.
_OF_A_SERVICE = re.compile(
    r"SKYPROXY_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
_RARE = frozenset({"SKYPROXY_TEST_DEVICE"})
"""Variables that nobody means who wrote another name."""
_SHORTENED = 3
"""From this length on, the beginning of a name is taken for a shortened one."""
_CERTAIN, _LIKELY = 0.86, 0.6
"""Likeness that a name needs to a known one: with another beginning than ours, and with ours."""


def known_variables() -> frozenset[str]:
    """Return the names of all variables that client and worker read."""
    settings = (PREFIX + field.name.upper() for field in dataclasses.fields(Settings))
    return frozenset({*settings, *OTHER_VARIABLES, *_MARKS})


def misspelt_variables(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Return the variables that are meant for skyproxy by their names, and that nothing reads.

    Args:
        environ: the environment; None for that of this process.

    Returns:
        For each of them, sorted, the known name that is nearest to it; None where none is near. Values are not looked
        at but to tell what Kubernetes sets: a misspelt name may stand before a token.
    """
    environ = os.environ if environ is None else environ
    suspects = sorted(name for name in environ if "SKY" in name.upper() or "PROXY" in name.upper())
    known = known_variables()
    found: dict[str, str | None] = {}
    for name in suspects:
        if name in known or name.startswith(_COMPONENTS) or _is_of_a_service(name, environ[name]):
            continue
        near = _nearest(name)
        if near is not None or name.startswith(PREFIX):
            found[name] = near
    return found


def _nearest(name: str) -> str | None:
    """Return the known name that a misspelt one stands for; None where none is near."""
    from difflib import get_close_matches  # late: hardly any program needs it

    names = sorted(known_variables() - _MARKS - _RARE)
    if not name.startswith(PREFIX):
        return next(iter(get_close_matches(name.upper(), names, n=1, cutoff=_CERTAIN)), None)
    # Without the common prefix, which would make all names similar.
    tail, tails = name[len(PREFIX) :], {known[len(PREFIX) :]: known for known in names}
    near = get_close_matches(tail.upper(), tails, n=1, cutoff=_LIKELY)
    near += [known for known in tails if len(tail) >= _SHORTENED and known.startswith(tail.upper())]
    return tails[near[0]] if near else None


def _is_of_a_service(name: str, value: str) -> bool:
    return bool(_OF_A_SERVICE.fullmatch(name)) and (name != "SKYPROXY_PORT" or "://" in value)


def remedy(near: str | None) -> str:
    """Return what to do about a misspelt variable whose nearest known name this is."""
    return f"Did you mean {near}?" if near else "See docs/reference/settings.md for those that there are."
