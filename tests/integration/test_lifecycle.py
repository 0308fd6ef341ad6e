"""How sessions begin, end, and survive: exits, kills, Ctrl-C, forks, settings, and the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

import skyproxy
from skyproxy import interrupts
from skyproxy.errors import ConfigurationError, SessionLostError
from skyproxy.tensor.core.devices import DEVICES
from tests.integration.programs import environment, run_program, started, succeed, wait_for, worker

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="sends POSIX signals")

LOST_WITHIN_SECONDS = 2.0
EXIT_WITHIN_SECONDS = 2.0
"""Beyond what Python and PyTorch alone take to end, thrice: machines are busy."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails if the body takes longer."""
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    assert took < seconds, f"took {took:.1f} s"


@contextlib.contextmanager
def later(seconds: float, action: Callable[[], object]) -> Iterator[None]:
    """Does `action` on another thread while the body runs."""
    timer = threading.Timer(seconds, action)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def keep_busy(device: torch.device | str, seconds: float) -> torch.Tensor:
    """Records work that keeps a worker busy for about so long; a value that comes at its end."""
    x = torch.full((768, 768), 1 / 768, device=device)
    x.cpu()
    start = time.monotonic()
    (x @ x @ x @ x).cpu()
    once = (time.monotonic() - start) / 3
    y = x
    for _ in range(max(3, int(seconds / once))):
        y = y @ x
    return y.mean()


@pytest.fixture
def node(sky: str) -> Iterator[skyproxy.Node]:
    """A worker that may be killed. The devices of other tests come first and keep their numbers."""
    with skyproxy.launch_local("cpu") as fresh:
        yield fresh


def kill(node: skyproxy.Node, number: int = signal.SIGKILL) -> None:
    assert node.process_id is not None
    os.kill(node.process_id, number)


# --- beginning and end of a program ----------------------------------------------------------------------------------

ENDS = "import time; print(time.time(), flush=True)"


def run_to_end(source: str, cwd: Path | None = None) -> tuple[list[str], float]:
    """Runs a program that ends silently: the lines that it prints, and the seconds from the last one to its end."""
    lines = succeed(source + "\n" + ENDS, cwd=cwd).splitlines()
    return lines[:-1], time.time() - float(lines[-1])


def check_exit(source: str, expected: list[str], cwd: Path | None = None) -> None:
    """Runs a program that prints `expected`; it must end soon after its last line, and silently."""
    printed, took = run_to_end(source, cwd)
    assert printed == expected
    assert took < EXIT_WITHIN_SECONDS + 3 * run_to_end("import torch")[1]


def test_a_one_line_program_runs_and_ends_by_itself(tmp_path: Path) -> None:
    check_exit(
        "import skyproxy, torch; print(torch.ones(2, device='sky:0') + 1)",
        ["tensor([2., 2.], device='sky:0')"],
        cwd=tmp_path,
    )


def test_imports_work_in_the_other_order() -> None:
    check_exit("import torch, skyproxy; print((torch.ones(2).to('sky') * 3).tolist())", ["[3.0, 3.0]"])


def test_a_program_that_never_waits_ends_as_well() -> None:
    check_exit("import torch, skyproxy; torch.ones(2).to('sky:0')", [])


def test_a_program_ends_while_much_is_under_way() -> None:
    check_exit(
        """
import contextlib, threading, torch, skyproxy
x = torch.full((1024, 1024), 1 / 1024, device="sky:0")
for _ in range(3000):
    x = x @ x
big = torch.ones(64 << 20)

def quietly(action):
    with contextlib.suppress(skyproxy.errors.SessionLostError):
        action()

threading.Thread(target=quietly, args=(lambda: big.to("sky:0"),), daemon=True).start()
threading.Thread(target=quietly, args=(lambda: x.cpu(),), daemon=True).start()
""",
        [],
    )


def test_an_error_ends_the_program_as_an_error_does() -> None:
    done = run_program("import skyproxy, torch; x = torch.ones(2, device='sky:0'); raise SystemExit(7)")
    assert (done.returncode, done.stderr) == (7, "")


def test_tensors_that_live_until_the_end_die_silently() -> None:
    source = "import skyproxy, torch; x = [torch.ones(n, device='sky:0') for n in (2, 2_000_000)]; y = x[1] + 1"
    done = run_program(source)
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_standard_streams_do_no_harm(tmp_path: Path) -> None:
    source = (
        "import pathlib, skyproxy, torch; x = torch.ones(300_000).to('sky:0') + 1; "
        f"pathlib.Path({str(tmp_path / 'sum')!r}).write_text(str(x.sum().item()))"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, source]
    done = subprocess.run(command, timeout=60, env=environment(), check=False)
    assert done.returncode == 0
    assert (tmp_path / "sum").read_text() == "600000.0"


def test_the_worker_of_a_killed_program_ends() -> None:
    source = """
    import skyproxy, torch, time
    (torch.ones(2, device="sky:0") + 1).cpu()
    print(skyproxy.nodes._nodes[0].process_id, flush=True)
    x = torch.full((1024, 1024), 1 / 1024, device="sky:0")
    for _ in range(1000):
        x = x @ x
    x.cpu()
    """
    with started(source) as program:
        assert program.stdout is not None
        line = program.stdout.readline()
        assert line, program.communicate()
        served = psutil.Process(int(line))
        program.kill()
        program.wait()
        served.wait(5.0)


def test_what_functions_started_ends_with_the_worker_of_a_killed_program() -> None:
    source = """
    import multiprocessing, subprocess, time
    import skyproxy

    def start():
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(10_000,))
        forked.start()
        return forked.pid, subprocess.Popen(["sleep", "10000"]).pid

    with skyproxy.launch_local("cpu") as node:
        print(*node.run(start), flush=True)
        time.sleep(10_000)
    """
    with started(source) as program:
        assert program.stdout is not None
        line = program.stdout.readline()
        assert line, program.communicate()
        children = [psutil.Process(int(number)) for number in line.split()]
        program.kill()
        program.wait()
        for child in children:
            child.wait(30)


# --- a worker that dies ----------------------------------------------------------------------------------------------


def test_a_killed_worker_is_noticed_at_the_next_wait(node: skyproxy.Node) -> None:
    x = torch.ones(3, device=node.devices[0])
    x.cpu()
    kill(node)
    with within(LOST_WITHIN_SECONDS), pytest.raises(SessionLostError, match="tensors on the CPU are unharmed"):
        (x + 1).cpu()
    with within(0.5), pytest.raises(SessionLostError):
        x.cpu()
    with within(0.5), pytest.raises(ConnectionError):
        torch.sky.synchronize(node.devices[0])
    assert not node.alive
    assert [info.alive for info in skyproxy.devices() if info.device == node.devices[0]] == [False]


def test_a_killed_worker_ends_a_wait(node: skyproxy.Node) -> None:
    result = keep_busy(node.devices[0], 20)
    with later(0.3, lambda: kill(node)), within(0.3 + LOST_WITHIN_SECONDS), pytest.raises(SessionLostError):
        result.item()


def test_a_killed_worker_ends_an_upload(node: skyproxy.Node) -> None:
    data = torch.zeros(64 << 20)
    torch.ones(2, device=node.devices[0]).cpu()
    kill(node, signal.SIGSTOP)  # so that the upload is surely under way when it dies
    with later(0.3, lambda: kill(node)), within(0.5 + LOST_WITHIN_SECONDS), pytest.raises(SessionLostError):
        data.to(node.devices[0])


def test_a_killed_worker_ends_a_program_that_only_records(node: skyproxy.Node) -> None:
    x = torch.ones(3, device=node.devices[0])
    x.cpu()
    with later(0.2, lambda: kill(node)), within(0.2 + LOST_WITHIN_SECONDS), pytest.raises(SessionLostError):
        while True:
            x = x + 1


def test_a_killed_worker_ends_a_large_download(node: skyproxy.Node) -> None:
    x = torch.zeros(64 << 20, device=node.devices[0])
    torch.sky.synchronize(node.devices[0])
    kill(node, signal.SIGSTOP)
    with later(0.3, lambda: kill(node)), within(0.5 + LOST_WITHIN_SECONDS), pytest.raises(SessionLostError):
        x.cpu()


def test_a_process_that_a_function_forked_does_not_hide_the_end_of_its_worker(tmp_path: Path) -> None:
    def fork() -> tuple[int, int]:
        import multiprocessing

        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(10_000,))
        forked.start()
        assert forked.pid is not None
        return os.getpid(), forked.pid

    with worker(tmp_path) as (url, token), skyproxy.connect(url, token=token) as node:
        own, forked = (psutil.Process(number) for number in node.run(fork))
        try:
            own.kill()  # it alone, as the kernel does when memory runs out
            with within(LOST_WITHIN_SECONDS), pytest.raises(SessionLostError):
                node.run(abs, 1)
            assert forked.is_running()
            # A dying process closes its connections before its port; when all is closed, it can be reaped.
            os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
            port = int(url.rpartition(":")[2])
            with socket.create_server(("127.0.0.1", port), reuse_port=False):
                pass  # another worker can have the port
        finally:
            forked.kill()


def test_who_connects_again_finds_the_same_number(node: skyproxy.Node) -> None:
    (place,) = node.devices
    old = torch.ones(3, device=place)
    kill(node)
    with pytest.raises(SessionLostError, match=r"skyproxy.connect\(.*same sky:N.*skyproxy.reset\(\)"):
        old.cpu()
    with skyproxy.launch_local("cpu") as again:
        assert again.devices == [place]
        new = torch.ones(3, device=place)
        assert (new + 1).tolist() == [2, 2, 2]
        for mixed in (
            lambda: old + new,
            lambda: new.add_(old),
            lambda: new.copy_(old),
            lambda: torch.stack([new, old]),
        ):
            with pytest.raises(SessionLostError):
                mixed()
        assert new.tolist() == [1, 1, 1]
        assert [info.alive for info in skyproxy.devices() if info.device == place] == [True]


def test_a_compiled_function_goes_on_with_the_worker_that_took_the_number(node: skyproxy.Node) -> None:
    (place,) = node.devices
    double = torch.compile(lambda x: x * 2 + 1, backend="sky")
    assert double(torch.ones(3, device=place)).tolist() == [3, 3, 3]
    kill(node)
    with pytest.raises(SessionLostError):
        double(torch.ones(3, device=place)).cpu()
    with skyproxy.launch_local("cpu") as again:
        assert again.devices == [place]
        assert double(torch.ones(3, device=place)).tolist() == [3, 3, 3]


@pytest.mark.slow
def test_a_program_that_was_stopped_finds_its_worker_as_it_left_it(tmp_path: Path) -> None:
    """Its own standstill is no silence of the worker's: with a patience of one second it is stopped for five."""
    go_on = tmp_path / "go on"
    source = f"""
    import os, time, torch, skyproxy
    x = torch.ones(3, device="sky:0")
    print(x.sum().item(), flush=True)
    while not os.path.exists({str(go_on)!r}):
        time.sleep(0.01)
    for _ in range(200):
        x += 1
    print(x.sum().item(), flush=True)
    """
    patience = {"SKYPROXY_LIVENESS_TIMEOUT_SECONDS": "1", "SKYPROXY_PING_INTERVAL_SECONDS": "0.5"}
    with started(source, **patience) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "3.0\n"
        for _ in range(3):
            program.send_signal(signal.SIGSTOP)
            threading.Event().wait(5)
            program.send_signal(signal.SIGCONT)
            threading.Event().wait(0.2)
        go_on.touch()
        assert program.stdout.readline() == "603.0\n"
        assert program.wait(30) == 0


def test_other_workers_live_on(node: skyproxy.Node, sky: str) -> None:
    x = torch.ones(3, device=sky)
    kill(node)
    with pytest.raises(SessionLostError):
        torch.ones(3, device=node.devices[0]).cpu()
    assert (x + 1).tolist() == [2, 2, 2]


def test_a_silent_worker_is_given_up() -> None:
    """A worker that no longer answers but whose connection stands: a stopped process, a cut cable."""
    source = """
    import os, pathlib, signal, time, torch, skyproxy

    def stopped(process):
        tasks = pathlib.Path(f"/proc/{process}/task")
        return not tasks.exists() or all(
            (task / "stat").read_text().rpartition(")")[2].split()[0] in "Tt" for task in tasks.iterdir()
        )

    def attempt(what, action):
        node = skyproxy.launch_local("cpu")
        device = node.devices[0]
        x = torch.ones(300, device=device)
        x.cpu()
        os.kill(node.process_id, signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while not stopped(node.process_id):  # its threads stop one by one, and could still answer
            assert time.monotonic() < deadline
        start = time.monotonic()
        try:
            action(device, x)
        except skyproxy.errors.SessionLostError as error:
            assert "answered nothing for 1 s" in str(error), error
            took = time.monotonic() - start
            assert 0.5 < took < 6, took
        else:
            raise AssertionError(what)
        node.close()

    def record(device, x):
        while True:
            x = x + 1

    attempt("waiting", lambda device, x: (x + 1).cpu())
    attempt("recording", record)
    attempt("uploading", lambda device, x: torch.zeros(64 << 20).to(device))
    """
    succeed(source, SKYPROXY_PING_INTERVAL_SECONDS="0.2", SKYPROXY_LIVENESS_TIMEOUT_SECONDS="1")


@pytest.mark.slow
def test_a_busy_worker_is_not_given_up() -> None:
    source = """
    import time, torch, skyproxy
    x = torch.full((2048, 2048), 1 / 2048, device="sky:0")
    start = time.monotonic()
    while time.monotonic() - start < 4:
        for _ in range(20):
            x = x @ x
        torch.sky.synchronize()
    print(x[0, 0].item() > 0)
    """
    extra = {"SKYPROXY_PING_INTERVAL_SECONDS": "0.2", "SKYPROXY_LIVENESS_TIMEOUT_SECONDS": "1"}
    assert succeed(source, **extra) == "True"


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_a_wait_at_once_and_harms_nothing(node: skyproxy.Node) -> None:
    device = node.devices[0]
    result = keep_busy(device, 3)
    with later(0.3, interrupt), within(1.5), pytest.raises(KeyboardInterrupt):
        result.item()
    assert node.alive
    assert result.item() == pytest.approx(1 / 768, rel=1e-3)
    assert (torch.arange(3.0, device=device) + 1).tolist() == [1, 2, 3]


def test_ctrl_c_ends_synchronize_and_a_large_download(node: skyproxy.Node) -> None:
    device = node.devices[0]
    large = torch.arange(8 << 20, device=device)
    keep_busy(device, 2)
    with later(0.3, interrupt), within(1.5), pytest.raises(KeyboardInterrupt):
        torch.sky.synchronize(device)
    with later(0.1, interrupt), pytest.raises(KeyboardInterrupt):
        large.cpu()
    assert torch.equal(large.cpu(), torch.arange(8 << 20))


def test_ctrl_c_ends_an_upload_whose_worker_is_slow(node: skyproxy.Node) -> None:
    device = node.devices[0]
    data = torch.arange(32 << 20)
    torch.ones(2, device=device).cpu()
    kill(node, signal.SIGSTOP)
    with later(0.3, interrupt), within(1.5), pytest.raises(KeyboardInterrupt):
        data.to(device)
    kill(node, signal.SIGCONT)
    assert torch.equal((data[: 1 << 20].to(device) + 1).cpu(), data[: 1 << 20] + 1)
    torch.sky.synchronize(device)  # the upload that was given up is nobody's error
    assert node.alive


def test_ctrl_c_ends_a_wait_for_room(node: skyproxy.Node) -> None:
    """A program that runs far ahead of its worker waits inside of recording."""
    device = node.devices[0]
    x = torch.zeros(3, device=device)
    x.cpu()
    kill(node, signal.SIGSTOP)
    with later(1.0, interrupt), within(60), pytest.raises(KeyboardInterrupt):
        while True:
            x = x + 1
            torch.sky.current_device()
    kill(node, signal.SIGCONT)
    y = x + 1
    assert (y - x).tolist() == [1, 1, 1]


class Storm:
    """Presses Ctrl-C at random times: a thread sends SIGINT, and whoever is in an `attempt` is struck by it."""

    def __init__(self) -> None:
        self.strikes = 0
        self._raging = False
        self._over = threading.Event()
        self._random = random.Random(1)
        self._thread = threading.Thread(target=self._rage)

    def start(self) -> None:
        self._thread.start()

    def _rage(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while not self._over.wait(self._random.choice((1e-4, 1e-3, 1e-2)) * self._random.random()):
            signal.pthread_kill(main, signal.SIGINT)

    def strike(self, *_: object) -> None:
        if self._raging:
            self._raging = False
            self.strikes += 1
            raise KeyboardInterrupt

    def attempt(self, action: Callable[[], object]) -> bool:
        """Whether `action` came to its end."""
        try:
            self._raging = True
            action()
            self._raging = False
        except KeyboardInterrupt:
            return False
        finally:
            self._raging = False
        return True

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        while interrupts.deferred:  # a strike that is still to come would hit somebody else
            time.sleep(0.001)


@pytest.fixture
def storm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storm]:
    # A strike inside a destructor cannot be raised, only reported; that is no failure here.
    monkeypatch.setattr(sys, "unraisablehook", lambda info: None)
    made = Storm()
    before = signal.signal(signal.SIGINT, made.strike)
    made.start()
    yield made
    made.end()
    signal.signal(signal.SIGINT, before)


def test_a_storm_of_interrupts_never_changes_a_result(node: skyproxy.Node, storm: Storm) -> None:
    device = node.devices[0]
    small, large = torch.arange(5.0), torch.arange(40_000.0)
    remote = torch.arange(7.0, device=device)
    results: dict[str, torch.Tensor] = {}

    def record() -> None:
        y = remote
        for i in range(5):
            y = y * 2 + i
        results["record"] = y

    def new_signatures() -> None:
        shape = [1 + int(time.monotonic() * 1e6) % 50, 3]
        results["new"] = torch.ones(shape, device=device).sum(0)

    def upload() -> None:
        results["upload"] = small.to(device) + 1

    def upload_large() -> None:
        results["upload_large"] = large.to(device) + 1

    def download() -> None:
        results["download"] = (remote + 1).cpu()

    def download_large() -> None:
        results["download_large"] = (torch.zeros(40_000, device=device) + 3).cpu()

    def grow() -> None:
        x = torch.ones(3, device=device, requires_grad=True)
        (x * x * remote[:3]).sum().backward()
        assert x.grad is not None
        results["backward"] = x.grad

    actions = [record, new_signatures, upload, upload_large, download, download_large, grow]
    expected = {
        "record": ((((remote.cpu() * 2 * 2 + 1) * 2 + 2) * 2 + 3) * 2 + 4),
        "upload": small + 1,
        "upload_large": large + 1,
        "download": torch.arange(7.0) + 1,
        "download_large": torch.full((40_000,), 3.0),
        "backward": 2 * torch.arange(3.0),
    }
    end = time.monotonic() + 6
    counts = dict.fromkeys(expected, 0)
    while time.monotonic() < end:
        for action in actions:
            if not any(storm.attempt(action) for _ in range(1000)):
                continue
            for name in list(results):
                if name == "new":
                    value = results.pop(name).cpu()
                    assert torch.equal(value, torch.full((3,), value[0].item()))
                    continue
                assert torch.equal(results.pop(name).cpu(), expected[name]), name
                counts[name] += 1
    assert storm.strikes > 100
    assert min(counts.values()) > 0, counts
    torch.sky.synchronize(device)  # no error was left behind
    assert remote.tolist() == list(range(7))
    check_nothing_leaks(node)


def check_nothing_leaks(node: skyproxy.Node) -> None:
    """Whatever a strike interrupts gives its slots back."""
    session = node._session
    node.synchronize()
    node.synchronize()
    held = session.call("stats")["handles"]
    assert held < 20
    assert len(session._waiters) < 5


def test_in_place_changes_happen_once_or_not_at_all(node: skyproxy.Node, storm: Storm) -> None:
    counter = torch.zeros((), device=node.devices[0])
    done = attempts = 0
    end = time.monotonic() + 2
    while time.monotonic() < end:
        attempts += 1
        done += storm.attempt(lambda: counter.add_(1))
    assert storm.strikes > 50
    assert done <= counter.item() <= attempts


# --- forks -----------------------------------------------------------------------------------------------------------


def test_a_forked_child_gets_a_clear_error_and_the_parent_goes_on() -> None:
    source = """
    import os, sys, torch, skyproxy
    from torch.utils.data import DataLoader, TensorDataset
    x = torch.ones(3, device="sky:0")
    x.cpu()

    def fails(action):
        try:
            action()
        except skyproxy.errors.SessionLostError as error:
            return "belongs to the parent" in str(error)
        return False

    pid = os.fork()
    if pid == 0:
        good = fails(lambda: x.cpu()) and fails(lambda: (x + 1).sum().item()) and fails(torch.sky.synchronize)
        good = good and fails(lambda: torch.zeros(300_000).to("sky:0")) and torch.sky._is_in_bad_fork()
        os._exit(0 if good else 1)
    assert os.waitpid(pid, 0)[1] == 0

    pid = os.fork()
    if pid == 0:
        del x
        sys.exit(0)  # runs what is registered for the end of a process
    assert os.waitpid(pid, 0)[1] == 0
    assert (x + 1).tolist() == [2, 2, 2]

    data = TensorDataset(torch.arange(64.0).reshape(16, 4))
    total = torch.zeros((), device="sky:0")
    for epoch in range(2):
        for (batch,) in DataLoader(data, batch_size=4, num_workers=2):
            total += batch.to("sky:0").sum()
    print(total.item())
    """
    done = run_program(source)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(2 * sum(range(64)) * 1.0)


def test_a_child_does_not_keep_the_worker_of_a_killed_parent_alive() -> None:
    source = """
    import os, time, torch, skyproxy
    torch.ones(3, device="sky:0").cpu()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(skyproxy.nodes._nodes[0].process_id, child, flush=True)
    time.sleep(60)
    """
    with started(source) as program:
        assert program.stdout is not None
        served, child = (psutil.Process(int(number)) for number in program.stdout.readline().split())
        try:
            program.kill()
            program.wait()
            served.wait(5.0)
        finally:
            child.kill()


# --- reset, nodes, configuration -------------------------------------------------------------------------------------


def test_reset_ends_everything_and_the_next_use_starts_anew() -> None:
    source = """
    import threading, torch, skyproxy
    import psutil
    skyproxy.reset()
    assert skyproxy.devices() == []
    old = torch.ones(2, device="sky:0")
    skyproxy.launch_local("cpu")
    torch.ones(300_000).to("sky:1").cpu()
    pids = [node.process_id for node in skyproxy.nodes._nodes]
    assert len(pids) == 2 and len(skyproxy.devices()) == 2
    skyproxy.reset()
    assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    skyproxy.reset()
    assert skyproxy.devices() == []
    try:
        old.cpu()
    except skyproxy.errors.SessionLostError as error:
        assert "closed" in str(error)
    else:
        raise AssertionError
    assert (torch.ones(2, device="sky:0") + 1).tolist() == [2, 2]
    assert skyproxy.nodes._nodes[0].process_id not in pids
    assert len(skyproxy.devices()) == 1
    """
    succeed(source)


def test_closing_twice_is_fine_and_a_node_is_a_context_manager(sky: str) -> None:
    with skyproxy.launch_local("cpu") as node:
        device = node.devices[0]
        assert node.alive
        assert torch.ones(2, device=device).sum().item() == 2
        assert node.device("cpu") == device
        with pytest.raises(ConfigurationError, match="this worker has no cuda"):
            node.device("cuda")
        process = psutil.Process(node.process_id)
    node.close()
    assert not node.alive
    assert "lost" in repr(node)
    with pytest.raises(psutil.NoSuchProcess):
        process.status()
    with pytest.raises(SessionLostError, match="closed"):
        torch.ones(2, device=device).cpu()
    # The others keep their numbers.
    assert torch.ones(2, device=sky).sum().item() == 2


def test_devices_lists_what_there_is(node: skyproxy.Node) -> None:
    row = skyproxy.devices()[-1]
    assert row.device == node.devices[0]
    assert row.type == "cpu"
    assert row.total_memory_bytes > 0
    assert row.source == "skyproxy.launch_local"
    assert row.alive


def test_where_sky_0_comes_from(tmp_path: Path) -> None:
    source = "import skyproxy, torch; torch.ones(2, device='sky:0').cpu()"
    source += "; print([d.source for d in skyproxy.devices()])"
    explicit = """
    import os, skyproxy, torch
    skyproxy.connect(os.environ["URL"], token=os.environ["TOKEN"])
    torch.ones(2, device='sky:0').cpu()
    print([d.source for d in skyproxy.devices()])
    """
    with worker(tmp_path) as (url, token):
        assert succeed(source, SKYPROXY_URL=url, SKYPROXY_TOKEN=token) == "['SKYPROXY_URL']"
        taken = succeed(explicit, SKYPROXY_URL="ws://127.0.0.1:1", SKYPROXY_TOKEN="no", URL=url, TOKEN=token)
        assert taken == "['skyproxy.connect']"
        done = run_program(source, SKYPROXY_URL=url)
        assert "ConfigurationError" in done.stderr
        assert "SKYPROXY_TOKEN" in done.stderr
    # What was asked for and is not there is an error: never silently another worker.
    done = run_program(source, SKYPROXY_URL=url, SKYPROXY_TOKEN=token)
    assert done.returncode == 1
    assert "nothing listens on port" in done.stderr
    assert succeed(source).startswith("['embedded worker")


def test_a_worker_that_does_not_start_says_why(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPROXY_MAX_HANDLES", "many")
    with pytest.raises(skyproxy.errors.WorkerStartError, match=r"SKYPROXY_MAX_HANDLES='many' is not a number"):
        skyproxy.launch_local("cpu")
    with pytest.raises(ConfigurationError, match="not one of 'auto', 'cpu', 'cuda'"):
        skyproxy.launch_local("tpu")


TINY = {
    "SKYPROXY_MAX_INLINE_BYTES": "16",
    "SKYPROXY_CHUNK_BYTES": "1000",
    "SKYPROXY_MAX_BATCH_COMMANDS": "1",
    "SKYPROXY_MAX_IN_FLIGHT_BYTES": "1",
    "SKYPROXY_MAX_IN_FLIGHT_BATCHES": "1",
    "SKYPROXY_MAX_CACHED_SHAPES": "4",
    "SKYPROXY_PROMPT_RELEASE_BYTES": "0",
}


def test_tiny_limits_are_honoured_and_do_not_change_results() -> None:
    source = """
    import torch, skyproxy
    from skyproxy.settings import SETTINGS
    assert SETTINGS.chunk_bytes == 1000
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    data = torch.randn(32, 8)
    import copy
    remote = copy.deepcopy(model).to("sky:0")
    for where, m in (("cpu", model), ("sky:0", remote)):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            m(data.to(where)).square().mean().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), remote.parameters()):
        torch.testing.assert_close(a, b.cpu())
    x = torch.arange(10_000.0)
    assert torch.equal((x.to("sky:0") * 2).cpu(), x * 2)
    assert all(len(device.cache) <= 4 for device in skyproxy.tensor.core.devices.DEVICES.existing())
    """
    succeed(source, **TINY)


def test_too_many_values_are_a_clear_error() -> None:
    source = """
    import torch, skyproxy
    kept = []
    try:
        for i in range(1000):
            kept.append(torch.zeros(2, device="sky:0"))
    except skyproxy.errors.LimitExceededError as error:
        assert "SKYPROXY_MAX_HANDLES" in str(error)
    else:
        raise AssertionError
    assert 90 <= len(kept) <= 100, len(kept)
    del kept[10:]
    assert (kept[0] + 1).tolist() == [1, 1]
    """
    succeed(source, SKYPROXY_MAX_HANDLES="100")


def test_lines_can_be_switched_off() -> None:
    source = """
    import torch, skyproxy
    bad = torch.nn.functional.embedding(torch.tensor([7], device="sky:0"), torch.zeros(3, 2, device="sky:0"))
    try:
        bad.cpu()
    except IndexError as error:
        print("<string>" in str(error), error.op)
    """
    assert succeed(source, SKYPROXY_RECORD_LINES="0") == "False aten::embedding"


def test_launch_blocking_raises_each_error_at_its_own_statement() -> None:
    source = """
    import torch, skyproxy, traceback
    rows, number = torch.zeros(3, 2, device="sky:0", requires_grad=True), torch.tensor([7], device="sky:0")
    large = torch.ones(2_000_000).to("sky:0")
    model = torch.nn.Linear(2, 2).to("sky:0")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2, device="sky:0")).sum().backward()
    optimizer.step()
    graph = torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        result = large + 1
    graph.replay()
    try:
        torch.nn.functional.embedding(number, rows)
        raise AssertionError("nothing was raised")
    except IndexError as error:
        print(error.op, result[0].item(), (number + 1).item(), torch.sky.stats()["round_trips"] > 20)
    """
    assert succeed(source, SKYPROXY_LAUNCH_BLOCKING="1") == "aten::embedding 2.0 8 True"


def test_many_small_uploads_in_a_row_do_not_pile_up(sky: str) -> None:
    session = DEVICES.of(sky).session
    piece = torch.arange(10_000.0)
    kept = []
    most = 0
    for _ in range(2500):  # 100 MB in all, more than a frame may have
        kept.append(piece.to(sky))
        most = max(most, len(session.recorder.stream), sum(map(len, session.recorder._buffers)) // 1000)
    assert most < 5000
    assert torch.equal(kept[-1].cpu(), piece)
    assert torch.equal(kept[1234].cpu(), piece)


# --- threads of the user ---------------------------------------------------------------------------------------------


def test_several_threads_share_a_session(sky: str) -> None:
    failures: list[BaseException] = []
    base = torch.arange(50.0, device=sky)

    def work(seed: int) -> None:
        try:
            for i in range(100):
                x = base * seed + i
                if i % 10 == 0:
                    assert x.tolist() == [v * seed + i for v in range(50)]
                if i % 25 == 0:
                    y = torch.full((30_000,), float(seed)).to(sky) + i
                    assert torch.equal(y.cpu(), torch.full((30_000,), float(seed + i)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


# --- the event loop --------------------------------------------------------------------------------------------------


def test_the_asynchronous_surface_leaves_the_event_loop_free(tmp_path: Path) -> None:
    async def main(url: str, token: str) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        async with await skyproxy.connect_async(url, token=token) as node:
            device = node.devices[0]
            result = await asyncio.to_thread(keep_busy, device, 1.0)
            before = ticks
            value = await skyproxy.fetch_async(result)
            assert value.device.type == "cpu"
            assert value.item() == pytest.approx(1 / 768, rel=1e-3)
            assert ticks - before > 10
            await asyncio.to_thread(keep_busy, device, 1.0)
            before = ticks
            await node.synchronize_async()
            assert ticks - before > 10
            several = [torch.full((n,), float(n), device=device) for n in (1, 2, 30_000)]
            fetched = await asyncio.gather(*map(skyproxy.fetch_async, several))
            assert [v.sum().item() for v in fetched] == [1, 4, pytest.approx(9e8)]
            sparse = torch.eye(3).to_sparse().to(device)
            assert torch.equal((await skyproxy.fetch_async(sparse)).to_dense(), torch.eye(3))
            assert torch.equal(await skyproxy.fetch_async(torch.ones(2)), torch.ones(2))
            bad = torch.nn.functional.embedding(torch.tensor([7], device=device), torch.zeros(3, 2, device=device))
            with pytest.raises(IndexError):
                await skyproxy.fetch_async(bad)
        assert not node.alive
        ticking.cancel()

    with worker(tmp_path) as (url, token):
        asyncio.run(main(url, token))


# --- what can be seen ------------------------------------------------------------------------------------------------


def test_debug_syncs_names_each_line_that_waits(sky: str) -> None:
    x = torch.arange(3.0, device=sky)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with skyproxy.debug_syncs() as watch:
            first = sys._getframe().f_lineno + 1
            x.sum().item()
            y = x + 1
            y.tolist()
            if (y > 0).all():
                y.cpu()
            torch.sky.synchronize(sky)
        x.cpu()  # nobody looks any more
    lines = [(Path(w.filename).name, w.lineno - first) for w in seen if w.category is skyproxy.SyncWarning]
    assert lines == [(Path(__file__).name, offset) for offset in (0, 2, 3, 4, 5)]
    assert watch.count == 5


def test_stats_have_the_documented_keys_and_count(sky: str) -> None:
    before = torch.sky.stats()
    assert set(before) >= {
        "ops", "batches", "bytes_sent", "bytes_received", "round_trips", "cache_hits", "cache_misses", "handles"
    }  # fmt: skip
    x = torch.zeros(30_000, device=sky)
    for _ in range(10):
        x = x + 1
    x.cpu()
    after = torch.sky.stats()
    assert after["ops"] - before["ops"] == 11
    assert after["round_trips"] - before["round_trips"] == 1
    assert after["bytes_received"] - before["bytes_received"] > 120_000
    assert after["handles"] - before["handles"] == 1


def test_no_token_is_in_arguments_or_environment(node: skyproxy.Node) -> None:
    assert node._worker is not None
    token = node._worker.token
    process = psutil.Process(node.process_id)
    assert token not in " ".join(process.cmdline())
    assert token not in " ".join(process.environ().values())
    assert token not in repr(node)
    assert token not in node._worker.output()
    wait_for(lambda: node.alive, "it lives")
