"""The part of a `Node` that keeps values under names: they outlive the program that put them there."""

from __future__ import annotations

import collections
import contextlib
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgpack
import torch

from skyproxy import torch_codec
from skyproxy.errors import (
    ConfigurationError,
    ProtocolError,
    SessionHeldError,
    SkyproxyError,
    UnknownNameError,
    UntrustedResultError,
    visible,
)
from skyproxy.functions.runner import Runner
from skyproxy.interrupts import raised_by_handler
from skyproxy.payloads.pickling import PICKLE, PLAIN, Pickled, Pickler, Unpickler
from skyproxy.payloads.plain import NotPlainError
from skyproxy.payloads.plain_reading import from_plain
from skyproxy.payloads.plain_writing import to_plain, write_as
from skyproxy.payloads.rebuilding import UnknownClassError
from skyproxy.payloads.tensors import REFERENCE, Row, as_leaf
from skyproxy.protocol import answers
from skyproxy.session.session import Session
from skyproxy.tensor.core import host_copies
from skyproxy.tensor.core.devices import DEVICES, Handle, SkyDevice
from skyproxy.tensor.core.memory import Memory, memory_of
from skyproxy.tensor.core.metadata import intern_meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor, make_tensor
from skyproxy.tensor.torch_api.state_dicts import RemoteStateDict, as_state_dict

write_as(torch.Tensor, RemoteTensor)
write_as(collections.OrderedDict, RemoteStateDict)

_MOST_ROWS = 1 << 20
_MOST_CHARACTERS = 200


class NamedValue(NamedTuple):
    """A value under a name; `Node.named` gives it.

    Attributes:
        tensors: how many tensors it has on the worker.
        bytes: what they hold there, a storage that several share counted once.
        age_seconds: the time since it was put there.

    Example:
        ```python
        for name, value in node.named().items():
            print(name, value.bytes, value.age_seconds)
        ```
    """

    tensors: int
    bytes: int
    age_seconds: float


class NodeNames:
    """Keeps values under names, for programs that come later.

    Attributes:
        session_name: the name of this session, as `skyproxy.connect(url, session=...)` gave it; else None.
    """

    session_name: str | None = None
    _restored: dict[str, tuple[bytes, list[torch.Tensor], bool]]
    _runner: Runner
    _session: Session
    _devices: list[SkyDevice]
    _known: KnownTensors

    def _hold(self, name: str, *, take: bool) -> None:
        """Use the named session from now on.

        Raises:
            SessionHeldError: another client does.
            ConfigurationError: the worker has none.
        """
        answer = self._session.call("hold_named", checked_name(name), take)
        if "refused" in answer:
            raise ConfigurationError(visible(answer["refused"]))
        if "moved" in answer:
            raise SessionHeldError(
                f"the session {name!r} has moved to {visible(answer['moved'])}: "
                "skyproxy.connect(that address, session=...) finds it there. take=True begins a new one here."
            )
        if "elsewhere" in answer:
            raise SessionHeldError(
                f"the session {name!r} is in use, or in the memory, of another worker that has the same volume "
                f"({visible(str(answer['elsewhere']))}). Connect there. With take=True that worker saves it for you, "
                "and its client loses its session; one that does not answer is not waited for, and you get what was "
                "saved last."
            )
        if "held_seconds" in answer:
            raise SessionHeldError(
                f"the session {name!r} has been in use by another client for {float(answer['held_seconds']):.0f} s. "
                "Nothing in it was changed. skyproxy.connect(..., session=..., take=True) takes it over: what was put "
                "under a name stays, and the other client loses its session."
            )
        self.session_name = name
        self._known = KnownTensors()

    def _finish_named(self) -> None:
        """Have everything executed that was recorded, because others will see what it makes of the named values."""
        if self.session_name is not None and self._session.is_reachable:
            with contextlib.suppress(SkyproxyError):  # of operations whose errors nobody waited for
                self._session.synchronize()

    def _check_named(self, name: str = "x") -> None:
        checked_name(name)
        if self.session_name is None:
            raise ConfigurationError(
                "this session has no name, so nothing in it could be found again. Connect with one: "
                'skyproxy.connect(url, session="exp1")'
            )

    def put(self, name: str, value: object) -> None:
        """Keeps a value under a name, where a later program finds it: `skyproxy.connect(url, session=...).get(name)`.

        Tensors stay where they are, and no bytes of them move; later operations in place change what is kept as well.
        Everything else, CPU tensors and numbers included, is kept as it is now.

        Args:
            name: a text of up to 200 characters; what has it already is replaced.
            value: a tensor, a module, an optimizer, or any structure of them. What is shared stays shared, within a
                value and between the values of a session. More than plain data is kept as a pickle, and only for a
                worker that this program trusts.

        Raises:
            ConfigurationError: the session has no name, or the value is not plain data and the worker is not trusted,
                or it has tensors of another worker.
            LimitExceededError: there are too many names, or too much that is not on the worker.

        Example:
            ```python
            with skyproxy.connect(url, token=token, session="exp1", trust_worker=True) as node:
                model = torch.nn.Linear(8, 8).to(node.devices[0])
                node.put("model", model)
            ```
        """
        self._check_named(name)
        pickled = self._pickle_value(name, value)
        self._keep(name, document_of(pickled), pickled.references)

    def _keep(self, name: str, document: bytes, tensors: Sequence[Any]) -> None:
        """Have the worker keep a value under a name."""
        numbers = self._session.call("put_named", name, document, [tensor._sky.slot for tensor in tensors])
        if len(numbers) != len(tensors):
            raise ProtocolError(f"the worker keeps {len(numbers)} tensors under {name!r} in place of {len(tensors)}")
        self._note(numbers, tensors)

    def _note(self, numbers: Sequence[int], tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            host_copies.escape(tensor._sky)  # other sessions may write to it
        self._known.note(numbers, tensors)

    def _pickle_value(self, name: str, value: object) -> Pickled:
        def refer(tensor: torch.Tensor) -> list[object] | None:
            if type(tensor) is not RemoteTensor:
                return None
            if tensor._sky.device.session is not self._session:
                raise ConfigurationError(
                    f"{name!r} holds tensors of another worker, or of a session that is over. Move them here first: "
                    "x.to(node.device(...))."
                )
            return []

        def refer_device(device: torch.device) -> list[object] | None:
            return DEVICES.of(device).place if device.type == "sky" else None

        try:
            return to_plain(value, refer)
        except NotPlainError as error:
            if not self._runner.trusted:
                raise ConfigurationError(
                    f"{name!r} is not plain data: {error.what}. It would come back as a pickle, which can run any code "
                    "here, and this worker is not trusted. Put its state_dict(); or connect with trust_worker=True."
                ) from error
        try:
            return Pickler(refer, refer_device).pickle(value)
        except ConfigurationError:
            raise
        except (TypeError, AttributeError, pickle.PicklingError, ValueError, RecursionError) as error:
            if raised_by_handler(error):
                raise
            raise ConfigurationError(f"{name!r} cannot be kept, for it cannot be pickled: {error}") from error

    def get(self, name: str) -> Any:
        """The value that was put under a name, by this program or one before it; its tensors stay where they are.

        A tensor that this program has already, by `put` or `get`, comes back as that very object.

        Raises:
            ConfigurationError: the session has no name.
            UnknownNameError: nothing was put under this one; says what was.
            UntrustedResultError: it is a pickle, and the worker is not trusted. It stays there.

        Example:
            ```python
            with skyproxy.connect(url, token=token, session="exp1", trust_worker=True) as node:
                model = node.get("model")
            ```
        """
        if self.session_name is None and self._restored:
            if checked_name(name) not in self._restored:
                there = ", ".join(map(repr, self._restored))
                raise UnknownNameError(f"nothing was restored under {name!r}: {there}")
            document, tensors, is_trusted = self._restored[name]
            with torch.inference_mode(False), torch.no_grad():
                form, tables, pieces = open_document(document)
                if form != PLAIN and not is_trusted:
                    raise UntrustedResultError(
                        f"{name!r} was saved as a pickle, which can run any code here, and nothing of it was read. If "
                        "you trust where it comes from: skyproxy.restore(..., trust=True); or save its state_dict()."
                    )
                return self._rebuild(form, tables, pieces, tensors)
        with torch.inference_mode(False), torch.no_grad():
            document, tensors = self._named_document(name)
            return self._rebuild(*open_document(document), tensors)

    def _named_document(self, name: str) -> tuple[bytes, list[torch.Tensor]]:
        """Return what the worker has under a name: its structure, and its tensors.

        Raises:
            UnknownNameError: nothing was put under this one; says what was.
            UntrustedResultError: it is a pickle, and the worker is not trusted.
        """
        self._check_named(name)
        answer = self._session.call("named_value", name)
        if "names" in answer:
            there = ", ".join(visible(repr(other)) for other in answer["names"]) or "nothing yet"
            raise UnknownNameError(f"nothing was put under {name!r} in the session {self.session_name!r}: {there}")
        try:
            form, tables, _ = open_document(answer["document"])
        except (KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
            if raised_by_handler(error):
                raise
            raise ProtocolError(f"what the worker sent for {name!r} is impossible: {error!r:.200}") from error
        if form != PLAIN and not self._runner.trusted:
            raise UntrustedResultError(
                f"{name!r} is a pickle, which can run any code here, and its worker is not trusted; nothing of it "
                "was read, and it stays there. Connect with trust_worker=True if you trust that worker."
            )
        with torch.inference_mode(False), torch.no_grad():
            return answer["document"], self._adopt_tensors(name, answer, tables)

    def _rebuild(self, form: str, tables: dict[str, Any], pieces: list[object], tensors: Sequence[torch.Tensor]) -> Any:
        if form != PLAIN:
            return Unpickler(pieces, tables, lambda row, position: tensors[position], self._device_at).unpickle()
        try:
            return as_state_dict(from_plain(pieces, tables, lambda row, position: tensors[position]))
        except UnknownClassError as error:
            raise UntrustedResultError(
                f"it has an object of {visible(error)}, which this program does not have. Import it first."
            ) from error

    def _device_at(self, place: Any) -> torch.device:
        for device in self._devices:
            if device.place == list(place):
                return device.torch_device
        raise ProtocolError(f"this worker has no device {place!r:.80}")

    def _adopt_tensors(self, name: str, answer: dict[str, object], tables: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors that a named value refers to, in their order."""
        try:
            looks: list[Row] = [row for row in tables["tensors"] if row[0] == REFERENCE]
            rows = msgpack.unpackb(answer["rows"])
            if len(rows) != len(looks) or len(rows) > _MOST_ROWS:
                raise ValueError(f"{len(rows)} tensors in place of {len(looks)}")
            tensors, slots = adopt_value(self._devices, self._known, looks, rows)
            version = answer["version"]
        except (LookupError, TypeError, ValueError, msgpack.UnpackException) as error:
            if raised_by_handler(error):
                raise
            raise ProtocolError(f"what the worker sent for {name!r} is impossible: {error!r:.200}") from error
        if not self._session.call("adopt_named", name, version, slots):
            raise UnknownNameError(f"the value under {name!r} was replaced while it was being read. Try again.")
        self._note([row[0] for row in rows], tensors)
        return tensors

    def named(self) -> dict[str, NamedValue]:
        """Return what this session has under names: how many tensors, their bytes, and since when.

        Raises:
            ConfigurationError: the session has no name.

        Example:
            ```python
            with skyproxy.connect(url, token=token, session="exp1") as node:
                print(sorted(node.named()))
            ```
        """
        if self.session_name is None and self._restored:
            return {name: _named_value(tensors) for name, (_, tensors, _) in self._restored.items()}
        self._check_named()
        rows = self._session.call("list_named")
        return {str(name): NamedValue(int(count), int(size), float(age)) for name, count, size, age in rows}

    def forget(self, name: str) -> bool:
        """Lets go of what stands under a name; tensors that this program has live on. Whether there was anything.

        Raises:
            ConfigurationError: the session has no name.

        Example:
            ```python
            with skyproxy.connect(url, token=token, session="exp1") as node:
                node.forget("model")
            ```
        """
        self._check_named(name)
        return bool(self._session.call("forget_named", name))


def checked_name(name: object) -> str:
    """The name, if it may be one.

    Raises:
        ConfigurationError: it may not.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_CHARACTERS:
        raise ConfigurationError(
            f"{name!r:.80} is not a name. Names are strings of 1 to {_MOST_CHARACTERS} characters."
        )
    return name


def document_of(pickled: Pickled) -> bytes:
    """The structure of a value, as it is kept."""
    pieces = [bytes(piece) for piece in pickled.pieces]
    document: bytes = msgpack.packb({"form": pickled.form, "tables": pickled.tables, "pieces": pieces})
    return document


def open_document(document: bytes) -> tuple[str, dict[str, object], list[object]]:
    """The form, the tables and the pieces of a document: those with the bytes of storages as tensors.

    Raises:
        KeyError, TypeError, ValueError, msgpack.UnpackException: it is none.
    """
    fields = msgpack.unpackb(document)
    form, tables, pieces = fields["form"], fields["tables"], fields["pieces"]
    first = len(pieces) - len(tables["bases"])
    if form not in (PLAIN, PICKLE) or first < 1 or not all(type(piece) is bytes for piece in pieces):
        raise ValueError("it is not a document")
    contents = [torch.frombuffer(bytearray(piece), dtype=torch.uint8) if piece else _EMPTY for piece in pieces[first:]]
    return form, tables, [*pieces[:first], *contents]


def _named_value(tensors: Sequence[torch.Tensor]) -> NamedValue:
    return NamedValue(len(tensors), sum(tensor.nbytes for tensor in tensors), 0.0)


_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")


class KnownTensors:
    """The tensors of this program that stand under names, by the numbers that the worker gave them."""

    def __init__(self) -> None:
        # With its handle: a tensor that has got another value since is no longer the one of that number.
        self._tensors: dict[int, tuple[weakref.ref[RemoteTensor], Handle]] = {}

    def note(self, numbers: Sequence[int], tensors: Sequence[Any]) -> None:
        """Take note of the numbers of tensors."""
        for number, tensor in zip(numbers, tensors, strict=True):
            self._tensors[number] = weakref.ref(tensor, self._forgetting(number)), tensor._sky

    def _forgetting(self, number: int) -> Callable[[object], None]:
        tensors = self._tensors

        def forget(reference: object) -> None:
            found = tensors.get(number)
            if found is not None and found[0] is reference:
                del tensors[number]

        return forget

    def find(self, number: int) -> RemoteTensor | None:
        """The tensor of a number, if it lives."""
        found = self._tensors.get(number)
        if found is None:
            return None
        tensor = found[0]()
        return tensor if tensor is not None and tensor._sky is found[1] else None


def adopt_value(
    devices: Sequence[SkyDevice], known: KnownTensors, looks: Sequence[Row], rows: Sequence[list[Any]]
) -> tuple[list[torch.Tensor], list[int]]:
    """Make the tensors of one value, whose bytes the worker has.

    Args:
        devices: the node's.
        known: tensors that are there already, by the numbers that the worker has for them.
        looks: their rows in the value's document.
        rows: for each: its number, what it looks like, its device, the bytes of its storage, and the numbers of all
            that share that.

    Returns:
        The tensors, and for each the slot where its value goes; 0 for one that is there.

    Raises:
        ProtocolError: the rows are impossible.
    """
    adoption = _Adoption(devices, known)
    try:
        return [adoption.tensor(look, row) for look, row in zip(looks, rows, strict=True)], adoption.slots
    except (
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # the last of PyTorch, for sizes that it cannot have
        if isinstance(error, SkyproxyError):
            raise
        raise ProtocolError(f"what the worker sent of a value's tensors is impossible: {error!r:.200}") from error


_NUMBER = answers.integer
_ROW = answers.row(
    _NUMBER, answers.description, answers.row(answers.name, _NUMBER), answers.size, answers.rows(_NUMBER)
)


class _Adoption:
    """Makes the tensors of one named value.

    Attributes:
        slots: for each of them, where its value goes; 0 for one that is there.
    """

    def __init__(self, devices: Sequence[SkyDevice], known: KnownTensors) -> None:
        self.slots: list[int] = []
        self._devices = {(device.row["type"], device.row["index"] or 0): device for device in devices}
        self._known = known
        self._roots: dict[int, Handle] = {}

    def tensor(self, look: Row, row: list[Any]) -> torch.Tensor:
        """The tensor of a row of the worker, with the gradients' marks of the document."""
        number, fields, place, storage_bytes, kin = _ROW(row)
        kind, index = place
        found = self._known.find(number)
        if found is not None:
            self.slots.append(0)
            return found
        root = self._root(kin)
        meta = intern_meta(torch_codec.decode_description(fields))
        handle = self._devices[kind, index].new_handle(meta, root)
        if root is None and kin:
            self._roots[min(kin)] = handle
            handle.memory = Memory(storage_bytes)
        self.slots.append(handle.slot)
        return as_leaf(make_tensor(meta, handle), look)

    def _root(self, kin: list[int]) -> Handle | None:
        """The handle whose storage this is; None where none of them is here."""
        if not kin:
            return None
        root = self._roots.get(min(kin))
        if root is None:
            for number in kin:
                tensor = self._known.find(number)
                if tensor is not None:
                    memory_of(tensor._sky)
                    root = self._roots[min(kin)] = tensor._sky.root or tensor._sky
                    break
        return root
