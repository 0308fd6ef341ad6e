"""Sessions that go on in another one: what a snapshot holds, and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from skyproxy.errors import SnapshotError
from skyproxy.protocol.messages import Failure, Reply
from skyproxy.settings import SETTINGS
from skyproxy.snapshots.folder import SnapshotFolder
from skyproxy.torch_codec import describe, encode_description
from skyproxy_server.activity import Activity
from skyproxy_server.failures import Failed
from skyproxy_server.functions.registry import Calls
from tests.server.snapshots.sessions import (
    ADD,
    ADD_,
    CALL,
    DO,
    EMBED,
    EXPECT,
    FETCH,
    RAND,
    RELEASE,
    REPLAY,
    Session,
    restored,
)

CPU = ["cpu", None]


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(tmp_path) as made:
        yield made


def same(a: Any, b: Any) -> bool:
    return describe(a) == describe(b) and torch.equal(a, b)


def test_a_session_goes_on_bit_for_bit(session: Session, tmp_path: Path) -> None:
    session.put(s1=torch.rand(4, 5), s2=torch.rand(4, 5))
    session.run(DO, "manual_seed", [CPU, 7], RAND, 1, 3)
    with restored(session, tmp_path) as other:
        for one in (session, other):
            one.run(RAND, 1, 4, ADD, 4, 3, 5, ADD_, 2, 5)
        assert all(same(session.slots[slot], other.slots[slot]) for slot in (1, 2, 3, 4, 5))


def test_tensors_of_one_memory_stay_so(session: Session, tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    session.put(s1=base, s2=base.t(), s3=base[1:, 2], s4=base, s5=torch.view_as_real(torch.randn(2, 2).cfloat()))
    session.put(s6=torch.view_as_complex(session.slots[5]).conj())
    with restored(session, tmp_path) as other:
        slots = other.slots
        assert slots[1] is slots[4]
        assert all(same(session.slots[slot], slots[slot]) for slot in range(1, 7))
        slots[1].zero_()
        assert slots[2].sum() == slots[3].sum() == 0
        slots[5].fill_(1)
        assert slots[6].is_conj()
        assert slots[6].resolve_conj()[0, 0] == 1 - 1j


def test_a_snapshot_is_of_the_state_between_two_batches(session: Session, tmp_path: Path) -> None:
    session.put(s1=torch.ones(3))
    session.call("save_snapshot", "s")
    session.run(ADD_, 1, 1)
    with Session(tmp_path, ops=False) as other:
        assert other.call("load_snapshot", "s")["sequence"] == session.sequence - 1
        assert other.slots[1].tolist() == [1, 1, 1]
        other.run(ADD_, 1, 1)
        assert other.sequence == session.sequence


def test_values_that_do_not_exist_stay_so(session: Session, tmp_path: Path) -> None:
    session.put(s1=torch.ones(2, 2), s2=torch.tensor([9]))
    session.put(s4=session.slots[1][0])
    session.run(EMBED, 1, 2, 3, ADD_, 4, 3)
    with restored(session, tmp_path) as other:
        assert isinstance(other.slots[3], Failed)
        assert other.slots[3].record == session.slots[3].record
        for _ in range(2):
            other.run(FETCH, 5, 3, 0)
            assert isinstance(other.sent[-1], Failure)
            assert other.sent[-1].error["type"] == "IndexError"
        other.run(CALL, 6, "synchronize", [])
        assert not isinstance(other.sent[-1], Failure)  # it was told above


def test_a_change_that_failed_is_told_once(session: Session, tmp_path: Path) -> None:
    session.put(s1=torch.ones(2, 2), s2=torch.tensor([9]))
    session.run(EMBED, 1, 2, 3, ADD_, 1, 3)
    with restored(session, tmp_path) as other:
        other.run(FETCH, 5, 1, 0)
        assert isinstance(other.sent[-1], Failure)
        other.run(FETCH, 5, 1, 0)
        assert not isinstance(other.sent[-1], Failure)


def test_generators_numbers_lists_and_modes_come_back(session: Session, tmp_path: Path) -> None:
    session.run(DO, "new_generator", [1, CPU], DO, "seed_generator", [1, 5], DO, "record_event", [2, CPU, True])
    session.run(DO, "set_modes", [{"default_dtype": "float64"}])
    session.slots[3] = [torch.ones(2), 2.5, None]
    with restored(session, tmp_path) as other:
        assert torch.equal(other.slots[1].get_state(), session.slots[1].get_state())
        assert other.slots[3][0].tolist() == [1, 1]
        assert other.slots[3][1:] == [2.5, None]
        assert 0 <= other.call("elapsed_milliseconds", 2, 2) == 0
        assert dict(other.state.modes.record) == {"default_dtype": "float64"}


@pytest.mark.filterwarnings("ignore:Sparse CS")
def test_sparse_tensors_come_back(session: Session, tmp_path: Path) -> None:
    dense = torch.tensor([[0, 1.5, 0], [2.5, 0, 0]])
    session.put(s1=dense.to_sparse(), s2=dense.to_sparse_csr(), s3=dense.to_sparse_csc())
    session.put(s4=session.slots[1]._values())
    with restored(session, tmp_path) as other:
        for slot in (1, 2, 3):
            assert other.slots[slot].layout == session.slots[slot].layout
            assert torch.equal(other.slots[slot].to_dense(), dense)
        assert other.slots[1].is_coalesced()
        other.slots[4].zero_()
        assert other.slots[1].to_dense().count_nonzero() == 0


def test_indices_that_share_memory_with_a_dense_tensor_are_looked_at_after_a_restore(
    session: Session, tmp_path: Path
) -> None:
    indices = torch.zeros(1, 2, dtype=torch.int64)
    session.put(s1=indices, s2=torch.sparse_coo_tensor(indices, torch.ones(2), (3,)))
    with restored(session, tmp_path) as other:
        other.slots[1].fill_(7)
        other.run(FETCH, 5, 2, 0)
        assert isinstance(other.sent[-1], Failure)


def test_a_storage_that_was_made_too_small_is_not_read(session: Session, tmp_path: Path) -> None:
    session.put(s1=torch.ones(100))
    session.run(DO, "resize_storage", [1, 0])
    with restored(session, tmp_path) as other:
        other.run(FETCH, 5, 1, 0)
        assert isinstance(other.sent[-1], Failure)
        assert "resized to 0 bytes" in other.sent[-1].error["message"]
        other.run(DO, "resize_storage", [1, 400])
        other.run(FETCH, 5, 1, 0)
        assert not isinstance(other.sent[-1], Failure)


def test_no_document_gives_a_storage_memory_that_nobody_wrote(session: Session, tmp_path: Path) -> None:
    from skyproxy_server.snapshots import capture, restore

    session.put(s1=torch.ones(100))
    session.run(DO, "resize_storage", [1, 0])
    captured = capture.capture(session.state)
    ((storage, former),) = captured.document["shrunk"]
    forged = {**captured.document, "shrunk": [[storage, 200], [storage, former]]}
    with Session(tmp_path, ops=False) as other:
        with pytest.raises(SnapshotError, match="smaller twice"):
            restore.restore(other.state, forged, captured.storages, 100)
        assert restore.is_empty(other.state)


def test_graphs_come_back_and_are_replayed(session: Session, tmp_path: Path) -> None:
    session.put(s1=torch.ones(2), s2=torch.full((2,), 10.0))
    two = encode_description(describe(torch.zeros(2)))
    stream = [ADD, 1, 2, 3, ADD, 3, 3, 4, RELEASE, [3]]
    session.run(DO, "graph_begin", [], DO, "graph_define", [7, stream, [[4, two]], [CPU], {}], RELEASE, [2])
    with restored(session, tmp_path) as other:
        other.run(FETCH, 5, 4, 0)
        assert isinstance(other.sent[-1], Failure)
        assert "replayed yet" in other.sent[-1].error["message"]
        for one in (session, other):
            one.run(ADD_, 1, 1, REPLAY, 7)
        assert session.slots[4].tolist() == other.slots[4].tolist() == [24, 24]
        with restored(session, tmp_path) as third:
            third.run(ADD_, 1, 1, REPLAY, 7)
            assert third.slots[4].tolist() == [28, 28]


def test_strides_that_were_mended_once_are_mended_afterwards(session: Session, tmp_path: Path) -> None:
    session.put(s1=torch.ones(3, 2), s2=torch.ones(3, 2))
    believed = encode_description(describe(torch.empty(2, 3).t()))
    session.run(EXPECT, [believed], ADD, 1, 2, 3)
    assert session.slots[3].stride() == (1, 3)
    with restored(session, tmp_path) as other:
        other.run(ADD, 1, 2, 4)
        assert other.slots[4].stride() == (1, 3)


def test_what_did_not_change_is_not_written_again(session: Session, tmp_path: Path) -> None:
    session.put(s1=torch.rand(3_000_000), s2=torch.rand(1000), s3=torch.rand(1000))
    first = session.call("save_snapshot", "s")
    assert first["written_bytes"] == first["bytes"] == 12_008_000
    session.run(ADD_, 2, 3)
    second = session.call("save_snapshot", "s")
    assert second["bytes"] == first["bytes"]
    assert second["written_bytes"] == 4000
    with restored(session, tmp_path) as other:
        assert all(same(other.slots[slot], session.slots[slot]) for slot in (1, 2, 3))


def test_a_session_goes_on_while_its_snapshot_is_written(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    begin = SnapshotFolder.begin
    monkeypatch.setattr(SnapshotFolder, "begin", lambda *args: (may_write.wait(60), begin(*args))[1])
    session.put(s1=torch.ones(1000))
    session.run(CALL, 5, "save_snapshot", ["s"])
    session.run(ADD_, 1, 1, FETCH, 6, 1, 0)
    assert [message.request for message in session.sent if isinstance(message, Reply)] == [6]
    may_write.set()
    session.snapshots.finish_writing()
    assert [message.request for message in session.sent if isinstance(message, Reply)] == [6, 5]
    with Session(tmp_path, ops=False) as other:
        other.call("load_snapshot", "s")
        assert torch.equal(other.slots[1], torch.ones(1000))


def test_a_session_larger_than_its_copies_may_be_waits_for_the_disk(tmp_path: Path) -> None:
    with Session(tmp_path, max_snapshot_copy_bytes=1000) as session:
        session.put(s1=torch.rand(1000), s2=torch.rand(100), s3=torch.rand(1 << 21))
        with restored(session, tmp_path) as other:
            assert all(same(other.slots[slot], session.slots[slot]) for slot in (1, 2, 3))


def test_a_snapshot_that_was_begun_is_whole_when_its_session_ends(tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        session.put(s1=torch.ones(100_000))
        session.run(CALL, 5, "save_snapshot", ["s"])
    with Session(tmp_path, ops=False) as other:
        assert other.call("load_snapshot", "s")["bytes"] == 400_000


def test_a_function_that_may_change_tensors_is_waited_for(session: Session, tmp_path: Path) -> None:
    calls = session.state.calls = Calls(session.state.devices, SETTINGS, Activity())
    call = calls._get_or_make("c", session.state.identity)
    assert call is not None
    call.bind([], [])
    assert session.call("save_snapshot", "s")["snapshot"] == "1"
    other = calls._get_or_make("d", session.state.identity)
    assert other is not None
    other.running = other.has_tensors = True
    assert session.call("save_snapshot", "s")["type"] == "SnapshotNotNowError"
    other.running = False
    assert session.call("save_snapshot", "s")["snapshot"] == "2"


def test_two_snapshots_are_kept_and_what_no_one_needs_goes(session: Session, tmp_path: Path) -> None:
    for _ in range(6):
        session.put(s1=torch.rand(100_000))
        session.call("save_snapshot", "s")
    assert [row["snapshot"] for row in session.call("list_snapshots", "s")] == ["6", "5"]
    assert sum(file.stat().st_size for file in (tmp_path / "token" / "s").iterdir()) < 3 * 400_000
    with Session(tmp_path, ops=False) as other:
        assert other.call("load_snapshot", "s", "5")["snapshot"] == "5"
    assert session.call("delete_snapshot", "s")
    assert session.call("list_snapshots") == []
    assert not (tmp_path / "token" / "s").exists()
    assert session.call("save_snapshot", "s")["snapshot"] == "1"


def test_a_pack_of_which_little_is_used_is_left_behind(session: Session, tmp_path: Path) -> None:
    session.put(s1=torch.rand(100), s2=torch.rand(1_000_000))
    session.call("save_snapshot", "s")
    session.run(RELEASE, [2])
    session.call("save_snapshot", "s")
    assert session.call("save_snapshot", "s")["written_bytes"] == 400
    session.call("save_snapshot", "s")
    assert sum(file.stat().st_size for file in (tmp_path / "token" / "s").iterdir()) < 100_000
    with restored(session, tmp_path) as other:
        assert same(other.slots[1], session.slots[1])


def test_a_name_belongs_to_the_session_that_wrote_last(session: Session, tmp_path: Path) -> None:
    session.call("save_snapshot", "s")
    with Session(tmp_path) as later:
        assert later.call("save_snapshot", "s")["snapshot"] == "2"
        assert "another session writes" in session.call("save_snapshot", "s")["message"]
        assert session.call("save_snapshot", "t")["snapshot"] == "1"


def test_who_deletes_one_of_its_snapshots_does_not_take_the_name_back_later(session: Session, tmp_path: Path) -> None:
    session.call("save_snapshot", "s")
    session.call("save_snapshot", "s")
    assert session.call("delete_snapshot", "s", "2")
    with Session(tmp_path) as later:
        assert later.call("save_snapshot", "s")["snapshot"] == "2"
        assert "another session writes" in session.call("save_snapshot", "s")["message"]
        assert session.call("delete_snapshot", "s")
        assert session.call("save_snapshot", "s")["snapshot"] == "1"  # of a name that nobody had any more


def test_tokens_do_not_see_each_other(session: Session, tmp_path: Path) -> None:
    session.call("save_snapshot", "s")
    for owner in ("mallory", "../token", "token/s", "..", ""):
        with Session(tmp_path, owner, ops=False) as other:
            assert other.call("list_snapshots") == []
            assert "there is no snapshot" in other.call("load_snapshot", "s")["message"]


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc", "a\0", "x" * 65, ".hidden", 7, None, "ä"])
def test_names_are_no_paths(session: Session, name: Any) -> None:
    for control in ("save_snapshot", "load_snapshot", "delete_snapshot"):
        assert session.call(control, name)["type"] == "SnapshotError"
    assert session.call("load_snapshot", "s", "../1")["type"] == "SnapshotError"


def test_what_cannot_be_captured_now_is_refused_by_name(session: Session, tmp_path: Path) -> None:
    session.run(DO, "graph_begin", [])
    assert session.call("save_snapshot", "s")["type"] == "SnapshotNotNowError"
    session.run(DO, "graph_abort", [[]])
    assert session.call("save_snapshot", "s")["snapshot"] == "1"
    session.slots[1] = object()
    assert session.call("save_snapshot", "s")["type"] == "SnapshotError"
    assert not session.state.reports.unreported


def test_a_worker_without_a_folder_says_so(session: Session) -> None:
    session.state.snapshots = None
    assert "--snapshots" in session.call("save_snapshot", "s")["message"]


def test_only_an_empty_session_loads(session: Session, tmp_path: Path) -> None:
    session.call("save_snapshot", "s")
    with pytest.raises(Exception, match="holds something already"):
        session.call("load_snapshot", "s")


def test_another_torch_device_or_format_is_refused(session: Session, tmp_path: Path) -> None:
    from skyproxy.snapshots import documents
    from skyproxy_server.snapshots import capture, restore

    captured = capture.capture(session.state)
    for change, words in (
        ({"format": documents.FORMAT + 1}, "format 2"),
        ({"torch": "1.13.1"}, "torch 1.13.1"),
        ({"devices": [["cuda", 0]]}, "device cuda:0"),
        ({"devices": [["cpu", 4]]}, "device cpu:4"),
    ):
        with Session(tmp_path, ops=False) as other:
            with pytest.raises(documents.SnapshotError, match=words):
                restore.restore(other.state, {**captured.document, **change}, captured.storages, 100)
            assert restore.is_empty(other.state)


def test_too_many_values_are_refused(session: Session, tmp_path: Path) -> None:
    session.put(s1=torch.ones(1), s2=torch.ones(1), s3=torch.ones(1))
    session.call("save_snapshot", "s")
    with Session(tmp_path, ops=False, max_handles=2) as other:
        assert "allows 2 a session" in other.call("load_snapshot", "s")["message"]
        assert len(other.slots) == 1


def test_a_volume_without_space_leaves_the_older_snapshot_whole(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    session.put(s1=torch.rand(1000))
    session.call("save_snapshot", "s")
    value = session.slots[1].clone()
    for name in ("pwrite", "fsync", "replace"):
        session.slots[1].add_(1)

        def fail(*args: object, **kwargs: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            error = session.call("save_snapshot", "s")
        assert error["type"] == "SnapshotError"
        assert "No space left" in error["message"]
    files = sorted(file.name for file in (tmp_path / "token" / "s").iterdir())
    assert len(files) == 3, files  # the header, its pack, and whose they are
    with Session(tmp_path, ops=False) as other:
        other.call("load_snapshot", "s")
        assert torch.equal(other.slots[1], value)
    assert session.call("save_snapshot", "s")["snapshot"] == "2"


def test_a_name_that_found_no_space_is_claimed_by_the_next_snapshot(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    session.put(s1=torch.rand(1000))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        patch.setattr(os, "replace", fail)
        assert "No space left" in session.call("save_snapshot", "fresh")["message"]
    assert session.call("save_snapshot", "fresh")["sequence"] > 0
    with Session(tmp_path, ops=False) as other:
        other.call("load_snapshot", "fresh")
        assert torch.equal(other.slots[1], session.slots[1])
