"""Options of a job. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from skyproxy.errors import ConfigurationError
from skyproxy.jobs.documents import new_name


@dataclass(frozen=True)
class JobOptions:
    """Options of a job.

    Attributes:
        name: by which it is found again; made up by default.
        max_restarts: how often it is started again when it dies.
        grace_seconds: the time that it has after SIGTERM; the worker's setting by default.
        env: further environment variables.
    """

    name: str | None = None
    max_restarts: int = 0
    grace_seconds: float | None = None
    env: Mapping[str, object] = field(default_factory=dict)

    def request(self, title: str, kind: str, part: tuple[int, int] = (0, 1)) -> dict[str, object]:
        """Return what a worker is asked for."""
        if type(self.max_restarts) is not int or self.max_restarts < 0:
            raise ConfigurationError(f"max_restarts={self.max_restarts!r}: use 0 or more.")
        return {
            "name": new_name(title) if self.name is None else self.name,
            "kind": kind,
            "title": title,
            "max_restarts": self.max_restarts,
            "grace_seconds": None if self.grace_seconds is None else float(self.grace_seconds),
            "env": {str(name): str(value) for name, value in self.env.items()},
            "part": list(part),
        }
