"""Writes docs/reference/compute-resource.md from the custom resource's definition; a test holds the page to it.

python docs/write_compute_reference.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/reference/compute-resource.md"
DEFINITION = ROOT / "manifests/base/crd.yaml"

HEAD = """\
# The Compute resource

A `Compute` of `skyproxy.dev/v1alpha1` (short name `sky`) is a worker, or several nodes that belong together. This page
is written from its definition, `manifests/base/crd.yaml`, by `docs/write_compute_reference.py`, and
`kubectl explain compute.spec` shows the same. How to use it: [Workers in a cluster](../howto/kubernetes.md).

```yaml
apiVersion: skyproxy.dev/v1alpha1
kind: Compute
metadata:
  name: train
spec:
  resources: {cpu: "4", memory: 32Gi, nvidia.com/gpu: "1"}
  volumes: [{name: cache, storage: 100Gi, path: /cache}]
  idleTimeout: 1h
```

Nothing in the spec is required. Durations are written like `30m`, `1h30m` or `2d`; see
[Durations, sizes and quantities](units.md).
"""

RULES = """\

## What else is checked

Servers from Kubernetes 1.25 on refuse what breaks one of these rules. On older ones, the operator says so in the
status, as it does with what only it can tell: reserved names and paths, names that are too long together.

"""

TAIL = """\

## Changing a Compute

| change of | means |
|---|---|
| `idleTimeout`, `maxLifetime`, `suspendAfter`, `restartPolicy`, `gateway` | nothing to the Pods |
| a volume's `storage` or `reclaimPolicy` | nothing to the Pods |
| `suspend` | the Pods go, or come back; with `snapshots`, so do their sessions |
| anything else | all Pods are made again: what they held in memory is lost |

A runtime of the installation that changes is nothing to Pods that run; those of the next start have it.

A Compute that has failed or expired, or was suspended by `suspendAfter`, starts again with any change of its spec, or
with a new value of the annotation `skyproxy.dev/wake`. The annotation
`skyproxy.dev/cert-manager-issuer: Issuer/NAME` (or `ClusterIssuer/NAME`) has cert-manager make the certificate; its
issuer must be one that publishes its authority, in `ca.crt`.

## What belongs to a Compute

| object | name | for |
|---|---|---|
| Pods | `NAME-0`, `NAME-1`, ... | the nodes |
| Service | `NAME` | clients in the cluster; it leads to the first node |
| Service | `NAME-nodes` | names for the nodes, where there are several: `NAME-1.NAME-nodes.NAMESPACE.svc` |
| Secret | `NAME-token` | the key `token`: what clients must show |
| Secret | `NAME-tls` | `tls.crt` and `tls.key`, and `ca.crt`: what clients trust |
| PersistentVolumeClaim | `NAME-VOLUME` | each volume |
| PersistentVolumeClaim | `NAME-snapshots` | snapshots of sessions, where `snapshots` asks for them |
| NetworkPolicy | `NAME` | lets clients to the workers' ports, and nodes to one another |
| HTTPRoute, BackendTLSPolicy, ConfigMap `NAME-ca` | `NAME` | the way through a gateway, where there is one |

All of them go with the Compute. Volumes whose policy is `Retain` stay, and are found by a Compute of the same name.
A Secret `NAME-token` that you make before is used as it is, and stays.
"""


def page() -> str:
    """The whole page."""
    definition = yaml.safe_load(DEFINITION.read_text(encoding="utf-8"))
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    text = HEAD
    for part, title in (("spec", "What is wanted"), ("status", "What is")):
        text += f"\n## {title}: {part}\n\n| field | kind | default | meaning |\n|---|---|---|---|\n"
        text += "".join(_row(*row) for row in _fields(schema["properties"][part]))
    text += RULES + "".join(f"- {message}\n" for message in _messages(schema))
    return text + TAIL


def _fields(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Those that have a description, and those inside of them."""
    for name, inner in schema.get("properties", {}).items():
        if "description" not in inner:
            continue
        yield prefix + name, inner
        if inner.get("type") == "array":
            yield from _fields(inner["items"], f"{prefix}{name}[].")
        else:
            yield from _fields(inner, f"{prefix}{name}.")


def _row(name: str, schema: dict[str, Any]) -> str:
    kind = schema.get("type", "quantity")
    if "enum" in schema:
        kind = ", ".join(schema["enum"])
    elif schema.get("format") == "date-time":
        kind = "time"
    elif kind == "array":
        kind = f"list of {schema['items'].get('type', 'quantity')}s"
    default = f"`{schema['default']}`".replace("True", "true").replace("False", "false") if "default" in schema else ""
    bounds = f" ({schema['minimum']} to {schema['maximum']})" if {"minimum", "maximum"} <= schema.keys() else ""
    return f"| `{name}` | {kind}{bounds} | {'' if default == '`{}`' else default} | {schema['description']} |\n"


def _messages(schema: dict[str, Any]) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield rule["message"]
    for inner in (*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else ())):
        yield from _messages(inner)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
