"""The part of a `Node` that has models and files on the worker: the worker reads them, and remote tensors come back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from skyproxy.errors import ConfigurationError
from skyproxy.functions.node_functions import NodeFunctions
from skyproxy.loading import worker_side


class NodeModels(NodeFunctions):
    """Loads, saves and runs models on a worker."""

    def from_pretrained(
        self, kind: object, name: str | os.PathLike[str], *, device: torch.device | str | None = None, **options: object
    ) -> Any:
        """A pretrained model whose weights the worker downloads, or reads, and keeps; here is all but those.

        Args:
            kind: the class, `AutoModelForCausalLM` say; its package must be installed on both sides.
            name: as `kind.from_pretrained` takes it; a path is one of the worker.
            device: one of this node's, the preferred one by default.
            options: for `kind.from_pretrained`: `dtype`, `attn_implementation`, ...

        Returns:
            The model, with remote tensors for parameters and buffers.

        Example:
            ```python
            model = node.from_pretrained(transformers.AutoModelForCausalLM, "Qwen/Qwen3-0.6B", dtype=torch.bfloat16)
            print(model.device)
            ```
        """
        return self.run(worker_side.from_pretrained, kind, os.fspath(name), self._place(device), options)

    def from_config(
        self, kind: object, config: object, *, device: torch.device | str | None = None, **options: object
    ) -> Any:
        """A fresh model, made on the worker; otherwise as `from_pretrained`.

        Example:
            ```python
            config = transformers.AutoConfig.from_pretrained("Qwen/Qwen3-0.6B")
            model = node.from_config(transformers.AutoModelForCausalLM, config)
            ```
        """
        return self.run(worker_side.from_config, kind, config, self._place(device), options)

    def load_safetensors(self, path: str | os.PathLike[str], *, device: torch.device | str | None = None) -> Any:
        """The tensors of a safetensors file on the worker's disk, or of all such files in a folder there.

        Returns:
            A `RemoteStateDict`: `state_dict.load_into(model)` fills a model with them.

        Example:
            ```python
            model = torch.nn.Linear(4, 2).to(node.devices[0])
            path = node.save(model.state_dict(), "model.safetensors")
            node.load_safetensors(path).load_into(model)
            ```
        """
        return self.run(worker_side.load_safetensors, os.fspath(path), self._place(device))

    def save(self, value: object, path: str | os.PathLike[str] | None = None, **values: object) -> str:
        """Writes remote tensors, and containers of them, to the worker's disk, as `torch.save` does.

        No byte comes here.

        Args:
            value: a state dict, say; not a module.
            path: on the worker; with the ending ".safetensors" in that format. The file appears when it is whole.

        Returns:
            The absolute path there.

        Example:
            ```python
            model = torch.nn.Linear(4, 2).to(node.devices[0])
            print(node.save(model.state_dict(), "model.pt"))
            ```
        """
        if isinstance(value, torch.nn.Module):
            raise ConfigurationError(
                "node.save writes tensors and containers of them: a file must not need the code that wrote it. For a "
                "module: node.save(model.state_dict(), path)"
            )
        if path is None or values:
            raise ConfigurationError("node.save(value, path) writes one value to a path on the worker.")
        written: str = self.run(worker_side.save, value, os.fspath(path))
        return written

    def load(
        self, path: str | os.PathLike[str], *, device: torch.device | str | None = None, weights_only: bool = True
    ) -> Any:
        """Reads what `save` or `torch.save` wrote on the worker's disk; the tensors stay there.

        Args:
            path: on the worker.
            device: one of this node's, the preferred one by default.
            weights_only: as in `torch.load`.

        Example:
            ```python
            path = node.save({"x": torch.ones(3, device=node.devices[0])}, "values.pt")
            x = node.load(path)["x"]
            ```
        """
        return self.run(worker_side.load, os.fspath(path), self._place(device), weights_only)

    def generate(self, model: object, inputs: object, *, streamer: Any = None, **options: object) -> Any:
        """`model.generate(**inputs, **options)` with its loop on the worker: one wait in place of one a token.

        Args:
            model: of transformers, with its weights on this worker.
            inputs: what a tokenizer returns, or input ids; on the CPU or remote.
            streamer: of transformers; gets the tokens here, as they come.
            options: for `model.generate`.

        Returns:
            What `generate` returns, its tensors remote: the same tokens, also where they are sampled.

        Example:
            ```python
            inputs = tokenizer("The sky is", return_tensors="pt")
            tokens = node.generate(model, inputs, max_new_tokens=20)
            print(tokenizer.decode(tokens[0].cpu()))
            ```
        """
        named = dict(inputs) if isinstance(inputs, Mapping) else {"inputs": inputs}
        if streamer is None:
            return self.run(worker_side.generate, model, named, options)
        call = self.submit(worker_side.stream_generate, model, named, options, name="generate")
        tokens = iter(call)
        try:
            while True:
                try:
                    ids = next(tokens)
                except StopIteration as end:
                    streamer.end()
                    return end.value
                streamer.put(torch.tensor(ids, device="cpu"))
        finally:
            call.cancel()  # Ctrl-C, or a streamer that failed

    def _place(self, device: torch.device | str | None) -> torch.device:
        """The device that is meant; it arrives on the worker as the real one."""
        return self._runner.devices[0].torch_device if device is None else torch.device(device)
