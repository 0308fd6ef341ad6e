"""Two programs on two workers with one volume, under every fault at once, in an order that a seed chooses.

Connections are cut at random bytes, or stall; workers are stopped for a while, told to end, and killed; processes of
sessions are killed; the programs move between the workers. Each program compares what it gets with an undisturbed run,
bit by bit:

python -m tests.integration.combined_faults --seconds 300 --seeds 5
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import operator
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

import skyproxy
from skyproxy.errors import ConfigurationError, ConnectError, RemoteError
from tests.integration.broken_connections import count
from tests.integration.chaos_proxy import ChaosProxy, chaos_proxy
from tests.integration.programs import ROOT, Worker, environment
from tests.integration.protected_programs import PROGRAMS, children, same

BREAKS = ("cut", "cut within", "stall", "stop")
ENDS = ("kill session", "kill worker", "end worker")
"""Where five workers end one after the other and none comes further, the operations themselves are taken for the cause:
after one of these, the next waits until both programs have."""
_STEPS = 30
_NOT_NOW = (ConnectError, ConfigurationError, RemoteError)
"""What a move may say while other faults strike: the session goes on where it was."""


class _Place:
    """A worker, and the bad network before it."""

    def __init__(self, folder: Path, snapshots: Path, seed: int, faults: contextlib.ExitStack) -> None:
        folder.mkdir()
        self.worker = Worker(folder, "--session-processes", snapshots=snapshots, SKYPROXY_SESSION_GRACE_SECONDS="120")
        faults.callback(self.worker.close)
        self.proxy: ChaosProxy = faults.enter_context(chaos_proxy(self.worker.port, seed))
        self._own = self._children()

    @property
    def address(self) -> tuple[str, str]:
        return f"ws://127.0.0.1:{self.proxy.port}", self.worker.token

    def _children(self) -> set[int]:
        assert self.worker.process is not None
        return set(children(self.worker.process.pid))

    def strike(self, fault: str) -> None:
        process = self.worker.process
        assert process is not None
        if fault == "cut":
            self.proxy.cut()
        elif fault == "cut within":
            self.proxy.cut_after(1, 300_000, cuts=4)
            self.proxy.cut()
        elif fault == "stall":
            self.proxy.stall()
        elif fault == "stop":
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.7)
            process.send_signal(signal.SIGCONT)
        elif fault == "kill session":
            for each in self._children() - self._own:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
        else:
            process.send_signal(signal.SIGKILL if fault == "kill worker" else signal.SIGTERM)
            process.wait(60)
            self.worker.start()
            self._own = self._children()


def _program(seed: int, seconds: float, places: list[tuple[str, str]]) -> None:
    """Run programs, and compare them; what is said ends up in the parent's message where something is wrong."""
    faulthandler.register(signal.SIGUSR1)  # where all threads are, for whoever has waited too long
    dice = random.Random(seed)
    torch.set_num_threads(1)
    expected = {}
    for name, program in PROGRAMS.items():
        with skyproxy.connect(places[0][0], token=places[0][1]) as node:
            expected[name] = program(node.devices[0], _STEPS, lambda step: None)
    with skyproxy.connect(places[0][0], token=places[0][1]) as node:
        device, here, moves = node.devices[0], 0, 0
        protected = skyproxy.protect(every=dice.choice((0.05, 0.5, 3.0)), node=node)
        print("ready", flush=True)
        sys.stdin.readline()
        until = time.monotonic() + seconds

        def disturb(step: int) -> None:
            nonlocal here, moves
            print("\x00", end="", flush=True)
            if step in at:
                url, token = places[1 - here]
                try:
                    node.move_to(url, token=token)
                except _NOT_NOW as problem:
                    print("not moved:", problem, flush=True)
                else:
                    here, moves = 1 - here, moves + 1

        rounds = 0
        while rounds == 0 or time.monotonic() < until:
            for name, program in PROGRAMS.items():
                at = {dice.randrange(_STEPS)} if dice.random() < 0.5 else set()
                assert same(expected[name], program(device, _STEPS, disturb)), name
                print(name, "is the same", flush=True)
            assert count(device, 500) == 500
            rounds += 1
        print(json.dumps({"rounds": rounds, "moves": moves, "recoveries": protected.recoveries}), flush=True)


@contextlib.contextmanager
def _programs(folder: Path, seed: int, seconds: float, places: list[tuple[str, str]]) -> Iterator[dict[Path, Popen]]:
    command = [sys.executable, "-u", "-m", __name__ if __name__ != "__main__" else "tests.integration.combined_faults"]
    begun: dict[Path, Popen] = {}
    try:
        for number, ordered in enumerate((places, places[::-1])):
            said = folder / f"program{number}"
            arguments = ["--program", json.dumps(ordered), "--seed", str(2 * seed + number), "--seconds", str(seconds)]
            variables = environment(SKYPROXY_RECONNECT="1", SKYPROXY_SILENCE_SECONDS="2", OMP_NUM_THREADS="1")
            with said.open("wb") as output:
                begun[said] = subprocess.Popen(
                    [*command, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env=variables,
                )
        yield begun
    finally:
        for process in begun.values():
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


Popen = subprocess.Popen[bytes]


def run(folder: Path, seed: int, seconds: float) -> tuple[Counter[str], list[dict[str, int]]]:
    """Let faults strike until the programs have run for so long; return how often each did, and what they tell.

    Raises:
        AssertionError: a program got another result, ended, or did not come to its end; says what it wrote last.
    """
    dice, struck = random.Random(seed), Counter[str]()
    with contextlib.ExitStack() as stack:
        places = [_Place(folder / f"worker{n}", folder / "volume", seed + n, stack) for n in range(2)]
        begun = stack.enter_context(_programs(folder, seed, seconds, [place.address for place in places]))

        def told(said: Path) -> str:
            return said.read_text(errors="replace")

        def running() -> list[Path]:
            for said, process in begun.items():
                assert process.poll() in (None, 0), f"seed {seed}, {dict(struck)}:\n{told(said)[-9000:]}"
            return [said for said, process in begun.items() if process.poll() is None]

        while not all("ready" in told(said) for said in running()):
            time.sleep(0.1)
        for process in begun.values():
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        last = time.monotonic() + seconds + 150
        came = [0, 0]
        while running():
            if time.monotonic() >= last:
                for said in running():
                    begun[said].send_signal(signal.SIGUSR1)
                time.sleep(2)
                raise AssertionError(f"seed {seed}, {dict(struck)}: " + "\n".join(map(told, running()))[-9000:])
            steps = [said.read_bytes().count(0) for said in begun]
            fault = dice.choice(BREAKS if any(map(operator.le, steps, came)) else BREAKS + ENDS)
            if fault in ENDS:
                came = steps
            dice.choice(places).strike(fault)
            struck[fault] += 1
            time.sleep(dice.uniform(0.3, 2.0))
        return struck, [json.loads(told(said).splitlines()[-1]) for said in begun]


def move_under_kills(folder: Path, seed: int, seconds: float) -> Counter[str]:
    """Move a session back and forth while its processes are killed near the moves' ends; count what happened.

    Raises:
        AssertionError: a value was wrong, or the session was not where the last move had said.
    """
    dice, happened, longest = random.Random(seed), Counter[str](), 0.5
    with contextlib.ExitStack() as stack:
        places = [_Place(folder / f"worker{n}", folder / "volume", seed + n, stack) for n in range(2)]
        node = stack.enter_context(skyproxy.connect(places[0].address[0], token=places[0].address[1]))
        skyproxy.protect(every=0.05, node=node)
        total, expected, here = torch.zeros(4, device=node.devices[0]), 0, 0
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in range(dice.randrange(5)):
                total += 1
                expected += 1
            if dice.random() < 0.5:
                assert total[0].item() == expected
            struck = [place for place in places if dice.random() < 0.4]
            timer = threading.Timer(
                dice.uniform(0, longest), lambda struck=struck: [place.strike("kill session") for place in struck]
            )
            timer.start()
            url, token = places[1 - here].address
            begun = time.monotonic()
            try:
                node.move_to(url, token=token)
            except _NOT_NOW:
                happened["refused"] += 1
            else:
                here, longest = 1 - here, 1.2 * (time.monotonic() - begun)
                happened["moves"] += 1
            assert node.url == places[here].address[0]
            timer.join()
            happened["kills"] += len(struck)
            total += 1
            expected += 1
            assert total[0].item() == expected
    return happened


def main() -> None:
    """Run with one seed after the other; the first difference is an error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the programs run with a seed")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--program", type=json.loads, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.program is not None:
        _program(arguments.seed, arguments.seconds, arguments.program)
        return
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            struck, told = run(Path(folder), seed, arguments.seconds)
        print(
            f"seed {seed}: {time.monotonic() - began:.0f} s, {sum(struck.values())} faults {dict(struck)}, {told}",
            flush=True,
        )


if __name__ == "__main__":
    main()
