"""Snapshots that somebody has changed, cut short or made: refused in words, and nothing is harmed."""

from __future__ import annotations

import copy
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skyproxy.errors import SnapshotError
from skyproxy.snapshots import documents, hashes
from skyproxy.snapshots.folder import KEPT_SNAPSHOTS, MAGIC, SnapshotFolder
from skyproxy.snapshots.hashes import BLAKE3, SHA256, fastest
from skyproxy.torch_codec import describe, encode_description
from skyproxy_server.snapshots.capture import Captured, capture
from skyproxy_server.snapshots.restore import is_empty, restore
from tests.server.snapshots.sessions import ADD, ADD_, DO, EMBED, EXPECT, RELEASE, REPLAY, Session

CPU = ["cpu", None]
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Hundreds of snapshots wait for a disk for minutes."""
HASHES = sorted({SHA256, fastest()})
"""Those that are installed here."""
DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn]


def rich(root: Path) -> Session:
    """A session with a value of each kind."""
    session = Session(root)
    session.put(s1=torch.rand(2, 3), s2=torch.tensor([9]), s4=torch.rand(2, 3).to_sparse(), s5=torch.rand(9))
    two = encode_description(describe(torch.zeros(2, 3)))
    session.run(DO, "graph_begin", [])
    session.run(DO, "graph_define", [7, [ADD, 1, 1, 10, ADD_, 10, 1], [[10, two]], [CPU], {}], REPLAY, 7)
    session.run(DO, "new_generator", [6, CPU], DO, "resize_storage", [5, 4], DO, "record_event", [8, CPU, True])
    session.run(EMBED, 1, 2, 3, ADD_, 1, 3)
    believed = encode_description(describe(torch.empty(3, 2).t()))
    session.run(EXPECT, [believed], ADD, 10, 10, 11)
    session.slots[9] = [session.slots[1], 1.5, 2 + 1j, None]
    return session


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Captured]]:
    root = tmp_path_factory.mktemp("volume")
    with rich(root) as session:
        captured = capture(session.state)
        captured.storages = [storage.clone() for storage in captured.storages]
        assert session.call("save_snapshot", "s")["snapshot"] == "1"
    return root, captured


# --- arbitrary tensors -----------------------------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn) -> list[torch.Tensor]:
    """Tensors of a few memories, anywhere in them, with any strides."""
    memories = [
        torch.randint(0, 2, (draw(st.integers(0, 200)),), dtype=torch.uint8) for _ in range(draw(st.integers(1, 3)))
    ]
    made: list[torch.Tensor] = []
    for _ in range(draw(st.integers(1, 6))):
        memory, dtype = draw(st.sampled_from(memories)), draw(st.sampled_from(DTYPES))
        room = memory.numel() // dtype.itemsize
        offset = draw(st.integers(0, room))
        size: list[int] = []
        stride: list[int] = []
        left = room - offset - 1
        for _ in range(draw(st.integers(0, 4))):
            step = draw(st.integers(0, 7))
            most = 5 if not step else max(min(5, left // step + 1), 0)
            size.append(draw(st.integers(0 if left < 0 else 1, max(most, 0 if left < 0 else 1))))
            stride.append(step)
            left -= max(size[-1] - 1, 0) * step
        if left < 0 and 0 not in size:
            size, stride = [0, *size], [1, *stride]
        tensor = torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), offset, size, stride)
        if dtype.is_complex and draw(st.booleans()):
            tensor = tensor.conj()
        if dtype.is_floating_point and dtype.itemsize == 4 and draw(st.booleans()):
            tensor = torch._neg_view(tensor)
        made.append(tensor)
        if draw(st.booleans()):
            made.append(draw(st.sampled_from(made)))
    return made


def shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def memory_of(tensor: torch.Tensor) -> bytes:
    return bytes(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).tolist())


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tensors())
def test_any_tensors_come_back_with_what_they_share(given_tensors: list[torch.Tensor]) -> None:
    with tempfile.TemporaryDirectory() as folder, Session(Path(folder)) as session:
        session.slots.update(enumerate(given_tensors, 1))
        assert "snapshot" in session.call("save_snapshot", "s")
        with Session(Path(folder), ops=False) as other:
            other.call("load_snapshot", "s")
            here, there = session.slots, other.slots
            assert here.keys() == there.keys()
            for a in range(1, len(given_tensors) + 1):
                assert describe(here[a]) == describe(there[a])
                assert memory_of(here[a]) == memory_of(there[a])
                for b in range(1, a):
                    assert (here[a] is here[b]) == (there[a] is there[b])
                    assert shares(here[a], here[b]) == shares(there[a], there[b])


# --- what was changed ------------------------------------------------------------------------------------------------


def refused(root: Path, change: Callable[[Path], object]) -> str:
    """The words in which a changed copy of the snapshots is refused; empty if it is not."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(root, folder, dirs_exist_ok=True)
        change(Path(folder) / "token" / "s")
        with Session(Path(folder), ops=False) as other:
            answer = other.call("load_snapshot", "s")
            if "snapshot" in answer:
                return ""
            assert answer["type"] == "SnapshotError", answer
            assert is_empty(other.state)
            assert not other.state.values.gates
            assert other.sequence == 1
            assert other.call("save_snapshot", "fresh")["snapshot"] == "1"  # the session goes on
            return str(answer["message"])


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_file_that_was_cut_or_changed_is_refused(snapshot: tuple[Path, Captured], data: st.DataObject) -> None:
    root, _ = snapshot
    kinds = ["snapshot-*.msgpack", "pack-*.safetensors"]
    kind = data.draw(st.sampled_from(kinds))

    def change(folder: Path) -> None:
        (path,) = folder.glob(kind)
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            path.write_bytes(content[:at])
        else:
            content[at] ^= data.draw(st.integers(1, 255))
            path.write_bytes(content)

    words = refused(root, change)
    if kind == kinds[0]:
        assert words
    # A byte of a pack may be a space of its padding, or of a piece's row beside its place: then all is as it was.


ODD: list[Any] = [None, -1, 0, 1, 7, 1 << 40, 1 << 63, "", "cuda", "qint8", b"\0", [], {}, [[]], 1.5, True, 2j]


def mutations(value: Any, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    """The document with one part of it exchanged."""
    if isinstance(value, dict) and value and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(value, key=str)))
        return {**value, key: mutations(value[key], draw)}
    if isinstance(value, list) and value and draw(st.integers(0, 9)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], mutations(value[at], draw), *value[at + 1 :]]
    return draw(st.sampled_from(ODD))


@settings(max_examples=300, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_forged_document_is_refused_or_harmless(snapshot: tuple[Path, Captured], data: st.DataObject) -> None:
    """What is not refused can be used: no value reaches beyond its memory, and all can be read or fail in words."""
    root, captured = snapshot
    forged = documents.pack(mutations(captured.document, data.draw))
    with Session(root, ops=False) as other:
        try:
            document = documents.unpack(forged)
            restore(other.state, document, [storage.clone() for storage in captured.storages], 1000)
        except SnapshotError:
            assert is_empty(other.state)
            assert not other.state.values.gates
            return
        for slot, value in list(other.slots.items()):
            if isinstance(value, torch.Tensor) and slot:
                other.run(7, 5, [slot], [])  # DESCRIBE
                if value.layout is torch.strided:
                    reach = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1
                    end = (int(value.storage_offset()) + reach) * value.element_size() if value.numel() else 0
                    shrunk = {int(storage._cdata) for storage, _ in other.state.values.gates.shrunk()}
                    storage = value.untyped_storage()
                    assert end <= storage.nbytes() or int(storage._cdata) in shrunk
        for number in list(other.state.graphs.recordings_by_slot):
            assert isinstance(number, int)


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../../x", "pack-0.safetensors", "pack-0123456789abcdef.safetensors", 7, ""],
)
def test_a_header_that_names_other_files_is_refused(snapshot: tuple[Path, Captured], path: Any) -> None:
    def change(folder: Path) -> None:
        (file,) = folder.glob("snapshot-*.msgpack")
        header = documents.unpack(file.read_bytes()[len(MAGIC) + 32 :])
        header["packs"] = [path]
        body = documents.pack(header)
        file.write_bytes(MAGIC + hashlib.sha256(body).digest() + body)

    assert refused(snapshot[0], change)


def test_a_header_of_a_newer_format_is_refused_by_that_name(snapshot: tuple[Path, Captured]) -> None:
    def change(folder: Path) -> None:
        (file,) = folder.glob("snapshot-*.msgpack")
        file.write_bytes(file.read_bytes().replace(MAGIC, b"skyproxy snapshot 3\n", 1))

    assert "of a newer format" in refused(snapshot[0], change)


def test_a_hash_that_is_not_known_here_is_refused_by_its_name(snapshot: tuple[Path, Captured]) -> None:
    def change(folder: Path) -> None:
        (path,) = folder.glob("snapshot-*.msgpack")
        rewrite(path, lambda header: header.update(hash="md5"))

    assert "'md5'" in refused(snapshot[0], change)


@pytest.mark.skipif(BLAKE3 not in HASHES, reason="blake3 is not installed")
def test_pieces_by_blake3_are_of_format_2_and_refused_where_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(tmp_path) as session:
        session.put(s20=torch.rand(10_000), s21=torch.rand(3))
        plain = session.call("save_snapshot", "s")
        fast = session.call("save_snapshot", "s", None, b"", BLAKE3)
        assert fast["written_bytes"] == plain["written_bytes"] == plain["bytes"], "no piece has both names"
        assert session.call("save_snapshot", "s", None, b"", BLAKE3)["written_bytes"] == 0
        expected = picture(session)
    headers = sorted((tmp_path / "token" / "s").glob("snapshot-*.msgpack"))
    assert all(path.read_bytes().startswith(b"skyproxy snapshot 2\n") for path in headers)
    with Session(tmp_path, ops=False) as other:
        assert other.call("load_snapshot", "s")["snapshot"] == "3"
        assert picture(other) == expected
    monkeypatch.setattr(hashes, "_blake3", lambda: None)
    with Session(tmp_path, ops=False) as other:
        assert "install the package blake3" in other.call("load_snapshot", "s")["message"]
        assert is_empty(other.state)
        assert other.call("save_snapshot", "t", None, b"", BLAKE3)["snapshot"] == "1"
        assert other.call("load_snapshot", "t")["snapshot"] == "1"


def test_a_pack_that_is_a_link_is_not_followed(snapshot: tuple[Path, Captured], tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        (pack,) = folder.glob("pack-*.safetensors")
        pack.rename(tmp_path / "elsewhere")
        pack.symlink_to(tmp_path / "elsewhere")

    assert "cannot be read" in refused(snapshot[0], change)


def test_packs_are_files_of_the_safetensors_format(snapshot: tuple[Path, Captured]) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    (pack,) = (snapshot[0] / "token" / "s").glob("pack-*.safetensors")
    pieces = safetensors.load_file(pack)
    found = {hashlib.sha256(bytes(piece.tolist())).hexdigest() for piece in pieces.values()}
    assert found == set(pieces)
    assert len(found) >= 3


def test_more_bytes_than_there_is_room_for_are_refused(snapshot: tuple[Path, Captured]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads, pytest.raises(SnapshotError, match="more memory"):
        SnapshotFolder(snapshot[0] / "token" / "s").read("", threads, lambda: 10)


def test_the_document_itself_is_whole(snapshot: tuple[Path, Captured]) -> None:
    document = documents.unpack(documents.pack(copy.deepcopy(snapshot[1].document)))
    with Session(snapshot[0], ops=False) as other:
        assert restore(other.state, document, snapshot[1].storages, 1000) == document["sequence"]


# --- a volume over time ----------------------------------------------------------------------------------------------

Picture = dict[int, tuple[object, bytes, list[int]]]
"""For each slot: what the tensor is, its whole memory, and the slots that share that."""


def picture(session: Session) -> Picture:
    slots = {slot: value for slot, value in session.slots.items() if slot}
    return {
        slot: (describe(value), memory_of(value), [other for other in slots if shares(slots[other], value)])
        for slot, value in slots.items()
    }


def rewrite(path: Path, change: Callable[[documents.Table], object]) -> None:
    """Forge the header of a snapshot, with a hash that is right."""
    header = documents.unpack(path.read_bytes()[len(MAGIC) + 32 :])
    change(header)
    body = documents.pack(header)
    path.write_bytes(MAGIC + hashlib.sha256(body).digest() + body)


def exchange(paths: list[Path]) -> None:
    if len(paths) > 1:
        first, second = paths[0].read_bytes(), paths[1].read_bytes()
        paths[0].write_bytes(second)
        paths[1].write_bytes(first)


class SnapshotsOfASession(RuleBasedStateMachine):
    """Whatever a session holds and whoever goes on with it: each kept snapshot is what the session was, and what was
    cut, changed or exchanged is refused in words, and takes nothing from the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(dir=IN_MEMORY)
        self.root = Path(self._folder.name)
        self.session = Session(self.root, ops=False)
        self.kept: dict[str, Picture] = {}

    @rule(given_tensors=tensors())
    def put(self, given_tensors: list[torch.Tensor]) -> None:
        first = max(self.session.slots) + 1 if len(self.session.slots) < 12 else 1
        self.session.slots.update(enumerate(given_tensors, first))

    @rule(which=st.integers(0, 20), value=st.integers(0, 1))
    def change(self, which: int, value: int) -> None:
        slots = [slot for slot in self.session.slots if slot]
        if slots:
            storage = self.session.slots[slots[which % len(slots)]].untyped_storage()
            torch.empty(0, dtype=torch.uint8).set_(storage)[::2].fill_(value)

    @rule(which=st.integers(0, 20))
    def drop(self, which: int) -> None:
        slots = [slot for slot in self.session.slots if slot]
        if slots:
            self.session.run(RELEASE, [slots[which % len(slots)]])

    @rule(hash_name=st.sampled_from(HASHES))
    def save(self, hash_name: str = SHA256) -> None:
        saved = self.session.call("save_snapshot", "s", None, b"", hash_name)
        self.kept[saved["snapshot"]] = picture(self.session)
        for number in sorted(self.kept, key=int)[:-KEPT_SNAPSHOTS]:
            del self.kept[number]

    @precondition(lambda self: self.kept)
    @rule(is_oldest=st.booleans())
    def go_on_elsewhere(self, is_oldest: bool) -> None:
        """Another session takes it up, and the name; the one before writes no more under that."""
        number = (min if is_oldest else max)(self.kept, key=int)
        other = Session(self.root, ops=False)
        assert other.call("load_snapshot", "s", number)["snapshot"] == number
        assert picture(other) == self.kept[number]
        before, self.session = self.session, other
        saved = self.session.call("save_snapshot", "s")
        self.kept = {key: self.kept[key] for key in sorted(self.kept, key=int)[1 - KEPT_SNAPSHOTS :]}
        self.kept[saved["snapshot"]] = picture(self.session)
        assert "another session writes" in before.call("save_snapshot", "s")["message"]
        before.executor.end()

    @precondition(lambda self: len(self.kept) > 1)
    @rule(is_oldest=st.booleans())
    def delete(self, is_oldest: bool) -> None:
        number = (min if is_oldest else max)(self.kept, key=int)
        assert self.session.call("delete_snapshot", "s", number)
        del self.kept[number]

    @precondition(lambda self: self.kept)
    @rule(kind=st.sampled_from(["cut", "changed", "exchanged", "empty"]), place=st.floats(0, 0.999), data=st.data())
    def damage(self, kind: str, place: float, data: st.DataObject) -> None:
        """A copy of the volume, of which one file is not what it was, or two have each other's names."""
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as copied:
            shutil.copytree(self.root, copied, dirs_exist_ok=True)
            folder = Path(copied) / "token" / "s"
            pattern = data.draw(st.sampled_from(["snapshot-*.msgpack", "pack-*.safetensors"]))
            paths = sorted(folder.glob(pattern))
            if not paths:  # of a session that holds nothing
                return
            path = paths[int(place * len(paths))]
            content = bytearray(path.read_bytes())
            at = int(place * len(content))
            if kind == "exchanged":
                exchange(paths)
            elif kind == "changed":
                content[at] ^= 255
                path.write_bytes(content)
            else:
                path.write_bytes(content[: at if kind == "cut" else 0])
            for number in self.kept:
                self._refused_or_one_of_them(Path(copied), number)

    @precondition(lambda self: self.kept)
    @rule(
        name=st.sampled_from(["contents", "pieces", "packs", "document", "bytes"]),
        change=st.sampled_from(["reversed", "missing", "twice", "newer"]),
    )
    def forge(self, name: str, change: str) -> None:
        """A header with another order, or less or more in it, than was written; its own hash is right."""

        def spoil(header: documents.Table) -> None:
            if change == "newer":
                header["document"]["format"] = documents.FORMAT + 1
            elif change == "missing" or not isinstance(header[name], list):
                del header[name]
            else:
                header[name] = header[name][::-1] if change == "reversed" else header[name] * 2

        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as copied:
            shutil.copytree(self.root, copied, dirs_exist_ok=True)
            (newest, *_) = sorted((Path(copied) / "token" / "s").glob("snapshot-*.msgpack"), reverse=True)
            rewrite(newest, spoil)
            number = str(int(newest.stem.partition("-")[2]))
            words = self._refused_or_one_of_them(Path(copied), number, may_differ=change == "reversed")
            if change == "newer":
                assert f"format {documents.FORMAT + 1}" in words
            if change == "missing" and name != "bytes":  # which is for people
                assert words

    def _refused_or_one_of_them(self, root: Path, number: str, *, may_differ: bool = False) -> str:
        """Return the words of a refusal; empty where a snapshot came back that is one of those that were taken."""
        with Session(root, ops=False) as other:
            answer = other.call("load_snapshot", "s", number)
            if "snapshot" in answer:
                # Equally large memories of forged headers may have changed places: the forger could have written that.
                assert may_differ or picture(other) in self.kept.values()
                return ""
            assert answer["type"] == "SnapshotError", answer
            assert is_empty(other.state)
            assert other.call("save_snapshot", f"after{number}")["snapshot"] == "1"  # the session goes on
            return str(answer["message"])

    @invariant()
    def all_that_is_kept_is_there(self) -> None:
        rows = self.session.snapshots.rows("")
        assert sorted(str(row["snapshot"]) for row in rows) == sorted(self.kept)
        assert not [row for row in rows if "trouble" in row]

    def teardown(self) -> None:
        for number, expected in self.kept.items():
            with Session(self.root, ops=False) as other:
                assert other.call("load_snapshot", "s", number)["snapshot"] == number
                assert picture(other) == expected
        self.session.executor.end()
        self._folder.cleanup()


TestSnapshotsOfASession = SnapshotsOfASession.TestCase
TestSnapshotsOfASession.settings = settings(
    max_examples=12,
    stateful_step_count=15,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
