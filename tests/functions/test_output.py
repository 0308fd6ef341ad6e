"""What a function prints: live, and to its own caller."""

from __future__ import annotations

import logging
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import skyproxy
from tests.functions.gates import hold, open_gate


class Collected:
    """Takes output; knows when a text has come."""

    def __init__(self, awaited: str = "") -> None:
        self.parts: list[tuple[str, str]] = []
        self.awaited = awaited
        self.came = threading.Event()

    def __call__(self, stream: str, text: str) -> None:
        self.parts.append((stream, text))
        if self.awaited and self.awaited in self.text(stream):
            self.came.set()

    def text(self, stream: str) -> str:
        return "".join(text for name, text in self.parts if name == stream)


def test_it_is_printed_here(node: skyproxy.Node, capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print("to stdout")
        print("to stderr", file=sys.stderr)

    node.run(speak)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("to stdout\n", "to stderr\n")


def test_it_comes_while_the_function_runs(node: skyproxy.Node) -> None:
    def speak() -> None:
        print("first")
        hold("live output")
        print("second")

    output = Collected("first")
    call = node.submit(speak, on_output=output)
    assert output.came.wait(60)
    assert not call.done()
    node.run(open_gate, "live output")
    call.result(60)
    assert output.text("stdout") == "first\nsecond\n"


def test_progress_bars_come_step_by_step(node: skyproxy.Node) -> None:
    def work() -> None:
        for percent in (0, 50, 100):
            sys.stderr.write(f"\r{percent}%")
            sys.stderr.flush()
            if percent == 50:
                hold("progress")
        sys.stderr.write("\n")

    output = Collected("\r50%")
    call = node.submit(work, on_output=output)
    assert output.came.wait(60)
    node.run(open_gate, "progress")
    call.result(60)
    assert output.text("stderr") == "\r0%\r50%\r100%\n"


def test_tqdm_and_logging_need_nothing_special(node: skyproxy.Node) -> None:
    pytest.importorskip("tqdm")

    def work() -> None:
        from tqdm import tqdm

        for _ in tqdm(range(3), desc="steps"):
            pass
        logging.getLogger("mine").warning("watch out")

    output = Collected()
    node.submit(work, on_output=output).result(60)
    assert "steps: 100%" in output.text("stderr")
    assert "watch out\n" in output.text("stderr")


def test_print_without_a_newline_comes_at_the_end(node: skyproxy.Node) -> None:
    output = Collected()
    node.submit(lambda: print("no newline", end=""), on_output=output).result(60)
    assert output.parts == [("stdout", "no newline")]


def test_bytes_written_to_the_buffer_are_text(node: skyproxy.Node) -> None:
    output = Collected()
    node.submit(lambda: sys.stdout.buffer.write("gr\u00fc\u00df\n".encode()), on_output=output).result(60)
    assert output.text("stdout") == "gr\u00fc\u00df\n"


def test_each_call_has_its_own_output_threads_included(node: skyproxy.Node) -> None:
    def speak(number: int) -> None:
        meeting = f"output {number // 2}"
        if number % 2:
            open_gate(meeting)
        hold(meeting)  # two at a time print at the same time
        print(f"call {number}")
        thread = threading.Thread(target=lambda: print(f"thread of {number}"))
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(print, f"pool of {number}").result()

    outputs = [Collected() for _ in range(8)]
    calls = [node.submit(speak, number, on_output=output) for number, output in enumerate(outputs)]
    for call in calls:
        call.result(60)
    for number, output in enumerate(outputs):
        assert output.text("stdout") == f"call {number}\nthread of {number}\npool of {number}\n"


def test_the_error_of_a_thread_is_shown_to_its_caller(node: skyproxy.Node) -> None:
    def fail_in_a_thread() -> None:
        thread = threading.Thread(target=int, args=("no number",), name="counter")
        thread.start()
        thread.join()

    output = Collected()
    node.submit(fail_in_a_thread, on_output=output).result(60)
    assert "Exception in thread counter" in output.text("stderr")
    assert "ValueError: invalid literal" in output.text("stderr")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_does_not_write_on_the_connection(node: skyproxy.Node) -> None:
    def fork() -> int:
        child = os.fork()
        if child == 0:
            print("from the child", flush=True)
            os._exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    output = Collected()
    assert node.submit(fork, on_output=output).result(60) == 7
    assert output.parts == []
    assert node.run(lambda: 1) == 1


def test_on_output_that_fails_harms_nothing(node: skyproxy.Node, caplog: pytest.LogCaptureFixture) -> None:
    def fail(stream: str, text: str) -> None:
        raise ZeroDivisionError

    assert node.submit(lambda: print("x") or 5, on_output=fail).result(60) == 5
    assert "on_output" in caplog.text


def test_much_output_arrives_whole(node: skyproxy.Node) -> None:
    def speak() -> None:
        for number in range(3000):
            print(f"{number:0999d}")  # 3 MB, several times what may wait

    output = Collected()
    node.submit(speak, on_output=output).result(100)
    assert output.text("stdout") == "".join(f"{number:0999d}\n" for number in range(3000))


def test_output_of_silent_functions_is_not_sent(node: skyproxy.Node) -> None:
    @skyproxy.silent
    def speak() -> int:
        print("nobody hears this")
        return 3

    output = Collected()
    assert node.submit(speak, on_output=output).result(60) == 3
    assert output.parts == []
