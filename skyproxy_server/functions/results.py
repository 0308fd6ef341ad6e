"""Results of functions, as plain data or as a pickle, with its tensors by value or kept here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from skyproxy.errors import text_of, traceback_text
from skyproxy.payloads.pickling import Pickled, Pickler, is_wrapper, pickle_simple
from skyproxy.payloads.plain import NotPlainError
from skyproxy.payloads.plain_writing import to_plain
from skyproxy.payloads.rebuilding import PartOfException
from skyproxy.payloads.tensors import is_strided_nested
from skyproxy.payloads.unpicklable import first_unpicklable
from skyproxy.runtime.call_groups import is_simple
from skyproxy_server.gates import storage_key
from skyproxy_server.inventory import DeviceRow

REMOTE = "remote"


class ResultWriter:
    """Writes results and items of one call.

    Args:
        devices: the worker's, as announced; tensors elsewhere travel by value.
        remote: whether tensors stay here.
        arguments: the tensors that the client handed in, by number, as the function sees them.
        plain: whether the client wants plain data, because it does not trust us with pickles.
    """

    def __init__(
        self,
        devices: Sequence[DeviceRow],
        remote: bool,
        arguments: dict[int, torch.Tensor],
        plain: bool = False,
    ) -> None:
        self._plain = plain
        self._places = {(row["type"], row["index"] or 0) for row in devices}
        self._remote = remote
        self._given = dict(arguments)
        self._arguments = {id(tensor): number for number, tensor in arguments.items()}
        self._looks = {number: _look(tensor) for number, tensor in arguments.items()}
        self._versions = {number: _version(tensor) for number, tensor in arguments.items()}
        self._roots = {storage_key(tensor): number for number, tensor in arguments.items()}

    def pickle(self, value: object) -> tuple[Pickled, list[torch.Tensor]]:
        """Write a value. One that is not plain data goes as a pickle all the same, and says so: the client may come to
        trust us.

        Returns:
            The value as bytes, and the tensor to keep for each reference in it.

        Raises:
            Exception: something in it cannot be pickled.
        """
        if not self._plain and is_simple(value):
            return pickle_simple(value), []
        groups: dict[int | None, int] = {}

        def refer(tensor: torch.Tensor) -> list[object] | None:
            place = (tensor.device.type, tensor.device.index or 0)
            if not self._remote or place not in self._places or _is_special(tensor):
                return None
            argument = self._arguments.get(id(tensor), -1)
            if argument >= 0 and self._looks[argument] != _look(tensor):
                argument = -1  # the function has put another storage into it
            key = storage_key(tensor)
            group = groups.setdefault(key, len(groups)) if key is not None else -1
            size = tensor.untyped_storage().nbytes() if key is not None else 0
            return [[place[0], place[1]], group, size, argument, self._roots.get(key, -1) if key is not None else -1]

        try:
            pickled = to_plain(value, refer) if self._plain else Pickler(refer).pickle(value)
        except NotPlainError as error:
            groups.clear()
            pickled = Pickler(refer).pickle(value)
            pickled.not_plain = error.what
        kept = [tensor.detach() for tensor in pickled.references]
        pickled.references.clear()
        return pickled, kept

    def explain(self, kind: str, value: object, function: str, error: Exception) -> str:
        """Return why a value could not be pickled, in words.

        Args:
            kind: "item" of a stream, or "result".
            value: that could not be.
            function: what made it.
            error: what was raised.
        """
        what = "an item" if kind == "item" else "the result"
        place = first_unpicklable({kind: value}, self.pickle)
        why = text_of(error) + (f", in {place}" if place != kind else "")
        return (
            f"{what} of {function} cannot be sent back: a {type(value).__qualname__} cannot be pickled ({why}). "
            "Return what can, or keep it on the worker in a module that you import there."
        )

    def changed_arguments(self) -> list[int]:
        """The numbers of the arguments that the function has changed in place since the last time."""
        versions = {number: _version(tensor) for number, tensor in self._given.items()}
        changed = [number for number, version in versions.items() if version != self._versions[number]]
        self._versions = versions
        return changed


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _look(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        storage_key(tensor),
        tuple(tensor.shape),
        tensor.stride() if tensor.layout is torch.strided else (),
        tensor.dtype,
        tensor.requires_grad,
    )


def _is_special(tensor: torch.Tensor) -> bool:
    made_of_others = is_wrapper(tensor) or is_strided_nested(tensor)
    return tensor.is_quantized or torch.nn.parameter.is_lazy(tensor) or made_of_others


def describe_error(error: BaseException, plain: bool = False) -> tuple[dict[str, Any], Pickled | None]:
    """An exception as it travels: what can be said of it in words, and itself where it can be written."""
    words = {
        "type": f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
        "message": _message(error),
        "traceback": traceback_text(error),
    }
    try:
        if plain:
            return words, to_plain(error, lambda tensor: None)
        return words, _pickle_error(error)
    except Exception:  # whatever it holds; the words remain
        return words, None


def _pickle_error(error: BaseException) -> Pickled:
    def pickle(value: object) -> Pickled:
        return Pickler(lambda tensor: None).pickle(value)

    def can_be_sent(value: object) -> bool:
        try:
            pickle(value)
        except Exception:
            return False
        return True

    try:
        return pickle(error)
    except Exception:
        return pickle(PartOfException(error, can_be_sent))


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""
