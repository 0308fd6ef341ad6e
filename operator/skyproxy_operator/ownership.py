"""Ownership of objects that have the names of a Compute's children, and what is said of foreign ones. Pure."""

from __future__ import annotations

from typing import Any

from skyproxy_operator.causes import Cause
from skyproxy_operator.names import COMPUTE_LABEL, ISSUER
from skyproxy_operator.options import Options
from skyproxy_operator.pod_policy import matches

Object = dict[str, Any]

_CERTIFICATE_NAME = "cert-manager.io/certificate-name"
"""On a Secret that cert-manager makes: the Certificate that it belongs to."""


def _owners(item: Object) -> list[Object]:
    owners: list[Object] = item["metadata"].get("ownerReferences") or []
    return owners


def is_owned(compute: Object, item: Object) -> bool:
    """Return whether an object goes when this Compute goes."""
    return any(owner["uid"] == compute["metadata"]["uid"] for owner in _owners(item))


def is_other_compute(compute: Object, item: Object) -> bool:
    """Return whether an object belongs to a Compute that had the same name and is gone."""
    kinds = {owner["kind"] for owner in _owners(item)}
    return "Compute" in kinds and not is_owned(compute, item)


def is_ours(compute: Object, item: Object) -> bool:
    """Return whether we made an object: for this Compute, or as a claim that outlives it."""
    labelled = (item["metadata"].get("labels") or {}).get(COMPUTE_LABEL) == compute["metadata"]["name"]
    return is_owned(compute, item) or (labelled and not _owners(item))


def may_use(compute: Object, secret: Object, options: Options) -> bool:
    """Return whether the workers of a Compute may have a Secret that has the name of one of theirs.

    Its name is chosen by whoever makes the Compute, and its content shown to what they run. What is not ours is theirs
    where the installation gives workers such Secrets, or where whoever may change it says so by our label.
    """
    metadata = secret["metadata"]
    ordered = (metadata.get("annotations") or {}).get(_CERTIFICATE_NAME) == compute["metadata"]["name"]
    return (
        is_ours(compute, secret)
        or matches(metadata["name"], options.secrets)
        or (ordered and issuer_of(compute) is not None)
    )


def issuer_of(compute: Object) -> str | None:
    """Return the issuer of cert-manager that a Compute names; None for a certificate of ours."""
    issuer: str | None = (compute["metadata"].get("annotations") or {}).get(ISSUER)
    return issuer


def leftover(what: str) -> Cause:
    """The cause where a child of an earlier Compute is still there."""
    return Cause("CleaningUp", f"{what} of an earlier Compute of this name must be deleted first.")


def name_taken(what: str) -> Cause:
    """The cause where somebody else's object has the name of one of ours."""
    text = f"There is a {what} that skyproxy does not manage. Delete it, or use another name."
    return Cause("NameTaken", text, actionable=True)


def foreign(compute: Object, name: str) -> Cause:
    """The cause where a Secret is not for workers."""
    label = f"{COMPUTE_LABEL}={compute['metadata']['name']}"
    text = f"There is a Secret {name} that this installation does not give to workers. Label it {label}, or delete it."
    return Cause("SecretTaken", text, actionable=True)
