"""Users of sessions, with the real program as root: what one session can do to another, and what it leaves behind."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy.errors import ConfigurationError, ConnectError, SessionLostError
from skyproxy_server.isolation import leftovers, options
from skyproxy_server.isolation.session_users import SessionUsers, SessionUsersUnavailableError
from skyproxy_server.limits import are_sessions_separable, end_all_others_of_this_user
from tests.integration.programs import start_worker, wait_for
from tests.server.isolation.interpreters import public_interpreter
from tests.server.isolation.workers import TOKEN, Worker


def may_give_users() -> bool:
    """Return whether we are root, and not one of a container that has few users or few rights."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or not os.access("/run", os.W_OK):
        return False
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        (rights,) = (int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
        wanted = sum(1 << right for right in (0, 1, 3, 5, 6, 7))  # CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID
        return rights & wanted == wanted and int(Path("/proc/self/uid_map").read_text().split()[2]) > 1 << 31
    return False


needs_root = pytest.mark.skipif(not may_give_users(), reason="only root gives sessions users of their own")
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not are_sessions_separable(), reason="session processes need Linux"),
]


def some_numbers(count: int) -> range:
    """Users that no other test has at this time: each of pytest's processes has its own."""
    return range(first := 2_000_000 + os.getpid() % 1_000_000 * 100, first + count)


def written(numbers: range) -> str:
    return f"{numbers[0]}:{len(numbers)}"


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that every user may enter; those of pytest are for one user alone."""
    folder = Path(tempfile.mkdtemp(prefix="skyproxy-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def python(place: Path) -> tuple[str, dict[str, str]]:
    return public_interpreter(place)


@pytest.fixture(scope="module")
def worker(place: Path, python: tuple[str, dict[str, str]]) -> Iterator[Worker]:
    """A worker in whose folder everybody may look; its token is for the worker's user alone."""
    (folder := place / "worker").mkdir(mode=0o755)
    made = Worker(folder, "--session-users", written(some_numbers(8)), python=python[0], **python[1])
    yield made
    made.end()


@pytest.fixture
def sessions(worker: Worker) -> Iterator[Callable[[], skyproxy.Node]]:
    """Makes sessions that end with the test."""
    made: list[skyproxy.Node] = []

    def make() -> skyproxy.Node:
        made.append(worker.connect())
        return made[-1]

    yield make
    for node in made:
        node.close()
    wait_for(lambda: worker.activity()["processes"] == 0, "all sessions end")


def refusals(attempts: dict[str, Callable[[], object]]) -> dict[str, str]:
    """What comes of each attempt: the name of its error, or the text 'done'."""
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = "done"
        except OSError as error:
            found[name] = type(error).__name__
    return found


REFUSED = {"PermissionError", "FileNotFoundError", "ProcessLookupError"}
"""What an attempt may come to: some systems do not even show the processes of others."""

# --- what one session can do to another ------------------------------------------------------------------------------


@needs_root
def test_sessions_have_users_groups_and_homes_of_their_own(sessions) -> None:
    def told() -> tuple[set[int], set[int], list[int], str, int, str]:
        home = os.environ["HOME"]
        status = os.stat(home)
        return (
            {*os.getresuid(), status.st_uid},
            {*os.getresgid(), status.st_gid},
            os.getgroups(),
            home,
            status.st_mode & 0o777,
            tempfile.gettempdir(),
        )

    first, second = sessions().run(told), sessions().run(told)
    for users, groups, others, home, mode, temporary in (first, second):
        assert users == groups
        assert len(users) == 1
        assert users <= set(some_numbers(8))
        assert 0 not in others
        assert mode == 0o700
        assert Path(temporary).is_relative_to(home)
    assert first[0] != second[0]
    assert first[3] != second[3]


@needs_root
def test_a_session_with_functions_reaches_nothing_of_another_session_or_of_the_worker(worker: Worker, sessions) -> None:
    def offer() -> tuple[int, list[str]]:
        home = Path(os.environ["HOME"], "secret")
        shared = Path(f"/dev/shm/skyproxy-test-{os.getpid()}")
        temporary = Path(f"/tmp/skyproxy-test-{os.getpid()}")
        for file in (home, shared, temporary):
            file.write_text("of one session alone")
        return os.getpid(), [str(home), str(shared), str(temporary)]

    def attack(pid: int, files: list[str]) -> dict[str, str]:
        library = ctypes.CDLL(None, use_errno=True)

        def call(name: str, *arguments: object) -> None:
            function = getattr(library, name)
            function.restype = ctypes.c_long
            if function(*arguments) < 0:
                raise OSError(ctypes.get_errno(), name)

        attempts: dict[str, Callable[[], object]] = {
            "mem": lambda: os.open(f"/proc/{pid}/mem", os.O_RDONLY),
            "environ": lambda: Path(f"/proc/{pid}/environ").read_bytes(),
            "maps": lambda: Path(f"/proc/{pid}/maps").read_bytes(),
            "descriptors": lambda: os.listdir(f"/proc/{pid}/fd"),
            "folder": lambda: os.listdir(f"/proc/{pid}/cwd/"),
            "root": lambda: os.listdir(f"/proc/{pid}/root/"),
            "oom": lambda: Path(f"/proc/{pid}/oom_score_adj").write_text("1000"),
            "signal": lambda: os.kill(pid, signal.SIGSTOP),
            "pidfd": lambda: signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGTERM),
            "trace": lambda: call("ptrace", 16, pid, 0, 0),
            "limits": lambda: __import__("resource").prlimit(pid, 7, (0, 0)),
            "affinity": lambda: os.sched_setaffinity(pid, {0}),
            "priority": lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        }
        for file in files:
            attempts[f"read {file}"] = lambda file=file: Path(file).read_text()
            attempts[f"remove {file}"] = lambda file=file: os.unlink(file)
        return refusals(attempts)

    victim, attacker = sessions(), sessions()
    pid, files = victim.run(offer)
    found = attacker.run(attack, pid, files)
    assert set(found.values()) <= REFUSED, found
    assert victim.run(lambda: [Path(file).read_text() for file in files]) == ["of one session alone"] * 3
    token = worker.tokens / "owner"
    assert token.read_text() == TOKEN
    for other in (worker.process.pid, next(iter(worker.children() - {pid, attacker.run(os.getpid)}))):
        found = attacker.run(attack, other, [str(token)])
        assert set(found.values()) <= REFUSED, found


@needs_root
def test_a_session_does_not_become_root_again(worker: Worker, sessions) -> None:
    def attack() -> dict[str, str]:
        return refusals(
            {
                "user": lambda: os.setuid(0),
                "users": lambda: os.setresuid(-1, 0, -1),
                "group": lambda: os.setgid(0),
                "groups": lambda: os.setgroups([0]),
                "shadow": lambda: Path("/etc/shadow").read_bytes(),
                "device": lambda: os.mknod("/tmp/skyproxy-test-device", 0o60666, os.makedev(8, 0)),
                "locks": lambda: os.listdir("/run/skyproxy/session-users"),
                "score": lambda: Path("/proc/self/oom_score_adj").write_text("-1000"),
            }
        )

    node = sessions()
    found = node.run(attack)
    assert set(found.values()) <= REFUSED, found
    lines = node.run(lambda: Path("/proc/self/status").read_text()).splitlines()
    words = {line.split(":")[0]: line.split(":")[1].split() for line in lines}
    assert [words[name] for name in ("CapEff", "CapPrm", "CapAmb")] == [["0" * 16]] * 3
    assert words["NoNewPrivs"] == ["1"]
    assert int(node.run(lambda: Path("/proc/self/oom_score_adj").read_text())) > 0


# --- what a session still has ----------------------------------------------------------------------------------------


@needs_root
def test_operations_uploads_functions_and_their_files_work_as_ever(sessions) -> None:
    def use() -> tuple[str, int, list[float]]:
        torch.save({"weight": torch.ones(3)}, "own.pt" if os.getcwd() == os.environ["HOME"] else Path.home() / "own.pt")
        loaded = torch.load(Path.home() / "own.pt")
        done = subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True, check=True)
        descriptors = len(os.listdir("/proc/self/fd"))
        return done.stdout.strip(), descriptors, loaded["weight"].tolist()

    large = torch.arange(3 << 18, dtype=torch.float32)
    for node in (sessions(), sessions()):  # the second is given what the first one has uploaded
        sent = large.to(str(node.devices[0]))
        assert torch.equal((sent * 2).cpu(), large * 2)
        answer, descriptors, weight = node.run(use)
        assert (answer, weight) == ("42", [1, 1, 1])
        assert descriptors > 0


@needs_root
def test_a_crash_of_a_session_with_a_user_is_told(worker: Worker, sessions) -> None:
    node = sessions()
    with pytest.raises(SessionLostError, match=r"SIGSEGV"):
        node.run(signal.raise_signal, signal.SIGSEGV)


# --- what a session leaves behind ------------------------------------------------------------------------------------


def leave_much() -> tuple[int, list[str]]:
    """Leave a process without a parent, files with deep folders, and memory under a name and a number; say which."""
    name = f"skyproxy-left-{os.getpid()}"
    deep = Path("/tmp") / name
    deep.mkdir()
    os.chdir(deep)
    for _ in range(30):
        os.mkdir("d")
        os.chdir("d")
    Path("file").write_text("deep")
    os.chdir("/")
    os.chmod(deep, 0)
    Path("/dev/shm", name).write_text("memory")
    os.symlink("/etc", f"/tmp/{name}-link")
    library = ctypes.CDLL(None)
    assert library.shmget(0, 4096, 0o1600) >= 0
    child = subprocess.Popen(["sh", "-c", "trap '' TERM HUP; while :; do sleep 1; done"], start_new_session=True)
    return child.pid, [os.environ["HOME"], str(deep), f"/dev/shm/{name}", f"/tmp/{name}-link"]


def is_alive(pid: int) -> bool:
    return leftovers._state_and_users(str(pid))[0] not in ("Z", "X")


def remains(files: list[str]) -> list[str]:
    return [file for file in files if os.path.lexists(file)]


@needs_root
def test_a_user_is_given_again_when_nothing_of_its_session_is_left(place: Path, python) -> None:
    (folder := place / "one").mkdir(mode=0o755)
    numbers = some_numbers(20)[19:]
    worker = Worker(folder, "--session-users", written(numbers), python=python[0], **python[1])
    try:
        with worker.connect() as node:
            assert node.run(os.getuid) == numbers[0]
            with pytest.raises(ConnectError, match="cannot start a process for another session"):
                worker.connect()
            pid, files = node.run(leave_much)
            assert is_alive(pid)
            assert len(remains(files)) == 4
            assert leftovers.IpcObjects(numbers[0]).found()

        def again() -> skyproxy.Node | None:
            with contextlib.suppress(ConnectError):
                return worker.connect()
            return None

        with wait_for(again, "the user is free again", 60) as node:
            assert node.run(os.getuid) == numbers[0]
            assert not is_alive(pid)
            assert remains(files) == []
            assert not leftovers.IpcObjects(numbers[0]).found()
        assert os.path.isdir("/etc")
    finally:
        worker.end()
    assert worker.process.returncode == 0
    assert not leftovers.files_of(numbers[0])


@needs_root
def test_what_the_session_of_a_killed_worker_left_is_cleared_by_the_next_worker(place: Path, python) -> None:
    numbers = some_numbers(30)[29:]
    (folder := place / "killed").mkdir(mode=0o755)
    worker = Worker(folder, "--session-users", written(numbers), python=python[0], **python[1])
    node = worker.connect()
    try:
        session = node.run(os.getpid)
        pid, files = node.run(leave_much)
        worker.process.kill()
        worker.process.wait()
        wait_for(lambda: not is_alive(session), "the kernel ends the session's process, whatever its user")
        assert is_alive(pid)
        users = SessionUsers(numbers[0], 1)
        try:
            user = users.claim("next")
            assert user.number == numbers[0]
            assert not is_alive(pid)
            assert remains(files) == []
        finally:
            users.close()
        assert not os.path.exists(user.home)
    finally:
        node.close()
        worker.end()


# --- where sessions cannot have users --------------------------------------------------------------------------------


@needs_root
def test_an_interpreter_that_only_root_can_reach_is_found_out_at_the_start(place: Path, python, tmp_path: Path) -> None:
    private = place / "private"
    private.mkdir(mode=0o700)
    (private / "python").symlink_to(python[0])
    hidden, environment = str(private / "python"), python[1]
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        arguments = ("--session-processes", "--session-users", written(some_numbers(50)[49:]))
        process = start_worker(token, stderr, *arguments, python=hidden, **environment)
        assert process.wait(100) == 2
    assert "cannot have users of their own: the interpreter" in log.read_text()
    (folder := tmp_path / "auto").mkdir()
    worker = Worker(folder, "--session-users", "auto", python=hidden, **environment)  # it says so and goes on
    try:
        assert "the worker's own user, root, for all" in worker.log
        with worker.connect() as node:
            assert node.run(os.getuid) == 0
    finally:
        worker.end()


@needs_root
def test_numbers_of_others_are_left_alone(tmp_path: Path) -> None:
    foreign, account, free = some_numbers(60)[57], 0, some_numbers(60)[58]
    other = subprocess.Popen(["sleep", "1000"], user=foreign)
    try:
        for number in (foreign, account):
            users = SessionUsers(number, 1, locks=tmp_path / "locks")
            with pytest.raises(SessionUsersUnavailableError, match="none of the users"):
                users.claim("first")
            users.close()
        users = SessionUsers(foreign, 2, locks=tmp_path / "locks")
        assert users.claim("first").number == free
        second = SessionUsers(foreign, 2, locks=tmp_path / "locks")  # as another worker does
        with pytest.raises(SessionUsersUnavailableError):
            second.claim("first")
        users.release("first")
        assert second.claim("first").number == free
        second.close()
        users.close()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@needs_root
def test_a_folder_of_locks_that_others_could_change_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks").chmod(0o777)
    with pytest.raises(SessionUsersUnavailableError, match="not root's alone"):
        SessionUsers(*(some_numbers(61)[60], 1), locks=tmp_path / "locks")


def test_root_never_ends_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    monkeypatch.setattr(os, "getresuid", lambda: (1000, 1000, 0))
    with pytest.raises(PermissionError):
        end_all_others_of_this_user()
    assert not sent


def choice(**given: object) -> argparse.Namespace:
    return argparse.Namespace(**{"session_users": options.AUTO, "embedded": False, **given})


def test_who_is_not_root_has_one_user_for_all_and_is_told_if_it_wanted_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert options.session_users(choice()) is None
    assert options.session_users(choice(session_users=options.OFF)) is None
    with pytest.raises(ConfigurationError, match="only root can give"):
        options.session_users(choice(session_users=range(60706, 60708)))


def test_an_embedded_worker_keeps_the_user_of_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert options.session_users(choice(embedded=True)) is None


@pytest.mark.parametrize("text", ["0:10", "1000", "x:1", "1000:0", "4294967294:2", "-5:3", "on"])
def test_ranges_of_users_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        options._session_users(text)


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_deep_and_wide_folder_is_removed_and_what_its_links_point_to_is_not(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("kept")
    top = tmp_path / "top"
    top.mkdir()
    (top / ".removed-0").mkdir()
    (top / ".removed-0" / ".removed-0").mkdir()
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(top)
        for _ in range(sys.getrecursionlimit() + 100):
            os.mkdir("d")
            os.chdir("d")
        os.symlink(kept, "link")
        Path("file").touch()
        os.mkdir("beside")
    finally:
        os.fchdir(before)
        os.close(before)
    assert leftovers.remove_tree(top, time.monotonic() + 60)
    assert not top.exists()
    assert (kept / "file").read_text() == "kept"
    assert leftovers.remove_tree(top, time.monotonic() + 60)


def test_what_cannot_be_removed_in_time_is_told(tmp_path: Path) -> None:
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "file").touch()
    assert not leftovers.remove_tree(tmp_path / "top", time.monotonic() - 1)
