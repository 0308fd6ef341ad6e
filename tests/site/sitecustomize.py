"""For processes that tests start with this folder on their path: a torchvision that loads.

Its wheel for CUDA cannot load its compiled part beside a torch for the CPU, and then `import torchvision` fails for
want of two operators, as does much of transformers. They are declared here; nothing in the tests calls them.
"""

from types import ModuleType

from skyproxy.import_watcher import when_imported

_libraries = []


def _declare(extension: ModuleType) -> None:
    if not extension._has_ops():
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)


# The first of torchvision's modules to be loaded, and the one that notices.
when_imported("torchvision.extension", _declare)
