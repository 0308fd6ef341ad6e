"""Which uploads are hashed, which are kept: never more hashing than can pay."""

from __future__ import annotations

import pytest

from skyproxy.protocol.digests import content_digest
from skyproxy.protocol.messages import Welcome
from skyproxy.session.offers import UploadDedup, UploadMode
from skyproxy.settings import Settings

MIB = 1 << 20


def offers(*, keeps: bool = True, had_blobs: bool = False) -> UploadDedup:
    return UploadDedup(MIB, keeps=keeps, had_blobs=had_blobs)


def test_small_uploads_cause_no_question() -> None:
    assert offers(had_blobs=True).plan(MIB - 1, together=True) is UploadMode.PLAIN


def test_a_worker_that_keeps_nothing_is_asked_nothing() -> None:
    assert offers(keeps=False, had_blobs=True).plan(4 * MIB, together=True) is UploadMode.PLAIN


def test_the_first_upload_to_a_fresh_worker_is_not_hashed() -> None:
    assert offers().plan(4 * MIB, together=True) is UploadMode.KEEP


def test_a_worker_that_kept_something_is_asked() -> None:
    assert offers(had_blobs=True).plan(4 * MIB, together=False) is UploadMode.QUERY


def test_a_size_that_was_uploaded_before_is_asked_for_and_others_are_not() -> None:
    chooser = offers()
    chooser.plan(4 * MIB, together=True)
    assert chooser.plan(4 * MIB, together=True) is UploadMode.QUERY
    assert chooser.plan(5 * MIB, together=True) is UploadMode.KEEP


def test_a_stream_of_new_data_is_soon_neither_hashed_nor_kept() -> None:
    chooser = offers(had_blobs=True)
    plans = []
    for _ in range(100):
        plans.append(chooser.plan(4 * MIB, together=False))
        if plans[-1] is UploadMode.QUERY:
            chooser.note_answer(4 * MIB, False)
    assert plans.count(UploadMode.QUERY) == 3
    assert plans[-1] is UploadMode.PLAIN
    assert len(plans) - plans.count(UploadMode.PLAIN) < 20


def test_modules_are_kept_however_many_tensors_of_a_size_they_have() -> None:
    chooser = offers(had_blobs=True)
    for _ in range(3):
        chooser.plan(4 * MIB, together=True)
        chooser.note_answer(4 * MIB, False)
    assert {chooser.plan(4 * MIB, together=True) for _ in range(100)} == {UploadMode.KEEP}


def test_an_answer_of_yes_counts_what_was_saved_and_keeps_the_size_worth_asking_for() -> None:
    chooser = offers(had_blobs=True)
    for known in (False, False, True, False, False):
        assert chooser.plan(4 * MIB, together=True) is UploadMode.QUERY
        chooser.note_answer(4 * MIB, known)
    assert chooser.plan(4 * MIB, together=True) is UploadMode.QUERY
    assert chooser.saved_bytes == 4 * MIB


def test_the_name_is_the_one_that_the_worker_gives() -> None:
    chooser = offers()
    data = memoryview(bytes(range(256)) * 40_000)
    assert chooser.digest(data) == content_digest(data)
    chooser.end()


@pytest.mark.parametrize("blob_bytes", [0, 1 << 30])
@pytest.mark.parametrize("blobs", [0, 3])
@pytest.mark.parametrize("remembers", [False, True])
def test_both_sides_must_keep_uploads(blob_bytes: int, blobs: int, remembers: bool) -> None:
    welcome = Welcome(1, "session", {}, [], {"blob_bytes": blob_bytes, "blobs": blobs})
    agreed = UploadDedup.agreed(welcome, Settings(remember_uploads=remembers))
    assert (agreed._keeps, agreed._had_blobs) == (remembers and blob_bytes > 0, blobs > 0)
