"""Cgroups of sessions: in the kernel's own where this machine lets us, and what is written there, anywhere."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from skyproxy.errors import ConfigurationError
from skyproxy_server.isolation import cgroups, options
from skyproxy_server.isolation.cgroups import CgroupBounds, Cgroups, CgroupsUnavailableError, own_cgroup
from tests.integration.programs import started, wait_for
from tests.server.isolation.workers import Worker

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's"),
]

ANY_CONTROLLERS: tuple[str, ...] = ()
SLEEP = ["sleep", "1000"]


@pytest.fixture
def base() -> Iterator[Path]:
    """A cgroup of the kernel's that this test may divide, below ours."""
    try:
        folder = own_cgroup() / f"test-{os.getpid()}-{os.urandom(4).hex()}"
        folder.mkdir()
    except (CgroupsUnavailableError, OSError) as error:
        pytest.skip(f"this machine gives us no cgroups: {error}")
    yield folder
    cgroups._remove(folder)
    assert not folder.exists()


def members(folder: Path) -> list[int]:
    return [int(word) for word in (folder / "cgroup.procs").read_text().split()]


def sessions_of(base: Path) -> dict[str, list[int]]:
    return {folder.name: members(folder) for folder in base.glob("skyproxy-*/*") if folder.is_dir()}


MAKES_ONE = """
    import os, pathlib, subprocess, sys
    from skyproxy_server.isolation.cgroups import CgroupBounds, Cgroups
    base = pathlib.Path({base!r})
    (base / "cgroup.procs").write_text(str(os.getpid()))
    made = Cgroups(base, ())
    # Without our pipes: they would be open for as long as it lives.
    nothing = subprocess.DEVNULL
    child = subprocess.Popen(["sleep", "1000"], stdin=nothing, stdout=nothing, stderr=nothing)
    made.add("first", child.pid, CgroupBounds())
    print(child.pid, flush=True)
    sys.stdin.readline()
    made.close()
    child.wait()
    print("closed", flush=True)
    sys.stdin.readline()
"""


# --- with the kernel -------------------------------------------------------------------------------------------------


def _write_but_stay(file: Path, text: str) -> None:
    """Write, but leave the tests' own process where it is."""
    if text != str(os.getpid()):
        file.write_text(text)


def test_a_session_and_what_it_starts_are_in_its_cgroup_and_end_with_it(base: Path, monkeypatch) -> None:
    monkeypatch.setattr(cgroups, "_write", _write_but_stay)
    made = Cgroups(base, ANY_CONTROLLERS)
    # A shell whose child has a group and a parent of its own; both are the session's all the same.
    shell = subprocess.Popen(["sh", "-c", "read go; setsid sleep 1000 & wait"], stdin=subprocess.PIPE)
    try:
        made.add("first", shell.pid, CgroupBounds())
        (folder,) = base.glob("skyproxy-*/first")
        shell.stdin.write(b"\n")  # type: ignore[union-attr]
        shell.stdin.flush()  # type: ignore[union-attr]
        pids = wait_for(lambda: members(folder) if len(members(folder)) == 2 else None, "both are there")
        assert shell.pid in pids
        made.remove("first")
        assert not folder.exists()
        assert shell.wait(20) == -9
    finally:
        shell.kill()
        shell.communicate()
        made.close()
    assert not list(base.glob("skyproxy-*"))


def test_a_worker_moves_out_of_the_cgroup_that_it_divides_and_back(base: Path) -> None:
    with started(MAKES_ONE.format(base=str(base))) as process:
        child = int(process.stdout.readline())  # type: ignore[union-attr]
        found = sessions_of(base)
        assert found["first"] == [child]
        assert found["worker"] == [process.pid]
        assert members(base) == []
        process.stdin.write("\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        assert process.stdout.readline() == "closed\n"  # type: ignore[union-attr]
        assert members(base) == [process.pid]
        assert not list(base.glob("skyproxy-*"))


def test_what_a_killed_worker_left_is_ended_by_the_next_one_and_no_living_workers(base: Path) -> None:
    program = MAKES_ONE.format(base=str(base))
    with started(program) as living:  # each moves out of the base, so that the next one finds it empty
        kept = int(living.stdout.readline())  # type: ignore[union-attr]
        with started(program) as killed:
            left = int(killed.stdout.readline())  # type: ignore[union-attr]
            killed.kill()
            killed.wait()
            assert not _has_ended(left)
            with started(program) as third:
                own = int(third.stdout.readline())  # type: ignore[union-attr]
                firsts = sorted(members(folder) for folder in base.glob("skyproxy-*/first"))
                assert firsts == sorted([[kept], [own]])
                wait_for(lambda: _has_ended(left), "what the killed one left ends")


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_cgroup_with_other_processes_is_left_alone(base: Path) -> None:
    with subprocess.Popen(SLEEP) as other:
        try:
            (base / "cgroup.procs").write_text(str(other.pid))
            with pytest.raises(CgroupsUnavailableError, match="1 other processes"):
                Cgroups(base, ANY_CONTROLLERS)
            assert not list(base.glob("skyproxy-*"))
            assert members(base) == [other.pid]
        finally:
            other.kill()


SERVES = """
    import functools, pathlib, sys
    from skyproxy_server import __main__ as program
    from skyproxy_server.isolation import options
    options.own_cgroup = lambda: pathlib.Path({base!r})
    options.Cgroups = functools.partial(options.Cgroups, controllers=())
    sys.exit(program.main({arguments!r}))
"""


def test_sessions_of_a_worker_have_cgroups_that_go_with_them(base: Path, tmp_path: Path, monkeypatch) -> None:
    import tests.server.isolation.workers as workers

    def start(tokens: Path, log, *arguments: str, **extra: str) -> subprocess.Popen[bytes]:
        from tests.integration.programs import environment

        words = ["--port", "0", "--device", "cpu", "--token-file", str(tokens), "--session-users", "off", *arguments]
        source = SERVES.format(base=str(base), arguments=words)
        return subprocess.Popen(
            [sys.executable, "-c", "import textwrap; exec(textwrap.dedent(" + repr(source) + "))"],
            stdin=subprocess.DEVNULL,
            stderr=log,
            env=environment(**extra),
        )

    monkeypatch.setattr(workers, "start_worker", start)
    worker = Worker(tmp_path, "--session-cgroups")
    try:
        with worker.connect() as node, worker.connect() as other:
            assert torch.ones(3, device=str(node.devices[0])).sum().item() == 3
            child = node.run(lambda: subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
            found = sessions_of(base)
            own = found[node._session.welcome.session]
            assert sorted(own) == sorted([node.run(os.getpid), child])
            assert found[other._session.welcome.session] == [other.run(os.getpid)]
        wait_for(lambda: set(sessions_of(base)) <= {"worker"}, "the cgroups go with the sessions")
        wait_for(lambda: _has_ended(child), "and what they have started")
    finally:
        worker.end()
    assert worker.process.returncode == 0
    assert "sessions: a cgroup each" in worker.log


# --- what is written, and what is refused, anywhere -----------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is written into a folder that stands for the root of all cgroups, with all controllers."""
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    lines: list[tuple[str, str]] = []
    monkeypatch.setattr(cgroups, "_write", lambda file, text: lines.append((file.name, text)))
    return lines


def test_memory_and_processors_are_bounded_before_the_process_is_there(tmp_path: Path, written) -> None:
    made = Cgroups(tmp_path)
    assert sorted(written) == sorted([("cgroup.subtree_control", f"+{name}") for name in ("cpu", "memory")] * 2)
    written.clear()
    made.add("first", 17, CgroupBounds(memory_bytes=1 << 30, cpus=1.5))
    assert written[:-1] == [("memory.max", str(1 << 30)), ("memory.swap.max", "0"), ("cpu.max", "150000 100000")]
    assert written[-1] == ("cgroup.procs", "17")
    written.clear()
    made.add("second", 18, CgroupBounds())
    assert written == [("cgroup.procs", "18")]
    made.close()
    assert not list(tmp_path.glob("skyproxy-*"))


def test_a_kernel_that_does_not_account_for_swap_bounds_memory_all_the_same(tmp_path, written, monkeypatch) -> None:
    def write(file: Path, text: str) -> None:
        if file.name == "memory.swap.max":
            raise FileNotFoundError(file)
        written.append((file.name, text))

    monkeypatch.setattr(cgroups, "_write", write)
    made = Cgroups(tmp_path)
    made.add("first", 17, CgroupBounds(memory_bytes=1 << 30))
    assert written[-2:] == [("memory.max", str(1 << 30)), ("cgroup.procs", "17")]
    made.close()


def test_a_bound_that_the_kernel_refuses_is_an_error_and_not_left_out(tmp_path, written, monkeypatch) -> None:
    made = Cgroups(tmp_path)

    def write(file: Path, text: str) -> None:
        raise PermissionError(file)

    monkeypatch.setattr(cgroups, "_write", write)
    with pytest.raises(PermissionError):
        made.add("first", 17, CgroupBounds(cpus=1))
    made.close()


def test_missing_controllers_are_named(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("hugetlb\n")
    with pytest.raises(CgroupsUnavailableError, match="no controller for cpu and memory"):
        Cgroups(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["cgroup.controllers"]


def test_two_workers_that_start_at_once_take_nothing_from_one_another(tmp_path: Path, written) -> None:
    made: list[Cgroups] = []
    threads = [threading.Thread(target=lambda: made.append(Cgroups(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(tmp_path.glob("skyproxy-*"))) == len(made) == 8
    for one in made:
        one.close()


def choice(**given: object) -> argparse.Namespace:
    return argparse.Namespace(**{"session_cgroups": None, "session_cpus": 0.0, **given})


def test_without_cgroups_only_who_asked_for_them_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise CgroupsUnavailableError("the system has no cgroups version 2")

    monkeypatch.setattr(options, "own_cgroup", none)
    assert options.session_cgroups(choice()) is None
    assert options.session_cgroups(choice(session_cgroups=False)) is None
    for asked in ({"session_cgroups": True}, {"session_cpus": 0.5}):
        with pytest.raises(ConfigurationError, match=r"no cgroups version 2.*Delegate=yes"):
            options.session_cgroups(choice(**asked))
    with pytest.raises(ConfigurationError, match="leave out --no-session-cgroups"):
        options.session_cgroups(choice(session_cgroups=False, session_cpus=0.5))


def test_the_log_says_what_is_in_force(tmp_path: Path, written, monkeypatch, caplog) -> None:
    caplog.set_level("INFO", "skyproxy.server")
    monkeypatch.setattr(options, "own_cgroup", lambda: tmp_path)
    for cpus, text in ((0.0, "equal parts of the processors"), (1.5, "at most 1.5 processors")):
        made = options.session_cgroups(choice(session_cpus=cpus))
        assert made is not None
        made.close()
        assert f"sessions: a cgroup each, with {text}" in caplog.text


# --- with the kernel's controllers -----------------------------------------------------------------------------------


def test_a_session_with_its_children_takes_no_more_than_its_bounds(tmp_path: Path) -> None:
    try:
        worker = Worker(tmp_path, "--session-memory", str(256 << 20), "--session-cpus", "0.5", "--blob-bytes", "0")
    except AssertionError as error:
        if "Sessions can have no cgroups here" in str(error):
            pytest.skip(f"this machine lets us bound no cgroups: {error}")
        raise
    try:
        with worker.connect() as node:

            def bounds() -> tuple[str, str]:
                folder = own_cgroup()
                return (folder / "memory.max").read_text().strip(), (folder / "cpu.max").read_text().strip()

            assert node.run(bounds) == (str(512 << 20), "50000 100000")
            greedy = [sys.executable, "-c", "print(len(bytearray(2 << 30)))"]
            done = node.run(lambda: subprocess.run(greedy, capture_output=True).returncode)
            assert done != 0
    finally:
        worker.end()
