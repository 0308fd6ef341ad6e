"""`python -m skyproxy_server.isolation.template`: has torch loaded, and becomes a session's process when one is needed.

It is forked, so a session starts in milliseconds, and all sessions share the memory of what is loaded. It never runs an
operator, touches a GPU, starts a thread or sees a token or a client's byte: those would be in each session.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from skyproxy.collector import collector_paused, set_loaded_aside
from skyproxy.errors import ConfigurationError
from skyproxy_server import limits
from skyproxy_server.control_channel import ChannelClosedError, ControlChannel
from skyproxy_server.isolation.session_user import SessionUser, obstacle


def main() -> int:
    """Load what sessions need and fork them, until the supervisor is gone."""
    limits.end_with(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the supervisor, which ends us
    channel = ControlChannel(socket.socket(fileno=int(sys.argv[1])))
    try:
        setup, _ = channel.receive()
    except ChannelClosedError:
        return 0
    from skyproxy import import_watcher
    from skyproxy_server.allocator import keep_freed_memory
    from skyproxy_server.program_log import log_to_stderr

    keep_freed_memory()
    limits.raise_oom_score()  # before it is hidden, when only root may; sessions are born so
    limits.hide_memory()
    limits.set_name("skyproxy-templ")
    import_watcher.forget_own()
    log_to_stderr(setup["log_level"])
    # Threads that numpy's linear algebra has started do not matter here: they do nothing, and it starts others.
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    try:
        _load(setup)
        found = _run_in_child(lambda: _look(setup["device"]))
        if setup["user"] is not None:
            user = SessionUser.from_plain(setup["user"])
            found["user_obstacle"] = _run_in_child(lambda: {"text": obstacle(user)})["text"]
    except ConfigurationError as error:
        channel.send({"refused": str(error)})
        return 2
    except ImportError as error:
        channel.send({"refused": f"The worker cannot load what it needs: {error}"})
        return 2
    channel.send({"ready": True, **found})
    try:
        while True:
            order, descriptors = channel.receive()
            try:
                if "sweep" in order:
                    _sweep(SessionUser.from_plain(order["sweep"]))
                else:
                    _fork_session(channel, order, descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
    except ChannelClosedError:
        return 0


def _load(setup: dict[str, Any]) -> None:
    with collector_paused():
        import skyproxy_server.isolation.session_process  # noqa: F401 - with all that a session needs
        from skyproxy_server.allowed_ops import open_ops
    set_loaded_aside()  # a collection in a session would touch, and so copy, all that it shares with the others
    open_ops(setup["allow_ops"])


def _look(choice: str) -> dict[str, object]:
    import torch

    from skyproxy.torch_versions import software
    from skyproxy_server.inventory import inventory

    return {"devices": inventory(choice), "software": software(torch.__version__)}


def _run_in_child(look: Callable[[], dict[str, object]]) -> dict[str, object]:
    """Return what `look` returns in a child: a process that has asked for GPUs cannot be forked any more.

    Raises:
        ConfigurationError: `look` raised it, or the child ended without a word.
    """
    ours, theirs = ControlChannel.pair()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            end = ControlChannel(theirs)
            try:
                end.send({"found": look()})
            except ConfigurationError as error:
                end.send({"refused": str(error)})
            status = 0
        finally:
            os._exit(status)
    theirs.close()
    try:
        answer, _ = ours.receive()
    except ChannelClosedError:
        answer = {"refused": "The process that looked for devices ended; see its output above."}
    finally:
        ours.close()
        os.waitpid(child, 0)
    if "refused" in answer:
        raise ConfigurationError(answer["refused"])
    found: dict[str, object] = answer["found"]
    return found


def _sweep(user: SessionUser) -> None:
    """End all processes of a user, as only one of them can: whoever ends them one by one may come too late forever."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        limits.gain_no_privileges()
        user.become()
        limits.end_all_others_of_this_user()
    finally:
        os._exit(0)


def _fork_session(channel: ControlChannel, order: dict[str, object], descriptors: list[int]) -> None:
    """Fork a session's process, which becomes a child of the supervisor because the process between ends at once."""
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        return
    own = os.getpid()
    try:
        if os.fork():
            os._exit(0)
        channel.abandon()
        while os.getppid() == own:
            time.sleep(0.0002)
        from skyproxy_server.isolation.session_process import main as be_session

        be_session(descriptors, order)
    except BaseException:
        logging.getLogger("skyproxy.server").exception("a session's process could not begin")
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
