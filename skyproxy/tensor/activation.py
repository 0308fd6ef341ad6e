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
    # Before the lock: importing torch may call this very function, see `skyproxy._load_device`.
    import torch  # noqa: F401

    with _lock:
        if _active:
            return
        # Each module that is only imported fills the table of special ops.
        from skyproxy.tensor import (  # noqa: F401
            attention,
            autocast,
            copies,
            cross_entropy,
            cuda_like_names,
            device_module,
            dynamo,
            generators,
            global_modes,
            graphs,
            group_norm,
            host,
            hot_path,
            modules,
            nested_batches,
            nested_tensors,
            pending,
            recurrent,
            registration,
            serialization,
            special_ops,
            state_dicts,
            storage,
            streams,
            subclasses,
            undivided,
            values,
        )

        hot_path.install()
        pending.install()
        registration.register(device_module.MODULE)
        attention.install(registration.library())
        group_norm.install(registration.library())
        recurrent.install(registration.library())
        special_ops.install(registration.library())
        undivided.install(registration.library())
        nested_tensors.install()
        storage.install()
        serialization.install()
        values.install()
        subclasses.install()
        modules.install()
        cross_entropy.install()
        state_dicts.install()
        generators.install()
        autocast.install()
        host.install()
        streams.install()
        cuda_like_names.install()
        global_modes.install()
        graphs.install()
        dynamo.install()
        _active = True
