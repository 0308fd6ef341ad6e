"""Models and files on a worker: what a `Node` offers as `from_pretrained`, `save`, `load`, `generate`."""

import torch  # noqa: F401  (first: its import makes the device, which needs all of this package)
