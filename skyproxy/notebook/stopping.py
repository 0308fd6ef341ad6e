"""The effect of Stop: the workers drop what they have not begun."""

from __future__ import annotations

import sys
from typing import Any


def queues() -> str:
    """Return a line for each worker: what it has still to do."""
    from skyproxy.tensor.core.devices import DEVICES

    sessions = {id(device.session): device.session for device in DEVICES.alive()}
    return "\n".join(str(session.backlog()) for session in sessions.values()) or "No sky device yet."


def cancel() -> None:
    """Have all workers drop what they have not begun; does not wait."""
    devices = sys.modules.get("skyproxy.tensor.core.devices")
    for device in devices.DEVICES.alive() if devices is not None else ():
        device.session.cancelling.cancel()


def after_cell(result: Any) -> None:
    """Cancel what an interrupted cell has left on the workers, wherever it was interrupted; IPython calls this.

    Args:
        result: IPython's `ExecutionResult`.
    """
    error = result.error_in_exec
    devices = sys.modules.get("skyproxy.tensor.core.devices")
    if isinstance(error, KeyboardInterrupt) and devices is not None:
        for device in devices.DEVICES.alive():
            device.session.on_interrupt(error)
