"""What a function job leaves behind, and what a client takes of it."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import cloudpickle.cloudpickle as cloudpickle
import msgpack
import pytest
import torch

from skyproxy.errors import ProtocolError, RemoteFunctionError, UntrustedResultError
from skyproxy.jobs.results import read_result, write_error, write_result


class Own:
    """A class that no plain data has."""

    def __init__(self) -> None:
        self.value = 7


class Dangerous:
    """An object whose pickle runs a function."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (os.environ["DANGEROUS_FOLDER"],)


def left(folder: Path) -> bytes:
    return (folder / "result").read_bytes()


@pytest.mark.parametrize("plain", [True, False])
def test_plain_data_and_tensors_come_back(plain: bool, tmp_path: Path) -> None:
    value = {"loss": [1.0, 2], "weights": torch.arange(6).reshape(2, 3), "name": "é", 3: None}
    write_result(tmp_path, value, plain=plain)
    found = read_result(left(tmp_path), "job", trusted=not plain)
    assert torch.equal(found.pop("weights"), torch.arange(6).reshape(2, 3))
    assert found == {"loss": [1.0, 2], "name": "é", 3: None}


def test_tensors_that_share_memory_do_so_again(tmp_path: Path) -> None:
    base = torch.zeros(4)
    write_result(tmp_path, (base, base[2:]), plain=True)
    first, second = read_result(left(tmp_path), "job", trusted=False)
    second.fill_(1)
    assert first.tolist() == [0, 0, 1, 1]


def test_a_result_is_of_the_classes_of_the_program_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = sys.modules["__main__"]
    monkeypatch.delitem(vars(main), "__getattr__", raising=False)  # a worker of another test has run in this process
    monkeypatch.setattr(main, "Settings", type("Settings", (), {"__module__": "__main__"}), raising=False)
    write_result(tmp_path, main.Settings(), plain=False)
    number = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.pop(main.Settings)
    del cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[number]  # as in another process
    monkeypatch.setattr(main, "Settings", type("Settings", (), {"__module__": "__main__"}))
    assert type(read_result(left(tmp_path), "job", trusted=True)) is main.Settings


def test_any_object_comes_from_a_trusted_worker_only(tmp_path: Path) -> None:
    write_result(tmp_path, Own(), plain=True)
    assert read_result(left(tmp_path), "job", trusted=True).value == 7
    with pytest.raises(UntrustedResultError, match=r"the job job returned .*Own.*trust_worker"):
        read_result(left(tmp_path), "job", trusted=False)


def test_a_pickle_of_an_untrusted_worker_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "made by the pickle"
    monkeypatch.setenv("DANGEROUS_FOLDER", str(place))
    write_result(tmp_path, Dangerous(), plain=False)
    with pytest.raises(UntrustedResultError):
        read_result(left(tmp_path), "job", trusted=False)
    write_error(tmp_path, ValueError(Dangerous()), plain=False)
    with pytest.raises(RemoteFunctionError):
        read_result(left(tmp_path), "job", trusted=False)
    assert not place.exists()


@pytest.mark.parametrize("plain", [True, False])
def test_an_error_is_raised_again_with_its_traceback(plain: bool, tmp_path: Path) -> None:
    try:
        raise KeyError("missing")
    except KeyError as error:
        write_error(tmp_path, error, plain=plain)
    with pytest.raises(KeyError, match="missing") as caught:
        read_result(left(tmp_path), "night-run", trusted=not plain)
    assert "test_an_error_is_raised_again" in str(caught.value.__cause__)
    assert "raised by the job night-run" in caught.value.__notes__[0]


def test_an_error_that_cannot_be_made_again_is_told_in_words(tmp_path: Path) -> None:
    class Local(Exception):
        def __init__(self) -> None:
            super().__init__("in words")
            self.lock = __import__("threading").Lock()

    write_error(tmp_path, Local(), plain=False)
    with pytest.raises(RemoteFunctionError, match="in words"):
        read_result(left(tmp_path), "job", trusted=True)


def changed(content: bytes, **changes: object) -> bytes:
    size = int.from_bytes(content[:8], "little")
    head = {**msgpack.unpackb(content[8 : 8 + size], strict_map_key=False), **changes}
    packed: bytes = msgpack.packb(head)
    return len(packed).to_bytes(8, "little") + packed + content[8 + size :]


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "other"},
        {"kind": []},
        {"tables": []},
        {"tables": {"bases": 7}},
        {"tables": {"form": "plain", "tensors": 7, "bases": []}},
        {"sizes": None},
        {"sizes": [1 << 62]},
        {"sizes": [-1, 1]},
        {"sizes": ["x"]},
        {"sizes": []},
    ],
)
def test_a_made_up_result_is_refused(changes: dict[str, object], tmp_path: Path) -> None:
    write_result(tmp_path, [1, torch.ones(2)], plain=True)
    with pytest.raises((ProtocolError, UntrustedResultError)):
        read_result(changed(left(tmp_path), **changes), "job", trusted=False)


@pytest.mark.parametrize(
    "content", [b"", b"x", b"\xff" * 8, b"\0" * 8, b"\x01" + b"\0" * 7 + b"\xc1", b"\x01" + b"\0" * 8]
)
def test_bytes_that_are_no_result_are_refused(content: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_result(content, "job", trusted=True)


def test_every_cut_of_a_result_is_refused(tmp_path: Path) -> None:
    write_result(tmp_path, {"a": torch.ones(3)}, plain=True)
    content = left(tmp_path)
    for size in range(len(content)):
        with pytest.raises(ProtocolError):
            read_result(content[:size], "job", trusted=False)


@pytest.mark.parametrize("plain", [True, False])
def test_a_result_that_cannot_be_written_says_what_to_do(plain: bool, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"a dict cannot be pickled .*, in result\['lock'\]\). Return"):
        write_result(tmp_path, {"loss": 1.0, "lock": threading.Lock()}, plain=plain)
