"""The progress bar: drawn by the thread that waits, only after a second, and gone before the call returns."""

from __future__ import annotations

import io
import sys
import threading
import types
from collections.abc import Callable

import pytest

from skyproxy.session import progress
from skyproxy.session.progress import TransferWatch
from skyproxy.session.waiters import Waiter


class Bar:
    def __init__(self, after_update: Callable[[], object]) -> None:
        self.figures: list[tuple[int, int]] = []
        self.threads: set[threading.Thread] = set()
        self.closed = 0
        self._after_update = after_update

    def update(self, done_bytes: int, total_bytes: int) -> None:
        self.figures.append((done_bytes, total_bytes))
        self.threads.add(threading.current_thread())
        self._after_update()

    def close(self) -> None:
        self.closed += 1


class Stage:
    """A screen that counts its bars, and a transfer that is done after three looks at it."""

    def __init__(self) -> None:
        self.bars: list[Bar] = []
        self.waiter = Waiter()

    def display(self, text: str) -> Bar:
        self.bars.append(Bar(self.advance))
        return self.bars[-1]

    def advance(self) -> None:
        if len(self.bars[-1].figures) == 3:
            self.waiter.set("landed")

    def watch(self, shown: bool = True, clock: Callable[[], float] | None = None) -> TransferWatch:
        ticks = iter((0.0, 5.0))  # its second is over as soon as it waits
        return TransferWatch("upload", lambda: (1, 4), shown, self.display, clock or (lambda: next(ticks, 5.0)))


def test_a_long_wait_is_shown_by_its_own_thread_and_no_longer_than_it_lasts() -> None:
    stage = Stage()
    with stage.watch() as watch:
        assert watch.wait(stage.waiter) == "landed"
    (bar,) = stage.bars
    assert bar.figures == [(1, 4)] * 3
    assert bar.threads == {threading.current_thread()}
    assert bar.closed == 1


def test_a_short_wait_shows_nothing() -> None:
    stage = Stage()
    stage.waiter.set("landed")
    with stage.watch() as watch:
        assert watch.wait(stage.waiter) == "landed"
    assert stage.bars == []


def test_what_is_switched_off_shows_nothing() -> None:
    stage = Stage()
    timer = threading.Timer(0.05, stage.waiter.set, ("landed",))
    timer.start()
    with stage.watch(shown=False) as watch:
        assert watch.wait(stage.waiter) == "landed"
    assert stage.bars == []
    timer.join()


def test_several_waits_share_one_bar() -> None:
    stage = Stage()
    with stage.watch() as watch:
        watch.wait(stage.waiter)
        stage.waiter = Waiter()
        stage.bars[0].figures.clear()
        watch.wait(stage.waiter)
    assert len(stage.bars) == 1


def test_of_two_threads_one_is_shown() -> None:
    first, second = Stage(), Stage()
    second_is_done = threading.Timer(0.2, second.waiter.set, ("second",))
    with first.watch() as watch, second.watch() as other:
        watch.wait(first.waiter)
        second_is_done.start()
        assert other.wait(second.waiter) == "second"
    assert (len(first.bars), len(second.bars)) == (1, 0)
    second_is_done.join()
    third = Stage()
    with third.watch() as watch:
        watch.wait(third.waiter)
    assert len(third.bars) == 1


def test_failures_and_interrupts_remove_the_bar() -> None:
    for error in (RuntimeError("lost"), KeyboardInterrupt()):
        stage = Stage()
        stage.advance = lambda stage=stage, error=error: stage.waiter.fail(error)  # type: ignore[method-assign]
        with pytest.raises(type(error)):
            with stage.watch() as watch:
                watch.wait(stage.waiter)
        assert stage.bars[0].closed == 1


def test_a_broken_screen_harms_no_transfer() -> None:
    stage = Stage()

    def broken() -> None:
        stage.waiter.set("landed")
        raise OSError("the terminal is gone")

    stage.advance = broken  # type: ignore[method-assign]
    with stage.watch() as watch:
        assert watch.wait(stage.waiter) == "landed"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_rich_draws_on_stderr_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    threads = set(threading.enumerate())
    bar = progress.visible_bar("upload")
    assert bar is not None
    assert set(threading.enumerate()) <= threads  # those of other tests may have ended
    bar.update(1 << 20, 4 << 20)
    assert "1.0/4.0 MiB" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    bar.close()
    size = len(sys.stderr.getvalue())  # type: ignore[attr-defined]
    bar.close()
    assert sys.stdout.getvalue() == ""  # type: ignore[attr-defined]
    assert size > 0


def test_without_a_terminal_there_is_no_bar_and_rich_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert progress.visible_bar("upload") is None
    monkeypatch.setattr(sys, "stderr", None)
    assert progress.visible_bar("upload") is None


def test_in_a_notebook_the_bar_is_one_display_that_empties(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []

    class Handle:
        def update(self, value: progress.NotebookBar) -> None:
            shown.append(value._repr_mimebundle_())

    def display(value: progress.NotebookBar, display_id: bool) -> Handle:
        assert display_id
        shown.append(value._repr_mimebundle_())
        return Handle()

    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))  # type: ignore[arg-type]
    bar = progress.visible_bar("a <model>")
    assert isinstance(bar, progress.NotebookBar)
    bar.update(1 << 20, 4 << 20)
    assert 'value="1048576" max="4194304"' in shown[-1]["text/html"]
    assert "a &lt;model&gt;" in shown[-1]["text/html"]
    assert shown[-1]["text/plain"].startswith("a <model>: 1.0 of 4.0 MiB")
    bar.close()
    assert shown[-1] == {"text/plain": "", "text/html": ""}
    assert len(shown) == 3


class CountedWaiter(Waiter):
    """A wait that ends with its third look."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def done_within(self, seconds: float) -> bool:
        self.waits.append(seconds)
        if len(self.waits) == 3:
            self.set("landed")
        return self.done


def test_a_bar_comes_after_its_second_and_is_drawn_often_from_then_on() -> None:
    waiter = CountedWaiter()
    bar = Bar(lambda: None)
    with TransferWatch("upload", lambda: (1, 4), True, lambda text: bar, lambda: 5.0) as watch:
        assert watch.wait(waiter) == "landed"
    assert waiter.waits == [progress.PATIENCE_SECONDS, *[progress._REFRESH_SECONDS] * 2]
    assert len(bar.figures) == 2
