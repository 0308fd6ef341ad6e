"""Causes of what the API server refuses, in words that say what to do. Pure."""

from __future__ import annotations

import re

from skyproxy_operator.causes import Cause, namespace_cause

# As the admission plugins ResourceQuota and LimitRanger write it.
_QUOTA = re.compile(r"exceeded quota: (\S+), requested: (\S+), used: (\S+), limited: (\S+)")
_QUOTA_NEEDS = re.compile(r"failed quota: (\S+): must specify (.+)")
_LIMIT_RANGE = re.compile(
    r"\[?((?:maximum|minimum) \S+ usage per (?:Container|Pod|PersistentVolumeClaim) is .+"
    r"|\S+ max limit to request ratio per (?:Container|Pod) is .+)"
)


def refusal_cause(what: str, status: int, message: str) -> Cause:
    """Return why the API server refused what we asked for.

    Args:
        what: the object, such as "Pod dev-0".
        status: the HTTP status.
        message: the server's own words.
    """
    if status == 403 and "because it is being terminated" in message:
        return namespace_cause()
    if status == 403 and (cause := _quota_cause(what, message)):
        return cause
    if status == 403 and "violates PodSecurity" in message:
        return Cause("PodSecurityViolation", f"{what} is not allowed in its namespace: {message}", actionable=True)
    if status == 403:
        return Cause("Forbidden", f"{what} was refused: {message}", actionable=True)
    if status in (400, 422):
        return Cause("Invalid", f"{what} is not valid: {message}", actionable=True)
    return Cause("ApiError", f"{what} could not be applied (HTTP {status}): {message}")


def _quota_cause(what: str, message: str) -> Cause | None:
    """Return which quota or limit of its namespace an object does not fit; None for another refusal."""
    if found := _QUOTA.search(message):
        name, *lists = found.groups()
        asked, used, hard = map(_amounts, lists)
        rows = [
            f"{key}: {value} asked for, {used.get(key, '?')} of {hard.get(key, '?')} in use"
            for key, value in asked.items()
        ]
        return Cause(
            "QuotaExceeded", f"{what} exceeds the ResourceQuota {name} of its namespace: {'; '.join(rows)}.", True
        )
    if found := _QUOTA_NEEDS.search(message):
        return Cause(
            "QuotaNeedsResources",
            f"{what} must say what it needs, for the ResourceQuota {found[1]} of its namespace counts {found[2]}. Set "
            "it in spec.resources.",
            actionable=True,
        )
    if found := _LIMIT_RANGE.search(message):
        text = found[1].rstrip("].")
        return Cause(
            "LimitRangeViolated", f"{what} does not fit a LimitRange of its namespace: {text}.", actionable=True
        )
    if "exceeded quota" in message:
        return Cause("QuotaExceeded", f"{what} exceeds a quota of its namespace: {message}", actionable=True)
    return None


def _amounts(text: str) -> dict[str, str]:
    """Return the quantities by resource name, of such a text as `cpu=1,pods=2`."""
    return dict(row.partition("=")[::2] for row in text.split(","))
