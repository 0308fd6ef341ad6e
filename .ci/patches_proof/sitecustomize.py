"""Switches replacements off in every Python process that has this folder on `PYTHONPATH`; for `.ci/patches_proof.py`.

`WITHOUT_PATCHES` says which, in JSON: those of a test that have this reason, or are at this place. Each is
undone as soon as it is made. `WITHOUT_PATCHES_LOG` is a file to which each place is appended that was switched off.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from typing import Any


class _Finder:
    """Finds `skyproxy.patching` as the others do, and makes its loading end with `_switch_off`."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "skyproxy.patching":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_switch_off(module: Any) -> None:
            execute(module)
            _switch_off(module)

        spec.loader.exec_module = execute_and_switch_off  # type: ignore[method-assign]
        return spec


def _switch_off(patching: Any) -> None:
    """Have the registry undo what is unwanted as soon as it is listed, and take it off the list."""
    note = patching._note

    def note_or_undo(patch: Any) -> None:
        note(patch)
        unwanted = json.loads(os.environ["WITHOUT_PATCHES"])
        if patch.test != unwanted["test"] or (patch.why != unwanted["why"] and patch.place != unwanted["place"]):
            return
        patching.PATCHES.remove(patch)
        if patch.undo is not None:
            patch.undo()
        elif patch.owner is None:
            _WITHOUT_UNDO[patch.place]()
        elif patch.original is patching.ABSENT:
            delattr(patch.owner, patch.name)
        else:
            setattr(patch.owner, patch.name, patch.original)
        with open(os.environ["WITHOUT_PATCHES_LOG"], "a", encoding="utf-8") as log:
            log.write(f"{patch.place}\n")

    patching._note = note_or_undo


def _destroy_kernels_of_pinning() -> None:
    sys.modules["skyproxy.tensor.torch_api.accelerator"]._keep[-1]._destroy()  # type: ignore[attr-defined]


_WITHOUT_UNDO = {"kernels of `aten::is_pinned` and `aten::_pin_memory` for the CPU": _destroy_kernels_of_pinning}
"""What the product never takes back, by its place."""

sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
