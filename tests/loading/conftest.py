"""A worker to load things on."""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec

import pytest
import torch

import skyproxy


def declare_torchvision_ops() -> None:
    """Lets `import torchvision` succeed where its compiled part does not fit this torch; transformers wants that.

    Runs here and on the worker. No test calls one of these operators.
    """
    package = find_spec("torchvision")
    if package is None or hasattr(torch.ops.torchvision, "nms"):
        return
    compiled = PathFinder.find_spec("_C", list(package.submodule_search_locations or ()))
    try:
        torch.ops.load_library(compiled.origin if compiled is not None else "")
    except (ImportError, OSError):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torch.torchvision_library = library  # type: ignore[attr-defined]  # it lasts as long as somebody holds it


declare_torchvision_ops()


@pytest.fixture
def node(sky: str) -> skyproxy.Node:
    """The worker behind "sky:0", ready for transformers."""
    node = skyproxy.list_nodes()[0]
    node.run(declare_torchvision_ops)
    return node
