"""timm and torchvision, which `make environment` keeps in a folder that no other program sees."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import torch

_FOLDER = Path(sys.prefix) / "vision"
_libraries: list[torch.library.Library] = []


def import_timm() -> None:
    """Import timm from the environment or from its folder `vision`.

    Raises:
        ImportError: if it is in neither.
    """
    if find_spec("timm") is not None:
        import timm

        return
    sys.path.append(str(_FOLDER))
    try:
        _declare_torchvision_ops()
        import timm  # noqa: F401
    finally:
        sys.path.remove(str(_FOLDER))


def _declare_torchvision_ops() -> None:
    """Declare the two operators without which `import torchvision` fails, where its compiled part does not load.

    PyPI's wheel of torchvision is built for CUDA, and its compiled part does not load beside a torch for the CPU. All
    of the package but two fake kernels says so only when one of its operators is called, and timm's models call none.
    """
    package = find_spec("torchvision")
    if package is None or not package.submodule_search_locations or hasattr(torch.ops.torchvision, "nms"):
        return
    compiled = PathFinder.find_spec("_C", list(package.submodule_search_locations))
    try:
        torch.ops.load_library(compiled.origin if compiled is not None else "")
    except (ImportError, OSError):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)
