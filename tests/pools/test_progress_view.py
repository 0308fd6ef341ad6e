"""How a pool comes up, for people."""

from __future__ import annotations

import pytest

from skyproxy.pools.progress_view import ProgressView
from skyproxy.providers import Progress


def test_nothing_is_drawn_where_nobody_looks(capfd: pytest.CaptureFixture[str]) -> None:
    with ProgressView("pool: 2 nodes") as view:
        view.report(Progress("provisioning", 0, "no GPU is free"))
    assert capfd.readouterr() == ("", "")


def test_every_node_has_a_line_with_its_last_step(capfd: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    with ProgressView("pool: 2 nodes", show=True) as view:
        view.report(Progress("provisioning", 0, "no GPU is free"))
        view.report(Progress("bootstrapping", 0, "installing torch"))
        view.report(Progress("running", 1, "rank 1 listens"))
        console = Console(width=100)
        with console.capture() as drawn:
            console.print(view._table())
    text = drawn.get()
    assert "no GPU is free" not in text
    assert text.index("node 0 bootstrapping: installing torch") < text.index("node 1 running: rank 1 listens")
    assert "pool: 2 nodes" in text
