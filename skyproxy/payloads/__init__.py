"""Python objects as bytes, with their tensors beside them: how functions and their results travel. No I/O."""

# Before any module in here: whoever imports one before torch would otherwise have the device made in the midst of it.
import torch  # noqa: F401
