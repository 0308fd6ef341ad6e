"""Programs whose default device is `sky`: what the device makes on this side stays here."""

from __future__ import annotations

import ast
import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import skyproxy

_FACTORIES = {"empty", "zeros", "ones", "full", "tensor", "arange", "empty_strided", "scalar_tensor", "as_tensor"}
_FOLDERS = ("tensor", "payloads", "snapshots", "loading", "session")


def _saved(x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    return loaded


PROGRAMS: dict[str, Callable[[torch.Tensor], object]] = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": _saved,
    "deepcopy": copy.deepcopy,
    "read": lambda x: (x.cpu(), x.tolist(), x[0].item(), repr(x)),
    "number": lambda x: x.copy_(1.0),
    "storage": lambda x: x.untyped_storage().cpu().tolist(),
    "bytes of a storage": lambda x: x.untyped_storage().copy_(torch.UntypedStorage(16, device="cpu")),
    "index": lambda x: x[[0, 2]],
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.view(1, 1, 2, 2)] * 3),
    "convolution": lambda x: torch.conv2d(x.view(1, 1, 2, 2), torch.ones(1, 1, 1, 1)),
    "module": lambda x: torch.nn.Linear(4, 2)(x).sum().backward(),
    "to": lambda x: torch.nn.Linear(4, 2, device="cpu").to(x.device)(x),
    "numbers of the host": lambda x: torch.nn.utils.rnn.pack_padded_sequence(x.view(2, 2, 1), [2, 1]).data,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_with_another_default_device_runs(name: str, sky1: str) -> None:
    x = torch.arange(4.0, device=sky1)
    with torch.device(sky1):
        result = PROGRAMS[name](x)
    if isinstance(result, torch.Tensor):
        assert result.device == torch.device(sky1)


def test_no_tensor_of_this_side_is_made_on_the_default_device() -> None:
    """Which a program may have set: each factory in the client's own code names its device."""
    found = []
    for path in (p for folder in _FOLDERS for p in (Path(skyproxy.__file__).parent / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner, named = node.func.value, {keyword.arg for keyword in node.keywords}
            is_factory = isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in _FACTORIES
            if is_factory and not named & {"device", None}:
                found.append(f"{path.name}:{node.lineno}")
    assert found == []
