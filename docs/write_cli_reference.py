"""Writes docs/reference/cli.md from the command line itself; a test holds the page to it.

python docs/write_cli_reference.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent / "reference" / "cli.md"

HEAD = """\
# The command line

`skyproxy` gets you a worker, makes it what `sky:0` is, shows what it does and lets it go; see
[A worker with one command](../howto/skyproxy-up.md). This page is written from the commands' own help by
`docs/write_cli_reference.py`.

Results go to standard output and everything else to standard error; every command that reads has `--json`. Progress is
shown on a terminal only. `skyproxy --version` prints one line, and `python -m skyproxy` is the
same command. `skyproxy --install-completion` teaches your shell to complete commands and names.

## Exit status

| status | meaning |
|---|---|
"""

VARIABLES = """\

## Variables

| variable | meaning |
|---|---|
| `SKYPROXY_URL`, `SKYPROXY_TOKEN` | the worker that `sky:0` is, before any saved context |
| `SKYPROXY_CERTIFICATE`, `SKYPROXY_SERVER_NAME` | whom to trust (a PEM file, PEM text, a fingerprint); the name there |
| `SKYPROXY_CONTEXT` | the saved context that `sky:0` is, in place of the current one; empty: none |
| `SKYPROXY_PROVIDER` | what `skyproxy up` takes without `--provider` |
| `KUBECONFIG` | which cluster, as for kubectl |
| `XDG_CONFIG_HOME`, `XDG_STATE_HOME` | where contexts, and the traces of workers on this machine, are kept |
"""


def page() -> str:
    """The whole page."""
    import typer

    from skyproxy.cli.exit_codes import MEANINGS
    from skyproxy.cli.main import app

    text = HEAD + "".join(f"| {int(code)} | {meaning} |\n" for code, meaning in MEANINGS.items()) + VARIABLES
    return text + "".join(_section(path, command) for path, command in commands(typer.main.get_command(app)))


def commands(group: Any, prefix: str = "skyproxy") -> list[tuple[str, Any]]:
    """Every command with its whole name, in the order of the help."""
    found = []
    for name, command in group.commands.items():
        path = f"{prefix} {name}"
        found += commands(command, path) if hasattr(command, "commands") else [(path, command)]
    return found


def _section(path: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join([path, "[OPTIONS]" if options else "", *(_shown(item) for item in arguments)])
    text = f"\n## {path}\n\n{_paragraphs(command.help)}\n\n```\n{' '.join(usage.split())}"
    text += " [ARGS]...\n```\n" if command.context_settings.get("allow_extra_args") else "\n```\n"
    from skyproxy.cli.examples import EXAMPLES

    text += f"\nFor example `{'`, or `'.join(EXAMPLES[path])}`.\n"
    rows = [(_shown(item), item.help) for item in arguments] + [(_flags(item), _meaning(item)) for item in options]
    if rows:
        text += "\n| argument | meaning |\n|---|---|\n"
        text += "".join(f"| `{name}` | {meaning.replace('|', chr(92) + '|')} |\n" for name, meaning in rows)
    return text


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _shown(argument: Any) -> str:
    name = (argument.metavar or argument.name.upper()).strip("[]").replace("|", " or ")
    return name if argument.required else f"[{name}]"


def _flags(option: Any) -> str:
    return ", ".join(sorted(option.opts, key=len) + option.secondary_opts)


def _meaning(option: Any) -> str:
    default = option.default
    if default is None or callable(default) or isinstance(default, bool) or default in ("", [], ()):
        return str(option.help)
    return f"{option.help} Default: {getattr(default, 'value', default)}"


if __name__ == "__main__":
    sys.path.insert(0, str(PAGE.parents[2]))
    PAGE.write_text(page(), encoding="utf-8")
