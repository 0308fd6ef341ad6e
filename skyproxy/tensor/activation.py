"""Switches the device on: once a process, as soon as both torch and skyproxy are imported."""

from __future__ import annotations

import threading

from skyproxy import patching

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
        from skyproxy.tensor.core import generators
        from skyproxy.tensor.dispatch import hot_path, positions  # noqa: F401
        from skyproxy.tensor.ops import (
            async_values,
            attention,
            checked_numbers,  # noqa: F401
            composites,
            copies,  # noqa: F401
            determinants,
            group_norm,
            half_transforms,
            linear_gradients,
            masked_gradients,
            nested_batches,  # noqa: F401
            nested_tensors,
            packed_sequences,
            products,
            recurrent,
            renorms,
            set_storage,  # noqa: F401
            sparse_tensors,  # noqa: F401
            special_ops,
            transformed_composites,
            zero_tensors,
        )
        from skyproxy.tensor.torch_api import (
            accelerator,
            autocast,
            autograd,
            cross_entropy,
            cuda_like_names,
            current_device,
            distributions,
            dynamo,
            global_modes,
            graph_capture,
            interpolation,
            local_accelerator,
            modules,
            registration,
            serialization,
            sky_module,
            state_dicts,
            storage,
            streams,
            subclasses,
            tensor_methods,
            torchscript,
            traced_kernels,
        )

        hot_path.install()
        zero_tensors.install()
        transformed_composites.install()
        autograd.install()
        async_values.install()
        registration.register(sky_module.MODULE)
        attention.install(registration.library())
        group_norm.install(registration.library())
        products.install(registration.library())
        determinants.install(registration.library())
        masked_gradients.install(registration.library())
        recurrent.install(registration.library())
        renorms.install(registration.library())
        packed_sequences.install(registration.library())
        special_ops.install(registration.library())
        composites.install(registration.library())
        half_transforms.install(registration.library())
        linear_gradients.install(registration.library())
        nested_tensors.install()
        storage.install()
        serialization.install()
        torchscript.install()
        tensor_methods.install()
        subclasses.install()
        traced_kernels.install()
        modules.install()
        cross_entropy.install()
        interpolation.install()
        distributions.install()
        state_dicts.install()
        generators.install()
        autocast.install()
        accelerator.install()
        local_accelerator.install()
        streams.install()
        graph_capture.install()
        cuda_like_names.install()
        current_device.install()
        global_modes.install()
        dynamo.install()
        _active = True


def deactivate() -> list[patching.Patch]:
    """Undo what `activate`, and what came with first use, replaced; return what cannot be undone. Sessions are over.

    A worker that shares the process keeps what it replaced for itself.
    """
    global _active
    with _lock:
        _active = False
        return patching.undo_all(but=[patching.When.WORKER, patching.When.QUIET])
