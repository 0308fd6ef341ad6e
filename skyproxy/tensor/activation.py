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
        from skyproxy.tensor.core import generators, storage, transfers  # noqa: F401
        from skyproxy.tensor.dispatch import hot_path
        from skyproxy.tensor.ops import (
            async_values,
            attention,
            composites,
            group_norm,
            nested_batches,  # noqa: F401
            nested_tensors,
            recurrent,
            special_ops,
        )
        from skyproxy.tensor.programs import graphs
        from skyproxy.tensor.torch_api import (
            accelerator,
            autocast,
            cross_entropy,
            cuda_like_names,
            dynamo,
            global_modes,
            modules,
            registration,
            serialization,
            sky_module,
            state_dicts,
            streams,
            subclasses,
            tensor_methods,
        )

        hot_path.install()
        async_values.install()
        registration.register(sky_module.MODULE)
        attention.install(registration.library())
        group_norm.install(registration.library())
        recurrent.install(registration.library())
        special_ops.install(registration.library())
        composites.install(registration.library())
        nested_tensors.install()
        storage.install()
        serialization.install()
        tensor_methods.install()
        subclasses.install()
        modules.install()
        cross_entropy.install()
        state_dicts.install()
        generators.install()
        autocast.install()
        accelerator.install()
        streams.install()
        cuda_like_names.install()
        global_modes.install()
        graphs.install()
        dynamo.install()
        _active = True
