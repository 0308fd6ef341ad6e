"""Python objects as bytes, with their tensors beside them: how functions and their results travel. No I/O."""

# Before any module in here: otherwise, importing one before torch would create the device in the middle of it.
import torch  # noqa: F401
