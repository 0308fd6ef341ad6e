"""stdout, stderr and silent: who prints, decided for each task."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import threading
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest

from skyproxy.errors import ConfigurationError
from skyproxy.runtime import CallContext, InstanceInfo, entered_call, silent, stderr, stdout


def at(node: int) -> contextlib.AbstractContextManager[None]:
    info = InstanceInfo(node=node, total_nodes=4, rank=node, world_size=4)
    return entered_call(CallContext("1", "f", {"pool": info}))


def speak() -> str:
    print("out")
    print("err", file=sys.stderr)
    return "done"


@pytest.mark.parametrize(
    ("decorate", "printed"),
    [
        (stdout(only="head"), [("out\n", "err\n"), ("", "err\n"), ("", "err\n")]),
        (stderr(only="head"), [("out\n", "err\n"), ("out\n", ""), ("out\n", "")]),
        (stdout(only=lambda info: info.node < 2), [("out\n", "err\n"), ("out\n", "err\n"), ("", "err\n")]),
        (silent, [("", "")] * 3),
        (silent(), [("", "")] * 3),
    ],
)
def test_who_prints(decorate: Any, printed: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    for node, expected in enumerate(printed):
        with at(node):
            assert decorate(speak)() == "done"
        assert tuple(capsys.readouterr()) == expected
    assert (sys.stdout, sys.stderr) == before


def test_a_muted_task_does_not_mute_another(capsys: pytest.CaptureFixture[str]) -> None:
    inside, go_on = threading.Event(), threading.Event()

    @silent
    def quiet() -> None:
        print("quiet one")
        inside.set()
        assert go_on.wait(30)
        print("quiet two")

    task = threading.Thread(target=quiet)
    task.start()
    assert inside.wait(30)
    print("loud")
    go_on.set()
    task.join(30)
    print("after")
    assert capsys.readouterr().out == "loud\nafter\n"


def test_coroutines_are_muted_for_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    @silent
    async def quiet() -> None:
        print("quiet")
        await asyncio.sleep(0)
        print("quiet")

    async def loud() -> None:
        print("loud")
        await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(quiet(), loud(), quiet())

    asyncio.run(both())
    assert capsys.readouterr().out == "loud\n"


def test_a_generator_is_muted_and_its_consumer_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    @silent
    def count() -> Iterator[int]:
        try:
            for number in range(2):
                print("quiet")
                yield number
        finally:
            print("quiet end")

    for number in count():
        print("loud", number)
        if number == 1:
            break
    assert capsys.readouterr().out == "loud 0\nloud 1\n"


def test_a_redirection_inside_still_works() -> None:
    @stdout(only="head")
    def redirect() -> str:
        target = io.StringIO()
        with contextlib.redirect_stdout(target):
            print("kept")
        return target.getvalue()

    assert redirect() == "kept\n"


def test_an_exception_passes_and_the_stream_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout

    @silent
    def fail() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert sys.stdout is before


def test_a_decorated_function_travels(capsys: pytest.CaptureFixture[str]) -> None:
    suffix = "!"

    @stdout(only=lambda info: info.node == 1)
    def shout(text: str) -> str:
        print(text + suffix)
        return text

    copy = cloudpickle.loads(cloudpickle.dumps(shout))
    with at(0):
        assert copy("no") == "no"
    with at(1):
        assert copy("yes") == "yes"
    assert capsys.readouterr().out == "yes!\n"


def test_only_must_be_head_or_a_predicate() -> None:
    with pytest.raises(ConfigurationError, match="only"):
        stdout(only="rank0")  # type: ignore[arg-type]


def test_the_name_of_the_function_is_kept() -> None:
    assert silent(speak).__name__ == "speak"
