"""What the libraries of others need before they can be imported here: no network, and a torchvision that loads."""

from __future__ import annotations

import os
from importlib.machinery import PathFinder
from importlib.util import find_spec

import torch

# Before any of the libraries is imported: each of them reads its own when it is. Nothing here may look on a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # data loaders fork

_libraries: list[torch.library.Library] = []


def _declare_torchvision_ops() -> None:
    """Declares the two operators without which `import torchvision` fails.

    Its wheel for CUDA cannot load its compiled part beside a torch for the CPU; all of it but two fake kernels says so
    only when an operator is called. No test here calls one. Where the compiled part loads, nothing is declared.
    """
    package = find_spec("torchvision")
    if package is None or not package.submodule_search_locations or hasattr(torch.ops.torchvision, "nms"):
        return
    compiled = PathFinder.find_spec("_C", list(package.submodule_search_locations))
    if compiled is None or compiled.origin is None:
        return
    try:
        torch.ops.load_library(compiled.origin)
    except (ImportError, OSError):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)


_declare_torchvision_ops()
