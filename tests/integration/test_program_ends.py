"""How programs end, and what they have started with them: exits, errors, kills, forks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.programs import environment, run_program, started, succeed

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="sends POSIX signals")


EXIT_WITHIN_SECONDS = 2.0
"""Beyond what Python and PyTorch alone take to end, thrice: machines are busy."""


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


def test_a_program_leaves_nothing_in_the_folder_for_temporary_files(tmp_path: Path) -> None:
    source = "import os, torch, skyproxy; print((torch.ones(2, device='sky:0') * 2).sum().item())"
    assert succeed(source, cwd=tmp_path, TMPDIR=str(tmp_path)) == "4.0"
    assert [path for path in tmp_path.iterdir() if path.name.startswith("skyproxy")] == []


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


def test_a_thread_that_is_in_an_operation_is_waited_for() -> None:
    check_exit(
        """
import contextlib, threading, time, torch, skyproxy
from skyproxy.nodes import observing
x = torch.rand(10_000, device="sky:0") + 1
inside = threading.Event()

def stay(_):
    inside.set()
    time.sleep(0.2)

def read():
    with contextlib.suppress(skyproxy.errors.SessionLostError), observing(stay):
        x.cpu()

threading.Thread(target=read, daemon=True).start()
assert inside.wait(30)
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
    print(skyproxy.list_nodes()[0].process_id, flush=True)
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
        # At its line, so that a DataLoader's worker says where.
        good = good and fails(lambda: x + 1) and fails(lambda: torch.ones(2, device="sky:0"))
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
    assert fails(lambda: next(iter(DataLoader([x, x], num_workers=1, collate_fn=list))))  # a worker that reads nothing
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
    print(skyproxy.list_nodes()[0].process_id, child, flush=True)
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
