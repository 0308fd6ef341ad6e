"""Values of a session that were saved, brought back in another program: `skyproxy.restore("experiment")`."""

from __future__ import annotations

import os

from skyproxy import nodes
from skyproxy.node import Node


def restore(location: str | os.PathLike[str], node: Node | None = None, *, trust: bool = False) -> Node:
    """Bring back what `node.save` has written: `node.get(name)` gives each value, with its tensors on the worker.

    The random states of its devices, and PyTorch's global modes, such as the default dtype, are as they were. What the
    session has already stays.

    Args:
        location: as it was saved: a folder, "worker:NAME", or an address of fsspec.
        node: whose session takes the values; by default the node of "sky:0", which this may begin.
        trust: whether what lies there may run code here. Modules and optimizers are saved as pickles and need it; plain
            data, such as a state_dict(), does not.

    Returns:
        The node.

    Raises:
        SnapshotError: there is nothing, it is damaged, or of a newer format, another torch, or other devices; nothing
            has changed, and what was saved is untouched.
        ConfigurationError: the worker keeps no snapshots, or the location cannot be.
        SessionLostError: the session is over.

    Example:
        ```python
        with skyproxy.launch_local("cpu") as before:
            before.save("experiment", weights=torch.ones(3, device=before.device("cpu")))
        with skyproxy.launch_local("cpu") as node:
            skyproxy.restore("experiment", node)
            print(node.get("weights").sum().item())
        ```
    """
    if node is None:
        nodes.start_default()
        node = next(each for each in nodes.list_nodes() if each.alive)
    node._restore(location, trust=trust)
    return node
