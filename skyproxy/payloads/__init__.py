"""Python objects as bytes, with their tensors beside them: how functions and their results travel. No I/O."""
