"""What runs in an environment of its own. Its module is imported there by name, so it imports nothing of the tests'."""

from __future__ import annotations

from typing import Any

import skyproxy as sky


@sky.compute
def describe(word: str) -> dict[str, Any]:
    import importlib.util
    import sys

    import inflection
    import torch

    import skyproxy

    return {
        "word": inflection.underscore(word),
        "prefix": sys.prefix,
        "python": sys.executable,
        "extra": inflection.__file__,
        "torch": (torch.__version__, torch.__file__),
        "skyproxy": skyproxy.__file__,
        "pytest": importlib.util.find_spec("pytest") is not None,
        "rank": skyproxy.instance_info().rank,
        "sum": torch.arange(4.0).sum(),
    }
