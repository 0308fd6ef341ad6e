"""`python -m skyproxy_server`: runs a worker."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import ssl
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from skyproxy import import_watcher
from skyproxy.collector import collector_paused, set_loaded_aside
from skyproxy.errors import ConfigurationError
from skyproxy.runtime.checkpoints import remove_left_folders
from skyproxy.runtime.descendants import MARK_VARIABLE, end_marked
from skyproxy.runtime.lifecycle import close_at_once
from skyproxy.runtime.scratch import remove_abandoned
from skyproxy.settings import SETTINGS
from skyproxy.snapshots.stores import is_address, open_store
from skyproxy_server import audit, auth, forked_processes
from skyproxy_server.addresses import refuse_early
from skyproxy_server.allocator import keep_freed_memory
from skyproxy_server.arguments import parser
from skyproxy_server.blob_backends import BlobBackend, FolderBackend
from skyproxy_server.blobs import BlobStore, usable_memory_bytes
from skyproxy_server.certificates import Certificate
from skyproxy_server.endings import LOST_STATUS
from skyproxy_server.inventory import DeviceRow, inventory
from skyproxy_server.invitation import invite
from skyproxy_server.isolation import options
from skyproxy_server.isolation.session_starter import SessionBounds
from skyproxy_server.isolation.spawner import TemplateSetup
from skyproxy_server.isolation.supervisor import ProcessHost
from skyproxy_server.isolation.uploads import SealedFolderBackend, SealedMemoryBackend
from skyproxy_server.jobs.choosing import choose_jobs
from skyproxy_server.jobs.store import Jobs
from skyproxy_server.leaving import LeavingHost, Stop, is_idle, take_leave
from skyproxy_server.limits import are_sessions_separable, hide_memory
from skyproxy_server.listener import Listener, serve
from skyproxy_server.processes import run_processes, wait_for_ports
from skyproxy_server.program_log import log_to_stderr
from skyproxy_server.tokens import Tokens

logger = logging.getLogger("skyproxy.server")

_LOOK_SECONDS = 1.0
_at_once: list[Callable[[], object]] = []
"""Calls that an embedded worker makes last: it ends at once with its parent, and closes nothing else."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a worker until it is told to end.

    Args:
        argv: the arguments, by default those of the process.

    Returns:
        The exit status: 0 after an orderly end, 2 where the configuration cannot work.
    """
    arguments = parser().parse_args(argv)
    keep_freed_memory()
    _leave_no_core_dumps()
    import_watcher.forget_own()
    log_to_stderr(arguments.log_level.upper())
    if arguments.embedded:
        # Its only client knows what it calls. Its log is a file that grows, whose end tells what the worker died of.
        audit.leave_out("call")
    with contextlib.ExitStack() as ending:
        try:
            return _run(arguments, sys.argv[1:] if argv is None else argv, ending)
        except ConfigurationError as exc:
            print(f"skyproxy_server: {exc}", file=sys.stderr)
            return 2


def _run(arguments: argparse.Namespace, argv: Sequence[str], ending: contextlib.ExitStack) -> int:
    """Serve until the worker is told to end, and return the exit status.

    Args:
        arguments: of the program, and `argv`, those that it was called with.
        ending: closes what is opened here, the last first.

    Raises:
        ConfigurationError: the arguments cannot work.
    """
    stop = _stop_event(arguments.embedded)
    certificate = _ssl_context(arguments.tls_cert, arguments.tls_key)
    refuse_early(
        arguments.host,
        arguments.port,
        arguments.port_file,
        encrypted=certificate is not None,
        insecure=arguments.insecure,
    )
    if arguments.processes > 1:
        return _run_several(arguments, argv, stop)
    token, made = _token(arguments)
    if made is not None:
        ending.callback(made.unlink, missing_ok=True)
    has_processes = _wants_processes(arguments)
    blobs = _blob_store(arguments, shared=has_processes)
    if blobs is not None:
        ending.callback(blobs.close)
    processes: ProcessHost | None = None
    session_host: LeavingHost
    if has_processes:
        session_host = processes = ending.enter_context(contextlib.closing(_process_host(arguments, blobs)))
        devices = processes.start(stop)
    else:
        with collector_paused():
            devices = inventory(arguments.device)
        session_host = ending.enter_context(contextlib.closing(_session_host(arguments, devices, blobs)))
    logger.info("devices: %s", ", ".join(_name(row) for row in devices))
    remove_left_folders()
    remove_abandoned()
    if not wait_for_ports(arguments.host, arguments.after_port, stop):
        return 0
    apart = options.asks_for_processes(arguments) or (processes is not None and processes.has_users)
    jobs = choose_jobs(arguments.jobs, functions=not arguments.no_functions, bounds_sessions=apart)
    if not isinstance(jobs, str):
        ending.callback(jobs.close)
        _at_once.append(jobs.remove_temporary)
        if processes is not None:
            processes.spared = jobs.spared
    listener = serve(
        arguments.host,
        arguments.port,
        token,
        session_host,
        certificate,
        partial(_announce, arguments),
        insecure=arguments.insecure,
        allowed_origins=arguments.allow_origin,
        has_page=arguments.ui,
        jobs=jobs,
        on_ending=stop.forgo,
    )
    _wait(listener, session_host, jobs, stop, arguments)
    return 0


def _leave_no_core_dumps() -> None:
    """A dump would hold the token and the tensors of all clients."""
    if sys.platform != "win32":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, most))


def _run_several(arguments: argparse.Namespace, argv: Sequence[str], stop: threading.Event) -> int:
    """Runs several workers with these arguments.

    Raises:
        ConfigurationError: one of the arguments makes sense for a single worker only.
    """
    single = {"--embedded": arguments.embedded, "--port-file": arguments.port_file, "--port 0": arguments.port == 0}
    for name, given in single.items():
        if given:
            raise ConfigurationError(f"{name} is for a single worker, and --processes asks for {arguments.processes}.")
    if arguments.token_file is None:
        raise ConfigurationError("--processes needs a --token-file, which all of the workers can read.")
    if arguments.port + arguments.processes > 65536:
        raise ConfigurationError(f"There are fewer than {arguments.processes} ports from {arguments.port} upwards.")
    share = ["--blob-bytes", str(_blob_bytes(arguments))]
    leave_seconds = SETTINGS.leave_seconds if arguments.snapshots is not None else 0.0
    return run_processes([*argv, *share], arguments.processes, arguments.port, stop, leave_seconds, arguments.jobs)


def _stop_event(embedded: bool) -> Stop:
    """An event that SIGTERM and SIGINT set; from now on neither kills us halfway."""
    stop = Stop()
    # An embedded worker's sessions are its parent's, who ends it.
    signal.signal(signal.SIGTERM, lambda *_: stop.set() if embedded else stop.suspend())
    # Ctrl-C in a terminal goes to every process in it. The embedded worker must survive it: the user means the client.
    signal.signal(signal.SIGINT, signal.SIG_IGN if embedded else lambda *_: stop.set())
    forked_processes.end_by_signals(interrupts=not embedded)
    return stop


def _token(arguments: argparse.Namespace) -> tuple[str | Tokens, Path | None]:
    """The token, or several, and the file that was made for it if one was."""
    if arguments.token_file is not None:
        return Tokens(arguments.token_file, SETTINGS.token_overlap_seconds), None
    if arguments.embedded:
        token = auth.token_from_stream(sys.stdin.buffer)
        # Kept from processes that functions start: they would wait for input that never comes, or take ours.
        life_line = os.dup(sys.stdin.fileno())
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), sys.stdin.fileno())
        parent = threading.Thread(target=_end_with_parent, args=(life_line,), name="skyproxy-parent", daemon=True)
        parent.start()
        return token, None
    # Taken out of the environment: processes that are started here have no use for it.
    given = auth.token_from_environment(os.environ)
    auth.erase_from_environment()
    if given is not None:
        return given, None
    token, path = auth.new_token_file()
    print(f"A new token was made. Clients find it in: {path}", file=sys.stderr, flush=True)
    return token, path


def _end_with_parent(descriptor: int) -> None:
    """Ends the process when standard input ends: whoever started us is gone, and our tensors belong to nobody."""
    # Not through sys.stdin: a thread that waits in there makes the interpreter abort where it ends by itself.
    try:
        while os.read(descriptor, 4096):
            pass
    except OSError:
        pass
    close_at_once()
    if mark := os.environ.get(MARK_VARIABLE):
        end_marked(mark)
    for remove in _at_once:
        remove()
    # At once, whatever other threads are doing; and with what functions started here, which would outlive us.
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _end_without_context() -> NoReturn:
    """End the process, which has lost its CUDA context, as a crash would: whoever looks after it starts another."""
    try:
        close_at_once()
    finally:
        os._exit(LOST_STATUS)


def _ssl_context(certificate: Path | None, key: Path | None) -> Callable[[], ssl.SSLContext] | None:
    if certificate is None and key is None:
        return None
    if certificate is None:
        raise ConfigurationError("--tls-key was given without --tls-cert. Give both, or a --tls-cert that holds both.")
    return Certificate(certificate, key).context


def _wants_processes(arguments: argparse.Namespace) -> bool:
    """Return whether sessions get processes of their own.

    Unless told otherwise, where a client may not run what it likes: whoever may needs no hole in an operator to reach
    the others, and pools keep what their functions have loaded from one session to the next.

    Raises:
        ConfigurationError: they cannot here, or an argument makes no sense without.
    """
    wanted: bool | None = arguments.session_processes
    if wanted is None:
        wanted = options.asks_for_processes(arguments)
        if not wanted and not arguments.embedded and not _may_all_run_code(arguments):
            wanted = are_sessions_separable()
            if not wanted:
                logger.warning("all sessions share this process: process isolation is not available on this system")
    if wanted and not are_sessions_separable():
        raise ConfigurationError("--session-processes needs Linux. Use --sessions-in-process.")
    if not wanted and options.asks_for_processes(arguments):
        raise ConfigurationError("Limits per session need a process for each: leave out --sessions-in-process.")
    return wanted


def _process_host(arguments: argparse.Namespace, blobs: BlobStore | None) -> ProcessHost:
    hide_memory()
    setup = TemplateSetup(
        arguments.device,
        not arguments.no_functions,
        tuple(arguments.allow_ops),
        arguments.log_level.upper(),
        snapshots=_snapshots(arguments) or "",
    )
    bounds = SessionBounds(arguments.session_memory, arguments.session_gpu_fraction, arguments.session_cpus)
    users = options.session_users(arguments)
    cgroups = options.session_cgroups(arguments)
    priorities = options.session_priorities(arguments, cgroups)
    return ProcessHost(setup, bounds, SETTINGS, blobs, cgroups, users, priorities)


def _snapshots(arguments: argparse.Namespace) -> str | None:
    """Return the place of snapshots.

    Raises:
        ConfigurationError: it is an address that cannot be used.
    """
    place: str | None = arguments.snapshots
    if place is None or not is_address(place):
        return os.path.abspath(place) if place is not None else None
    open_store(place)
    return place


def _may_all_run_code(arguments: argparse.Namespace) -> bool:
    """Return whether all clients may run functions: in a directory there may be tokens that do not allow it, now or
    later.
    """
    return not arguments.no_functions and not (arguments.token_file and arguments.token_file.is_dir())


def _session_host(arguments: argparse.Namespace, devices: list[DeviceRow], blobs: BlobStore | None) -> LeavingHost:
    with collector_paused():
        # Late: it loads torch, and a wrong argument should not wait for that.
        from skyproxy_server.allowed_ops import WITH_FUNCTIONS, open_ops
        from skyproxy_server.graph_checks import trust_clients
        from skyproxy_server.worker_host import WorkerHost
    set_loaded_aside()

    open_ops([*arguments.allow_ops, *(WITH_FUNCTIONS if _may_all_run_code(arguments) else ())])
    if _may_all_run_code(arguments):
        trust_clients()
    host = WorkerHost(
        devices=devices,
        settings=SETTINGS,
        blobs=blobs,
        functions=not arguments.no_functions,
        snapshots=_snapshots(arguments),
    )
    host.on_context_lost = _end_without_context
    if not arguments.embedded:  # whose volume nobody else has
        host.keep_names()
    return host


def _blob_bytes(arguments: argparse.Namespace) -> int:
    """Return how much of uploads this process may keep; with --processes, each of them."""
    wanted: int | None = arguments.blob_bytes
    if wanted is None:
        # An embedded worker's client never comes back to it.
        wanted = SETTINGS.max_blob_bytes if arguments.blob_dir or not arguments.embedded else 0
    usable = usable_memory_bytes() if arguments.blob_dir is None else None
    return (wanted if usable is None else min(wanted, usable // 4)) // int(arguments.processes)


def _blob_store(arguments: argparse.Namespace, *, shared: bool) -> BlobStore | None:
    """Return where uploads are kept; None where none are.

    Args:
        arguments: those of the program.
        shared: whether sessions in processes of their own use it.
    """
    byte_count = _blob_bytes(arguments)
    if not byte_count:
        return None
    where = "memory"
    backend: BlobBackend | None = SealedMemoryBackend() if shared else None
    if arguments.blob_dir is not None:
        # One folder for each port: several workers may get the same folder, and each keeps its own limit.
        where = str(arguments.blob_dir / f"port-{arguments.port}")
        backend = SealedFolderBackend(Path(where)) if shared else FolderBackend(Path(where))
    store = BlobStore(byte_count, backend, SETTINGS.min_blob_bytes, shared=arguments.share_uploads)
    logger.info("keeps up to %d MiB of uploads in %s, %d are there", byte_count >> 20, where, len(store))
    return store


def _name(row: DeviceRow) -> str:
    return f"{row['type']}:{row['index']} ({row['name']})"


def _announce(arguments: argparse.Namespace, port: int) -> None:
    if arguments.embedded:
        print(json.dumps({"port": port}), flush=True)
    if arguments.invite is not None:
        invite(arguments.invite, port, arguments.tls_cert, arguments.token_file)
    port_file: Path | None = arguments.port_file
    if port_file is not None:
        # Renamed into place: whoever waits for the file never reads half of it.
        partial_file = port_file.with_name(port_file.name + ".partial")
        try:
            partial_file.write_text(f"{port}\n", encoding="ascii")
            partial_file.replace(port_file)
        except OSError as exc:
            raise ConfigurationError(f"The port file {port_file} cannot be written: {exc.strerror}.") from exc


def _wait(listener: Listener, host: LeavingHost, jobs: Jobs | str, stop: Stop, arguments: argparse.Namespace) -> None:
    # In slices, because on Windows a signal does not end a wait.
    while not stop.wait(_LOOK_SECONDS):
        if arguments.suspend_after and is_idle(host, listener.activity(), arguments.suspend_after):
            logger.info("nothing to do for %g s", arguments.suspend_after)
            stop.suspend()
    logger.info("shutting down")
    if not isinstance(jobs, str):
        jobs.preempt()  # first: the grace of each begins now
    if stop.suspends and arguments.snapshots is not None and not stop.is_final:
        listener.refuse_new()
        take_leave(host, SETTINGS.leave_seconds, arguments.suspend_report, time.monotonic, lambda: stop.is_final)
    listener.close(arguments.drain_seconds)


if __name__ == "__main__":
    sys.exit(main())
