"""Programs of others, run to their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence

from skyproxy.errors import WorkerStartError
from skyproxy.providers.bounded_output import communicate_bounded

_SHOWN_LINES = 30
_HIDDEN = ("PYTHONPATH", "PYTHONHOME")


async def run_command(
    command: Sequence[str], purpose: str, without: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> str:
    """Run a program and return what it wrote to its standard output; cancelling the task kills it.

    Args:
        command: the program and its arguments. No secret belongs there: everybody on the machine can read them.
        purpose: what for, as in "cannot PURPOSE".
        without: variables of our environment that it must not see.
        variables: those that it has beside the others.

    Raises:
        WorkerStartError: it is not there, or failed; with the end of its output.
    """
    environment = {name: value for name, value in os.environ.items() if name not in (*_HIDDEN, *without)}
    environment |= variables or {}
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,  # apart: warnings are no answer
            env=environment,
        )
    except OSError as error:
        raise WorkerStartError(f"cannot {purpose}: {command[0]}: {error}") from error
    try:
        output, problem = await communicate_bounded(process)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await asyncio.shield(process.wait())
        raise
    if process.returncode != 0:
        text = (output + problem).decode(errors="replace").strip()
        end = "\n".join(text.splitlines()[-_SHOWN_LINES:])
        raise WorkerStartError(
            f"cannot {purpose}: `{' '.join(command)}` exited with status {process.returncode}.\n{end}"
        )
    return output.decode(errors="replace").strip()
