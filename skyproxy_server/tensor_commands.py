"""The built-in commands that bring tensors to the worker, send them back, and describe them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError
from skyproxy.protocol import commands
from skyproxy.protocol.commands import Handler
from skyproxy.protocol.messages import Buffer
from skyproxy.torch_codec import Description
from skyproxy_server.devices import WorkerDevices
from skyproxy_server.failures import Failed, PoisonedError
from skyproxy_server.gates import Gate, storage_key
from skyproxy_server.incoming_transfer import IncomingTransfer, TransferCancelledError
from skyproxy_server.layouts import check_packed, packed
from skyproxy_server.reports import Reports
from skyproxy_server.transfers import Transfers
from skyproxy_server.values import Values


class TensorCommands:
    """The commands of one session that move tensors.

    Attributes:
        buffers: the bytes that came with the batch and that no command has taken yet, the last ones first.
    """

    def __init__(self, values: Values, reports: Reports, transfers: Transfers, devices: WorkerDevices) -> None:
        self._values = values
        self._reports = reports
        self._transfers = transfers
        self._devices = devices
        self.buffers: list[Buffer] = []

    @property
    def handlers(self) -> Mapping[int, Handler]:
        """The function that runs each of them, by number."""
        return {
            commands.UPLOAD: self._upload,
            commands.RECEIVE: self._receive,
            commands.FETCH: self._fetch,
            commands.DESCRIBE: self._describe,
        }

    def _upload(self, slots: dict[int, object], stream: list[Any], position: int) -> int:
        slot, fields, device = stream[position + 1 : position + 4]
        description = torch_codec.decode_description(fields)
        buffer = self.buffers.pop() if self.buffers else b""
        check_packed(description)
        byte_count = torch_codec.byte_count(description)
        if byte_count != len(buffer):  # before there is memory for it
            raise ProtocolError(f"an upload of {byte_count} bytes came with {len(buffer)}")
        target = torch_codec.empty_packed(description)
        view = torch_codec.byte_view(target)
        if len(view):
            view[:] = buffer
        place = self._devices.find(device)
        try:
            slots[slot] = target if place.type == "cpu" else target.to(place)
        except ProtocolError:
            raise
        except Exception as error:
            slots[slot] = self._reports.failure(error, "upload", position)
        return position + 4

    def _receive(self, slots: dict[int, object], stream: list[Any], position: int) -> int:
        slot, fields, device, number = stream[position + 1 : position + 5]
        description = torch_codec.decode_description(fields)
        check_packed(description)
        if not torch_codec.is_dense(description.size, description.stride):
            raise ProtocolError("the bytes of an upload lie without gaps or overlaps")
        place = self._devices.find(device)
        sequence = self._reports.sequence
        try:
            transfer = self._transfers.arrival(number, torch_codec.byte_count(description))
            value, staging = self._allocate(transfer, description, place)
            self._close_until_landed(slots, slot, transfer, value, staging, sequence, position)
            slots[slot] = value
        except ProtocolError:
            raise
        except Exception as error:
            slots[slot] = self._upload_failure(error, sequence, position)
        return position + 5

    def _allocate(
        self, transfer: IncomingTransfer, description: Description, place: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tensor whose bytes are on their way, and where they land first; on the CPU that is the tensor."""
        if transfer.target is None:
            transfer.wait()  # raises: there was no memory, or nothing comes any more
        assert transfer.target is not None
        staging = torch.as_strided(transfer.target.view(description.dtype), description.size, description.stride)
        if place.type == "cpu":
            return staging, staging
        value = torch.empty_strided(description.size, description.stride, dtype=description.dtype, device=place)
        self._transfers.pass_on(transfer, value)
        return value, staging

    def _close_until_landed(
        self,
        slots: dict[int, object],
        slot: int,
        transfer: IncomingTransfer,
        value: torch.Tensor,
        staging: torch.Tensor,
        sequence: int,
        position: int,
    ) -> None:
        """Let nobody use a tensor before its bytes are there; poison its slot if they never come."""

        def land() -> None:
            try:
                if value is staging:
                    transfer.wait()
                else:
                    transfer.settle(value, staging)
            except Exception as error:
                # Nothing else can have this storage: whoever wanted it had to pass through here.
                if slots.get(slot) is value:
                    slots[slot] = failed = self._upload_failure(error, sequence, position)
                else:
                    failed = Failed(error, "upload", sequence, position)
                raise PoisonedError(failed) from None

        self._values.gates.close(value, Gate(None, transfer.finished, land))

    def _upload_failure(self, error: Exception, sequence: int, position: int) -> Failed:
        if isinstance(error, TransferCancelledError):  # the client knows
            return Failed(error, "upload", sequence, position)
        return self._reports.failure(error, "upload", position, sequence)

    def _fetch(self, slots: dict[int, object], stream: list[Any], position: int) -> int:
        request, slot, transfer = stream[position + 1 : position + 4]

        def give() -> None:
            value = self._values.get(slot)
            tensor = packed(value)
            if not transfer:
                host = tensor.cpu()  # a name, for the view of its bytes does not keep it alive
                self._reports.reply(request, None, (torch_codec.byte_view(host),))
                return
            departure = self._transfers.depart(transfer, tensor)
            if storage_key(tensor) == storage_key(value):  # no copy was made: later writers must wait
                self._values.gates.close(tensor, Gate(None, departure.finished, departure.wait, blocks_reads=False))

        self._values.answer(request, position, "fetch", give)
        return position + 4

    def _describe(self, slots: dict[int, object], stream: list[Any], position: int) -> int:
        request, outputs, inputs = stream[position + 1 : position + 4]

        def give() -> None:
            made = [self._values.get(slot, sizes=False) for slot in outputs]
            held = [slots.get(slot) for slot in inputs]
            keys = [storage_key(value) if isinstance(value, torch.Tensor) else None for value in held]
            self._reports.reply(request, [_row(value, keys) for value in made])

        self._values.answer(request, position, "describe", give)
        return position + 4


def _row(value: object, keys: list[int | None]) -> list[object]:
    """Return what the client is told of a value; `keys` are the storages that it may be an alias of."""
    if isinstance(value, list | tuple):
        return ["list", [_row(item, keys) for item in value]]
    if not isinstance(value, torch.Tensor):
        return [None, value]
    key = storage_key(value)
    alias = keys.index(key) if key is not None and key in keys else -1
    if value.is_nested:
        return [torch_codec.encode_nested(value), alias]
    return [torch_codec.encode_description(torch_codec.describe(value)), alias]
