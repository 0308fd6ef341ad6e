"""Data loaders whose workers are processes, in a real kernel: tensors are moved to the device in the loop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook.kernels import Kernel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="one of the two ways to start workers is a fork"),
]

MODULE = """
import torch

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.full((3,), float(i)), i * i
"""
LOOP = """
from squares import Squares
loader = torch.utils.data.DataLoader(
    Squares(), batch_size=4, num_workers=2, multiprocessing_context={context!r}, pin_memory={pins}
)
total = torch.zeros((), device="sky")
for epoch in range(2):
    for x, y in loader:
        total += (x.to("sky", non_blocking={pins})[:, 0] * y.to("sky")).sum()
total.item()
"""
EXPECTED = float(2 * sum(i**3 for i in range(12)))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder: Path = tmp_path_factory.mktemp("notebook")
    (folder / "squares.py").write_text(MODULE)
    with Kernel() as made:
        made.succeed(f"%cd -q {folder}")
        made.succeed("%load_ext skyproxy")
        made.succeed("import torch, skyproxy\ntorch.ones(1, device='sky').cpu();")
        yield made


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("pins", [False, True], ids=["pageable", "pinned"])
def test_batches_of_worker_processes_reach_the_device(kernel: Kernel, context: str, pins: bool) -> None:
    shown = kernel.succeed(LOOP.format(context=context, pins=pins))
    assert float(shown.result["text/plain"]) == EXPECTED
    assert "Traceback" not in shown.printed["stderr"], shown.printed["stderr"]


def test_a_dataset_of_a_cell_works_where_workers_are_forked(kernel: Kernel) -> None:
    kernel.succeed(MODULE.replace("Squares", "OfACell"))
    shown = kernel.succeed(
        LOOP.format(context="fork", pins=False).replace("from squares import Squares", "Squares = OfACell")
    )
    assert float(shown.result["text/plain"]) == EXPECTED


def test_stop_in_a_loop_leaves_no_worker_process(kernel: Kernel) -> None:
    # Stopped at the second batch, when both processes have given one, and while none is taken from them: Stop strikes
    # them, too. One that starts then ends with an error, which PyTorch raises wherever this process is; and one that is
    # gone before its batch was fetched takes that batch's file with it, a FileNotFoundError. Both on every device.
    code = LOOP.format(context="fork", pins=False)
    begun = code.replace(
        "        total +=", "        print(batches.pop(), flush=True)\n        while not batches:\n            total +="
    )
    outcome = kernel.run(
        f"batches = ['second', 'first']\n{begun}",
        on_print=lambda text: kernel.interrupt() if "second" in text else None,
    )
    assert outcome.error[0] == "KeyboardInterrupt"
    left = kernel.value(
        "import gc, multiprocessing, time\n"
        "del loader\n"
        "until = time.monotonic() + 30\n"
        "while (gc.collect() or True) and multiprocessing.active_children() and time.monotonic() < until:\n"
        "    time.sleep(0.1)\n"
        "len(multiprocessing.active_children())"
    )
    assert left == "0"
    kernel.run("total.item()")  # says so once where the worker had not begun some of it
    assert float(kernel.value("total.isfinite().item() * 1.0")) == 1.0
