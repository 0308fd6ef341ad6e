"""The connections of this process and what it has done, as a table: HTML for notebooks, text for consoles."""

from __future__ import annotations

import contextlib
import html
from collections.abc import Iterable, Sequence

from skyproxy.errors import RemoteError, SessionLostError
from skyproxy.node import Node
from skyproxy.nodes import list_nodes
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.torch_api import sky_module as sky
from skyproxy.units import size_text

_HEAD = ("device", "worker's device", "memory in use", "worker", "state")
_FIGURES = ("ops", "round_trips", "bytes_sent", "bytes_received", "bytes_saved")


class Status:
    """Nodes, their devices and memory, and what was sent. Making it costs a round trip or two for each worker."""

    def __init__(self, nodes: Sequence[Node] | None = None) -> None:
        """Ask the workers of some nodes.

        Args:
            nodes: of which; by default all of this process.
        """
        self.rows: list[tuple[str, ...]] = []
        self.notes: list[str] = []
        self.figures: dict[str, int] = {}
        for node in list_nodes() if nodes is None else nodes:
            self._add(node)
        if self.rows:
            stats = sky.stats()
            self.figures = {name: stats[name] for name in _FIGURES}

    def _add(self, node: Node) -> None:
        for device in node.devices:
            row = sky.get_device_properties(device)
            used = "?"
            with contextlib.suppress(SessionLostError, RemoteError):
                if node.alive:
                    used = f"{size_text(sky.memory_allocated(device))} of {size_text(row.total_memory)}"
            state = "connected" if node.alive else "lost"
            self.rows.append((str(device), f"{row.type}: {row.name}", used, f"{node.url} ({node.source})", state))
        session = DEVICES.of(node.devices[0]).session
        with contextlib.suppress(SessionLostError, RemoteError):
            blobs = session.call("blob_stats") if node.alive else None
            if blobs is not None:
                self.notes.append(
                    f"{node.url} keeps {blobs['blobs']} uploads for programs that start again, "
                    f"{size_text(blobs['bytes'])} of {size_text(blobs['max_bytes'])}"
                )

    def __repr__(self) -> str:
        if not self.rows:
            return "No sky device yet: the first use of sky:0 starts or connects one."
        widths = [max(len(row[column]) for row in (_HEAD, *self.rows)) for column in range(len(_HEAD))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (_HEAD, *self.rows)
        ]
        return "\n".join([*lines, *self.notes, *self._figure_lines()])

    def _figure_lines(self) -> Iterable[str]:
        parts = (
            f"{name.replace('_', ' ')}: {size_text(value) if name.startswith('bytes') else format(value, ',')}"
            for name, value in self.figures.items()
        )
        yield ", ".join(parts)

    def _repr_html_(self) -> str:
        if not self.rows:
            return f"<p>{html.escape(repr(self))}</p>"
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in _HEAD)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows)
        rest = "".join(f"<p>{html.escape(line)}</p>" for line in (*self.notes, *self._figure_lines()))
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"
