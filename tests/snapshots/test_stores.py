"""Places of snapshots: a folder, and an address of fsspec."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from skyproxy.errors import ConfigurationError
from skyproxy.snapshots import stores
from skyproxy.snapshots.stores import FileStore, FsspecStore, LocalStore, is_address, open_store, read_whole
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
