"""`%load_ext skyproxy`."""

from __future__ import annotations

import contextlib
from typing import Any

from skyproxy.early_start import start_early
from skyproxy.errors import WorkerStartError
from skyproxy.notebook import displays, stopping
from skyproxy.notebook.magic import SkyMagic
from skyproxy.notebook.tracebacks import show_shortened


def load_ipython_extension(ipython: Any) -> None:
    """Add the magic `%sky`, let Stop cancel what is queued, and show errors without skyproxy's own frames.

    IPython calls this. The worker that `sky:0` will mean starts now, where that is an embedded one.

    Args:
        ipython: the `InteractiveShell`.

    Example:
        ```python
        get_ipython().extension_manager.load_extension("skyproxy")  # as %load_ext skyproxy
        ```
    """
    with contextlib.suppress(WorkerStartError):  # the first use says it, if there is one
        start_early()
    ipython.register_magic_function(SkyMagic(ipython), magic_kind="line_cell", magic_name="sky")
    ipython.events.register("post_run_cell", stopping.after_cell)
    displays.Displays(ipython).install()
    if not ipython.custom_exceptions:  # whoever shows errors already goes on with it
        ipython.set_custom_exc((BaseException,), show_shortened)


def unload_ipython_extension(ipython: Any) -> None:
    """Take all of it away again; IPython calls this for `%unload_ext skyproxy`.

    Example:
        ```python
        get_ipython().extension_manager.unload_extension("skyproxy")  # as %unload_ext skyproxy
        ```
    """
    if stopping.after_cell in ipython.events.callbacks["post_run_cell"]:
        ipython.events.unregister("post_run_cell", stopping.after_cell)
    if ipython.custom_exceptions == (BaseException,):
        ipython.set_custom_exc((), None)
    displays.uninstall(ipython)
    for kind in ("line", "cell"):
        ipython.magics_manager.magics[kind].pop("sky", None)
