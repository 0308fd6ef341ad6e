"""Switches the device on: once a process, as soon as both torch and skyproxy are imported."""

from __future__ import annotations

import threading

_lock = threading.Lock()
_active = False


def activate() -> None:
    """Registers the `sky` device and everything that PyTorch must know of it; idempotent.

    Raises:
        ConfigurationError: this torch is not supported, or another backend is registered already.
    """
    global _active
    with _lock:
        if _active:
            return
        # Each module that is only imported fills the table of special ops.
        from skyproxy.tensor import attention, copies, device_module, registration  # noqa: F401

        registration.register(device_module.MODULE)
        attention.install(registration.library())
        _active = True
