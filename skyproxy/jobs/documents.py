"""The orders to a job's own process, as bytes: written by a client, read by `begin`. The worker looks at none of it."""

from __future__ import annotations

import platform
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from skyproxy.errors import ConfigurationError
from skyproxy.runtime.instance import InstanceInfo

if TYPE_CHECKING:
    import torch

    from skyproxy.functions.scripts import Script

Document = dict[str, Any]
"""An order that was read: plain data, of the kinds that the functions here write."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")
_MAX_STEM = 40


def new_name(title: str) -> str:
    """Return a name for a job that was given none: what it runs, and something that tells it from others."""
    stem = _NOT_IN_NAMES.sub("-", title).strip("-_")[:_MAX_STEM] or "job"
    return f"{stem if stem[0].isalnum() else 'job'}-{secrets.token_hex(3)}"


def script_document(script: Script, info: InstanceInfo | None) -> bytes:
    """Return the document of a script.

    Args:
        script: packed for its node.
        info: for torchrun: who the nodes are, and where they meet; None runs the script by itself.
    """
    fields = {**asdict(script), "args": list(script.args), "env": dict(script.env)}
    del fields["debug_seconds"]  # no program is there by which anybody could attach
    return _pack({"kind": "script", "script": fields, "info": None if info is None else asdict(info)})


def function_document(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    plain: bool,
    shares_files: bool,
) -> bytes:
    """Return the document of a call.

    Args:
        function, args, kwargs: what to call.
        plain: whether the result must be plain data.
        shares_files: whether the worker sees this program's folders under the same paths.

    Raises:
        ConfigurationError: it cannot be sent.
    """
    from skyproxy.payloads.pickling import Pickler
    from skyproxy.payloads.project_files import PROJECT_FILES, read_file
    from skyproxy.payloads.projects import project_folders
    from skyproxy.runtime.project_code import pack_files

    name = getattr(function, "__qualname__", type(function).__qualname__)
    try:
        pickler = Pickler(_refuse_remote, _refuse_device, sends_lines=True)
        pickled = pickler.pickle((function, tuple(args), dict(kwargs)))
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{name} cannot be sent as a job: {error}. Its arguments and what it refers to must be picklable; open "
            "files, locks and the like are made inside the function instead."
        ) from error
    folders = project_folders()
    files = None
    if not shares_files:
        numbers = {path: number for number, (path, _) in enumerate(folders)}
        found = {(numbers[path], file): read_file(path, file) for path, file in PROJECT_FILES.current(folders)}
        files = pack_files({key: content for key, content in found.items() if content is not None})
    return _pack(
        {
            "kind": "function",
            "tables": pickled.tables,
            "pieces": [bytes(memoryview(piece).cast("B")) for piece in pickled.pieces],
            "plain": plain,
            "python": platform.python_version() if pickled.by_value else "",
            "by_value": pickled.by_value,
            "folders": [[path, first] for path, first in folders],
            "files": files,
        }
    )


def _refuse_remote(tensor: torch.Tensor) -> None:
    if tensor.device.type == "sky":
        raise ConfigurationError(
            "a job outlives this session, and remote tensors do not. Send their values: x.cpu(); or put them under a "
            "name on the node: node.put"
        )


def _refuse_device(device: torch.device) -> None:
    if device.type == "sky":
        raise ConfigurationError(f"{device} is a device of this program only. Name the worker's own in a job: cuda")


def _pack(document: Mapping[str, object]) -> bytes:
    try:
        packed: bytes = msgpack.packb(document)
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"the job is too large to be sent: {error}. Put its data in files on the worker"
        ) from error
    return packed


def read_document(path: Path) -> Document:
    """Return the document in a file."""
    document: Document = msgpack.unpackb(path.read_bytes(), strict_map_key=False)
    return document
