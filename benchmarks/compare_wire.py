"""What two checkouts send for the same programs: every command, operand and byte, held against each other.

    python benchmarks/compare_wire.py ../before .              # all programs
    python benchmarks/compare_wire.py ../before . --program cnn

Each checkout runs the programs in a process of its own, against an embedded worker, with the Python that runs this.
Where a stream is cut into batches depends on how fast the worker is, and so does when a dead tensor's value is
released; both are left out. The order of all other commands is not, nor their slots, numbers and buffers.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack

PROGRAMS = ("small", "cnn", "decode", "graph")
_LONGEST_RUN_SECONDS = 600.0


def record(program: str, out: Path) -> None:
    """Run a program and write the streams that it sends, batch by batch, with the hashes of their buffers."""
    import torch

    import skyproxy  # noqa: F401
    from skyproxy.session.recorder import Recorder
    from skyproxy_server.named_batches import NamedBatches

    batches: list[Any] = []
    begin = Recorder.__init__

    def begin_recorded(self: Any, send: Callable[[Any], object], *rest: Any, **options: Any) -> None:
        named, sequence = NamedBatches(), 0

        def send_noted(message: Any) -> None:
            nonlocal sequence
            if message.sequence > sequence:  # one that is sent again was noted
                sequence = message.sequence
                batch = named.resolve(message)
                assert batch is not None
                hashes = [hashlib.sha256(buffer).hexdigest() for buffer in batch.buffers]
                batches.append(msgpack.packb([batch.stream, hashes], default=list))
            send(message)

        begin(self, send_noted, *rest, **options)

    Recorder.__init__ = begin_recorded  # type: ignore[method-assign]
    torch.manual_seed(0)
    _run(program)
    torch.sky.synchronize()
    out.write_bytes(msgpack.packb(batches))


def _run(program: str) -> None:
    torch = importlib.import_module("torch")
    hot_path: Any = importlib.import_module("profile_hot_path")
    if program in hot_path.PROGRAMS:
        run, _ = hot_path.program(program, "sky")
        for _ in range(5):
            run()
        return
    x, y = torch.rand(16, 16).to("sky"), torch.rand(16, 16).to("sky")
    if program == "graph":
        for _ in range(3):
            total = (x @ y).relu().sum()
        with torch.sky.graph(graph := torch.sky.SkyGraph()):
            total = (x @ y).relu().sum()
        graph.replay()
        assert total.item() > 0
        return
    small_ops: Any = importlib.import_module("_small_ops")
    for _ in range(3):
        for call, _ in small_ops.cases("sky").values():
            for _ in range(50):
                call()
        for number in range(20):
            torch.cat([x[: number % 4 + 1], y * (number / 7)])
        parts = x.split(4)
        _, order = torch.sort(torch.stack([part.mean() for part in parts]))
        assert order.cpu().numel() == 4
        assert torch.nonzero(x > 2).tolist() == []


def commands_of(recorded: list[Any]) -> list[list[Any]]:
    """Return the commands of all batches in order, each with the hash of its buffer; those that release are left out.

    Args:
        recorded: for each batch its stream and the hashes of its buffers.
    """
    from skyproxy.protocol import commands

    widths, found = commands.width_table(), []
    for stream, hashes in recorded:
        buffers = iter(hashes)
        widths.update(_defined(stream))
        positions = commands.walk(stream, widths)
        for begin, end in zip(positions, [*positions[1:], len(stream)], strict=True):
            command = stream[begin:end]
            if command[0] == commands.UPLOAD:
                command = [*command, next(buffers)]
            if command[0] != commands.RELEASE:
                found.append(command)
    return found


def _defined(stream: list[Any]) -> Iterator[tuple[int, int]]:
    """The widths of the ops that a stream defines; what only looks like a definition has no list in its place."""
    from skyproxy.protocol import commands

    for at, number in enumerate(stream[:-2]):
        match stream[at + 2]:
            case [str(), [*positional], dict() as keywords, [*outputs]] if number == commands.DEFINE:
                compiled = stream[at + 2][0] == commands.COMPILED
                given = [] if compiled else keywords.values()
                yield stream[at + 1], commands.operand_count([*positional, *given, *outputs])


def first_difference(before: list[Any], after: list[Any]) -> str:
    """Return where two lists of commands part, and what stands there; empty where they are equal."""
    for number, (old, new) in enumerate(zip(before, after, strict=False)):
        if msgpack.packb(old) != msgpack.packb(new):  # == takes 1, 1.0 and True for one, and both zeros
            return f"command {number}: before {old!r:.300}, after {new!r:.300}"
    if len(before) != len(after):
        return f"before {len(before)} commands, after {len(after)}"
    return ""


def _recorded_in(checkout: Path, program: str) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="skyproxy-") as folder:
        out = Path(folder) / "wire"
        paths = [str(checkout), str(checkout / "benchmarks")]
        subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--record", program, "--out", str(out)],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            check=True,
            timeout=_LONGEST_RUN_SECONDS,
        )
        recorded: list[Any] = msgpack.unpackb(out.read_bytes(), strict_map_key=False)
        return [msgpack.unpackb(batch, strict_map_key=False) for batch in recorded]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT", help="two: before and after")
    parser.add_argument("--program", action="append", choices=PROGRAMS, help="what to run (default: all)")
    parser.add_argument("--record", choices=PROGRAMS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.record:
        record(given.record, given.out)
        return 0
    if len(given.checkouts) != 2:
        parser.error("two checkouts are compared")
    parted = False
    for program in given.program or PROGRAMS:
        before, after = (commands_of(_recorded_in(path.resolve(), program)) for path in given.checkouts)
        difference = first_difference(before, after)
        parted |= bool(difference)
        print(f"{program}: {difference or f'{len(before)} commands, equal'}")
    return int(parted)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file: in a checkout that is compared, its own benchmarks are run
    raise SystemExit(main())
