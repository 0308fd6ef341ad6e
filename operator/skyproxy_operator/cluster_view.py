"""The view of a cluster that decisions have without asking it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

Object = dict[str, Any]
Key = tuple[str, str]


class ClusterView(Protocol):
    """A view of a cluster without asking it; `informer.View` is the real one."""

    def check_current(self, patience_seconds: float) -> None:
        """Raise ApiError where nothing was heard for so long that decisions cannot stand on what is seen."""

    def compute(self, namespace: str, name: str) -> Object | None:
        """Return a Compute; None where there is none."""

    def computes(self) -> Iterable[Key]:
        """Return the places of all Computes."""

    def pods(self, namespace: str, compute: str) -> list[Object]:
        """Return all pods that bear a Compute's label."""

    def runtimes(self) -> dict[str, str]:
        """Return the texts of the installation's runtimes by their names."""

    def watches(self, kind: str) -> bool:
        """Tell whether objects of a kind are seen, those with our label."""

    def child(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return an object of such a kind; None where there is none that bears our label."""
