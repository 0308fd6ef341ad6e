"""The command line of a worker: its arguments, and what each may be."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from skyproxy_server.inventory import CHOICES
from skyproxy_server.isolation import options

_EPILOG = """\
The token comes from --token-file, or from SKYPROXY_TOKEN, or with --embedded from the first line of standard input;
without any of these a new one is made and written to a file whose name is printed. It is never an argument, for the
arguments of a process are visible to everyone on the machine. Where --token-file is a directory, each of its files
holds a token of that name and says what it allows.
"""


def parser() -> argparse.ArgumentParser:
    """The worker's arguments."""
    result = argparse.ArgumentParser(
        prog="skyproxy_server",
        description="Run a skyproxy worker: it holds the tensors and executes the operations of its clients.",
        epilog=_EPILOG,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=_port, default=8765, help="port to listen on; 0 takes a free one")
    add(
        "--processes",
        type=_process_count,
        default=1,
        help="number of workers, on consecutive ports from --port; if one ends, all end",
    )
    # Set by --processes: whoever finds the first worker finds all of them.
    add("--after-port", type=_port, action="append", default=[], help=argparse.SUPPRESS)
    add("--device", choices=CHOICES, default="auto", help="devices to offer; auto: CUDA if there is any, then the CPU")
    add(
        "--token-file",
        type=Path,
        metavar="PATH",
        help="file with the token that clients must present, or a directory with a file for each named token; reread "
        "when it changes",
    )
    add("--port-file", type=Path, metavar="PATH", help="file to write the port to, once the worker listens")
    add("--tls-cert", type=Path, metavar="PATH", help="certificate chain (PEM); with it clients use wss://")
    add("--tls-key", type=Path, metavar="PATH", help="private key of the certificate (PEM)")
    add(
        "--invite",
        metavar="HOST",
        help="print the command that connects to this worker from other machines, which know this one as HOST",
    )
    add(
        "--insecure",
        action="store_true",
        help="listen for other machines without TLS; for a worker behind a gateway where TLS ends",
    )
    add("--ui", action="store_true", help="serve the page of the web view at /ui; it shows nothing without a token")
    add("--allow-origin", action="append", default=[], metavar="ORIGIN", help="a web page that may connect; repeatable")
    add(
        "--blob-bytes",
        type=_byte_count,
        metavar="N",
        help="how many bytes of uploads to keep for returning clients; 0: none (default: SKYPROXY_MAX_BLOB_BYTES; "
        "with --embedded none, for no client returns)",
    )
    add("--share-uploads", action="store_true", help="share kept uploads between the clients of all tokens")
    add("--blob-dir", type=Path, metavar="PATH", help="keep them in this folder, which outlives the worker")
    add(
        "--snapshots",
        metavar="PLACE",
        default=os.environ.get("SKYPROXY_SNAPSHOTS") or None,
        help="keep snapshots of sessions in this folder, or at this address of fsspec (s3://bucket/snapshots), for "
        "clients that protect or save theirs (default: SKYPROXY_SNAPSHOTS)",
    )
    add(
        "--jobs",
        type=Path,
        metavar="PATH",
        default=os.environ.get("SKYPROXY_JOBS") or None,
        help="keep jobs in this folder, where the next worker finds them again (default: SKYPROXY_JOBS; without, they "
        "go with the worker)",
    )
    add(
        "--suspend-after",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="end after so long without anything to do; with --snapshots, sessions are suspended. 0: never",
    )
    # For whoever starts workers and wants to know what became of their sessions.
    add("--suspend-report", type=Path, metavar="PATH", help=argparse.SUPPRESS)
    add("--no-functions", action="store_true", help="accept tensor operations only; run no client code")
    add(
        "--allow-ops",
        action="append",
        default=[],
        metavar="NAME",
        help="a namespace (torchvision) or an operator (mylib::scale) that clients may call, too; repeatable",
    )
    add("--drain-seconds", type=float, default=0.0, help="how long sessions may continue after SIGTERM")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"), help="log level")
    kind = result.add_mutually_exclusive_group()
    kind.add_argument(
        "--session-processes",
        action="store_true",
        default=None,
        help="give each session a process of its own, so that none can harm another (Linux); the default where not all "
        "clients may run functions: with --no-functions or a directory of tokens",
    )
    kind.add_argument(
        "--sessions-in-process",
        action="store_false",
        dest="session_processes",
        help="run all sessions in this process; for clients that trust one another",
    )
    add(
        "--session-memory",
        type=_byte_count,
        default=0,
        metavar="BYTES",
        help="memory that a session's process may take; 0: no limit of its own",
    )
    add(
        "--session-gpu-fraction",
        type=_fraction,
        default=0.0,
        metavar="F",
        help="the part of each GPU's memory that a session may take; 0: no limit of its own",
    )
    options.add_arguments(result)
    add(
        "--embedded",
        action="store_true",
        help="run as the child of a client: token from stdin, port to stdout as JSON, exit when stdin ends",
    )
    return result


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; use a number from 0 to 65535")
    return int(text)


def _process_count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes; use one from 1 to 64")
    return int(text)


def _byte_count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes; use 0 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds; use 0 or more")
    return value


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction; use a number from 0 to 1")
    return value
