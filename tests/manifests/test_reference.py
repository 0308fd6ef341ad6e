"""The reference page says what the definition says."""

from __future__ import annotations

import importlib.util

from tests.manifests.custom_resource import SCHEMA
from tests.manifests.kustomization import ROOT

_SPEC = importlib.util.spec_from_file_location("write_compute_reference", ROOT / "docs/write_compute_reference.py")
assert _SPEC is not None
assert _SPEC.loader is not None
reference = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(reference)


def test_the_page_is_up_to_date() -> None:
    written = reference.PAGE.read_text(encoding="utf-8")
    assert written == reference.page(), "run: python docs/write_compute_reference.py"


def test_every_field_at_the_top_is_explained() -> None:
    for part in ("spec", "status"):
        for name, schema in SCHEMA["properties"][part]["properties"].items():
            assert schema.get("description"), f"{part}.{name}"
            assert f"| `{name}` |" in reference.page()
