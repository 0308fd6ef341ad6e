"""`%load_ext skyproxy`."""

from __future__ import annotations

from typing import Any

from skyproxy.notebook.magic import SkyMagic


def load_ipython_extension(ipython: Any) -> None:
    """Adds the magic `%sky`; IPython calls this.

    Args:
        ipython: the `InteractiveShell`.

    Example:
        ```python
        get_ipython().extension_manager.load_extension("skyproxy")  # as %load_ext skyproxy
        ```
    """
    ipython.register_magic_function(SkyMagic(ipython), magic_kind="line_cell", magic_name="sky")


def unload_ipython_extension(ipython: Any) -> None:
    """Takes it away again; IPython calls this for `%unload_ext skyproxy`.

    Example:
        ```python
        get_ipython().extension_manager.unload_extension("skyproxy")  # as %unload_ext skyproxy
        ```
    """
    for kind in ("line", "cell"):
        ipython.magics_manager.magics[kind].pop("sky", None)
