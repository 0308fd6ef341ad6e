"""What is private in PyTorch is looked up in one place, and what is missing is told in one way."""

from __future__ import annotations

import pytest
import torch

from skyproxy.errors import ConfigurationError
from skyproxy.tensor.core import torch_private


def test_a_missing_name_is_told_with_the_versions_that_have_it() -> None:
    with pytest.raises(ConfigurationError, match=r"lacks a part .*_not_there.*was tested with torch"):
        with torch_private.explain_missing_names():
            torch._C._not_there  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="_gone"), torch_private.explain_missing_names():
        from torch import _gone  # type: ignore[attr-defined]  # noqa: F401


def test_every_name_that_is_offered_exists() -> None:
    assert [name for name in torch_private.__all__ if not hasattr(torch_private, name)] == []


def test_a_level_of_forward_mode_is_seen() -> None:
    assert not torch_private.is_forward_ad_active()
    with torch.autograd.forward_ad.dual_level():
        assert torch_private.is_forward_ad_active()
    assert not torch_private.is_forward_ad_active()
