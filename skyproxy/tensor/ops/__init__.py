"""Ops that are not simply recorded, one file a family: `@implements` and the registered kernels side by side."""
