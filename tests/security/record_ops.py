"""Writes a JSON file with the operators that a client sends for the samples of PyTorch's operator database.

python tests/security/record_ops.py FILE
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import skyproxy
from skyproxy.protocol import commands
from skyproxy.session.session import Session
from tests.operator_database import op_db

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.conformance.op_checks import check_op

PASSES = ((torch.float32, 4, False), (torch.float32, 3, True), (torch.complex64, 2, False), (torch.int64, 2, False))
"""The samples: their dtype, how many of each entry, and whether in inference mode."""


def record(seen: set[str]) -> None:
    """From now on, `seen` gets the name of each operator that a session defines."""
    inner = Session.signature

    def signature(self: Session, structure: Any, define: Callable[[], list[Any]], width: int) -> int:
        def noted() -> list[Any]:
            definition = define()
            compiled = definition[0] == commands.COMPILED
            seen.update([node[0] for node in definition[2]["nodes"]] if compiled else [definition[0]])
            return definition

        return inner(self, structure, noted, width)

    Session.signature = signature  # type: ignore[method-assign]


def main() -> int:
    warnings.simplefilter("ignore")
    seen: set[str] = set()
    record(seen)
    skyproxy.launch_local("cpu")
    for dtype, limit, inference in PASSES:
        for op in op_db:
            if op.supports_dtype(dtype, "cpu"):
                check_op(op, dtype, "sky:0", limit=limit, variants=dtype is torch.float32, inference=inference)
    Path(sys.argv[1]).write_text(json.dumps(sorted(seen), indent=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
