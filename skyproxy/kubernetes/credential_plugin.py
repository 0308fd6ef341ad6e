"""Credentials that a program makes, as a kubeconfig's `exec` names it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping

from skyproxy.errors import ConfigurationError

logger = logging.getLogger("skyproxy.kubernetes")

PATIENCE_SECONDS = 300.0
"""Some ask a person to log in with a browser."""
_SILENCE_SECONDS = 5.0
_END_SECONDS = 5.0
_MAX_OUTPUT_BYTES = 1 << 20


async def make_credentials(plugin: Mapping[str, object]) -> dict[str, str]:
    """Run a credential plugin, and return what stands in its place in a kubeconfig's user.

    What it writes to its standard error is shown as it comes: there it says what a person has to do. Its end is ours:
    when the time is over, or the task is cancelled, it is killed with whatever it has started.

    Args:
        plugin: the `exec` of the user.

    Returns:
        `token`, or `client-certificate-data` and `client-key-data`.

    Raises:
        ConfigurationError: it cannot be started, failed, said nothing usable, or took longer than `PATIENCE_SECONDS`.
    """
    version, command = plugin.get("apiVersion"), plugin.get("command")
    rows, arguments = plugin.get("env") or [], plugin.get("args") or []
    if not version or not command or not isinstance(rows, list) or not isinstance(arguments, list):
        raise ConfigurationError("its exec needs apiVersion and command, and args and env are lists")
    # Someone at a terminal can be asked something, unless the plugin is known to ask nothing.
    asks = plugin.get("interactiveMode") != "Never" and os.isatty(0)
    wanted = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": asks}}
    environment = dict(os.environ)
    environment |= {str(row["name"]): str(row["value"]) for row in rows if isinstance(row, Mapping) and "name" in row}
    environment["KUBERNETES_EXEC_INFO"] = json.dumps(wanted)
    try:
        process = await asyncio.create_subprocess_exec(
            str(command),
            *map(str, arguments),
            stdin=None if asks else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            # In a session of its own it could not read from the terminal.
            start_new_session=not asks,
        )
    except (OSError, ValueError) as error:
        hint = " ".join(str(plugin.get("installHint") or "").split())
        raise ConfigurationError(
            f"its credential plugin {command} cannot be started: {error}{'. ' + hint if hint else ''}"
        ) from error
    reminder = asyncio.get_running_loop().call_later(
        _SILENCE_SECONDS, logger.warning, "waiting for the credential plugin %s of the kubeconfig", command
    )
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            output, said = await asyncio.gather(_read(process, has_group=not asks), _show(process.stderr))
            status = await process.wait()
    except BaseException as error:
        await _end(process, has_group=not asks)
        if not isinstance(error, TimeoutError):
            raise
        shown = " ".join(map(str, [command, *arguments]))
        raise ConfigurationError(
            f"its credential plugin {command} has not answered for {PATIENCE_SECONDS:g} s. Run it yourself: {shown}"
        ) from error
    finally:
        reminder.cancel()
    if output is None:
        raise ConfigurationError(f"its credential plugin {command} writes without end")
    if status != 0:
        raise ConfigurationError(f"its credential plugin {command} ended with status {status}: {said or 'no word'}")
    return _parse(output, str(version), str(command))


async def _read(process: asyncio.subprocess.Process, *, has_group: bool) -> bytes | None:
    """Return what a plugin answers; None where it was killed because that had no end."""
    assert process.stdout is not None
    output = b""
    while piece := await process.stdout.read(1 << 16):
        if len(output) <= _MAX_OUTPUT_BYTES:
            output += piece
        else:
            _kill(process, has_group=has_group)
    return output if len(output) <= _MAX_OUTPUT_BYTES else None


async def _show(stream: asyncio.StreamReader | None) -> str:
    """Pass on what a plugin says to people; return its last words."""
    assert stream is not None
    last = ""
    while piece := await stream.read(1 << 16):
        text = piece.decode(errors="replace")
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()
        last = (last + text)[-500:]
    return last.strip()


def _kill(process: asyncio.subprocess.Process, *, has_group: bool) -> None:
    """Kill a plugin and, where it has a group of its own, what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if has_group and hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


async def _end(process: asyncio.subprocess.Process, *, has_group: bool) -> None:
    """Kill a plugin that has not ended, and wait until that is so."""
    _kill(process, has_group=has_group)
    # Its end is not noticed before what it wrote was read; who has left its group may hold the pipes for longer.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
            await asyncio.gather(*(_drain(stream) for stream in (process.stdout, process.stderr)))
            await process.wait()


async def _drain(stream: asyncio.StreamReader | None) -> None:
    assert stream is not None
    while await stream.read(1 << 16):
        pass


def _parse(output: bytes, version: str, command: str) -> dict[str, str]:
    try:
        answer = json.loads(output)
        if answer["apiVersion"] != version:
            raise ValueError(f"it speaks {answer['apiVersion']}, and not {version}")
        status = answer["status"]
        if token := status.get("token"):
            return {"token": str(token)}
        pair = {"client-certificate-data": "clientCertificateData", "client-key-data": "clientKeyData"}
        return {name: base64.b64encode(status[key].encode()).decode() for name, key in pair.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(
            f"its credential plugin {command} did not answer with an ExecCredential that has a token, or a certificate "
            f"and its key ({error})"
        ) from error
