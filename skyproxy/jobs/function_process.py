"""The process of a function job: it calls the function, and leaves the result, or the error, in a file."""

from __future__ import annotations

import asyncio
import inspect
import platform
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

from skyproxy.errors import VersionMismatchError
from skyproxy.jobs.documents import Document
from skyproxy.jobs.results import write_error, write_result
from skyproxy.payloads.pickling import Unpickler
from skyproxy.payloads.tensors import memory_for
from skyproxy.runtime import child_processes


def run_function(folder: Path, code: Path, document: Document) -> int:
    """Call what a document holds; return the exit code.

    Args:
        folder: of the job, for its result.
        code: where copies of the program's modules lie, if there are any.
        document: of `documents.function_document`.
    """
    _import_from(code, document)
    try:
        _check_python(document)
        value = _call(document)
        write_result(folder, value, plain=document["plain"])
        status = 0
    except SystemExit as ending:
        return _exit_code(ending)
    except BaseException as error:
        traceback.print_exc()
        write_error(folder, error, plain=document["plain"])
        status = 1
    return status


def _import_from(code: Path, document: Document) -> None:
    """Import the program's modules from its own folders, or from the copies of them."""
    folders = [
        (path if document["files"] is None else str(code / str(n)), first)
        for n, (path, first) in enumerate(document["folders"])
    ]
    sys.path[:0] = [path for path, first in folders if first]
    sys.path += [path for path, first in folders if not first and path not in sys.path]


def _check_python(document: Document) -> None:
    theirs, own = document["python"], platform.python_version()
    if theirs and theirs.split(".")[:2] != own.split(".")[:2]:
        raise VersionMismatchError(
            f"{document['by_value']} travels as bytecode of Python {theirs}, and the worker runs {own}. Put it in a "
            "module of its own, or use the same Python on both sides"
        )


def _call(document: Document) -> object:
    contents, tables = document["pieces"], document["tables"]
    allocate = memory_for(tables, len(contents))
    pieces = []
    for index, content in enumerate(contents):
        piece, view = allocate(index, len(content))
        view[:] = content
        pieces.append(piece)
    child_processes.install()
    function, args, kwargs = Unpickler(pieces, tables, cast(Any, None)).unpickle()
    value = cast("Callable[..., object]", function)(*args, **kwargs)
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    if inspect.isasyncgen(value):
        return asyncio.run(_collect(value))
    return list(value) if inspect.isgenerator(value) else value


async def _collect(items: AsyncIterator[object]) -> list[object]:
    return [item async for item in items]


def _exit_code(ending: SystemExit) -> int:
    if ending.code is None or isinstance(ending.code, int):
        return ending.code or 0
    print(ending.code, file=sys.stderr)
    return 1
