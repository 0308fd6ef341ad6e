"""Warnings of PyTorch's kernels: what the local CPU warns of is warned of here too, at the same line."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

import skyproxy


def of_few_elements(device: str) -> None:
    x = torch.ones(1, device=device)
    for _ in range(3):
        y = x.var()
    x.std()
    y.item()


def of_resized_outputs(device: str) -> None:
    # Sizes of its own: a worker listens to what an operation says about inputs that are new to it.
    target = torch.ones(23, device=device)
    torch.add(torch.ones(31, device=device), 1, out=target)
    target.sum().item()


def of_shapes_after_the_first(device: str) -> None:
    for n in (5, 3, 1):
        torch.ones(n, device=device).var().item()


@pytest.mark.parametrize("program", [of_few_elements, of_resized_outputs, of_shapes_after_the_first])
def test_a_kernel_warns_at_the_line_that_called_it(program: Callable[[str], None]) -> None:
    def warned(device: str) -> set[tuple[type[Warning], int, str]]:
        globals().get("__warningregistry__", {}).clear()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("default")
            program(device)
        return {(w.category, w.lineno, str(w.message)) for w in seen if w.filename == __file__}

    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # locally, some come once a process
    try:
        theirs = warned("cpu")
    finally:
        torch.set_warn_always(always)
    assert theirs
    with skyproxy.launch_local("cpu") as node:  # one that has run nothing: it listens to what is new to it
        assert warned(str(node.device("cpu"))) == theirs


def test_a_warning_made_an_error_is_raised_where_the_program_waits(sky1: str) -> None:
    y = torch.ones(1, device=sky1).var()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="degrees of freedom"):
            y.item()
        assert torch.ones(3, device=sky1).var().item() == 0
    assert y.isnan().item()


def test_a_warning_is_shown_at_the_next_wait_and_not_before(sky1: str) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.ones(1, device=sky1).std()
        assert seen == []
        torch.sky.synchronize(sky1)
        assert len(seen) == 1


@pytest.mark.parametrize(
    "fill",
    [
        lambda x, out: torch.sub(x, 1, out=out),
        lambda x, out: torch.mm(x, x, out=out),
        lambda x, out: torch.sum(x, 0, out=out),
        lambda x, out: torch.cat([x, x], out=out),
        lambda x, out: torch.cumsum(x, 0, out=out),
        lambda x, out: torch.index_select(x, 0, torch.zeros(4, dtype=torch.int64, device=x.device), out=out),
    ],
)
def test_an_output_that_is_resized_is_told_once_in_pytorchs_words(fill: Callable[..., object], sky1: str) -> None:
    x = torch.ones(13, 13, device=sky1)
    fill(x, torch.empty(0, device=sky1))  # which resizes without a word, and makes the operation known

    def told(device: str) -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            out = torch.ones(7, device=device)
            fill(torch.ones(13, 13, device=device), out)
            out.sum().item()
        return [str(warning.message).partition(" (Triggered")[0] for warning in seen]

    assert told(sky1) == told("cpu")
    assert len(told("cpu")) == 1
