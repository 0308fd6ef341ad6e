"""The face that PyTorch sees: the `sky` device, its tensors, and `torch.sky`. All private PyTorch API stays in here."""

# First: importing torch loads the device, and with it modules of this package; none of them may be half loaded then.
import torch  # noqa: F401
