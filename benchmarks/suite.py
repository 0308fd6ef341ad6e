"""Every claim about speed, measured: `sky:0` against this machine itself, in one run, round by round.

    python benchmarks/suite.py                    # everything; `make bench`
    python benchmarks/suite.py --quick            # everything with small counts, in less than two minutes
    python benchmarks/suite.py --only decode      # one benchmark, on every link
    python benchmarks/suite.py --rtt-ms 0 20      # some links
    python benchmarks/suite.py --write-docs       # and put the figures into docs/topics/performance.md
    python benchmarks/suite.py --device cuda      # against local CUDA, on a machine that has it

Both sides of a figure are taken in turn, so that a machine whose speed drifts treats them alike; a ratio is the median
of the rounds' ratios. Trust ratios; absolute figures are this machine's. Every benchmark checks what it computed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import _cuda
import _decode
import _first_line
import _growth
import _new_shapes
import _report
import _small_ops
import _training
import _transfers
import _values
import torch
from _figures import Row, Table
from _links import DIRECT, HOME, RECHUNKED, TLS, Bench, LinkSpec, Workers, delayed
from _scale import FULL, QUICK, TINY, Scale
from graphs import TARGETS

import skyproxy

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
Benchmark = Callable[[Bench], None]

BENCHMARKS: dict[str, Benchmark] = {
    "first-line": _first_line.first_line,
    "enqueue": _small_ops.enqueue,
    "end-to-end": _small_ops.end_to_end,
    "never-seen": _small_ops.never_seen,
    "new-shapes": _new_shapes.never_seen_kinds,
    "growth": _growth.growth,
    "values": _values.round_trips,
    "bandwidth": _transfers.bandwidth,
    "memory": _transfers.memory,
    "while-it-moves": _transfers.while_it_moves,
    "cnn": _training.cnn,
    "transformer": _training.transformer,
    "op-traffic": _training.op_traffic,
    "decode": _decode.greedy,
    "decode-graphs": _decode.by_graphs,
}
CUDA_BENCHMARKS: dict[str, Benchmark] = {
    "enqueue": _small_ops.enqueue,
    "end-to-end": _small_ops.end_to_end,
    "values": _values.round_trips,
    "bandwidth": _transfers.bandwidth,
    **_cuda.BENCHMARKS,
}
ON_DELAYED_LINKS = ("values", "bandwidth", "cnn", "transformer", "decode", "decode-graphs")
"""The others cost the same on every link, for they do not wait for it."""
ON_OTHER_LINKS = {
    TLS: ("enqueue", "end-to-end", "values", "bandwidth", "memory", "while-it-moves", "cnn", "decode"),
    RECHUNKED: ("end-to-end", "values", "bandwidth", "cnn", "decode"),
    HOME: ("values", "bandwidth", "cnn", "transformer"),
}


def run_link(bench: Bench, benchmarks: dict[str, Benchmark], names: list[str]) -> list[str]:
    """Runs benchmarks over one link; one that fails does not end the run.

    Returns:
        What failed.
    """
    failed = []
    print(f"\n== {bench.link.name}", flush=True)
    for name in names:
        started = time.perf_counter()
        try:
            benchmarks[name](bench)
        except Exception as error:
            logging.getLogger("benchmarks").exception("%s failed over %s", name, bench.link.name)
            failed.append(f"{name} over {bench.link.name}")
            bench.skip(name, f"it failed: {type(error).__name__}")
        print(f"  -- {name}: {time.perf_counter() - started:.1f} s", flush=True)
    return failed


def plan(round_trips_ms: list[float]) -> dict[LinkSpec, tuple[str, ...]]:
    """Which links there are, and what is measured over each."""
    links: dict[LinkSpec, tuple[str, ...]] = {}
    for rtt_ms in round_trips_ms:
        links[delayed(rtt_ms)] = ON_DELAYED_LINKS if rtt_ms else tuple(BENCHMARKS)
    if 0 in round_trips_ms:
        links |= ON_OTHER_LINKS
    return links


def run_cpu(scale: Scale, table: Table, round_trips_ms: list[float], only: list[str], links: list[str]) -> list[str]:
    """All links, one after the other, each alone: an idle session's threads would still take their turns."""
    failed = []
    with Workers("cpu") as workers:
        for spec, names in plan(round_trips_ms).items():
            chosen = [name for name in names if not only or name in only]
            if not chosen or (links and spec.name not in links):
                continue
            try:
                with workers.open(spec, scale, table) as bench:
                    failed += run_link(bench, BENCHMARKS, chosen)
            except ModuleNotFoundError as error:
                if error.name != "trustme":
                    raise
                table.skip("everything", spec.name, "trustme is not installed, which makes the certificate")
            finally:
                skyproxy.reset()  # so that the next one is sky:0 again
    return failed


def run_cuda(
    scale: Scale,
    table: Table,
    only: list[str],
    round_trips_ms: list[float],
    device: str = "cuda",
    save: Callable[[], None] = lambda: None,
) -> list[str]:
    """Against local CUDA, over a direct link and over slow ones.

    Args:
        device: "cpu" for a rehearsal of the same where there is no GPU.
        save: keeps the figures so far; called after each link, for a run may be ended before the last one.
    """
    reason = _cuda.missing_cuda() if device == "cuda" else ""
    if reason:
        table.skip("everything", "cuda", reason)
        return []
    failed = []
    with Workers(device) as workers:
        for rtt_ms in round_trips_ms:
            names = _cuda.ON_DELAYED_LINKS if rtt_ms else tuple(CUDA_BENCHMARKS)
            try:
                with workers.open(delayed(rtt_ms), scale, table, device) as bench:
                    failed += run_link(bench, CUDA_BENCHMARKS, [n for n in names if not only or n in only])
            finally:
                save()
                skyproxy.reset()  # so that the next one is sky:0 again
    return failed


def add_graphs(table: Table, quick: bool) -> list[str]:
    """The figures of graphs.py beside this file, if it is there: rows as `Row.as_json` makes them."""
    script = FOLDER / "graphs.py"
    if not script.exists():
        table.skip("compiled and captured steps", DIRECT.name, "benchmarks/graphs.py is not there yet")
        return []
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "graphs.json"
        command = [sys.executable, str(script), "--json", str(target), *(["--quick"] if quick else [])]
        done = subprocess.run(command, check=False, timeout=600)
        if done.returncode or not target.exists():
            table.skip("compiled and captured steps", DIRECT.name, "benchmarks/graphs.py failed")
            return ["graphs.py"]
        content = json.loads(target.read_text(encoding="utf-8"))
    for row in content["rows"] if isinstance(content, dict) else content:
        other = row.get("other") or row.get("local")
        targets = (TARGETS[row["name"]],) if row["name"] in TARGETS else ()
        table.add(
            Row("graphs", row["name"], DIRECT.name, row["unit"], row["sky"], other, row.get("against", ""), targets)
        )
    return []


def parser() -> argparse.ArgumentParser:
    """The suite's arguments."""
    result = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = result.add_argument
    add("--quick", action="store_true", help="small counts: everything in less than two minutes")
    add(
        "--only",
        nargs="+",
        default=[],
        choices=sorted({*BENCHMARKS, *CUDA_BENCHMARKS, "graphs"}),
        metavar="NAME",
        help=f"some benchmarks: {', '.join({**BENCHMARKS, **CUDA_BENCHMARKS})}, graphs",
    )
    add("--rtt-ms", nargs="+", type=float, help="round-trip times (default: 0 5 20 80; with --device cuda 0 5 30)")
    add("--links", nargs="+", default=[], metavar="LINK", help='some links by name: ws, wss, "ws, 20 ms", ...')
    add("--device", choices=("cpu", "cuda"), default="cpu", help="the worker's device (default: %(default)s)")
    add("--rehearse", action="store_true", help="the benchmarks of CUDA on the CPU, with tiny models")
    add("--threads", type=int, default=1, help="PyTorch threads of either side (default: %(default)s)")
    add("--rounds", type=int, help="figures of each kind, instead of the usual number")
    add("--json", type=Path, default=RESULTS / "suite.json", help="where every figure goes")
    add("--plot", type=Path, default=RESULTS / "suite.png", help="where the plot goes")
    add("--write-docs", action="store_true", help="put table and plot into docs/topics/performance.md")
    return result


def main() -> int:
    """Runs what was asked for; 1 if a benchmark failed or computed something wrong."""
    arguments = parser().parse_args()
    scale = TINY if arguments.rehearse else QUICK if arguments.quick else FULL
    if arguments.rounds:
        scale = replace(scale, rounds=arguments.rounds, slow_rounds=arguments.rounds)
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # workers inherit it
    torch.set_num_threads(arguments.threads)
    logging.basicConfig(level="ERROR")
    facts = _report.machine(arguments.threads)
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    started, table = time.perf_counter(), Table()
    if arguments.device == "cuda" or arguments.rehearse:
        round_trips_ms = arguments.rtt_ms or [0, 5, 30]
        device = "cpu" if arguments.rehearse else "cuda"
        failed = run_cuda(
            scale,
            table,
            arguments.only,
            round_trips_ms,
            device,
            partial(_report.write_json, table, facts, arguments.json),
        )
    else:
        failed = run_cpu(scale, table, arguments.rtt_ms or [0, 5, 20, 80], arguments.only, arguments.links)
        if not arguments.links and (not arguments.only or "graphs" in arguments.only):
            failed += add_graphs(table, arguments.quick)
    facts["load_after"] = _report.load()
    print("\n" + _report.markdown(table, facts))
    _report.write_json(table, facts, arguments.json)
    reason = _report.plot(table, arguments.plot)
    if arguments.write_docs:
        _report.write_page(table, facts)
    print(f"\n{time.perf_counter() - started:.0f} s. Every figure: {arguments.json}. Plot: {reason or arguments.plot}")
    for name in failed:
        print(f"FAILED: {name}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
