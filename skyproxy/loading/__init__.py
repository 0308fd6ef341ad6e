"""Models and files on a worker: what a `Node` offers as `from_pretrained`, `save`, `load`, `generate`."""
