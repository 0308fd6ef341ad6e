"""Large tensors on their way, on the worker's side of the bulk connection."""

from __future__ import annotations

import contextlib
import hmac
import queue
import secrets
import threading
from collections.abc import Callable
from functools import partial

import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.protocol.digests import content_proof
from skyproxy.protocol.messages import (
    CancelOperations,
    CancelTransfer,
    Challenge,
    Chunk,
    Continue,
    Known,
    Landed,
    Message,
    Offer,
    PackedChunk,
    Ping,
    Pong,
    Proof,
)
from skyproxy.transport.base import Transport
from skyproxy.transport.packing import ChunkWriter, unpack
from skyproxy_server.blobs import UploadStore
from skyproxy_server.cuda_staging import Staging
from skyproxy_server.incoming_transfer import IncomingTransfer, TransferCancelledError
from skyproxy_server.outgoing_transfer import OutgoingTransfer

_MOST_CHALLENGES = 65_536
_MOST_UNANNOUNCED = 65_536
"""Transfers whose pieces came before the command that says what they are for."""
_REMEMBERED_CANCELS = 1000
"""Transfers that were cancelled before they were announced; few are, because the announcement is on its way already."""
_REMEMBERED_ARRIVALS = 65_536
"""Uploads that are complete, of which the client may not know; it waits for far fewer."""
_TOLD_EVERY_BYTES = 4 << 20
"""The bytes after which a client that keeps what the worker may not have is told of an upload's progress."""


class Transfers:
    """All transfers of a session. The executor announces them; the bulk connection's two threads move them.

    Attributes:
        blobs: where uploads are kept; None for a worker that keeps none.
        lasting: whether the bulk connection may be replaced when it breaks.
        on_cancel_operations: called with the number of each `CancelOperations`, on the thread that receives.
        on_device_failure: called where a device does not give its values, by whichever thread notices.
        on_load: called so with what the client says of itself unasked.
        has_left: tells whether the client is gone for good, so that nothing comes any more.
        on_deserted: called where it is, and something is still being sent to it.
    """

    lasting = False

    def __init__(
        self,
        chunk_bytes: int,
        staging: Staging | None = None,
        moved: Callable[[], None] = lambda: None,
        blobs: UploadStore | None = None,
        user: str = "",
        owner: str = "",
        most_blob_bytes: int | None = None,
    ) -> None:
        """Make the transfers of one session.

        Args:
            chunk_bytes: the size of the pieces that are sent.
            staging: how pieces come to devices and from there.
            moved: called for each piece that came or went.
            blobs: where uploads are kept.
            user: the session's name there.
            owner: the name of its token there; an empty text for the only one.
            most_blob_bytes: what may be kept for that token.
        """
        self._owner = owner
        self._most_blob_bytes = most_blob_bytes
        self._challenged: dict[int, tuple[Offer, bytes]] = {}
        self.blobs = blobs
        self._user = user
        self._staging = staging or Staging(chunk_bytes)
        self._moved = moved
        self._buffer: torch.Tensor | None = None
        """The place where the piece that is being received lands, if not in its arrival's own memory."""
        self._piece_bytes = 0
        """The size of the client's pieces; 0 until one came that was not the last of its transfer."""
        self._arrivals: dict[int, IncomingTransfer] = {}
        self._announced: set[int] = set()
        self._cancelled: dict[int, str] = {}
        self._lock = threading.Lock()
        self._departures: queue.SimpleQueue[OutgoingTransfer | None] = queue.SimpleQueue()
        self._leaving: dict[int, OutgoingTransfer] = {}
        self._complete: dict[int, int] = {}
        self._is_detached = False
        self._ended = False
        self.on_cancel_operations: Callable[[int], object] = lambda number: None
        self.on_device_failure: Callable[[RuntimeError], object] = lambda error: None
        self.has_left: Callable[[], bool] = lambda: False
        self.on_deserted: Callable[[], object] = lambda: None
        self.on_load: Callable[[dict[str, int]], object] = lambda load: None

    def arrival(self, number: int, byte_count: int) -> IncomingTransfer:
        """The arrival of this number; its first piece may have come before the command that announces it."""
        with self._lock:
            arrival = self._arrivals.get(number)
            if arrival is None:
                # No bytes may come of a transfer that was cancelled before its announcement was executed.
                reason = self._cancelled.pop(number, None)
                arrival = self._arrivals[number] = IncomingTransfer(byte_count if reason is None else 0, self.has_left)
                if reason is not None:
                    arrival.over = True
                    arrival.target = arrival.view = None
                    arrival.fail(TransferCancelledError(reason))
            elif arrival.byte_count != byte_count:
                raise ProtocolError(f"transfer {number} has {arrival.byte_count} bytes, {byte_count} were announced")
            self._announced.add(number)
            self._tidy(number, arrival)
            if self._ended:
                arrival.fail(RuntimeError("the bulk connection ended"))
            return arrival

    def pass_on(self, arrival: IncomingTransfer, value: torch.Tensor) -> None:
        """From now on, pieces go to this dense device tensor without delay, where its device can do that."""
        device = self._staging.arriving(value)
        with self._lock:
            arrival.device = device

    def depart(self, number: int, tensor: torch.Tensor) -> OutgoingTransfer:
        """Starts to send the bytes of a dense tensor."""
        self._staging.leave(tensor)
        departure = OutgoingTransfer(number, tensor, self._is_deserted)
        with self._lock:
            if self._ended:
                departure.end()
            elif self.lasting:
                self._leaving[number] = departure
            if not self._is_detached:
                self._departures.put(departure)
        return departure

    def _is_deserted(self) -> bool:
        if not self.has_left():
            return False
        self.on_deserted()
        return True

    def _arrival_of_chunk(self, chunk: Chunk | PackedChunk) -> IncomingTransfer:
        arrival = self._arrival_of_size(chunk.transfer, chunk.total_bytes)
        if chunk.offset > chunk.total_bytes:
            raise ProtocolError(f"a chunk of transfer {chunk.transfer} does not fit")
        return arrival

    def _arrival_of_size(self, number: int, byte_count: int) -> IncomingTransfer:
        with self._lock:
            arrival = self._arrivals.get(number)
            if arrival is None:
                if len(self._arrivals) - len(self._announced) >= _MOST_UNANNOUNCED:
                    raise ProtocolError(f"{_MOST_UNANNOUNCED} transfers have begun that no command speaks of")
                arrival = self._arrivals[number] = IncomingTransfer(byte_count, self.has_left)
            if arrival.byte_count != byte_count:
                raise ProtocolError(
                    f"transfer {number} has {arrival.byte_count} bytes: what has {byte_count} does not fit"
                )
            return arrival

    def _tidy(self, number: int, arrival: IncomingTransfer) -> None:
        if arrival.over and number in self._announced:
            self._arrivals.pop(number, None)
            self._announced.discard(number)

    def sink(self, message: Message) -> memoryview | None:
        """Return where a chunk's bytes go: straight into the tensor."""
        if not isinstance(message, Chunk):
            return None
        arrival = self._arrival_of_chunk(message)
        if arrival.device is not None and self._piece_bytes:
            self._buffer = arrival.device.buffer(self._piece_bytes)
            if self._buffer is not None:
                return torch_codec.byte_view(self._buffer)
        return arrival.view[message.offset :] if arrival.view is not None else None

    def receive(self, transport: Transport, load: Callable[[], dict[str, int]]) -> None:
        """Reads the bulk connection until it ends."""
        transport.set_sink(self.sink)
        while True:
            message = transport.recv()
            if isinstance(message, Chunk):
                self.on_chunk(message)
                self._tell(transport, message)
            elif isinstance(message, PackedChunk):
                self.on_packed_chunk(message)
                self._tell(transport, message)
            elif isinstance(message, Landed):
                self.on_landed(message)
            elif isinstance(message, Continue):
                self.on_continue(transport, message)
            elif isinstance(message, CancelTransfer):
                self.on_cancel(message)
            elif isinstance(message, Offer):
                nonce = self.challenge(message)
                if nonce:
                    transport.send(Challenge(message.transfer, nonce))
                    continue
                known = self.on_offer(message)
                if message.digest:
                    transport.send(Known(message.transfer, known))
            elif isinstance(message, Proof):
                transport.send(Known(message.transfer, self.on_proof(message)))
            elif isinstance(message, Ping):
                transport.send(Pong(message.number, load()))
            elif isinstance(message, Pong):
                self.on_load(message.load)
            elif isinstance(message, CancelOperations):
                self.on_cancel_operations(message.number)

    # --- a bulk connection that is replaced --------------------------------------------------------------------------

    def _tell(self, transport: Transport, chunk: Chunk | PackedChunk) -> None:
        """Tell the client how far an upload is: sometimes, and at its end."""
        if not self.lasting:
            return
        size = chunk.raw_bytes if isinstance(chunk, PackedChunk) else len(chunk.buffers[0])
        end = chunk.offset + size
        if end >= chunk.total_bytes or end // _TOLD_EVERY_BYTES != chunk.offset // _TOLD_EVERY_BYTES:
            transport.send(Landed(chunk.transfer, self._landed_bytes(chunk.transfer)))

    def _landed_bytes(self, number: int) -> int:
        with self._lock:
            arrival = self._arrivals.get(number)
            if number in self._complete or arrival is None:
                return self._complete.get(number, 0)
            return arrival.byte_count - max(arrival.missing, 0)

    def on_landed(self, message: Landed) -> None:
        """The client has a download, or knows that it failed."""
        with self._lock:
            departure = self._leaving.pop(message.transfer, None)
        if departure is not None:
            departure.end()

    def on_continue(self, transport: Transport, message: Continue) -> None:
        """Go on with what the connection before this one did not finish.

        Raises:
            ProtocolError: the session's connections are not replaced, or the client has more than was sent.
        """
        if not self.lasting or len(message.uploads) > _REMEMBERED_ARRIVALS:
            raise ProtocolError("this session ends with its connection, or so many uploads were never begun")
        self._challenged.clear()
        for number in message.uploads:
            transport.send(Landed(number, self._landed_bytes(number)))
        over: list[OutgoingTransfer] = []
        with self._lock:
            self._is_detached = False
            for departure in list(self._leaving.values()):
                offset = message.downloads.get(departure.number)
                if offset is not None and 0 <= offset <= departure.tensor.nbytes:
                    departure.offset = offset
                elif departure.begun or offset is not None:
                    over.append(self._leaving.pop(departure.number))
                    continue
                self._departures.put(departure)
        for departure in over:
            departure.end()

    def detach(self) -> None:
        """The bulk connection broke; its sending thread ends, and the next one begins with nothing to do."""
        with self._lock:
            before, self._departures = self._departures, queue.SimpleQueue()
            self._is_detached = True
        before.put(None)

    # --- offers ------------------------------------------------------------------------------------------------------

    def blob_stats(self) -> dict[str, int] | None:
        """Return what is kept of this client's uploads; None where nothing is."""
        return self.blobs.stats(self._owner) if self.blobs is not None else None

    def challenge(self, offer: Offer) -> bytes:
        """Return a nonce where the client must show that it has what it offers; else nothing.

        Raises:
            ProtocolError: so many offers wait for their proof already.
        """
        if self.blobs is None or not offer.digest:
            return b""
        if not self.blobs.needs_proof(offer.digest, offer.total_bytes, self._owner):
            return b""
        if len(self._challenged) >= _MOST_CHALLENGES:
            raise ProtocolError(f"{_MOST_CHALLENGES} offers wait for a proof")
        nonce = secrets.token_bytes(32)
        self._challenged[offer.transfer] = offer, nonce
        return nonce

    def on_proof(self, message: Proof) -> bool:
        """Take a client's answer to a challenge; return whether its bytes are now where they belong.

        Raises:
            ProtocolError: it was not asked.
        """
        try:
            offer, nonce = self._challenged.pop(message.transfer)
        except KeyError:
            raise ProtocolError(f"a proof for transfer {message.transfer}, which nobody has asked for") from None
        return self.on_offer(offer, (nonce, message.proof))

    def on_offer(self, offer: Offer, proof: tuple[bytes, bytes] | None = None) -> bool:
        """An upload begins. Whether its bytes were here already, and are now where they belong; if not, they are kept.

        Args:
            offer: what the client said of it.
            proof: the nonce that it was asked with, and its answer; None where it need not be asked.

        Raises:
            ProtocolError: this worker keeps nothing, or the transfer is under way already.
        """
        if self.blobs is None:
            raise ProtocolError("an upload was offered to a worker that keeps none")
        arrival = self._arrival_of_size(offer.transfer, offer.total_bytes)
        if arrival.over or arrival.view is None:  # cancelled, or there is no memory
            return False
        if arrival.missing != arrival.byte_count or arrival.kept is not None:
            raise ProtocolError(f"transfer {offer.transfer} was offered after it had begun")
        if offer.digest and self.blobs.copy_into(offer.digest, arrival.view, self._user, self._owner):
            # What was copied is the client's only once it has shown that; bytes that it sends itself replace all of it.
            if proof is None or hmac.compare_digest(content_proof(arrival.view, proof[0]), proof[1]):
                self.blobs.is_owned(offer.digest, self._owner)
                arrival.early.append((0, arrival.byte_count))
                arrival.pieces.append((0, arrival.byte_count))
                self._note_landed(offer.transfer, arrival, arrival.byte_count)
                return True
        arrival.kept = self.blobs.start(offer.total_bytes, self._user, self._owner, self._most_blob_bytes)
        return False

    def on_chunk(self, chunk: Chunk) -> None:
        """A piece has landed."""
        arrival, size = self._arrival_of_chunk(chunk), len(chunk.buffers[0])
        if not size and chunk.total_bytes:
            raise ProtocolError(f"a chunk of transfer {chunk.transfer} without a byte")  # they would add up
        buffer, self._buffer = self._buffer, None
        if chunk.offset + size < chunk.total_bytes:
            self._piece_bytes = size
        self._keep(arrival, buffer, chunk.offset, size)
        self._note_landed(chunk.transfer, arrival, size)

    def on_packed_chunk(self, chunk: PackedChunk) -> None:
        """A piece came, compressed.

        Raises:
            ProtocolError: it cannot be unpacked, or does not fit.
        """
        arrival = self._arrival_of_chunk(chunk)
        raw = unpack(chunk)
        buffer = arrival.device.buffer(len(raw)) if arrival.device is not None else None
        if buffer is not None:
            torch_codec.byte_view(buffer)[: len(raw)] = raw
        elif arrival.view is not None:
            arrival.view[chunk.offset : chunk.offset + len(raw)] = raw
        self._keep(arrival, buffer, chunk.offset, len(raw))
        self._note_landed(chunk.transfer, arrival, len(raw))

    @staticmethod
    def _keep(arrival: IncomingTransfer, buffer: torch.Tensor | None, offset: int, size: int) -> None:
        """A piece has landed, in `buffer` or in the arrival's own memory."""
        arrival.pieces.append((offset, size))
        if arrival.kept is not None:
            landed = torch_codec.byte_view(buffer)[:size] if buffer is not None else arrival.bytes(offset, size)
            if landed is not None:
                arrival.kept.write(offset, landed)
        if buffer is None:
            arrival.early.append((offset, size))
            return
        assert arrival.device is not None
        try:
            arrival.device.forward(buffer, offset, size)
        except RuntimeError as error:  # the device has failed; whoever wants the values learns of it
            arrival.fail(error)

    def _note_landed(self, number: int, arrival: IncomingTransfer, byte_count: int) -> None:
        self._moved()
        with self._lock:
            arrival.count(byte_count)
            if self.lasting and arrival.missing <= 0:
                if len(self._complete) >= _REMEMBERED_ARRIVALS:
                    self._complete.pop(next(iter(self._complete)))
                self._complete[number] = arrival.byte_count
            self._tidy(number, arrival)

    def on_cancel(self, message: CancelTransfer) -> None:
        """No more pieces of this transfer come."""
        with self._lock:
            arrival = self._arrivals.get(message.transfer)
            if arrival is not None:
                arrival.over = True
                arrival.fail(TransferCancelledError(message.reason))
                self._tidy(message.transfer, arrival)
            else:
                if len(self._cancelled) >= _REMEMBERED_CANCELS:
                    self._cancelled.pop(next(iter(self._cancelled)))
                self._cancelled[message.transfer] = message.reason

    def send(self, transport: Transport) -> None:
        """Writes departures until `end`, or until the connection breaks."""
        self.sender(transport)()

    def sender(self, transport: Transport) -> Callable[[], None]:
        """Return what writes departures to a connection that begins now."""
        return partial(self._send_from, self._departures, transport)

    def _send_from(self, departures: queue.SimpleQueue[OutgoingTransfer | None], transport: Transport) -> None:
        writer = ChunkWriter(transport)
        while (departure := departures.get()) is not None:
            try:
                with departure.reading():
                    self._send_one(transport, writer, departure)
            except SessionLostError:
                if self.lasting:
                    return  # the client asks for it again
                self.end()
            finally:
                if not self.lasting:
                    departure.end()

    def _send_one(self, transport: Transport, writer: ChunkWriter, departure: OutgoingTransfer) -> None:
        tensor, offset = departure.tensor, 0
        try:
            for piece in () if departure.is_over else self._staging.pieces(tensor):
                if departure.is_over:
                    break
                if offset >= departure.offset:
                    writer.send(departure.number, offset, tensor.nbytes, piece, tensor.element_size())
                    departure.begun = True
                    self._moved()
                offset += len(piece)
        except RuntimeError as error:  # the device has failed; whoever asked for the values learns of it
            self.on_device_failure(error)
            with contextlib.suppress(SessionLostError):
                transport.send(CancelTransfer(departure.number, f"the values could not be read: {error!r:.500}"))

    def end(self) -> None:
        """The bulk connection is gone: nobody waits any longer."""
        with self._lock:
            self._ended = True
            for arrival in self._arrivals.values():
                arrival.fail(RuntimeError("the bulk connection ended"))
            pending: list[OutgoingTransfer] = list(self._leaving.values())
            self._leaving.clear()
        while True:
            try:
                departure = self._departures.get_nowait()
            except queue.Empty:
                break
            if departure is not None:
                pending.append(departure)
        for departure in pending:
            departure.end()
        self._departures.put(None)
