"""The magic `%sky`: status and logs of the workers, cells that run there, and every `skyproxy` command."""

from __future__ import annotations

import itertools
import shlex
import subprocess
import sys
from typing import Any

from skyproxy.errors import ConfigurationError, visible, visible_output
from skyproxy.notebook.cells import RESULT, inputs_of, read_cell, run_cell

USAGE = """\
%sky status               the workers of this notebook, their devices and memory, and what was sent
%sky queue                what the workers of this notebook still have to do
%sky cancel               drops what they have not begun, as an interrupt does
%sky session [sky:K]      the name of this notebook's session, and what is kept in it under names
%sky logs [sky:K]         the end of a worker's log
%sky dashboard            the web view of this notebook's program, in a frame
%%sky run [sky:K]         runs the cell on a worker: it reads this notebook's variables, and what it sets comes back;
                          tensors stay there and come back as remote ones
%sky COMMAND ...          any other command of `skyproxy`, such as: %sky up gpu --provider local
"""


class SkyMagic:
    """The magic `%sky` of one shell."""

    __name__ = "sky"
    __doc__ = USAGE

    def __init__(self, shell: Any) -> None:
        """Make the magic for one shell.

        Args:
            shell: IPython's `InteractiveShell`.
        """
        self._shell = shell
        self._numbers = itertools.count(1)

    def __call__(self, line: str, cell: str | None = None) -> Any:
        """Runs `%sky line`, or `%%sky line` with a cell."""
        words = shlex.split(line)
        name = words[0] if words else "help"
        if cell is not None:
            if name != "run":
                raise ConfigurationError(f"%%sky {name} takes no cell. Use %sky {name}, or %%sky run.")
            return self._run(words[1:], cell)
        if name == "status" and len(words) == 1:
            from skyproxy.notebook.status import Status

            return Status()
        if name == "dashboard" and len(words) == 1:
            from skyproxy.webview.program import ui

            return ui()
        if name in ("queue", "cancel") and len(words) == 1:
            from skyproxy.notebook import stopping

            stopping.cancel() if name == "cancel" else print(stopping.queues())
        elif name == "logs" and len(words) <= 2 and (len(words) == 1 or words[1].startswith("sky")):
            print(_logs(words[1] if len(words) == 2 else None))
        elif name == "session" and len(words) <= 2:
            print(_session(words[1] if len(words) == 2 else None))
        elif name in ("help", "-h", "--help"):
            print(USAGE, end="")
        elif name == "run":
            raise ConfigurationError("run takes a cell: begin it with %%sky run")
        else:
            _command(words)
        return None

    def _run(self, words: list[str], source: str) -> Any:
        if len(words) > 1:
            raise ConfigurationError("%%sky run takes one device at most: %%sky run sky:1")
        filename = f"<worker's cell {next(self._numbers)}>"
        cell = read_cell(source, filename)
        variables = inputs_of(cell, self._shell.user_ns, self._shell.user_ns_hidden)
        left = _node(words[0] if words else None).run(run_cell, cell, filename, **variables)
        result = left.pop(RESULT, None)
        self._shell.push(left)
        return result


def _node(device: str | None) -> Any:
    """The node of a device, by default that of the current one; starts it if there is none."""
    import torch

    from skyproxy.nodes import list_nodes
    from skyproxy.tensor.core.devices import DEVICES

    chosen = DEVICES.of(torch.device(device or "sky")).torch_device
    return next(node for node in list_nodes() if chosen in node.devices)


def _session(device: str | None) -> str:
    """The name of a node's session, and a line for each value that is kept in it."""
    node = _node(device)
    if node.session_name is None:
        return (
            f"the session on {node.url} has no name, and ends with this kernel. "
            'skyproxy.connect(url, session="exp1") makes one that can be found again'
        )
    lines = [f"session {node.session_name!r} on {node.url}"]
    for name, value in node.named().items():
        size = f"{value.bytes / (1 << 20):.1f} MiB in {value.tensors} tensors"
        lines.append(f"  {visible(name)}: {size}, put {value.age_seconds:.0f} s ago")
    return "\n".join(lines if len(lines) > 1 else [*lines, "  nothing yet: node.put(name, value)"])


def _logs(device: str | None) -> str:
    """The end of a worker's log.

    Raises:
        ConfigurationError: it is not on this machine, and no saved context names it.
    """
    from skyproxy.providers.detached import list_detached

    node = _node(device)
    text = node.log_tail()
    if text is None:
        text = next((worker.log_tail() for worker in list_detached() if worker.url == node.url), None)
    if text is None:
        raise ConfigurationError(
            f"the log of {node.url} is where that worker was started. For one of `skyproxy up`: %sky logs NAME"
        )
    return visible_output(str(text))


def _command(words: list[str]) -> None:
    """Runs a command of `skyproxy` and shows what it writes, as it comes.

    Raises:
        ConfigurationError: it failed; its own message stands above.
    """
    command = [sys.executable, "-m", "skyproxy.cli.main", *words]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
        except BaseException:
            process.terminate()  # an interrupt of the kernel goes to the kernel alone
            raise
    if process.returncode:
        raise ConfigurationError(f"skyproxy {shlex.join(words)} ended with status {process.returncode}")
