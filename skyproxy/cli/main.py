"""The `skyproxy` command: its groups of commands, and how errors end it."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from skyproxy.cli import (
    connecting,
    debugger,
    doctor,
    inspecting,
    installing,
    jobs,
    lifecycle,
    running,
    saved_contexts,
    serving,
    sessions,
    suspending,
    tokens,
    web_view,
)
from skyproxy.cli.arguments import Json
from skyproxy.cli.examples import examples_text, help_text
from skyproxy.cli.exit_codes import code_of
from skyproxy.cli.output import fail, show_json, show_line
from skyproxy.errors import SkyproxyError
from skyproxy.first_use import tell_misspelt_variables

_ELSEWHERE = {
    **dict.fromkeys(("ls", "ps", "get"), "list"),
    **dict.fromkeys(("create", "launch", "start"), "up"),
    **dict.fromkeys(("delete", "destroy", "rm", "terminate"), "down"),
    "stop": "suspend",
    **dict.fromkeys(("exec", "python"), "run"),
}
"""Commands by their names in other programs; by its letters alone, gpus would be suggested for ps, and top for stop."""


_PYDANTIC_PREFIX = "Value error, "
"""Words that typer's parser puts before the message of a type's own check."""


class _Commands(TyperGroup):
    """Ends with a message and a status of its own where skyproxy says what is wrong; no traceback."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if (meant := _ELSEWHERE.get(args[0])) is not None:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {meant!r}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix(_PYDANTIC_PREFIX)
            raise
        except (SkyproxyError, KeyboardInterrupt) as error:
            fail(str(error) or "interrupted", code_of(error))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            fail(f"the disk is full, or your quota is used up: {error}. Make room, and try again.", code_of(error))


app = typer.Typer(
    name="skyproxy",
    cls=_Commands,
    help="PyTorch tensors on a GPU somewhere else: start a worker, use it as sky:0, watch it, shut it down.",
    no_args_is_help=True,
    # Local variables in a traceback could show a token.
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_PANELS: dict[str, list[tuple[str, Callable[..., None]]]] = {
    "Workers": [
        ("up", lifecycle.up),
        ("down", lifecycle.down),
        ("suspend", suspending.suspend),
        ("resume", suspending.resume),
        ("move", suspending.move),
        ("list", inspecting.list_command),
        ("status", inspecting.status),
        ("logs", inspecting.logs),
        ("top", inspecting.top),
        ("ui", web_view.ui),
    ],
    "Using one": [
        ("connect", connecting.connect),
        ("run", running.run),
        ("debug", debugger.debug),
        ("attach", jobs.attach),
        ("cancel", jobs.cancel),
        ("port-forward", connecting.port_forward),
    ],
    "Cluster": [
        ("gpus", inspecting.gpus),
        ("install", installing.install),
        ("uninstall", installing.uninstall),
    ],
    "This machine": [
        ("serve", serving.serve_command),
        ("doctor", doctor.doctor),
    ],
}
_TELL_OF_VARIABLES = (["doctor"], ["run"])
"""Commands that name misspelt variables themselves: among their findings, or in the program that they run."""
_PASSES_ARGUMENTS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
for panel, commands in _PANELS.items():
    for command_name, command in commands:
        settings = _PASSES_ARGUMENTS_ON if command_name == "run" else {}
        app.command(
            command_name,
            rich_help_panel=panel,
            context_settings=settings,
            help=help_text(command),
            epilog=examples_text(f"skyproxy {command_name}"),
        )(command)
app.add_typer(saved_contexts.app, name="context", rich_help_panel="Using one")
app.add_typer(jobs.app, name="jobs", rich_help_panel="Using one")
app.add_typer(sessions.app, name="sessions", rich_help_panel="Using one")
app.add_typer(tokens.app, name="token", rich_help_panel="Using one")


def _show_version(wanted: bool) -> None:
    if wanted:
        show_line(f"skyproxy {_version_of('skyproxy')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Print the version of skyproxy and exit; skyproxy version prints more.",
        ),
    ] = False,
) -> None:
    """Take what stands before the command."""


@app.command("version", rich_help_panel="This machine", epilog=examples_text("skyproxy version"))
def version_command(as_json: Json = False) -> None:
    """Print the versions of skyproxy and its main dependencies."""
    import platform

    rows = {name: _version_of(name) for name in ("skyproxy", "torch", "websockets", "msgpack")}
    rows["python"] = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if as_json:
        show_json(rows)
        return
    for name, text in rows.items():
        show_line(f"{name:<11} {text}")


def _version_of(distribution: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    """The entry point of the `skyproxy` command, which is `python -m skyproxy`, too."""
    if sys.argv[1:2] not in _TELL_OF_VARIABLES:
        tell_misspelt_variables()
    app(prog_name="skyproxy")


if __name__ == "__main__":
    main()
