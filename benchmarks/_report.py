"""What a run leaves behind: Markdown, JSON, a plot, and the page of the documentation."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
from _figures import Row, Spread, Table, number, spread_text, verdict

PAGE = Path(__file__).resolve().parents[1] / "docs" / "topics" / "performance.md"
FIGURES = ("<!-- figures: begin -->", "<!-- figures: end -->")
SUMMARY = ("<!-- summary: begin -->", "<!-- summary: end -->")
_PLOT_NAME = "performance.png"
_PROGRAMS = {
    "MNIST CNN, batch 64": "train a CNN, loss never read",
    "MNIST CNN, batch 64, loss asked every step": "train a CNN, `loss.item_async()` every step",
    "MNIST CNN, batch 64, loss.item() every step": "train a CNN, `loss.item()` every step",
    "transformer 4x128": "train a transformer",
    "Qwen2 4x256 generate, sdpa, run on the worker": "`generate` of transformers, run on the worker",
    "Qwen2 4x256 generate, sdpa": "`generate` of transformers, run here",
}
"""Programs of the summary by the names of their rows; the words are those of somebody who reads nothing else."""


def machine(threads: int) -> dict[str, Any]:
    """What the figures were taken on; nothing that names the machine."""
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": threads,
        "date": datetime.date.today().isoformat(),
    }
    facts["load_before"] = load()
    if torch.cuda.is_available():
        facts["cuda"] = torch.cuda.get_device_name()
    return facts


def load() -> float | str:
    """How many processes wanted the processor lately, ours included."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else "unknown"


def noise(table: Table) -> Spread | None:
    """How far the samples of local code lie apart, as (maximum - minimum) / median: over all rows on loopback."""
    widths = []
    for row in table.rows:
        if row.other is not None and row.against.startswith("local") and row.link == "ws":
            spread = Spread.of(row.other)
            widths.append((spread.high - spread.low) / spread.middle)
    return Spread.of(widths) if widths else None


def markdown(table: Table, facts: dict[str, Any]) -> str:
    """All figures: one table for each link, one that shows ratios by round-trip time, and what is missing."""
    parts = [_conditions(table, facts)]
    links = list(dict.fromkeys(row.link for row in table.rows))
    if len(_delayed(table)) > 1:
        parts.append(_by_delay(table, _delayed(table)))
    for link in links:
        parts.append(f"**Link: {link}**\n\n" + _rows([row for row in table.rows if row.link == link]))
    if table.skipped:
        lines = [f"- {item.name}, on {item.link}: {item.reason}." for item in table.skipped]
        parts.append("**Not measured**\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _conditions(table: Table, facts: dict[str, Any]) -> str:
    text = (
        f"Taken on {facts['date']} with torch {facts['torch']}, Python {facts['python']}, {facts['system']}, "
        f"{facts['cores']} cores, {facts['threads']} PyTorch thread{'s' * (facts['threads'] != 1)} on either side"
    )
    if "cuda" in facts:
        text += f", {facts['cuda']}"
    text += "."
    if "load_before" in facts:
        # Two cores that only this run uses show a load of about 2 at its end.
        text += f" Load when it began: {facts['load_before']}; when it ended: {facts.get('load_after', 'unknown')}."
    found = noise(table)
    if found is not None:
        text += (
            f" Noise: the samples of one local figure lie {found.middle:.0%} of their median apart "
            f"(median over all local figures on loopback; worst {found.high:.0%})."
        )
    rated = [row for row in table.rows if row.met is not None]
    text += f" Targets met: {sum(bool(row.met) for row in rated)} of {len(rated)}."
    return text


def _rows(rows: list[Row]) -> str:
    lines = ["| figure | unit | remote | compared with | there | ratio | target |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        there = spread_text(Spread.of(row.other)) if row.other is not None else ""
        cells = (row.name, row.unit, spread_text(row.spread), row.against, there, spread_text(row.ratio), verdict(row))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _by_delay(table: Table, links: list[str]) -> str:
    names = dict.fromkeys(row.name for row in table.rows if row.link == links[-1] and row.against == "local CPU")
    return "**By round-trip time**\n\n" + _ratios(table, links, {name: name for name in names}, "ratio to local CPU")


def _ratios(table: Table, links: list[str], words: dict[str, str], title: str) -> str:
    """Make a table of ratios: a line for each row's name, a column for each link."""
    head = [title, *("0 ms" if link == "ws" else link.removeprefix("ws, ") for link in links)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, text in words.items():
        cells = []
        for link in links:
            row = table.row(name, link)
            cells.append(number(row.ratio.middle) if row is not None and row.ratio is not None else "")
        if any(cells):
            lines.append("| " + " | ".join([text, *cells]) + " |")
    return "\n".join(lines)


def _delayed(table: Table) -> list[str]:
    """Return the links that stand for a round-trip time, the direct one first."""
    links = dict.fromkeys(row.link for row in table.rows)
    return ["ws", *(link for link in links if link.startswith("ws, ") and link.endswith(" ms"))]


def summary(table: Table) -> str:
    """Speed of whole programs by round-trip time: the one small table that a page begins with."""
    return _ratios(table, _delayed(table), _PROGRAMS, "speed, local CPU = 1; round trip:")


def write_json(table: Table, facts: dict[str, Any], path: Path) -> None:
    """Every sample of every figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "machine": facts,
        "rows": [row.as_json() for row in table.rows],
        "skipped": [vars(item) for item in table.skipped],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def plot(table: Table, path: Path) -> str:
    """Draws the speed of whole programs by round-trip time.

    Returns:
        Why there is no plot; empty if there is one.
    """
    try:
        import matplotlib
    except ImportError:
        return "matplotlib is not installed; it comes with the extra `bench`"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for name, words in _PROGRAMS.items():
        rows = [(link, table.row(name, link)) for link in _delayed(table)]
        points = sorted((_milliseconds(link), row.ratio) for link, row in rows if row is not None and row.ratio)
        if points:
            delays, ratios = zip(*points, strict=True)
            (line,) = axes.plot(delays, [ratio.middle for ratio in ratios], "o-", label=words.replace("`", ""))
            low, high = [ratio.low for ratio in ratios], [ratio.high for ratio in ratios]
            axes.fill_between(delays, low, high, alpha=0.15, color=line.get_color())
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set(xlabel="round-trip time, ms", ylabel="speed, local CPU = 1", ylim=(0, None))
    if axes.lines[1:]:
        figure.legend(loc="outside right upper", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, metadata={"Software": None})
    pyplot.close(figure)
    return ""


def _milliseconds(link: str) -> float:
    return 0.0 if link == "ws" else float(link.removeprefix("ws, ").removesuffix(" ms"))


def write_page(table: Table, facts: dict[str, Any], page: Path = PAGE) -> None:
    """Puts plot and summary, and all figures, between the markers of a page.

    Raises:
        ValueError: the page lacks markers.
    """
    text = _between(page.read_text(encoding="utf-8"), FIGURES, markdown(table, facts), page.name)
    text = _between(text, SUMMARY, summary(table), page.name)
    if not plot(table, page.with_name(_PLOT_NAME)):
        image = f"![Speed of whole programs by round-trip time]({_PLOT_NAME})"
        text = _between(text, SUMMARY, f"{image}\n\n{summary(table)}", page.name)
    page.write_text(text, encoding="utf-8")


def _between(text: str, markers: tuple[str, str], content: str, name: str) -> str:
    begin, end = markers
    if begin not in text or end not in text:
        raise ValueError(f"{name} has no markers. Put {begin} and {end} where the figures belong.")
    before, rest = text.split(begin, 1)
    return f"{before}{begin}\n\n{content}\n\n{end}{rest.split(end, 1)[1]}"


__all__ = [
    "FIGURES",
    "PAGE",
    "SUMMARY",
    "load",
    "machine",
    "markdown",
    "noise",
    "plot",
    "summary",
    "write_json",
    "write_page",
]
