"""Pools that run when their program ends, or is forked."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(120)


def run_program(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    # Python 3.12 warns of every fork where there are threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


@pytest.mark.parametrize(
    ("keep", "ending", "status", "said"),
    [
        ("pool = ", "pass", 0, ""),
        ("pool = ", "sys.exit(3)", 3, ""),
        ("pool = ", "raise LookupError('mine')", 1, "LookupError: mine"),
        ("", "pass", 0, ""),
    ],
    ids=["ends", "exits", "fails", "was forgotten"],
)
def test_a_pool_that_nobody_closed_ends_with_the_program(
    tmp_path: Path, keep: str, ending: str, status: int, said: str
) -> None:
    done = run_program(
        tmp_path,
        f"""
        import sys
        import skyproxy as sky

        @sky.compute
        def one():
            import os
            return os.getpid()

        def begin():
            pool = sky.Compute(provider=sky.Local(device="cpu"), nodes=2)
            pool.start()
            print(*(one() @ pool), flush=True)
            return pool

        {keep}begin()
        {ending}
        """,
    )
    assert done.returncode == status, done.stderr
    assert done.stderr.splitlines()[-1:] == [said] * bool(said)
    workers = [int(word) for word in done.stdout.split()]
    assert len(workers) == 2
    assert not any(psutil.pid_exists(worker) for worker in workers)


def test_nothing_is_said_of_what_was_under_way(tmp_path: Path) -> None:
    done = run_program(
        tmp_path,
        """
        import time
        import skyproxy as sky

        class Counter(sky.Actor):
            def count(self):
                yield from range(10_000_000)

        @sky.compute
        def count():
            yield from range(10_000_000)

        pool = sky.Compute(provider=sky.Local(device="cpu"), concurrency=4).start()
        counter = Counter.on(pool)()
        stream, of_actor, results = count().stream(pool), counter.count(), pool.map(abs, range(10_000_000))
        print(next(stream), next(of_actor), next(results))
        futures = [pool.submit(time.sleep, 600) for _ in range(8)]
        itself = [stream]
        itself.append(itself)  # which is let go of when the interpreter is taken down
        """,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 0 0\n", "")


def test_threads_that_outlive_the_main_one_learn_why_there_are_no_pools(tmp_path: Path) -> None:
    done = run_program(
        tmp_path,
        """
        import threading
        from concurrent.futures import CancelledError
        import skyproxy as sky

        def use(pool):
            while True:
                try:
                    pool.run(abs, -1)
                except CancelledError:
                    continue
                except sky.errors.ConfigurationError as error:
                    print(error, flush=True)
                    break
            try:
                sky.Compute(provider=sky.Local(device="cpu")).start()
            except sky.errors.ConfigurationError as error:
                print(error, flush=True)

        pool = sky.Compute(provider=sky.Local(device="cpu"), nodes=1)
        pool.start()
        threading.Thread(target=use, args=(pool,)).start()
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert "this pool was closed because the main thread of the program has ended. Join the threads" in first
    assert "none can be started any more. Join the threads" in second


def test_a_forked_child_leaves_the_pool_to_its_parent_however_it_ends(tmp_path: Path) -> None:
    """The provider ends what costs money: a child of multiprocessing or of a data loader must not have it do so."""
    done = run_program(
        tmp_path,
        """
        import contextlib, multiprocessing, os, sys, time
        import skyproxy as sky

        parent = os.getpid()

        class Watched(sky.Local):
            async def launch(self, spec, report):
                launched = await super().launch(spec, report)
                close = launched.close

                def told():
                    print("ended by the", "parent" if os.getpid() == parent else "child", flush=True)
                    return close()

                object.__setattr__(launched, "close", told)
                return launched

        class Adder(sky.Actor):
            def add(self, one, two):
                return one + two

        class Hooked(sky.plugins.Plugin):
            @contextlib.contextmanager
            def around_client(self, pool):
                yield
                print("hook left by the", "parent" if os.getpid() == parent else "child", flush=True)

        def use_everything():
            uses = [lambda: pool.run(abs, -1), lambda: pool.nodes, lambda: adder.add(1, 2), lambda: pool.map(abs, [1])]
            for use in uses:
                try:
                    use()
                except sky.errors.ConfigurationError as error:
                    assert "it belongs to the process that started it" in str(error), error
                else:
                    raise AssertionError("a child has used the pool of its parent")
            future.cancel()
            stream.close()
            pool.close()

        def start_another():
            with sky.Compute(provider=sky.Local(device="cpu")) as own:
                print(own.run(abs, -5), flush=True)

        def fork(child):
            number = os.fork()
            if not number:
                child()
                sys.exit(0)
            assert os.waitpid(number, 0)[1] == 0

        with sky.Compute(provider=Watched(device="cpu"), plugins=[Hooked()], concurrency=3) as pool:
            adder = Adder.on(pool)()
            future = pool.submit(time.sleep, 1)
            stream = sky.compute(lambda: (yield from range(10_000)))().stream(pool)
            next(stream)
            fork(lambda: None)
            fork(use_everything)
            fork(start_another)
            process = multiprocessing.get_context("fork").Process(target=int)
            process.start()
            process.join()
            assert process.exitcode == 0
            assert (adder.add(1, 2), pool.run(abs, -1), len(list(stream)), future.result()) == (3, 1, 9_999, None)
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "5\nhook left by the parent\nended by the parent\n"
