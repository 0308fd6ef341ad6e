"""Where the client's time goes: microseconds of every operation, then a profile of one of them or of a training step.

    python benchmarks/profile_hot_path.py                          # the table, and the profile of `y = x + y`
    python benchmarks/profile_hot_path.py --case "x + y with gradient" --count 50000
    python benchmarks/profile_hot_path.py --case cnn --sort cumulative
    python benchmarks/profile_hot_path.py --case decode --out profile.prof

cProfile adds about a microsecond to every call of a Python function: a profile says what is called how often and what
weighs most, and the table how long an operation takes. The worker is embedded; the garbage collector is left on.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
from collections.abc import Callable
from pathlib import Path

import torch
from _figures import Spread, interleaved, microseconds_each, number
from _models import Decoder, decode_greedily, digits_net
from _small_ops import cases
from _training import Trainer

import skyproxy

PROGRAMS = ("cnn", "decode")


def table(device: str, count: int, rounds: int) -> None:
    """Prints what the client waits for each operation, and what the local CPU takes."""
    sky, local = cases(device), cases("cpu")
    print(f"{'operation':<24} {'sky us':>8} {'local us':>9} {'ratio':>7}   us, minimum to maximum")
    for name, (call, _) in sky.items():
        twin = local[name][0]
        microseconds_each(call, count // 5)
        figures = interleaved(
            {
                "sky": lambda call=call: microseconds_each(call, count, torch.sky.synchronize),
                "local": lambda twin=twin: microseconds_each(twin, count),
            },
            rounds,
        )
        spread, other = Spread.of(figures["sky"]), Spread.of(figures["local"])
        print(
            f"{name:<24} {number(spread.middle):>8} {number(other.middle):>9} {spread.middle / other.middle:>7.2f}"
            f"   {number(spread.low)} to {number(spread.high)}"
        )


def program(name: str, device: str) -> tuple[Callable[[], object], int]:
    """A piece of a whole program, and how many operations of PyTorch it records."""
    torch.manual_seed(0)
    if name == "cnn":
        images, labels = torch.rand(64, 1, 8, 8).to(device), torch.randint(10, (64,)).to(device)
        trainer = Trainer(digits_net(), [(images, labels)], device)

        def run() -> object:
            return trainer.step((images, labels))
    else:
        model = Decoder(4, 256, 4, 1000, 64).eval().to(device)
        prompt = torch.randint(1000, (1, 16)).to(device)

        def run() -> object:
            return decode_greedily(model, prompt, 16, ask_every_token=False)

    for _ in range(3):
        run()
    torch.sky.synchronize()
    before = torch.sky.stats()["ops"]
    run()
    return run, torch.sky.stats()["ops"] - before


def profile(call: Callable[[], object], count: int, sort: str, lines: int, out: Path | None) -> None:
    """Prints the profile of `count` calls; the wait for the worker is not part of it."""
    torch.sky.synchronize()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(count):
        call()
    profiler.disable()
    torch.sky.synchronize()
    found = pstats.Stats(profiler)
    found.strip_dirs().sort_stats(sort).print_stats(lines)
    if out is not None:
        found.dump_stats(out)
        print(f"written to {out}; see it with a viewer such as snakeviz")


def main() -> None:
    names = [*cases("cpu"), *PROGRAMS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=names, default="y = x + y", metavar="NAME", help=", ".join(names))
    parser.add_argument("--count", type=int, default=10_000, help="calls a figure (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="figures of each kind (default: %(default)s)")
    parser.add_argument("--sort", default="tottime", choices=("tottime", "cumulative", "ncalls"))
    parser.add_argument("--lines", type=int, default=25, help="functions to show (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file for the profile itself")
    parser.add_argument("--no-table", action="store_true", help="the profile only")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # the embedded worker inherits it
    torch.set_num_threads(1)
    torch.zeros(1, device="sky:0")
    print(f"{skyproxy.devices()[0].source}; torch {torch.__version__}; {os.cpu_count()} cores\n")
    if not arguments.no_table:
        table("sky:0", arguments.count, arguments.rounds)
    if arguments.case in PROGRAMS:
        call, ops = program(arguments.case, "sky:0")
        count = max(1, min(arguments.count, 20_000 // ops))
        alone = microseconds_each(call, count, torch.sky.synchronize)
        print(f"\n{arguments.case}: {ops} operations, {number(alone / 1e3)} ms, {number(alone / ops)} us an operation")
    else:
        call, count = cases("sky:0")[arguments.case][0], arguments.count
    gc.collect()
    print(f"\nprofile of {count} x {arguments.case}")
    profile(call, count, arguments.sort, arguments.lines, arguments.out)


if __name__ == "__main__":
    main()
