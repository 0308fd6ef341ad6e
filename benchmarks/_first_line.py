"""The first value of a program: import skyproxy, start an embedded worker and ask it, beyond `import torch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

from _figures import value_at_most
from _links import Bench

_ALONE = """
import time
started = time.perf_counter()
import torch
print(time.perf_counter() - started)
"""
_WITH_SKY = """
import json, time
started = time.perf_counter()
{imports}
value = (torch.ones(2, device="sky:0") + 1).sum().item()
seconds = time.perf_counter() - started
print(json.dumps([seconds, value, skyproxy.list_nodes()[0].process_id is not None]))
"""
_USUAL = "import torch, skyproxy"
_EARLY = "import skyproxy; assert skyproxy.start_early(); import torch"


def _run(source: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SKYPROXY_")}
    # As an installed package has them; without, every run would compile skyproxy anew, and torch not.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:  # without a saved worker
        environment |= {"XDG_CONFIG_HOME": folder, "XDG_STATE_HOME": folder}
        return subprocess.run(
            [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True, timeout=300
        ).stdout


def _with_sky(imports: str) -> float:
    seconds, value, embedded = json.loads(_run(_WITH_SKY.format(imports=imports)))
    assert value == 4.0
    assert embedded
    return float(seconds)


def first_line(bench: Bench) -> None:
    """Seconds to the first value, less those of `import torch` alone, beside the latter."""
    rounds = 1 if bench.scale.small_models else bench.scale.rounds
    if not bench.scale.small_models:
        _with_sky(_USUAL)  # compiles what is not compiled yet
    usual, early, alone = [], [], []
    for _ in range(rounds):
        alone.append(float(_run(_ALONE)))
        usual.append(max(0.0, _with_sky(_USUAL) - alone[-1]))
        early.append(max(0.0, _with_sky(_EARLY) - alone[-1]))
    for name, beyond in (("", usual), (", worker started early", early)):
        bench.add(
            "first value",
            f"first value of a program, beyond `import torch`{name}",
            "s",
            beyond,
            alone,
            "`import torch` alone",
            (value_at_most(1.5),),
        )


__all__ = ["first_line"]
