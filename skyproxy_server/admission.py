"""The decision who may have another session. No torch here: whoever decides about connections need not load it."""

from __future__ import annotations

from skyproxy.errors import LimitExceededError
from skyproxy.settings import Settings
from skyproxy_server.auth import Identity


def refuse_session(client: Identity, others: list[Identity], settings: Settings) -> None:
    """Refuse a session where there are too many.

    Args:
        client: who wants one.
        others: who have those that there are.
        settings: limits.

    Raises:
        LimitExceededError: the worker, the token, or the token at this address has as many as it may.
    """
    if len(others) >= settings.max_sessions:
        raise LimitExceededError(f"this worker already serves {len(others)} sessions, its limit")
    own = [other for other in others if other.name == client.name]
    if client.bounds.sessions is not None and len(own) >= client.bounds.sessions:
        raise LimitExceededError(f"the token {client.name} already has {len(own)} sessions, its limit")
    if sum(other.address == client.address for other in own) >= settings.max_sessions_per_client:
        raise LimitExceededError(
            f"{client.address or 'this client'} already has {settings.max_sessions_per_client} sessions, its limit; "
            "SKYPROXY_MAX_SESSIONS_PER_CLIENT on the worker raises it"
        )
