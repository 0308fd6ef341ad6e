"""The worker's part of `node.from_pretrained` and its kin; it imports this by name, and nothing of the client."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from skyproxy.runtime.cuda_streams import carry_streams


def from_pretrained(kind: Any, name: str, device: object, options: dict[str, object]) -> Any:
    """A pretrained model on a device of this worker, in evaluation mode."""
    model = kind.from_pretrained(name, **options)
    return model if "device_map" in options else model.to(device)


def from_config(kind: Any, config: object, device: object, options: dict[str, object]) -> Any:
    """A fresh model on a device of this worker."""
    make = getattr(kind, "from_config", None) or getattr(kind, "_from_config", None) or kind
    return make(config, **options).to(device)


def load_safetensors(path: str, device: object) -> dict[str, Any]:
    """The tensors of a file, or of all files in a folder."""
    from safetensors.torch import load_file

    place = Path(path).expanduser()
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files:
        raise FileNotFoundError(f"there is no *.safetensors in {place} on the worker")
    tensors: dict[str, object] = {}
    for file in files:
        for name, tensor in load_file(file, device=str(device)).items():
            if name in tensors:
                raise ValueError(f"{name} is in {file} and in another file of {place}")
            tensors[name] = tensor
    return tensors


def save(value: Any, path: str) -> str:
    """Writes a file as a whole or not at all; its absolute path."""
    import torch

    target = Path(path).expanduser().absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        if target.suffix == ".safetensors":
            from safetensors.torch import save_file

            save_file(dict(value), draft)
        else:
            torch.save(value, draft)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    return str(target)


def load(path: str, device: Any, weights_only: bool) -> Any:
    """Return what `torch.save` wrote, or a safetensors file."""
    import torch

    place = Path(path).expanduser()
    if place.suffix == ".safetensors":
        return load_safetensors(path, device)
    return torch.load(place, map_location=device, weights_only=weights_only)


class _StoppedError(Exception):
    """The caller has gone: no more tokens."""


class _Relay:
    """A streamer of transformers that passes token ids on, and ends the generation when nobody wants them."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.stopped = False

    def put(self, value: Any) -> None:
        if self.stopped:
            raise _StoppedError
        self.queue.put(value.tolist())

    def end(self) -> None:
        pass


def generate(model: Any, inputs: Mapping[str, object], options: dict[str, object]) -> Any:
    """`model.generate` on this worker."""
    import torch

    with torch.no_grad():
        return model.generate(**_move_inputs(model, inputs), **options)


def stream_generate(
    model: object, inputs: Mapping[str, object], options: dict[str, object]
) -> Generator[Any, None, Any]:
    """The same, with what a streamer is given as items; returns what `generate` returns."""
    relay, outcome = _Relay(), {}
    use_streams = carry_streams()

    def work() -> None:
        try:
            use_streams()
            outcome["value"] = generate(model, inputs, {**options, "streamer": relay})
        except BaseException as error:
            outcome["error"] = error
        relay.queue.put(None)

    thread = threading.Thread(target=work, name="skyproxy-generate", daemon=True)
    thread.start()
    try:
        while (tokens := relay.queue.get()) is not None:
            yield tokens
    finally:
        relay.stopped = True
        thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def _move_inputs(model: Any, inputs: Mapping[str, object]) -> dict[str, object]:
    import torch

    return {
        name: value.to(model.device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
    }
