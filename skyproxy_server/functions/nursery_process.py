"""`python -m skyproxy_server.functions.nursery_process`: has torch loaded, and becomes the process of a function.

It is forked, so an isolated function begins in milliseconds. It has one thread, never runs an operator and never uses a
GPU. It owns the processes that it forks, and all that those leave behind: it ends them, and reports how they ended.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import traceback
import warnings
from dataclasses import dataclass

from skyproxy import import_watcher
from skyproxy.collector import collector_paused, set_loaded_aside
from skyproxy_server import limits
from skyproxy_server.control_channel import ChannelClosedError, ControlChannel
from skyproxy_server.functions.nursery import ENDING

_PARENT, _ORDERS = "parent", "orders"


@dataclass(slots=True)
class _Child:
    """A forked process.

    Attributes:
        number: its name between us and our parent.
        pid: its process id.
        watch: tells its end.
        report: where its end is told.
    """

    number: int
    pid: int
    watch: int
    report: int


class ForkedChildren:
    """The children of this process.

    Args:
        channel: where orders come from.
        parent: whose end ends all.
    """

    def __init__(self, channel: ControlChannel, parent: int) -> None:
        self._channel = channel
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, _ORDERS)
        self._parent = os.pidfd_open(parent)
        self._selector.register(self._parent, selectors.EVENT_READ, _PARENT)

    def run(self) -> None:
        """Carry out orders until the parent is gone, or wants no more."""
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data == _PARENT:
                        return
                    if key.data == _ORDERS:
                        self._carry_out(*self._channel.receive())
                    else:
                        self._bury(key.data)
        except ChannelClosedError:
            return
        finally:
            for child in list(self._children.values()):
                self._kill(child.number)
                self._bury(child.number)

    def _carry_out(self, order: dict[str, object], descriptors: list[int]) -> None:
        number = int(str(order["number"]))
        if order["order"] == "kill":
            self._kill(number)
            return
        control, out, err, report = descriptors
        pid = os.fork()
        if pid == 0:
            try:
                self._abandon()
                os.close(report)
                from skyproxy_server.functions.isolated_process import main as be_function

                be_function(control, out, err)
            except BaseException:
                # Where its caller reads what the function prints; where that is not set up yet, in the worker's log.
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(1)
        for descriptor in (control, out, err):
            os.close(descriptor)
        child = _Child(number, pid, os.pidfd_open(pid), report)
        self._children[number] = child
        self._selector.register(child.watch, selectors.EVENT_READ, number)

    def _abandon(self) -> None:
        """Let go, in a child, of what is this process's: a copy of a report kept open would hide an end."""
        self._channel.abandon()
        self._selector.close()
        os.close(self._parent)
        for child in self._children.values():
            os.close(child.watch)
            os.close(child.report)

    def _kill(self, number: int) -> None:
        child = self._children.get(number)
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)  # nobody else has this id: it was not waited for yet

    def _bury(self, number: int) -> None:
        """Tell how a child ended, and end what it left behind, which has become ours."""
        child = self._children.pop(number)
        ending = os.waitid(os.P_PID, child.pid, os.WEXITED)
        assert ending is not None
        self._selector.unregister(child.watch)
        os.close(child.watch)
        self._end_orphans()
        exited = ending.si_code == os.CLD_EXITED
        with contextlib.suppress(OSError):
            os.write(child.report, ENDING.pack(*((0, ending.si_status) if exited else (ending.si_status, 0))))
        os.close(child.report)

    def _end_orphans(self) -> None:
        known = {child.pid for child in self._children.values()}
        while orphans := set(limits.children_of_this_process()) - known:
            for orphan in orphans:
                with contextlib.suppress(OSError):
                    os.kill(orphan, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(orphan, 0)


def main() -> int:
    """Load what functions need and fork their processes, until the worker is gone."""
    channel = ControlChannel(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the worker, which ends us
    limits.raise_oom_score()
    limits.hide_memory()
    limits.set_name("skyproxy-nurse")
    limits.adopt_orphans()
    os.setsid()
    import_watcher.forget_own()
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    with collector_paused():
        import skyproxy_server.functions.isolated_process  # noqa: F401 - with all that a function needs
    set_loaded_aside()
    ForkedChildren(channel, int(sys.argv[2])).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
