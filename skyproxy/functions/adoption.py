"""Results that come home while their tensors stay away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError, SkyproxyError, UntrustedResultError, visible
from skyproxy.interrupts import raised_by_handler
from skyproxy.payloads.pickling import PLAIN, Unpickler, unpickle_simple
from skyproxy.payloads.plain_reading import from_plain
from skyproxy.payloads.rebuilding import UnknownClassError
from skyproxy.payloads.tensors import REFERENCE, Row, as_leaf
from skyproxy.protocol import answers
from skyproxy.session.session import Session
from skyproxy.tensor.core.devices import Handle, SkyDevice
from skyproxy.tensor.core.host_copies import escape
from skyproxy.tensor.core.memory import Memory, memory_of
from skyproxy.tensor.core.metadata import intern_meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor, make_tensor
from skyproxy.tensor.torch_api.state_dicts import as_state_dict


class Adopter:
    """Makes values of what one call sends.

    Args:
        call: the call's name.
        session: the session that the tensors will belong to.
        devices: its devices.
        arguments: the remote tensors that were handed in; a result that is one of them comes back as that very object.
        trusted: whether the worker may send pickles, which run code of its choice here.

    Attributes:
        trusted: the same.
    """

    def __init__(
        self,
        call: str,
        session: Session,
        devices: Sequence[SkyDevice],
        arguments: Sequence[RemoteTensor],
        trusted: bool = False,
    ) -> None:
        self.trusted = trusted
        self._adopted: tuple[int, list[torch.Tensor]] = (0, [])
        self._call = call
        self._session = session
        self._devices = devices
        self._arguments = arguments
        # The function may keep them, and give them to somebody else under another name.
        for tensor in arguments:
            escape(tensor._sky)

    def value(self, number: int, tables: dict[str, Any], pieces: Sequence[object]) -> Any:
        """The value that came with the event `number`.

        Raises:
            UntrustedResultError: it is not plain data, and the worker is not trusted; or it has an object of a class
                that this program has not loaded. It can be asked for again.
            ProtocolError: it is nothing that a worker of ours sends.
            Exception: a pickle cannot be read here, for want of a module mostly.
        """
        plain = tables.get("form") == PLAIN
        if not plain and not self.trusted:
            raise UntrustedResultError(f"returned {visible(tables.get('not_plain') or 'a pickle')}")
        for changed in tables.get("changed", ()):
            if changed < len(self._arguments):
                torch.autograd.graph.increment_version(self._arguments[changed])
        if not plain and tables.get("simple") is True and pieces and not tables.get("tensors"):
            return unpickle_simple(pieces[0])
        with torch.inference_mode(False), torch.no_grad():
            try:
                if self._adopted[0] != number:
                    self._adopted = (
                        number,
                        self._adopt(number, [row for row in tables["tensors"] if row[0] == REFERENCE]),
                    )
            except (
                LookupError,
                TypeError,
                ValueError,
                RuntimeError,
            ) as error:  # the last of PyTorch: it cannot have such sizes
                if isinstance(error, SkyproxyError) or raised_by_handler(error):
                    raise
                raise ProtocolError(f"the worker sent impossible tensors: {error!r:.200}") from error
            tensors = self._adopted[1]
            if not plain:
                return as_state_dict(Unpickler(pieces, tables, lambda row, position: tensors[position]).unpickle())
            try:
                value = as_state_dict(from_plain(pieces, tables, lambda row, position: tensors[position]))
            except UnknownClassError as error:
                raise UntrustedResultError(
                    f"returned an object of {visible(error)}, which this program does not have"
                ) from error
            self._adopted = 0, []
            return value

    def release(self) -> None:
        """Nothing more comes of this call: its arguments need not live because of it."""
        self._arguments = ()

    def _adopt(self, number: int, rows: list[Row]) -> list[torch.Tensor]:
        if not rows:
            return []
        devices = {(device.row["type"], device.row["index"] or 0): device for device in self._devices}
        roots: dict[int, Handle] = {}
        slots: list[int] = []
        tensors: list[torch.Tensor] = []
        for row in rows:
            _, fields, _, _, (kind, index), *numbers = row
            group, storage_bytes, argument, argument_root = map(answers.integer, numbers)
            answers.size(storage_bytes)
            answers.description(fields)
            if 0 <= argument < len(self._arguments):
                slots.append(0)
                tensors.append(self._arguments[argument])
                continue
            root = roots.get(group)
            if root is None and 0 <= argument_root < len(self._arguments):
                shared = self._arguments[argument_root]._sky
                memory_of(shared)
                root = roots[group] = shared.root or shared
            meta = intern_meta(torch_codec.decode_description(fields))
            handle = devices[kind, index].new_handle(meta, root)
            if root is None:
                escape(handle)  # a function may give the same tensor again
                if group >= 0:
                    roots[group] = handle
                    handle.memory = Memory(storage_bytes)
            slots.append(handle.slot)
            tensors.append(as_leaf(make_tensor(meta, handle), row))
        self._session.do("adopt_results", self._call, number, slots)
        return tensors
