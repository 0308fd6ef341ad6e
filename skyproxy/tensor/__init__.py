"""The face that PyTorch sees: the `sky` device, its tensors, and `torch.sky`. The only door is `activation`."""

# First: importing torch loads the device, and with it modules of this package; none of them may be half loaded then.
import torch  # noqa: F401
