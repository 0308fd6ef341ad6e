"""Many ops as one: captured graphs, and graphs of PyTorch's compiler."""
