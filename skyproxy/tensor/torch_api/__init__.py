"""PyTorch's own interfaces for remote tensors: everything that replaces or extends a behaviour of PyTorch."""
