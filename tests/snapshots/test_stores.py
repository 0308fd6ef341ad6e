"""Places of snapshots: a folder, and an address of fsspec."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from skyproxy.errors import ConfigurationError
from skyproxy.snapshots import stores
from skyproxy.snapshots.folder import SnapshotFolder
from skyproxy.snapshots.locks import SHARED_FOLDER
from skyproxy.snapshots.sources import read_whole
from skyproxy.snapshots.stores import FileStore, FsspecStore, LocalStore, is_address, open_store
from tests.server.snapshots.sessions import ADD_, Session, restored

needs_posix = pytest.mark.skipif(os.name != "posix", reason="pipes and links")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_PAUSE_SECONDS", 0.0)


@pytest.fixture(params=["folder", "address of a folder", "address"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileStore]:
    if request.param == "folder":
        yield open_store(tmp_path / "a")
    elif request.param == "address of a folder":
        yield open_store(f"file://{tmp_path}/a")
    else:
        yield open_store(f"memory://stores/{tmp_path.name}")
        MemoryFileSystem.store.clear()


def test_files_are_written_read_and_removed(store: FileStore) -> None:
    assert (store.files(), store.places()) == ([], [])
    store.prepare()
    store.write("one", b"first")
    store.write("one", b"second")
    assert (store.files(), store.read("one")) == (["one"], b"second")
    below = store.child("below")
    below.prepare()
    below.write("two", b"")
    assert (store.places(), below.files(), below.name) == (["below"], ["two"], "below")
    store.remove("one")
    store.remove("one")
    assert "one" not in store.files()
    with pytest.raises(OSError, match=r".+"):
        store.read("one")


def test_a_draft_gets_its_name_when_it_is_whole(store: FileStore) -> None:
    store.prepare()
    draft = store.draft("pack")
    draft.write_bytes(b"x" * 1000)
    assert "pack" not in store.files()
    store.publish(draft, "pack")
    assert "pack" in store.files()
    assert not draft.exists()
    source = store.open("pack")
    assert (source.size, read_whole(source)) == (1000, b"x" * 1000)
    part = bytearray(10)
    assert source.read_into(memoryview(part), 995) == 5
    assert source.read_into(memoryview(part), 1000) == 0
    source.close()


@pytest.mark.parametrize(
    ("location", "kind"), [("a/b", LocalStore), ("file:///a/b", LocalStore), ("memory://a/b", FsspecStore)]
)
def test_what_has_a_scheme_is_an_address(location: str, kind: type) -> None:
    assert type(open_store(location)) is kind
    assert is_address(location) == ("://" in location)


def test_an_address_that_cannot_be_used_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="nosuchthing://there/x cannot be used"):
        open_store("nosuchthing://user:secret@there/x")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigurationError, match="not installed") as caught:
        open_store("s3://key:secret@bucket/x")
    assert "secret" not in str(caught.value)
    assert "s3://bucket/x" in str(caught.value)


def test_what_an_address_raises_becomes_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("memory://user:secret@there/x")

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("throttled")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", fail)
    with pytest.raises(OSError, match=r"RuntimeError: throttled.*memory://there/x") as caught:
        store.read("a")
    assert "secret" not in str(caught.value)


@needs_posix
def test_a_pipe_or_a_link_in_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    store = LocalStore(tmp_path)
    for name in ("pipe", "link", "folder"):
        with pytest.raises(OSError, match=r".+"):
            store.read(name)


def shared(folder: Path) -> LocalStore:
    """A folder as a token's sessions of several users share it."""
    folder.mkdir()
    folder.chmod(SHARED_FOLDER)
    return LocalStore(folder)


@needs_posix
def test_no_link_in_a_shared_folder_leads_out_of_it(tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir(mode=0o700)
    for name in ("writer", "lock", "pack"):
        (home / name).write_bytes(b"private")
        (home / name).chmod(0o600)
    token = shared(tmp_path / "token")
    (tmp_path / "token" / "kept").symlink_to(home)
    kept = token.child("kept")
    assert token.places() == kept.files() == kept.places() == []
    for attempt in (
        kept.prepare,
        kept.settle,
        lambda: kept.remove("writer"),
        lambda: kept.write("writer", b"other"),
        lambda: kept.read("writer"),
        lambda: kept.open("writer"),
        lambda: kept.publish(tmp_path / "draft", "pack"),
        lambda: kept.exclusive("lock").__enter__(),
        lambda: kept.held("lock").__enter__(),
    ):
        with contextlib.suppress(OSError):
            attempt()
    SnapshotFolder(kept).delete("")
    assert {path.name: path.read_bytes() for path in home.iterdir()} == dict.fromkeys(
        ("writer", "lock", "pack"), b"private"
    )
    assert {stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()} == {0o600}
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


@needs_posix
def test_a_link_that_takes_a_folders_place_meanwhile_changes_nothing_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home := tmp_path / "home").mkdir()
    (home / "writer").write_bytes(b"private")
    kept = shared(tmp_path / "token").child("kept")
    kept.prepare()
    kept.write("writer", b"own")
    replace, unlink = os.replace, os.unlink

    def exchange() -> None:
        if not kept.path.is_symlink():
            kept.path.rename(tmp_path / "aside")
            kept.path.symlink_to(home)

    def exchange_before(act: Any) -> Any:
        def acted(*arguments: Any, **keywords: Any) -> Any:
            exchange()
            return act(*arguments, **keywords)

        return acted

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", exchange_before(replace))
        kept.write("writer", b"other")
    assert (home / "writer").read_bytes() == b"private"
    assert (tmp_path / "aside" / "writer").read_bytes() == b"other"
    kept.path.unlink()
    (tmp_path / "aside").rename(kept.path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", exchange_before(unlink))
        kept.remove("writer")
    assert (home / "writer").read_bytes() == b"private"


@needs_posix
def test_a_file_that_lies_elsewhere_too_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "private").write_bytes(b"private")
    (tmp_path / "private").chmod(0o600)
    kept = shared(tmp_path / "token").child("kept")
    kept.prepare()
    (kept.path / "lock").hardlink_to(tmp_path / "private")
    with kept.exclusive("lock"):
        pass
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o600


def test_a_folder_of_ones_own_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "token").mkdir(mode=0o700)
    (tmp_path / "token" / "kept").symlink_to(tmp_path / "disk", target_is_directory=True)
    token = LocalStore(tmp_path / "token")
    token.child("kept").write("one", b"first")
    assert token.places() == ["kept"]
    assert (tmp_path / "disk" / "one").read_bytes() == b"first"


def test_a_file_takes_no_more_memory_than_it_may_have(store: FileStore) -> None:
    store.prepare()
    store.write("small", b"x" * 1000)
    assert store.read("small", 1000) == b"x" * 1000
    with pytest.raises(OSError, match="999 are allowed"):
        store.read("small", 999)


@needs_posix
def test_a_size_that_a_file_only_claims_takes_no_memory(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(OSError, match="are allowed"):
        store.read("large")


@pytest.mark.parametrize("method", ["cat_file", "pipe_file", "ls", "size"])
def test_what_fails_for_a_moment_is_tried_again(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, failures = open_store(f"memory://stores/{tmp_path.name}"), [RuntimeError("throttled"), OSError("reset")]
    store.prepare()
    function = getattr(MemoryFileSystem, method)

    def fail(*arguments: Any, **keywords: Any) -> Any:
        if failures:
            raise failures.pop()
        return function(*arguments, **keywords)

    monkeypatch.setattr(MemoryFileSystem, method, fail)
    store.write("a", b"content")
    assert (store.files(), store.read("a"), read_whole(store.open("a"))) == (["a"], b"content", b"content")
    assert not failures


@pytest.mark.parametrize("is_large", [False, True])
def test_what_is_half_written_is_written_again_or_refused(
    is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"memory://stores/{tmp_path.name}")
    store.prepare()
    left, pipe, put = [1], MemoryFileSystem.pipe_file, MemoryFileSystem.put_file

    def pipe_half(self: Any, path: str, value: bytes, **keywords: Any) -> None:
        pipe(self, path, value[: len(value) // 2] if left and left.pop() else value, **keywords)

    def put_half(self: Any, source: str, path: str, **keywords: Any) -> None:
        put(self, source, path, **keywords)
        pipe_half(self, path, Path(source).read_bytes())

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_half)
    monkeypatch.setattr(MemoryFileSystem, "put_file", put_half)

    def write(content: bytes) -> None:
        if not is_large:
            store.write("a", content)
            return
        draft = store.draft("a")
        draft.write_bytes(content)
        store.publish(draft, "a")

    write(b"x" * 1000)
    assert store.read("a") == b"x" * 1000
    left += [1] * 100
    with pytest.raises(OSError, match="a has 500 bytes there, and 1000 were written"):
        write(b"y" * 1000)


@pytest.mark.parametrize("scheme", ["memory", "file", "local"])
def test_a_session_goes_on_from_an_address(tmp_path: Path, scheme: str) -> None:
    address = f"memory://worker/{tmp_path.name}" if scheme == "memory" else f"{scheme}://{tmp_path}/worker"
    with Session(address) as session:
        session.put(s1=torch.rand(2 << 20), s2=torch.rand(5))
        session.slots[3] = session.slots[2][1:4]
        with restored(session, address) as other:
            assert all(torch.equal(session.slots[slot], other.slots[slot]) for slot in (1, 2, 3))
            other.run(ADD_, 3, 3)
            assert torch.equal(other.slots[2][1:4], other.slots[3])
        first = session.call("list_snapshots", "s")
        assert [row["snapshot"] for row in first] == ["1"]
        session.slots[2] += 1
        again = session.call("save_snapshot", "s")
        assert again["written_bytes"] == 20
        assert session.call("delete_snapshot", "s")
        assert session.call("list_snapshots", "") == []
    assert not [name for name in MemoryFileSystem.store if tmp_path.name in name]
