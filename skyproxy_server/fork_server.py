"""`python -m skyproxy_server.fork_server DESCRIPTOR`: starts workers for which it has imported PyTorch already.

It has one thread, has computed nothing and has not touched a GPU, so that its copies are as good as new processes;
where that is not so, it ends, and its program starts workers in another way. Each order comes as one datagram with the
descriptors of the worker's standard streams; each end of a worker is told with its status. It ends with its program,
whose end of the socket nobody else has.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from skyproxy import import_watcher
from skyproxy.runtime.descendants import MARK_VARIABLE

MAX_ORDER_BYTES = 1 << 20
_STREAMS = 3
_ENV_START_FIELD = 50


def main() -> int:
    """Fork workers until the program ends; in a worker, run it.

    Returns:
        The exit status of this process, whichever of them it is.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    _prepare()
    threads = len(os.listdir("/proc/self/task"))
    control.send(json.dumps({"threads": threads}).encode())
    if threads != 1:
        return 1
    arguments = _serve(control)
    if arguments is None:
        return 0
    from skyproxy_server.__main__ import main as run_worker

    return run_worker(arguments)


def _prepare() -> None:
    """Import what every worker needs."""
    import_watcher.forget_own()
    import skyproxy_server.__main__
    import skyproxy_server.worker_host  # noqa: F401

    mark = os.environ.get(MARK_VARIABLE, "")
    _mark(mark, mark)  # to see that it can be done
    _end_threads_of_libraries()
    gc.collect()
    gc.freeze()  # a collection would write to all pages, and so make copies of them


def _end_threads_of_libraries() -> None:
    """End the threads that a library ends before a fork, and starts again at need: those of NumPy's OpenBLAS."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _serve(control: socket.socket) -> list[str] | None:
    """Take orders; return the arguments of a worker in its own process, None where the program has ended."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    while True:
        readable, _, _ = select.select([control.fileno(), woken], [], [])
        if woken in readable:
            with contextlib.suppress(BlockingIOError):
                while os.read(woken, 4096):
                    pass
            _reap(control)
        if control.fileno() in readable:
            data, descriptors, _, _ = socket.recv_fds(control, MAX_ORDER_BYTES, _STREAMS)
            if not data:
                return None
            order = json.loads(data)
            ready, tells = os.pipe()
            child = os.fork()
            if child == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (woken, wakes, ready):
                    os.close(descriptor)
                control.close()
                _become(order, descriptors)
                os.close(tells)
                return list(order["arguments"])
            for descriptor in (*descriptors, tells):
                os.close(descriptor)
            os.read(ready, 1)  # until it has closed its end: whoever looks for it by its mark finds it from here on
            os.close(ready)
            control.send(json.dumps({"order": order["number"], "process": child}).encode())


def _reap(control: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                return
            control.send(json.dumps({"ended": child, "status": os.waitstatus_to_exitcode(status)}).encode())


def _become(order: dict[str, Any], descriptors: list[int]) -> None:
    """Turn the copy into what a new process would be."""
    os.setsid()
    for stream, descriptor in enumerate(descriptors):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    variables: dict[str, str] = order["variables"]
    _mark(os.environ.get(MARK_VARIABLE, ""), variables.get(MARK_VARIABLE, ""))
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    threads = variables.get("OMP_NUM_THREADS", "").partition(",")[0]
    if threads.isdigit() and int(threads):
        import torch

        torch.set_num_threads(int(threads))


def _mark(before: str, mark: str) -> None:
    """Change the mark where the system shows the variables that a process was started with.

    It is how processes are found that a function has started and left; see `skyproxy.runtime.descendants`.
    """
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start = int(fields[_ENV_START_FIELD - 3])
    with open("/proc/self/environ", "rb") as file:
        place = file.read().index(f"{MARK_VARIABLE}={before}\0".encode())
    if len(before) != len(mark):
        raise ValueError("a mark of another length")
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start + place + len(MARK_VARIABLE) + 1)
        memory.write(mark.encode())


if __name__ == "__main__":
    sys.exit(main())
