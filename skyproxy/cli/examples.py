"""An example or two for the help of each command; a test reads each with the command's own parser."""

from __future__ import annotations

from collections.abc import Callable

EXAMPLES = {
    "skyproxy up": ("skyproxy up dev --gpus 1 --idle-timeout 30m", "skyproxy up ssh://me@gpu-box"),
    "skyproxy down": ("skyproxy down dev",),
    "skyproxy suspend": ("skyproxy suspend dev",),
    "skyproxy resume": ("skyproxy resume dev",),
    "skyproxy move": ("skyproxy move dev bigger",),
    "skyproxy list": ("skyproxy list --json",),
    "skyproxy status": ("skyproxy status dev",),
    "skyproxy logs": ("skyproxy logs dev --follow --tail 100", "skyproxy logs --job night-run --follow"),
    "skyproxy top": ("skyproxy top dev --interval 5",),
    "skyproxy ui": ("skyproxy ui", "skyproxy ui dev --port 8900"),
    "skyproxy connect": (
        "skyproxy connect sky://gpu-box:8765#sha256:3f0c...",
        "skyproxy connect dev --env",
        "skyproxy connect remote --certificate sha256:3f0c...",
    ),
    "skyproxy run": (
        "skyproxy run --on dev train.py --epochs 3",
        "skyproxy run -m package.train",
        "skyproxy run --on dev --nproc-per-node gpu train.py",
        "skyproxy run --on dev --detach --max-restarts 3 train.py",
    ),
    "skyproxy debug": ("skyproxy debug", "skyproxy debug --list", "skyproxy debug 1f3a90bc"),
    "skyproxy attach": ("skyproxy attach night-run",),
    "skyproxy cancel": ("skyproxy cancel night-run --on dev",),
    "skyproxy jobs list": ("skyproxy jobs list --on dev",),
    "skyproxy jobs logs": ("skyproxy jobs logs night-run --follow",),
    "skyproxy jobs remove": ("skyproxy jobs remove night-run",),
    "skyproxy port-forward": ("skyproxy port-forward dev --local-port 8765",),
    "skyproxy gpus": ("skyproxy gpus --context production",),
    "skyproxy install": ("skyproxy install --namespace team --dry-run",),
    "skyproxy uninstall": ("skyproxy uninstall --keep-computes",),
    "skyproxy serve": ("skyproxy serve --tls", "skyproxy serve --port 7777 --device cpu"),
    "skyproxy doctor": ("skyproxy doctor",),
    "skyproxy version": ("skyproxy version --json",),
    "skyproxy context list": ("skyproxy context list",),
    "skyproxy context current": ("skyproxy context current",),
    "skyproxy context use": ("skyproxy context use dev",),
    "skyproxy context clear": ("skyproxy context clear",),
    "skyproxy context remove": ("skyproxy context remove old",),
    "skyproxy sessions list": ("skyproxy sessions list --on dev",),
    "skyproxy sessions end": ("skyproxy sessions end exp1 --on dev",),
    "skyproxy token rotate": ("skyproxy token rotate dev --timeout 2m",),
}


def examples_text(command: str) -> str:
    """Return the examples of a command, for the end of its help.

    Args:
        command: its whole name.
    """
    examples = EXAMPLES[command]
    # A line each, to be copied: an empty line is what becomes the end of a line in a help.
    return "\n\n".join([f"Example{'s' if len(examples) > 1 else ''}:", *examples])


def help_text(command: Callable[..., object]) -> str:
    """Return the docstring of a command with a line for each paragraph, for the terminal to break where it ends."""
    return "\n\n".join(" ".join(part.split()) for part in (command.__doc__ or "").split("\n\n"))
