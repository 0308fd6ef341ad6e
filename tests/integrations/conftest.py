"""What the libraries of others need before they can be imported here: no network, and no torchvision that fails."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

# Before any of the libraries is imported: each of them reads its own when it is. Nothing here may look on a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # data loaders fork

if find_spec("torchvision") is not None:
    try:
        import torchvision  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise pytest.UsageError(
            "The torchvision of this environment was built for another torch, and transformers cannot be imported "
            "beside it. Run `make environment`, which keeps it off the path, or: pip uninstall timm torchvision"
        ) from error


@pytest.fixture
def far(sky1: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device so far away that `generate` never waits before it has 64 tokens without news."""
    from skyproxy.session.session import Session

    far_away = property(lambda self: 1e6, lambda self, seconds: None)
    monkeypatch.setattr(Session, "round_trip_seconds", far_away, raising=False)
    return sky1
