"""The part of a `Node` that saves values of its session, and brings them back in another program."""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING, Any

import torch

from skyproxy import torch_modes
from skyproxy.errors import ConfigurationError, ProtocolError, SkyproxyError
from skyproxy.interrupts import raised_by_handler
from skyproxy.loading.node_models import NodeModels
from skyproxy.loading.node_names import KnownTensors, NodeNames, adopt_value, checked_name, document_of
from skyproxy.session.opening import Opener

if TYPE_CHECKING:
    from skyproxy.loading.saved_names import Location, SavedValue


class NodeSaves(NodeModels, NodeNames):
    """Saves values of the session, and restores them."""

    url: str
    software: dict[str, str]
    _opener: Opener | None

    def save(self, value: object, path: Location | None = None, **values: object) -> str:
        """Saves values of this session, for another program and another worker: `skyproxy.restore(location)`.

        `node.save(location, model=model, ...)` saves what is given by keyword and what was put under names
        (`node.put`), and with it the random state of the devices and PyTorch's global modes, such as the default dtype.
        What is shared stays shared. Saving to the same place again writes what has changed; the two newest are kept.

        `node.save(value, path)` writes remote tensors, and containers of them, to the worker's disk, as `torch.save`
        does. No byte comes here.

        Args:
            value: the location: a folder on this machine; "worker:NAME", on the worker's own volume; or an address of
                fsspec, such as "s3://bucket/experiment". With a path: a state dict, say; not a module.
            path: on the worker; with the ending ".safetensors" in that format. The file appears when it is whole.
            values: what to save, each under its name: tensors, modules, optimizers, or any structure of them.

        Returns:
            The location; with a path, the absolute path on the worker.

        Raises:
            ConfigurationError: there is nothing to save, a value cannot be pickled, or the worker keeps no snapshots.
            SnapshotError: it cannot be written; what was saved there before is untouched.
            SessionLostError: the session is over.

        Example:
            ```python
            model = torch.nn.Linear(4, 2).to(node.devices[0])
            node.save("experiment", model=model)  # the session; skyproxy.restore("experiment", trust=True)
            print(node.save(model.state_dict(), "model.pt"))  # a file there
            ```
        """
        if path is not None:
            if values:
                raise ConfigurationError("node.save(value, path) writes one value; leave the path out to save several.")
            return super().save(value, path)
        if not isinstance(value, str | os.PathLike):
            raise ConfigurationError(
                "node.save(value, path) writes a value to the worker's disk, and needs the path; node.save(location, "
                "model=model) saves a session."
            )
        location: Location = value
        self._save_session(location, values)
        return os.fspath(location)

    def _save_session(self, location: Location, values: dict[str, object]) -> None:
        from skyproxy.loading.saved_names import SavedValue, name_on_worker, pack_names, slots_of, unwritable
        from skyproxy.session.snapshot_copies import copy_beside, write_to_folder
        from skyproxy.snapshots.folder import SnapshotFolder
        from skyproxy.snapshots.stores import open_store

        self._check_snapshots()
        pickled = {checked_name(name): self._pickle_value(name, value) for name, value in values.items()}
        kept: list[torch.Tensor] = []  # until it is written
        saved: dict[str, SavedValue] = {}
        for name in self.named() if self.session_name is not None else ():
            document, tensors = self._named_document(name)
            kept += tensors
            saved[name] = SavedValue(document, slots_of(tensors))
        for name, value in pickled.items():
            saved[name] = SavedValue(document_of(value), slots_of(value.references))
        if not saved:
            raise ConfigurationError(
                'nothing was named that could be saved. Say what: node.save("folder", model=model, optimizer=optimizer)'
            )
        slots = sorted({slot for value in saved.values() for slot in value.slots})
        names = pack_names(saved)
        on_worker = name_on_worker(location)
        if on_worker:
            self._session.call("save_snapshot", on_worker, slots, names)
            return
        store = open_store(location)  # what is wrong with it should be known first
        session, opener, key = self._session, self._require_opener(), secrets.token_hex(16)
        folder = SnapshotFolder(store, secrets.token_hex(16))
        try:
            session.call("save_snapshot", key, slots, names)
            copy_beside(session, opener, lambda worker: write_to_folder(worker.open(key), folder, names))
        except OSError as error:
            if raised_by_handler(error) or isinstance(error, SkyproxyError):
                raise
            raise unwritable(store, error) from error
        finally:
            self._delete_snapshot(key)

    def _restore(self, location: Location, *, trust: bool) -> None:
        """Bring back what `save` wrote; see `skyproxy.restore`."""
        from skyproxy.loading.saved_names import name_on_worker, read_names
        from skyproxy.session.snapshot_copies import copy_beside, copy_in_folder
        from skyproxy.snapshots.folder import SnapshotFolder
        from skyproxy.snapshots.origin import check_origin
        from skyproxy.snapshots.stores import open_store

        self._check_snapshots()
        on_worker = name_on_worker(location)
        if on_worker:
            answer = self._session.call("open_snapshot", on_worker, "")
            self._take(read_names(answer.get("names")), answer, trust or self._runner.trusted)
            return
        key = secrets.token_hex(16)
        store = open_store(location)
        with copy_in_folder(SnapshotFolder(store)) as copy:
            names = read_names(copy.names)
            devices = {(device.row["type"], device.row["index"] or 0) for device in self._devices}
            check_origin(copy.document, self.software.get("torch", ""), devices)
            nameless = copy._replace(names=b"")
            try:
                copy_beside(self._session, self._require_opener(), lambda worker: worker.write(nameless, key))
                answer = self._session.call("open_snapshot", key, "")
            finally:
                self._delete_snapshot(key)
        self._take(names, answer, trust)

    def _delete_snapshot(self, key: str) -> None:
        """Delete from the worker's volume what was there on its way only, as far as that can be done."""
        with contextlib.suppress(SkyproxyError):
            self._session.call("delete_snapshot", key)

    def _take(
        self, names: tuple[dict[str, SavedValue], torch_modes.Record], answer: dict[str, Any], trust: bool
    ) -> None:
        """Make the values that the worker has read the session's own."""
        from skyproxy.loading.saved_names import looks_of

        saved, modes = names
        try:
            by_slot = {int(row[0]): row for row in answer["rows"]}
        except (LookupError, TypeError, ValueError) as error:
            if raised_by_handler(error):
                raise
            raise ProtocolError(f"what the worker sent of a snapshot is impossible: {error!r:.200}") from error
        known = KnownTensors()
        pairs: list[list[int]] = []
        values: dict[str, list[torch.Tensor]] = {}
        for name, value in saved.items():
            looks = looks_of(name, value, by_slot)
            with torch.inference_mode(False), torch.no_grad():
                tensors, slots = adopt_value(self._devices, known, looks, [by_slot[slot] for slot in value.slots])
            values[name] = tensors
            known.note(value.slots, tensors)
            pairs += [[before, now] for before, now in zip(value.slots, slots, strict=True) if now]
        self._session.call("adopt_snapshot", pairs)
        for mode, setting in modes:
            torch_modes.MODES[mode].write(setting)
        for name, tensors in values.items():
            document = saved[name].document
            if self.session_name is None:
                self._restored[name] = document, tensors, trust
            else:
                self._keep(name, document, tensors)

    def _check_snapshots(self) -> None:
        self._session.check()
        self._require_opener()
        if not self._session.welcome.limits.get("snapshots"):
            raise ConfigurationError(
                f"the worker at {self.url} keeps no snapshots, which sessions are saved from. Start it with "
                "--snapshots FOLDER."
            )

    def _require_opener(self) -> Opener:
        if self._opener is None:
            raise ConfigurationError("this node was made without a way to open a connection for snapshots")
        return self._opener
