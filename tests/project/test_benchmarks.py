"""The benchmarks compute what they should: every one runs with tiny settings, and the parts around them are right.

Nothing here judges a speed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
figures: Any = importlib.import_module("_figures")
links: Any = importlib.import_module("_links")
report: Any = importlib.import_module("_report")
suite: Any = importlib.import_module("suite")
cuda: Any = importlib.import_module("_cuda")
scale: Any = importlib.import_module("_scale")
Table, Row = figures.Table, figures.Row


@pytest.fixture(scope="module")
def workers(sky_devices: tuple[str, str]) -> Iterator[Any]:
    """Workers of the benchmarks' own; the fixture's two devices come first and keep their numbers."""
    with links.Workers("cpu") as started:
        yield started


@pytest.fixture(scope="module")
def threads() -> Iterator[None]:
    """As the suite does it: as many threads here as in the workers, or sums come out otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", before)))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bench(workers: Any, threads: None) -> Iterator[Any]:
    """A direct link."""
    with workers.open(links.DIRECT, scale.TINY, Table(quiet=True)) as opened:
        yield opened


@pytest.mark.parametrize("name", suite.BENCHMARKS)
def test_a_benchmark_measures_something_and_what_it_computes_is_right(name: str, bench: Any) -> None:
    before = len(bench.table.rows)
    suite.BENCHMARKS[name](bench)
    rows = bench.table.rows[before:]
    assert rows
    for row in rows:
        assert row.sky
        assert all(sample >= 0 for sample in row.sky)
        assert row.other is None or (len(row.other) == len(row.sky) and min(row.other) > 0)


@pytest.mark.parametrize(
    "spec",
    [
        links.TLS,
        links.LinkSpec("ws, 2 ms", conditions=links.Conditions(0.002)),
        links.LinkSpec("ws, capped", conditions=links.Conditions(0.001, mbit_up=400, mbit_down=400)),
        links.RECHUNKED,
    ],
    ids=lambda spec: spec.name,
)
def test_every_kind_of_link_carries_values_tensors_training_and_tokens(spec: Any, workers: Any, threads: None) -> None:
    with workers.open(spec, scale.TINY, Table(quiet=True)) as opened:
        for name in suite.ON_DELAYED_LINKS:
            suite.BENCHMARKS[name](opened)
        assert {row.link for row in opened.table.rows} == {spec.name}
        assert not [row for row in opened.table.rows if "none" in row.against]


@pytest.mark.parametrize("name", cuda.BENCHMARKS)
def test_the_benchmarks_of_cuda_are_right_where_the_local_side_is_a_cpu(name: str, bench: Any) -> None:
    before = len(bench.table.rows) + len(bench.table.skipped)
    cuda.BENCHMARKS[name](bench)
    assert len(bench.table.rows) + len(bench.table.skipped) > before


def test_without_cuda_its_figures_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    table = Table(quiet=True)
    assert suite.run_cuda(scale.TINY, table, [], [0]) == []
    assert not table.rows
    assert "no CUDA device" in table.skipped[0].reason


def test_a_benchmark_that_computes_something_wrong_is_reported_and_ends_nothing(bench: Any) -> None:
    def wrong(bench: Any) -> None:
        raise AssertionError("other tokens")

    ran = []
    table = Table(quiet=True)
    broken = links.Bench(bench.link, bench.device, [], bench.yardsticks, scale.TINY, table)
    failed = suite.run_link(broken, {"wrong": wrong, "right": ran.append}, ["wrong", "right"])
    assert failed == ["wrong over ws"]
    assert ran == [broken]
    assert table.skipped[0].reason == "it failed: AssertionError"


def test_the_memory_watch_sees_memory_that_is_given_back_at_once(tmp_path: Path) -> None:
    watch = importlib.import_module("_memory_watch").MemoryWatch([os.getpid()])
    try:
        watch.start()
        for _ in range(20):  # on a busy machine, the watch is not there at each moment
            torch.ones(64 << 18).sum()
        (peak,) = watch.stop()
        assert peak.most - peak.before > 40 << 20
        watch.start()
        (peak,) = watch.stop()
        assert peak.most - peak.before < 40 << 20
    finally:
        watch.close()


def test_sides_take_turns_and_the_order_alternates() -> None:
    order: list[str] = []
    taken = figures.interleaved({name: lambda name=name: order.append(name) or len(order) for name in "ab"}, 3)
    assert "".join(order) == "abbaab"
    assert taken == {"a": [1, 4, 5], "b": [2, 3, 6]}


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    row = Row("g", "n", "ws", "us", [2.0, 30.0, 4.0], [1.0, 10.0, 4.0], "local CPU")
    assert row.ratio == (1.0, 2.0, 3.0)
    assert row.spread == (2.0, 4.0, 30.0)
    assert Row("g", "n", "ws", "us", [1.0]).ratio is None


@pytest.mark.parametrize(
    ("target", "met", "text"),
    [
        (figures.ratio_at_most(2), True, "≤ 2.00x"),
        (figures.ratio_at_most(1.9), False, "≤ 1.90x"),
        (figures.ratio_at_least(2.5), False, "≥ 2.50x"),
        (figures.value_at_most(64), True, "≤ 64.0 us"),
        (figures.value_at_least(150), False, "≥ 150 us"),
    ],
)
def test_a_target_is_met_or_missed_by_the_median(target: Any, met: bool, text: str) -> None:
    row = Row("g", "n", "ws", "us", [2.0, 4.0], [1.0, 2.0], "local CPU", (target,))
    assert row.met is met
    assert target.text("us") == text
    assert ("MISSED" in figures.verdict(row)) is not met


@pytest.mark.parametrize(("percent", "expected"), [(50, 5), (99, 10), (100, 10), (0, 1), (10, 1), (11, 2)])
def test_a_percentile_is_one_of_the_figures(percent: float, expected: int) -> None:
    assert figures.percentile([float(n) for n in range(1, 11)], percent) == expected


def sample_table() -> Any:
    table = Table(quiet=True)
    add = table.add
    for link in ("ws", "ws, 20 ms"):
        add(Row("training", "MNIST CNN, batch 64", link, "steps/s", [9.0, 9.5], [10.0, 10.0], "local CPU"))
    add(Row("ops", "client time: x + y", "ws", "us/op", [4.0], [1.0], "local CPU", (figures.ratio_at_most(5),)))
    add(Row("traffic", "sent a step", "ws", "bytes", [1000.0], targets=(figures.value_at_most(64),)))
    table.skip("decode", "wss", "there was no time")
    return table


def test_the_page_gets_summary_and_figures_between_their_markers_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (short, short_end), (begin, end) = report.SUMMARY, report.FIGURES
    page.write_text(f"# Title\n\n{short}\nold\n{short_end}\n\nText.\n\n{begin}\nold\n{end}\n\nThe end.\n")
    for _ in range(2):
        report.write_page(sample_table(), report.machine(1), page)
        text = page.read_text()
        assert text.startswith(f"# Title\n\n{short}\n")
        assert f"{short_end}\n\nText.\n\n{begin}\n" in text
        assert text.endswith(f"{end}\n\nThe end.\n")
        assert "old" not in text
        assert text.count("**Link: ws**") == 1
    first, rest = text.split(short_end)
    for part, name in ((first, "train a CNN, loss never read"), (rest, "MNIST CNN, batch 64")):
        assert f"| {name} | 0.93 | 0.93 |" in part or f"| {name} | 0.92 | 0.92 |" in part
    assert "| sent a step | bytes | 1,000 |  |  |  | ≤ 64.0 bytes MISSED |" in text
    assert "- decode, on wss: there was no time." in text
    assert "Targets met: 1 of 2." in text


@pytest.mark.parametrize("missing", ["SUMMARY", "FIGURES"])
def test_a_page_without_markers_is_refused(missing: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    there = report.FIGURES if missing == "SUMMARY" else report.SUMMARY
    before = "# Title\n" + "\n".join(there)
    page.write_text(before)
    with pytest.raises(ValueError, match="no markers"):
        report.write_page(sample_table(), report.machine(1), page)
    assert page.read_text() == before
    assert list(tmp_path.iterdir()) == [page]


def test_our_page_has_the_markers() -> None:
    text = report.PAGE.read_text(encoding="utf-8")
    assert [text.count(marker) for marker in (*report.SUMMARY, *report.FIGURES)] == [1] * 4


def test_the_plot_is_small(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert report.plot(sample_table(), tmp_path / "plot.png") == ""
    assert 1000 < (tmp_path / "plot.png").stat().st_size < 100_000


def test_every_sample_is_in_the_json_file_and_nothing_names_the_machine(tmp_path: Path) -> None:
    target = tmp_path / "results" / "suite.json"
    report.write_json(sample_table(), report.machine(1), target)
    content = json.loads(target.read_text())
    assert content["rows"][0]["sky"] == [9.0, 9.5]
    assert content["rows"][0]["ratio"] == pytest.approx([0.9, 0.925, 0.95])
    assert content["skipped"] == [{"name": "decode", "link": "wss", "reason": "there was no time"}]
    assert str(Path.home()) not in target.read_text()
    assert os.uname().nodename not in target.read_text() if hasattr(os, "uname") else True


def test_every_link_is_planned_once() -> None:
    planned = suite.plan([0, 5, 20, 80])
    assert [spec.name for spec in planned][:4] == ["ws", "ws, 5 ms", "ws, 20 ms", "ws, 80 ms"]
    assert len({spec.name for spec in planned}) == len(planned) == 7
    assert {name for names in planned.values() for name in names} == set(suite.BENCHMARKS)


def test_the_figures_of_graphs_are_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"name": "captured step", "unit": "us", "sky": [1, 2, 3], "local": [2, 4, 6], "against": "eager dispatch"}]
    script = f"import json, sys\nopen(sys.argv[sys.argv.index('--json') + 1], 'w').write(json.dumps({rows!r}))"
    monkeypatch.setattr(suite, "FOLDER", tmp_path)
    table = Table(quiet=True)
    assert suite.add_graphs(table, quick=True) == []
    assert table.skipped[0].name == "compiled and captured steps"
    (tmp_path / "graphs.py").write_text(script)
    assert suite.add_graphs(table, quick=True) == []
    assert table.rows[0].ratio == (0.5, 0.5, 0.5)
    (tmp_path / "graphs.py").write_text("raise SystemExit(1)")
    assert suite.add_graphs(table, quick=True) == ["graphs.py"]


def test_the_benchmark_of_pools_measures_everyone(tmp_path: Path) -> None:
    target = tmp_path / "pools.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "pools.py")]
    command += ["--rounds", "1", "--count", "2", "--mib", "1", "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(target.read_text())
    assert {"ProcessPoolExecutor", "one after the other", "in one of 10"} <= {row["against"] for row in rows}
    assert {"a map of 80 calls", "the scheduler, a call in a pool of 1000"} <= {row["name"] for row in rows}
    assert all(min(row["sky"]) > 0 for row in rows)


def test_the_benchmark_of_broadcasts_counts_what_is_sent() -> None:
    broadcasts: Any = importlib.import_module("broadcasts")
    rows = {row.name: row for row in broadcasts.measure(2, 5, None, 0.0, 1)}
    assert list(rows) == [
        "5 MiB to 2 processes on as many machines",
        "sent, on as many machines",
        "5 MiB to 2 processes on one machine",
        "sent, on one machine",
    ]
    for where in ("on as many machines", "on one machine"):
        assert 5 < rows[f"sent, {where}"].sky[0] < 6
        assert 10 < rows[f"sent, {where}"].other[0] < 11


def test_kinds_of_operations_on_new_shapes_are_inferred_by_rules(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake tensor costs a hundred times as much as a rule, forward and backward."""
    from skyproxy.tensor.dispatch import inference

    shapes: Any = importlib.import_module("_new_shapes")
    asked: set[str] = set()
    by_fake = inference._infer_by_fake
    monkeypatch.setattr(inference, "_infer_by_fake", lambda call: [asked.add(call.info.name), by_fake(call)][1])
    faked: dict[str, set[str]] = {}
    gradients: dict[str, set[str]] = {}
    waits = torch.sky.stats()["round_trips"]
    for name, op in shapes.operations(sky).items():
        asked.clear()
        shapes._once(op, shapes._inputs(sky, 1), learns=False)
        if asked:
            faked[name] = set(asked)
        asked.clear()
        with contextlib.suppress(RuntimeError, AttributeError):  # of kinds that have no derivative, or no result
            shapes._once(op, shapes._inputs(sky, 1, learns=True), learns=True)
        if asked:
            gradients[name] = set(asked)
    assert faked == {}
    assert gradients == {}
    assert torch.sky.stats()["round_trips"] == waits
