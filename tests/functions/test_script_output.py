"""What processes of a script print: whole lines, and no more room on the disk than what is yet to be read."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from skyproxy.functions import script_output
from skyproxy.functions.script_output import pass_on_file


class Written(list[str]):
    """What was written, piece by piece; `after` is told of each."""

    after: Callable[[str], object] = staticmethod(lambda text: None)

    def write(self, text: str) -> None:
        self.append(text)
        self.after(text)

    @property
    def text(self) -> str:
        return "".join(self)


def passed_on(content: bytes, path: Path, only: Callable[[str], bool] | None = None) -> str:
    path.write_bytes(content)
    written, finished = Written(), threading.Event()
    finished.set()
    pass_on_file("[rank 1] ", str(path), written, finished, 0.01, only)
    return written.text


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        ("größe\nzwei\n".encode(), ["größe", "zwei"]),
        (b"no end", ["no end"]),
        (b"\n\nx\n", ["", "", "x"]),
        (b"1%\r2%\rdone\r\nnext", ["1%", "2%", "done", "next"]),
        (b"a\xff\xfeb\x00c\n\xc3", ["a\ufffd\ufffdb\x00c", "\ufffd"]),
    ],
    ids=repr,
)
def test_each_line_has_its_rank(content: bytes, lines: list[str], tmp_path: Path) -> None:
    assert passed_on(content, tmp_path / "out") == "".join(f"[rank 1] {line}\n" for line in lines)


def test_only_wanted_lines_are_passed_on(tmp_path: Path) -> None:
    assert passed_on(b"one\ntwo\n", tmp_path / "out", lambda line: line == "two\n") == "[rank 1] two\n"


def test_a_line_that_is_written_in_pieces_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_output, "_READ_BYTES", 3)  # so that each piece is read by itself
    text = "ärger, zwei; drei\n" * 5
    assert passed_on(text.encode(), tmp_path / "out") == "".join(f"[rank 1] {line}\n" for line in text.splitlines())


def test_a_file_that_never_comes_is_no_output(tmp_path: Path) -> None:
    written, finished = Written(), threading.Event()
    finished.set()
    pass_on_file("", str(tmp_path / "none"), written, finished, 0.01)
    assert written == []


def test_what_is_printed_without_an_end_is_shown_while_the_process_runs(tmp_path: Path) -> None:
    path, finished, written = tmp_path / "out", threading.Event(), Written()
    path.write_bytes(b"Continue? ")
    written.after = lambda text: finished.set()  # nobody else ends it: shown or for ever
    pass_on_file("[rank 0] ", str(path), written, finished, 0.001)
    assert written == ["[rank 0] Continue? \n"]


@pytest.mark.skipif(sys.platform != "linux", reason="files with holes")
def test_what_was_read_takes_no_room_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_output, "_FREE_BYTES", 1 << 20)
    path, finished, written = tmp_path / "out", threading.Event(), Written()
    most, left, seen = 0, 16, 0
    with path.open("wb", buffering=0) as process:  # as the launcher opens it: not to append

        def print_more(text: str) -> None:
            nonlocal most, left, seen
            seen += text.count("\n")
            if seen < (16 - left) * 1024:
                return  # not all of it has been read yet
            if left == 0:
                finished.set()
                return
            left -= 1
            process.write((b"x" * 1023 + b"\n") * 1024)
            most = max(most, os.stat(path).st_blocks * 512)

        written.after = print_more
        print_more("")
        pass_on_file("", str(path), written, finished, 0.001)
    assert len(written.text) == 16 << 20
    assert set(written.text) == {"x", "\n"}
    assert most <= 4 << 20
    assert os.stat(path).st_blocks * 512 <= 64 << 10
