"""Makes hidden waits visible."""

from __future__ import annotations

import sys
import warnings
from types import TracebackType

from skyproxy.session.requests import WAIT_OBSERVERS
from skyproxy.tensor.core.user_lines import user_frame


class SyncWarning(UserWarning):
    """A line of the program waited for a worker.

    Example:
        ```python
        import warnings

        warnings.simplefilter("error", skyproxy.SyncWarning)
        with skyproxy.debug_syncs():
            y = torch.ones(3, device="sky:0") * 2  # a wait here would be an error
        ```
    """


class debug_syncs:
    """Warns with the user's line at every wait for a worker.

    Call it to switch the warnings on until `stop`, or use it as a context manager::

        with skyproxy.debug_syncs():
            train_one_epoch()

    Attributes:
        count: waits seen so far.
    """

    def __init__(self) -> None:
        self.count = 0
        WAIT_OBSERVERS.append(self._warn)

    def _warn(self, purpose: str) -> None:
        self.count += 1
        frame = user_frame(sys._getframe(1))
        warnings.warn_explicit(
            f"this line waits for a sky worker ({purpose})",
            SyncWarning,
            frame.f_code.co_filename,
            frame.f_lineno,
            module=frame.f_globals.get("__name__", "<unknown>"),
            registry={},  # every wait counts, also the second one of a line
        )

    def stop(self) -> None:
        """Switches the warnings off; idempotent.

        Example:
            ```python
            syncs = skyproxy.debug_syncs()
            print(torch.ones(3, device="sky:0").sum().item())
            syncs.stop()
            print(syncs.count)
            ```
        """
        if self._warn in WAIT_OBSERVERS:
            WAIT_OBSERVERS.remove(self._warn)

    def __enter__(self) -> debug_syncs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
