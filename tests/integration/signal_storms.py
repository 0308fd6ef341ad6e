"""Handlers of signals that raise, at moments that are drawn, in programs of many kinds. By hand, or a few in a test.

Each program runs again and again while a signal strikes it; afterwards it must give what it gives on the CPU, every
tensor that lived must still be read, and nothing may be left on the worker. A process that dies or stands still is
found by the one that started it.

    python -m tests.integration.signal_storms                              # each signal in each program
    python -m tests.integration.signal_storms --signal SIGALRM --only loaders --seed 3 --strikes 200
    python -m tests.integration.signal_storms --way wakeup                 # how the handler is set: see WAYS
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.integration.programs import ROOT, environment
from tests.integration.signal_programs import PROGRAMS

SIGNALS = ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1")
WAYS = ("before", "late", "faulthandler", "wakeup")
"""How the handler is set: before any device is there; when the program has run; below faulthandler's own, which is set
in C and passes signals on; beside a descriptor that wakes an event loop up."""
_STILL_SECONDS = 100
"""Without a strike or a program's end for so long, a process stands still."""


class Struck(BaseException):
    """What the handler raises."""


class Striker:
    """Lets a signal strike at moments that are drawn, while it is armed.

    Args:
        number: the signal.
        seed: what moments are drawn from.
    """

    def __init__(self, number: int, seed: int) -> None:
        self.strikes = 0
        self.armed = False
        self._number = number
        self._chance = random.Random(seed)
        self._child: subprocess.Popen[bytes] | None = None

    def handle(self, number: int, frame: object) -> None:
        if self.armed:
            self.armed = False
            self.strikes += 1
            raise Struck

    def rage(self) -> None:
        """Begin: with a timer where the signal is one's, else from a process that needs no interpreter lock of ours."""
        if self._number == signal.SIGALRM:
            signal.setitimer(signal.ITIMER_REAL, 0.002, 0.0007 + self._chance.random() * 0.002)
            return
        source = (
            "import os, random, sys, time\npid, number, seed = map(int, sys.argv[1:])\nchance = random.Random(seed)\n"
            "while os.getppid() == pid:\n"
            "    time.sleep(chance.choice((2e-4, 1e-3, 1e-2)) * chance.random())\n    os.kill(pid, number)\n"
        )
        command = [sys.executable, "-S", "-c", source, str(os.getpid()), str(int(self._number))]
        self._child = subprocess.Popen([*command, str(self._chance.randrange(1 << 30))])

    def rest(self) -> None:
        """End."""
        self.armed = False
        if self._child is None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        else:
            self._child.kill()
            self._child.wait()
        for _ in range(20):  # what was deferred
            time.sleep(0.002)


def _set_handler(striker: Striker, number: int, way: str) -> list[Any]:
    """Set the handler; return what must live as long."""
    signal.signal(number, striker.handle)
    if way == "faulthandler":
        nowhere = open(os.devnull, "w")  # noqa: SIM115 - it lives as long as the registration
        faulthandler.register(number, file=nowhere, chain=True)
        return [nowhere]
    if way == "wakeup":
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(False)
        signal.set_wakeup_fd(ends[1].fileno(), warn_on_full_buffer=False)
        return list(ends)
    return []


def _same(ours: Any, theirs: Any) -> bool:
    a, b = pytree.tree_leaves(ours), pytree.tree_leaves(theirs)
    if len(a) != len(b):
        return False
    for x, y in zip(a, b):
        if isinstance(y, torch.Tensor):
            if x.shape != y.shape or not torch.allclose(x, y, rtol=1e-3, atol=1e-3, equal_nan=True):
                return False
        elif isinstance(y, float):
            if abs(x - y) > 2e-3:
                return False
        elif x != y:
            return False
    return True


def _left_behind(session: Any) -> int:
    gc.collect()
    with contextlib.suppress(torch.linalg.LinAlgError):  # of a statement that was struck before it waited for its error
        torch.sky.synchronize()
    torch.sky.synchronize()
    return int(session.call("stats")["handles"])


def storm(run: Callable[[str], Any], number: int, strikes: int, seed: int, way: str, seconds: float) -> str:
    """Strike one program until it was struck often enough, or for some time.

    Returns:
        What is wrong then; empty if nothing is.
    """
    import skyproxy

    striker = Striker(number, seed)
    before, held, kept = signal.getsignal(number), 0, []
    try:
        if way != "late":
            kept = _set_handler(striker, number, way)
        for _ in range(3):
            run("sky:0")
        if way == "late":
            kept = _set_handler(striker, number, way)
        session = skyproxy.list_nodes()[0]._session
        base = torch.arange(6.0, device="sky:0")
        held = _left_behind(session)
        striker.rage()
        until = time.monotonic() + seconds
        while striker.strikes < strikes and (time.monotonic() < until or striker.strikes < 3):
            try:
                found = _run_struck(striker, run)
                if found:
                    return found
            except Struck:
                faulthandler.dump_traceback_later(_STILL_SECONDS, exit=True)
        striker.rest()
        ours, theirs = run("sky:0"), run("cpu")
        if not _same(ours, theirs):
            return f"{ours} instead of {theirs}"
        if base.tolist() != [0, 1, 2, 3, 4, 5]:
            return f"what was not touched has {base.tolist()}"
        gc.collect()  # what a strike left half made is in its traceback
        alive = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.device.type == "sky"]
        for x in alive:
            if x.layout is torch.strided and x.detach().cpu().shape != x.shape:
                return f"a tensor of {tuple(x.shape)} is {tuple(x.detach().cpu().shape)} on the worker"
        del alive
        left = _left_behind(session) - held
        return f"{left} tensors are left on the worker" if left > 10 else ""
    finally:
        striker.rest()
        if way == "faulthandler":
            faulthandler.unregister(number)
        signal.set_wakeup_fd(-1)
        signal.signal(number, before)
        for end in kept:
            end.close()


def _run_struck(striker: Striker, run: Callable[[str], Any]) -> str:
    """Run a program while the striker may strike; say what a strike became."""
    try:
        striker.armed = True
        run("sky:0")
        striker.armed = False
    except Exception as error:
        striker.armed = False
        if not _comes_of_a_strike(error):
            trace = traceback.extract_tb(error.__traceback__)
            where = "; ".join(f"{f.filename}:{f.lineno} {f.name}" for f in trace)
            return f"a strike became {type(error).__name__}: {str(error)[:300]} ({where[-1500:]})"
    return ""


def _comes_of_a_strike(error: BaseException) -> bool:
    """PyTorch and Python wrap what is raised inside of some of their parts; it is the error's cause or context then."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, Struck) or "Struck" in str(current):
            return True
        if "unsupported operand type(s) for *: 'NestedTensor'" in str(current):
            return (
                True  # PyTorch takes for a `TypeError` what strikes while a nested tensor is made, on the CPU as well
            )
        waiting += [current.__cause__, current.__context__]
    return False


def _run_here(names: list[str], options: argparse.Namespace) -> int:
    sys.unraisablehook = lambda info: None  # what strikes in a destructor cannot be raised, locally neither
    faulthandler.enable()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wrong = 0
    for name in names:
        print(f"AT {name}", flush=True)
        faulthandler.dump_traceback_later(_STILL_SECONDS, exit=True)
        number = getattr(signal, options.signal[0])
        found = storm(PROGRAMS[name], number, options.strikes, options.seed, options.way, options.seconds)
        faulthandler.cancel_dump_traceback_later()
        print(f"OF {name}: {found}" if found else f"SOUND {name}", flush=True)
        wrong += bool(found)
    return 1 if wrong else 0


def main(arguments: list[str] | None = None) -> int:
    """Strike what the command line names; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signal", action="append", choices=SIGNALS, help="all of them by default")
    parser.add_argument("--way", choices=WAYS, default="before", help="how the handler is set")
    parser.add_argument("--only", default="", help="programs whose names have this part")
    parser.add_argument("--part", default="0/1", help="K/N: each Nth program, from the Kth on")
    parser.add_argument("--seed", type=int, default=1, help="what the moments are drawn from")
    parser.add_argument("--strikes", type=int, default=60, help="for each program, at most")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each program")
    parser.add_argument("--here", action="store_true", help="in this process, with one signal")
    options = parser.parse_args(arguments)
    first, step = map(int, options.part.split("/"))
    names = [name for name in PROGRAMS if options.only in name][first::step]
    if options.here:
        return _run_here(names, options)
    sound, problems = 0, []
    for name in options.signal or SIGNALS:
        left = list(names)
        while left:
            done, died = _run_apart(left, name, options)
            sound += sum(line.startswith("SOUND") for line in done)
            problems += [f"{name}, {line[3:]}" for line in done if line.startswith("OF ")]
            reached = sum(line.startswith("AT ") for line in done)
            if died:
                problems.append(f"{name}, {left[max(reached - 1, 0)]}: {died}")
            left = left[reached:] if died and reached else []
    print(*problems, sep="\n")
    print(f"{sound + len(problems)} storms, {len(problems)} not sound")
    return 1 if problems or not sound else 0


def _run_apart(names: list[str], name: str, options: argparse.Namespace) -> tuple[list[str], str]:
    """Run programs in a process of their own; return what it said, and how it died if it did."""
    source = (
        "import sys\nfrom tests.integration import signal_storms as storms\n"
        "picked = sys.argv[1].split('|')\n"
        "storms.PROGRAMS = {name: storms.PROGRAMS[name] for name in picked}\n"
        "sys.exit(storms.main(['--here', *sys.argv[2:]]))\n"
    )
    arguments = [f"--signal={name}", f"--way={options.way}", f"--seed={options.seed}"]
    arguments += [f"--strikes={options.strikes}", f"--seconds={options.seconds}"]
    command = [sys.executable, "-c", source, "|".join(names), *arguments]
    child = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=Path(ROOT), check=False)
    died = (
        ""
        if child.returncode in (0, 1) and "AT " in child.stdout and _ended(child.stdout)
        else child.stderr[:2500] + "\n...\n" + child.stderr[-1500:]
    )
    return child.stdout.splitlines(), f"status {child.returncode}\n{died}" if died else ""


def _ended(output: str) -> bool:
    lines = [line.split()[0] for line in output.splitlines() if line.strip()]
    return lines.count("AT") == lines.count("OF") + lines.count("SOUND")


if __name__ == "__main__":
    sys.exit(main())
