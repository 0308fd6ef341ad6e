"""What becomes of each block of the documentation: run as written, parsed, or not run, and why.

`tests/firstrun/test_fresh_environments.py` runs the pages of `RUN` in fresh environments, and
`tests/project/test_page_blocks.py` holds that no block is forgotten, and parses every command line of skyproxy.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^(```+)\s*(\w*)\s*\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)


class Needs(NamedTuple):
    """What the Python blocks of a page need besides torch.

    Attributes:
        packages: besides the extra `torch`.
        worker: an address on the page that stands for a worker with a token; another one is put in its place.
    """

    packages: tuple[str, ...] = ()
    worker: str = ""


FIRST_STEPS = ("README.md", "docs/tutorial/first-tensor.md")
"""Also run with the extra `server` in place of `torch`."""
RUN: dict[str, Needs] = {
    "docs/howto/actors.md": Needs(),
    "docs/howto/ddp.md": Needs(),
    "docs/howto/debugging.md": Needs(),
    "docs/howto/first-hour.md": Needs(),
    "docs/howto/frameworks-on-pools.md": Needs(("scikit-learn",)),
    "docs/howto/functions-on-a-node.md": Needs(),
    "docs/howto/graphs-and-compile.md": Needs(),
    "docs/howto/jobs.md": Needs(),
    "docs/howto/load-weights.md": Needs(),
    "docs/howto/model-round-trip.md": Needs(("scikit-learn",)),
    "docs/howto/named-sessions.md": Needs(worker="wss://gpu.example.com"),
    "docs/howto/out-of-memory.md": Needs(),
    "docs/howto/protect.md": Needs(),
    "docs/howto/save.md": Needs(),
    "docs/howto/pools.md": Needs(),
    "docs/howto/profile.md": Needs(),
    "docs/howto/run-a-worker.md": Needs(worker="wss://worker.example:7777"),
    "docs/howto/send-files.md": Needs(),
    "docs/howto/skyproxy-up.md": Needs(),
    "docs/howto/slow-links.md": Needs(),
    "docs/howto/telemetry.md": Needs(("opentelemetry-sdk",)),
    "docs/howto/web-view.md": Needs(),
    "docs/reference/errors.md": Needs(),
    "docs/reference/plugins.md": Needs(),
    "docs/reference/torch-sky.md": Needs(),
    "docs/topics/distributed.md": Needs(),
    "docs/topics/performance.md": Needs(),
    "docs/topics/uploads.md": Needs(),
}
NOT_RUN: dict[str, str] = {
    "docs/howto/hugging-face.md": "loads models from a hub; tests/integrations runs the same calls with tiny models",
    "docs/howto/torchrun.md": "runs a script of the reader's; tests of pool.torchrun and of scripts have theirs",
}
"""Pages whose Python blocks are compiled only, and why."""
COMMANDS_NOT_RUN: dict[str, str] = {
    "curl": "asks a worker that the reader runs; tests/server/test_activity.py asks the same",
    "export": "variables that tests/integration/test_choosing_a_worker.py sets",
    "journalctl": "needs systemd",
    "kubectl": "needs a cluster; tests/e2e runs skyproxy's own commands on one",
    "loginctl": "needs systemd",
    "make": "docs/check_docs.py holds that the targets exist; .ci/run runs them",
    "pip": "tests/project/test_page_blocks.py holds that the extras exist; tests/firstrun installs them",
    "podman": "builds images, from the network",
    "pytest": "the scripts that measure; they are run by hand",
    "python": "a reader's program, or one that measures",
    "ssh": "needs another machine; tests/providers/test_ssh.py has a server of its own",
    "systemctl": "needs systemd",
    "tmux": "keeps a terminal",
    "git": "a reader's checkout",
}
"""The first words of command lines that are not run as written, and why; those of `skyproxy` are parsed."""


def blocks(page: str, *languages: str) -> list[str]:
    """The blocks of a page in these languages; "" is a block without a name."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [match[3] for match in _FENCE.finditer(text) if match[2] in languages]


def programs(page: str, *, worker: str = "") -> list[str]:
    """The Python blocks of a page: one program; or one each, where they are those of several clients of a worker.

    Args:
        worker: the address of the worker that stands for the one on the page.
    """
    found = blocks(page, "python")
    return [block.replace(RUN[page].worker, worker) for block in found] if worker else ["\n".join(found)]


def pages() -> list[str]:
    """Every page that a reader follows."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def command_lines(page: str) -> list[str]:
    """The shell's lines of a page: continued ones joined, prompts and comments taken away.

    What is a block without a name can also be a file or a log: a line counts whose first word is a known command.
    """
    known = {*COMMANDS_NOT_RUN, "skyproxy"}
    found = []
    for block in blocks(page, "", "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"^\w+\$ ", "", line.partition(" #")[0].strip())
            for part in re.split(r" && | \| |; ", line):
                words = part.split()
                if words and words[0] in known:
                    found.append(part.strip())
    return found
