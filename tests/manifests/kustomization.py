"""Reads a kustomization as kubectl does, as far as ours go: resources, and patches by file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from skyproxy_operator.strategic_merge import merged

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "manifests"
INSTALLATIONS = ("base", "overlays/e2e", "overlays/openshift")

Object = dict[str, Any]


def documents(path: Path) -> list[Object]:
    """The objects of a file."""
    return [item for item in yaml.safe_load_all(path.read_text(encoding="utf-8")) if item]


def rendered(folder: Path) -> list[Object]:
    """What `kubectl kustomize` makes of a folder."""
    (kustomization,) = documents(folder / "kustomization.yaml")
    unknown = kustomization.keys() - {"apiVersion", "kind", "resources", "patches"}
    assert not unknown, f"{folder}: this reader does not know {unknown}"
    objects = [item for name in kustomization["resources"] for item in _resource(folder / name)]
    for entry in kustomization.get("patches", ()):
        assert set(entry) == {"path"}, "a patch names its target by itself"
        for patch in documents(folder / entry["path"]):
            (place,) = [index for index, item in enumerate(objects) if identity(item) == identity(patch)]
            objects[place] = merged(objects[place], patch)
    return objects


def _resource(path: Path) -> list[Object]:
    return rendered(path) if path.is_dir() else documents(path)


def identity(item: Object) -> tuple[str, str, str, str]:
    """What tells an object from every other one."""
    metadata = item["metadata"]
    return item["apiVersion"], item["kind"], metadata.get("namespace", ""), metadata["name"]


def of_kind(objects: list[Object], kind: str) -> Iterator[Object]:
    """Those of a kind."""
    return (item for item in objects if item["kind"] == kind)
