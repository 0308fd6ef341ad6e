"""`skyproxy serve`: becomes a worker."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from skyproxy.cli.identity import own_address, own_certificate, own_token
from skyproxy.cli.output import fail
from skyproxy.errors import ConfigurationError
from skyproxy.extras import install_command

_SERVER = "skyproxy_server"
_ANY = ("0.0.0.0", "::", "")
"""Names of every address of a machine, which are not addresses to connect to."""


class Device(StrEnum):
    """A kind of device that a worker can be asked to offer."""

    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


class LogLevel(StrEnum):
    """The least severity that a worker logs."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def serve_command(
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on; default: 127.0.0.1, or with --tls all addresses (0.0.0.0)."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8765,
    processes: Annotated[
        int,
        typer.Option(min=1, max=64, help="Number of workers, on consecutive ports from --port; if one ends, all end."),
    ] = 1,
    device: Annotated[
        Device, typer.Option(help="Devices to offer; auto: CUDA devices if present, and the CPU.")
    ] = Device.AUTO,
    token_file: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            readable=True,
            help="File with the token that clients must present, or a directory with one file per named token; "
            "reread when it changes.",
        ),
    ] = None,
    port_file: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File to write the port to once the worker listens.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Certificate chain (PEM); clients then use wss://.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Private key of the certificate (PEM).")
    ] = None,
    tls: Annotated[
        bool,
        typer.Option(
            "--tls",
            help="Encrypt, with a token and a certificate that are created once and kept, and print the command that "
            "connects to this worker from another machine.",
        ),
    ] = False,
    advertise: Annotated[
        str | None,
        typer.Option(help="With --tls: the name or address under which other machines reach this one."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Accept other machines without TLS; for a worker behind a gateway.")
    ] = False,
    ui: Annotated[
        bool,
        typer.Option(
            "--ui", help="Serve the page of the web view at /ui; it asks for the token before it shows anything."
        ),
    ] = False,
    allow_origin: Annotated[list[str] | None, typer.Option(help="A web origin that may connect; repeatable.")] = None,
    blob_bytes: Annotated[
        int | None,
        typer.Option(min=0, help="How many bytes of uploads to keep for returning clients; 0 for none."),
    ] = None,
    blob_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="Keep uploads in this folder, which outlives the worker.")
    ] = None,
    snapshots: Annotated[
        Path | None, typer.Option(file_okay=False, help="Keep snapshots of sessions in this folder.")
    ] = None,
    jobs: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Keep jobs in this folder, where the next worker finds them; else they go with this one.",
        ),
    ] = None,
    suspend_after: Annotated[
        float,
        typer.Option(min=0.0, metavar="SECONDS", help="End after so long idle; with --snapshots, suspend sessions."),
    ] = 0.0,
    share_uploads: Annotated[
        bool, typer.Option("--share-uploads", help="Share kept uploads between the clients of all tokens.")
    ] = False,
    no_functions: Annotated[
        bool, typer.Option("--no-functions", help="Accept tensor operations only; run no client code.")
    ] = False,
    allow_ops: Annotated[
        list[str] | None,
        typer.Option(help="An additional operator namespace or operator that clients may call; repeatable."),
    ] = None,
    session_processes: Annotated[
        bool | None,
        typer.Option(
            "--session-processes/--sessions-in-process",
            help="Run each session in its own process (Linux; default where not all clients may run functions), or all "
            "in one.",
        ),
    ] = None,
    session_memory: Annotated[
        int | None,
        typer.Option(min=0, help="Memory limit of a session's process, in bytes; 0 for none."),
    ] = None,
    session_gpu_fraction: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Fraction of each GPU's memory that a session may use; 0 for no limit."),
    ] = None,
    session_cpus: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=4096.0, help="Processors that a session may keep busy; 0 for no limit. Needs cgroups."
        ),
    ] = None,
    session_cgroups: Annotated[
        bool | None,
        typer.Option(
            "--session-cgroups/--no-session-cgroups",
            help="Give each session with a process its own cgroup (default where the worker may make them).",
        ),
    ] = None,
    session_priorities: Annotated[
        bool,
        typer.Option(
            "--session-priorities/--no-session-priorities",
            help="Let sessions with a process that have computed much give way to those that mostly wait, and to "
            "other programs.",
        ),
    ] = True,
    session_users: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST:COUNT",
            help="User numbers for sessions with a process, one each, where the worker runs as root; auto (default): "
            "unused ones where possible; off: the worker's own user.",
        ),
    ] = None,
    drain_seconds: Annotated[float, typer.Option(min=0.0, help="How long sessions may continue after SIGTERM.")] = 0.0,
    log_level: Annotated[LogLevel, typer.Option(help="Log level.")] = LogLevel.INFO,
    embedded: Annotated[
        bool,
        typer.Option(
            "--embedded", help="Run as a client's child: token from stdin, port to stdout, exit when stdin closes."
        ),
    ] = False,
) -> None:
    """Run a worker on this machine.

    The token comes from --token-file or SKYPROXY_TOKEN, never from an argument: everyone on the machine can read those.
    Without either, a new token is created in a file whose name is printed.
    """
    _check_modules()
    if tls_key is not None and tls_cert is None:
        raise ConfigurationError("--tls-key was given without --tls-cert. Give both, or a --tls-cert that holds both.")
    if port_file is not None and not port_file.absolute().parent.is_dir():
        raise ConfigurationError(f"--port-file {port_file} cannot be written: there is no such folder.")
    invitation: list[str] = []
    if tls:
        token_file, tls_cert = _own_identity(token_file, tls_cert, tls_key)
        invitation = ["--invite", advertise or (host if host not in (None, *_ANY) else own_address())]
        host = host or "0.0.0.0"
    elif advertise:
        raise ConfigurationError("--advertise names this machine for --tls. Add --tls, or leave it out.")
    arguments = [
        *invitation,
        "--host",
        host or "127.0.0.1",
        "--port",
        str(port),
        "--device",
        device.value,
        "--log-level",
        log_level.value,
    ]
    arguments += ["--drain-seconds", str(drain_seconds)]
    arguments += ["--suspend-after", str(suspend_after)] if suspend_after else []
    arguments += ["--processes", str(processes)] if processes > 1 else []
    paths = {
        "--token-file": token_file,
        "--port-file": port_file,
        "--tls-cert": tls_cert,
        "--tls-key": tls_key,
        "--blob-dir": blob_dir,
        "--snapshots": snapshots,
        "--jobs": jobs,
    }
    bounds = {
        "--session-memory": session_memory,
        "--session-gpu-fraction": session_gpu_fraction,
        "--session-cpus": session_cpus,
        "--session-users": session_users,
    }
    for flag, value in {**paths, "--blob-bytes": blob_bytes, **bounds}.items():
        if value is not None:
            arguments += [flag, str(value)]
    for origin in allow_origin or ():
        arguments += ["--allow-origin", origin]
    for name in allow_ops or ():
        arguments += ["--allow-ops", name]
    if session_processes is not None:
        arguments.append("--session-processes" if session_processes else "--sessions-in-process")
    if session_cgroups is not None:
        arguments.append("--session-cgroups" if session_cgroups else "--no-session-cgroups")
    switches = {
        "--no-session-priorities": not session_priorities,
        "--insecure": insecure,
        "--embedded": embedded,
        "--ui": ui,
        "--no-functions": no_functions,
        "--share-uploads": share_uploads,
    }
    arguments += [flag for flag, given in switches.items() if given]
    run_server(arguments)


def _own_identity(
    token_file: Path | None, tls_cert: Path | None, tls_key: Path | None
) -> tuple[Path | None, Path | None]:
    """Return the token file and the certificate for `--tls`: those that were given, else those of this user."""
    if tls_cert is not None or tls_key is not None:
        raise ConfigurationError("--tls makes a certificate, and --tls-cert names one. Give one of them.")
    if token_file is None and "SKYPROXY_TOKEN" not in os.environ:
        token_file = own_token()
    return token_file, own_certificate()


def _check_modules() -> None:
    for module in (_SERVER, "torch"):
        if importlib.util.find_spec(module) is None:
            fail(f"A worker needs {module}, which is not installed here. Install it: {install_command('server')}")


def run_server(arguments: list[str]) -> NoReturn:
    """Becomes the worker's program; the client's code never imports it.

    Args:
        arguments: those of `python -m skyproxy_server`.
    """
    _check_modules()
    # -P: a module of the user's in the current directory must not take the place of one of ours.
    command = [sys.executable, "-P", "-m", _SERVER, *arguments]
    if os.name == "posix":
        # In our place, so that signals and the exit status are the worker's own.
        os.execv(sys.executable, command)
    sys.exit(subprocess.call(command))
