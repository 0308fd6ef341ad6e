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
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
_PLOT_NAME = "performance.png"
_LINES = (
    "MNIST CNN, batch 64",
    "MNIST CNN, batch 64, loss asked every step",
    "MNIST CNN, batch 64, loss.item() every step",
    "transformer 4x128",
    "own decoder 4x256, never asked",
    "Qwen2 4x256 generate, sdpa",
)


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
    delays = [link for link in links if link.startswith("ws, ") and link.endswith(" ms")]
    if delays:
        parts.append(_by_delay(table, ["ws", *delays]))
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
    head = ["ratio to local CPU", *("0 ms" if link == "ws" else link.removeprefix("ws, ") for link in links)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    names = dict.fromkeys(row.name for row in table.rows if row.link == links[-1] and row.against == "local CPU")
    for name in names:
        cells = []
        for link in links:
            row = table.row(name, link)
            cells.append(number(row.ratio.middle) if row is not None and row.ratio is not None else "")
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "**By round-trip time**\n\n" + "\n".join(lines)


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
    """Draws ratios by round-trip time, and the small operations.

    Returns:
        Why there is no plot; empty if there is one.
    """
    try:
        import matplotlib
    except ImportError:
        return "matplotlib is not installed; it comes with the extra `bench`"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name in _LINES:
        points = []
        for row in table.rows:
            if row.name == name and row.ratio is not None and (row.link == "ws" or row.link.endswith(" ms")):
                delay = 0.0 if row.link == "ws" else float(row.link.removeprefix("ws, ").removesuffix(" ms"))
                points.append((delay, row.ratio))
        points.sort()
        if points:
            middles = [ratio.middle for _, ratio in points]
            (line,) = left.plot([delay for delay, _ in points], middles, "o-", label=name)
            left.fill_between(
                [delay for delay, _ in points],
                [ratio.low for _, ratio in points],
                [ratio.high for _, ratio in points],
                alpha=0.15,
                color=line.get_color(),
            )
    left.axhline(1, color="gray", linewidth=0.8)
    left.set(xlabel="round-trip time, ms", ylabel="speed, local CPU = 1", ylim=(0, None), title="Whole programs")
    if left.lines[1:]:
        left.legend(fontsize=7)

    rows = [row for row in table.rows if row.link == "ws" and row.name.startswith("client time: ") and row.ratio]
    names = [row.name.removeprefix("client time: ") for row in rows]
    places = range(len(rows))
    sky = [row.spread for row in rows]
    errors = [[s.middle - s.low for s in sky], [s.high - s.middle for s in sky]]
    right.barh([p + 0.2 for p in places], [s.middle for s in sky], 0.4, xerr=errors, label="remote")
    right.barh([p - 0.2 for p in places], [Spread.of(row.other or [0]).middle for row in rows], 0.4, label="local CPU")
    right.set_yticks(list(places), names, fontsize=8)
    right.invert_yaxis()
    right.set(xlabel="client time, us an operation", title="Small operations")
    right.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=70, metadata={"Software": None})
    pyplot.close(figure)
    return ""


def write_page(table: Table, facts: dict[str, Any], page: Path = PAGE) -> None:
    """Puts the figures between the markers of a page, and the plot beside it.

    Raises:
        ValueError: the page has no markers.
    """
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page.name} has no markers. Put {BEGIN} and {END} where the figures belong.")
    reason = plot(table, page.with_name(_PLOT_NAME))
    image = "" if reason else f"![Speed by round-trip time, and client time of small operations]({_PLOT_NAME})\n\n"
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    page.write_text(f"{before}{BEGIN}\n\n{image}{markdown(table, facts)}\n\n{END}{after}", encoding="utf-8")


__all__ = ["BEGIN", "END", "PAGE", "load", "machine", "markdown", "noise", "plot", "write_json", "write_page"]
