"""Saves named sessions that no client uses, when their worker ends: whoever comes to the next one finds them there."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from pathlib import Path

import torch

from skyproxy.errors import SkyproxyError
from skyproxy.settings import Settings
from skyproxy_server.inventory import DeviceRow
from skyproxy_server.named_sessions import NamedSession, NamedSessions, NamedValueRequests
from skyproxy_server.session_state import SessionState
from skyproxy_server.snapshots.requests import SessionSnapshots
from skyproxy_server.snapshots.volume import VolumeHangsError
from skyproxy_server.transfers import Transfers

logger = logging.getLogger("skyproxy.server")


class _Nobody:
    """Holds a named session while it is saved, in nobody's name."""

    identity = ""
    is_detached = is_leaving = True
    deserted_seconds = 0.0

    def take_away(self, reason: str, timeout_seconds: float) -> bool:
        return True


def save_unused(
    sessions: Iterable[NamedSession],
    store: NamedSessions,
    root: Path | str,
    devices: list[DeviceRow],
    settings: Settings,
) -> list[NamedSession]:
    """Save sessions, each as a snapshot of a session that holds nothing else; return those that failed.

    Args:
        sessions: that no client uses.
        store: theirs.
        root: the worker's place for snapshots.
        devices: the worker's.
        settings: limits.
    """
    failed: list[NamedSession] = []
    due = list(sessions)
    for index, session in enumerate(due):
        state = SessionState(devices, lambda message: None, Transfers(settings.chunk_bytes), settings)
        try:
            if state.devices.has_cuda:
                torch.cuda.synchronize()  # the streams of sessions that are over
            state.names = NamedValueRequests(store, session.owner, _Nobody())
            state.names.held = session
            for value in session.values.values():
                for tensor in value.tensors:
                    state.values.gates.note_memory(tensor)
            saving = SessionSnapshots(root, session.owner, lambda sequence: None, settings)
            state.snapshots = saving
            problems: list[Exception] = []
            saving.save(state, secrets.token_hex(16)).tell(lambda answer: None, problems.append)
            saving.finish_writing()
            if problems:
                raise problems[0]
        except VolumeHangsError as error:
            logger.error("the named session %r is not saved, nor are those after it: %s", session.name, error)
            return failed + due[index:]  # each would wait as long again, and the worker is about to end
        except (SkyproxyError, OSError, RuntimeError) as error:
            logger.error("the named session %r is not saved: %s", session.name, error)
            failed.append(session)
        finally:
            state.end()
    return failed
