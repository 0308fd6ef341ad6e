"""The face that PyTorch sees: the `sky` device, its tensors, and `torch.sky`. All private PyTorch API stays in here."""
