"""The words of the operator about a Compute, as Kubernetes' events. Pure."""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass
from typing import Any

from skyproxy_operator.names import API_VERSION, FIELD_MANAGER, KIND
from skyproxy_operator.status import timestamp

Object = dict[str, Any]


@dataclass(frozen=True)
class Announcement:
    """An event on the Compute."""

    kind: str
    reason: str
    message: str


def event_of(compute: Object, announcement: Announcement, now: datetime.datetime) -> Object:
    """An event on a Compute. The same one twice in a second has the same name, and so is one."""
    metadata, stamp = compute["metadata"], timestamp(now)
    text = f"{metadata['uid']} {announcement.reason} {announcement.message} {stamp}"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{metadata['name']}.{hashlib.sha256(text.encode()).hexdigest()[:16]}",
            "namespace": metadata["namespace"],
        },
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
            "resourceVersion": metadata.get("resourceVersion", ""),
        },
        "type": announcement.kind,
        "reason": announcement.reason,
        "message": announcement.message[:1000],
        "source": {"component": FIELD_MANAGER},
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }
