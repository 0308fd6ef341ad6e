"""Filling a model with weights that are on a worker already: nothing of them is downloaded, tied weights stay tied."""

from __future__ import annotations

import copy
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from skyproxy import patching
from skyproxy.errors import ConfigurationError
from skyproxy.tensor.core.prefetching import READER, SequentialReads
from skyproxy.tensor.core.remote_tensor import RemoteTensor


class RemoteStateDict(OrderedDict[str, Any]):
    """A state dict whose tensors live on a worker: what a function's dict of tensors comes back as.

    Example:
        ```python
        weights = node.run(load_weights, "model.pt")  # its tensors stay on the worker
        with torch.device("meta"):
            model = Model()
        weights.load_into(model)
        ```
    """

    def load_into(self, model: torch.nn.Module, *, strict: bool = True) -> Any:
        """Fills `model` with these weights; see `skyproxy.load_into`.

        Example:
            ```python
            model = torch.nn.Linear(4, 2).to(node.devices[0])
            weights = node.load(node.save(model.state_dict(), "weights.pt"))
            weights.load_into(model)
            ```
        """
        return load_into(model, self, strict=strict)

    def __reduce__(self) -> tuple[object, ...]:
        # In files and on workers it is an ordinary dict: its readers need neither skyproxy nor trust in its classes.
        return OrderedDict, (), self.__dict__ or None, None, iter(self.items())

    def __copy__(self) -> RemoteStateDict:
        return self._copy_with(self.items())

    def __deepcopy__(self, memo: dict[int, object]) -> RemoteStateDict:
        return self._copy_with((name, copy.deepcopy(value, memo)) for name, value in self.items())

    def _copy_with(self, items: Iterable[tuple[str, object]]) -> RemoteStateDict:
        result = RemoteStateDict(items)
        result.__dict__.update(self.__dict__)
        return result


def as_state_dict(value: Any) -> Any:
    """`value`, as a `RemoteStateDict` if it is a plain dict of names and remote tensors."""
    if type(value) not in (dict, OrderedDict) or not value:
        return value
    if all(type(name) is str and isinstance(item, RemoteTensor) for name, item in value.items()):
        result = RemoteStateDict(value)
        if hasattr(value, "_metadata"):
            result._metadata = value._metadata  # type: ignore[attr-defined]
        return result
    return value


def load_into(model: torch.nn.Module, source: Mapping[str, object] | torch.nn.Module, *, strict: bool = True) -> Any:
    """Fills a model with weights from elsewhere, as `load_state_dict` does.

    A model on the meta device takes the tensors themselves, without a copy; one that has memory already gets their
    values. Parameters that are one object in the model stay one, also if the source names only one of them. The
    model's dtypes and `requires_grad` stay.

    Args:
        model: what to fill, typically made under `torch.device("meta")`.
        source: a state dict, or a module. A module also gives its buffers that no state dict has; from a state dict
            those are computed anew, where the model knows how to.
        strict: whether missing and unexpected names are an error.

    Returns:
        The missing and the unexpected names, as `load_state_dict` returns them.

    Raises:
        RuntimeError: names or shapes differ, in the words of `load_state_dict`.
        ConfigurationError: the model has buffers that the source does not have and that cannot be computed here.

    Example:
        ```python
        source = torch.nn.Linear(4, 2).to("sky:0")
        with torch.device("meta"):
            model = torch.nn.Linear(4, 2)
        skyproxy.load_into(model, source.state_dict())
        assert model.weight.device == torch.device("sky:0")
        ```
    """
    if not isinstance(source, torch.nn.Module | Mapping):
        raise ConfigurationError(
            f"load_into takes a state dict or a module, not {source!r:.80}. To read a file where the worker is: "
            "node.load(...) or node.load_safetensors(...)"
        )
    values: dict[str, object] = dict(source.state_dict() if isinstance(source, torch.nn.Module) else source)
    is_skeleton = any(tensor.is_meta for tensor in _tensors(model))
    families = _families(model)
    for names in families:
        present = next((name for name in names if name in values), None)
        if present is not None:
            for name in names:
                values.setdefault(name, values[present])
    with torch.no_grad():
        if is_skeleton:
            for name, own in model.state_dict(keep_vars=True).items():
                value = values.get(name)
                if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor) and value.dtype != own.dtype:
                    values[name] = value.to(own.dtype)
        metadata = getattr(source, "_metadata", None)
        if metadata is not None:
            values = OrderedDict(values)
            values._metadata = metadata  # type: ignore[attr-defined]
        result = model.load_state_dict(values, strict=strict, assign=is_skeleton)
        if is_skeleton:
            _tie(model, families)
            _fill_other_buffers(model, source, result.missing_keys)
    return result


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _families(model: torch.nn.Module) -> list[list[str]]:
    """The names of parameters, and of buffers, that are one object."""
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    return [family for family in names.values() if len(family) > 1]


def _place(model: torch.nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if leaf in module._parameters else module._buffers), leaf


def _tie(model: torch.nn.Module, families: list[list[str]]) -> None:
    for first, *others in families:
        table, leaf = _place(model, first)
        for other in others:
            target, name = _place(model, other)
            target[name] = table[leaf]


def _fill_other_buffers(model: torch.nn.Module, source: object, missing: list[str]) -> None:
    """Buffers that are in no state dict, such as the frequencies of rotary embeddings."""
    given = dict(source.named_buffers(remove_duplicate=False)) if isinstance(source, torch.nn.Module) else {}
    empty = [
        (name, buffer)
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if buffer.is_meta and name not in missing
    ]
    known: dict[int, torch.Tensor] = {}
    for name, buffer in empty:
        value = known.get(id(buffer), given.get(name))
        if value is not None:
            known[id(buffer)] = value
            table, leaf = _place(model, name)
            table[leaf] = value if value.dtype == buffer.dtype else value.to(buffer.dtype)
    left = [name for name, _ in empty if _place(model, name)[0][_place(model, name)[1]].is_meta]
    if left:
        device = next((tensor.device for tensor in _tensors(model) if not tensor.is_meta), torch.device("cpu"))
        left = _compute(model, left, device)
    if left:
        raise ConfigurationError(
            f"{type(model).__name__} has buffers that no state dict holds and that cannot be computed here: "
            f"{', '.join(left[:5])}{', ...' if len(left) > 5 else ''}. The rest is loaded. Return the module itself "
            "from the worker, not its state dict, and load from that: it has them."
        )


def _compute(model: torch.nn.Module, names: list[str], device: torch.device) -> list[str]:
    """Has modules without parameters fill these buffers by their own means; the names of those that nobody filled."""
    left: list[str] = []
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = model.get_submodule(path)
        own = [name for name in names if name.rpartition(".")[0] == path]
        fill = _filler(model, module)
        leaves = [name.rpartition(".")[2] for name in own]
        skeletons = {leaf: module._buffers[leaf] for leaf in leaves}
        fresh: dict[str, torch.Tensor] = {}
        for leaf, skeleton in skeletons.items():
            assert skeleton is not None
            fresh[leaf] = module._buffers[leaf] = torch.empty_like(skeleton, device=device)
        before = {leaf: tensor._version for leaf, tensor in fresh.items()}
        if fill is not None:
            fill()
        for name, leaf in zip(own, leaves, strict=True):
            now = module._buffers[leaf]
            if now is fresh[leaf] and now._version == before[leaf]:
                module._buffers[leaf] = skeletons[leaf]  # untouched: better no values than wrong ones
                left.append(name)
            elif now is not None and now.device != device:
                module._buffers[leaf] = now.to(device)
    return left


def _filler(model: torch.nn.Module, module: torch.nn.Module) -> Callable[[], object] | None:
    if module._parameters:  # it would initialize those, too
        return None
    initialise = getattr(model, "_init_weights", None)  # transformers
    if callable(initialise):
        return lambda: initialise(module)
    return getattr(module, "reset_parameters", None)


def _module_load_into(self: torch.nn.Module, model: torch.nn.Module, *, strict: bool = True) -> Any:
    """Fills `model`, typically one on the meta device, with the weights of this one; see `skyproxy.load_into`."""
    return load_into(model, self, strict=strict)


def _staged_state_dict(state_dict: Callable[..., object]) -> Callable[..., object]:
    """`Module.state_dict`, whose values come in blocks if somebody copies them one by one."""

    @functools.wraps(state_dict)
    def remembered(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
        result = state_dict(self, *args, **kwargs)
        whole = not args and kwargs.get("destination") is None and not kwargs.get("keep_vars")
        if whole and type(result) is OrderedDict and not torch.compiler.is_compiling():
            READER.guess = SequentialReads(weakref.ref(result))
        return result

    return remembered


def install() -> None:
    """Gives modules a `load_into`, for those that come back from a worker, and watches who copies a state dict."""
    patching.wrap(
        torch.nn.Module,
        "state_dict",
        _staged_state_dict,
        why="a loop that copies a state dict to the CPU, value by value, is read ahead in blocks",
        test="tests/tensor/core/test_prefetching.py::test_a_loop_over_a_state_dict_comes_in_blocks",
    )
    if not hasattr(torch.nn.Module, "load_into"):
        patching.add(
            torch.nn.Module,
            "load_into",
            _module_load_into,
            why="a module that comes back from a function takes the weights that are already on the worker",
            test="tests/loading/test_load_into.py::test_a_remote_module_fills_a_skeleton",
        )
