"""The size of an elastic pool: its limits, and the decisions when it grows and shrinks. Pure: no threads, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from skyproxy.errors import ConfigurationError
from skyproxy.units import duration_seconds

_PATIENCE_SECONDS = 0.2
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_MAX_FAILURES = 5


@dataclass(frozen=True, init=False)
class Nodes:
    """The limits of a pool that grows with its queue and shrinks when it has nothing to do.

    Attributes:
        minimum: nodes that are there in any case; with 0, the first call starts the first one.
        maximum: nodes that there are at most.
        idle_seconds: how long a node above the minimum may have nothing to do before it is taken away.

    Example:
        ```python
        limits = skyproxy.Nodes(1, 4, idle="2m")
        with skyproxy.Compute(provider=skyproxy.Local(), nodes=limits) as pool:
            print(list(pool.map(pow, range(8), [2] * 8)))
        ```
    """

    minimum: int
    maximum: int
    idle_seconds: float

    def __init__(self, minimum: int, maximum: int, *, idle: float | str = 60.0) -> None:
        """Set the limits of a pool.

        Args:
            minimum: 0 or more.
            maximum: 1 or more, and not below the minimum.
            idle: in seconds or as "2m".

        Raises:
            ConfigurationError: these limits contradict each other, or are none.
        """
        for name, value, least in (("minimum", minimum, 0), ("maximum", maximum, 1)):
            if type(value) is not int or value < least:
                raise ConfigurationError(f"Nodes({minimum!r}, {maximum!r}): {name} is a whole number from {least}.")
        if minimum > maximum:
            raise ConfigurationError(f"Nodes({minimum}, {maximum}): the minimum is above the maximum. Swap them?")
        object.__setattr__(self, "minimum", minimum)
        object.__setattr__(self, "maximum", maximum)
        object.__setattr__(self, "idle_seconds", duration_seconds(idle, "Nodes(idle)"))

    def __str__(self) -> str:
        return f"{self.minimum} to {self.maximum}"


@dataclass(frozen=True)
class Load:
    """The state of a pool at one moment.

    Attributes:
        idle_since: since when each node has had nothing to do, by its number; None: it has.
        starting: nodes that were asked for and are not there yet.
        free_slots: single calls that could begin at once.
        waiting: single calls that wait for any process.
        wanted: nodes that somebody asked for by number, such as a broadcast that needs one.
    """

    idle_since: Mapping[int, float | None]
    starting: int = 0
    free_slots: int = 0
    waiting: int = 0
    wanted: int = 0


@dataclass(frozen=True)
class Decision:
    """Changes of a pool's size.

    Attributes:
        start: so many nodes.
        stop: these nodes.
        look_at: when to look again, even if nothing happens; None: whenever something does.
    """

    start: int = 0
    stop: tuple[int, ...] = ()
    look_at: float | None = None


class Growth:
    """The rule by which a pool grows and shrinks.

    Calls that wait for longer than a moment have nodes started for them, as many as they can use. A node above the
    minimum that was idle for long is stopped, the one with the highest number first. After a node that could not be
    started, the next attempt waits; each further failure doubles the pause.

    Attributes:
        failures: attempts in a row that failed.
    """

    def __init__(self, limits: Nodes, slots_per_node: int) -> None:
        """Make the rule of one pool.

        Args:
            limits: of the pool.
            slots_per_node: single calls that a node runs at a time.
        """
        self.failures = 0
        self._limits = limits
        self._slots = slots_per_node
        self._waiting_since: float | None = None
        self._paused_until = float("-inf")

    @property
    def has_given_up(self) -> bool:
        """True if so many attempts failed that calls should not wait for the next one."""
        return self.failures >= _MAX_FAILURES

    def failed(self, now: float) -> float:
        """Note that a node could not be started; return the pause before the next attempt, in seconds."""
        if now >= self._paused_until:  # those that were begun together failed together
            self.failures += 1
            pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** (self.failures - 1))
            self._paused_until = now + pause
        return self._paused_until - now

    def succeeded(self) -> None:
        """Note that a node came up."""
        self.failures = 0
        self._paused_until = float("-inf")

    def reset(self) -> None:
        """Forget the failures: whoever waited has been told, and the next call is worth an attempt."""
        self.succeeded()

    def decide(self, load: Load, now: float) -> Decision:
        """Return what to do now.

        Args:
            load: of the pool.
            now: the same clock's as in `load`, in seconds.
        """
        present = len(load.idle_since)
        needed = self._needed_nodes(load, now)
        start = max(0, min(needed, self._limits.maximum) - present - load.starting)
        looks = []
        if start and now < self._paused_until:
            looks.append(self._paused_until)
            start = 0
        if self._waiting_since is not None and now - self._waiting_since < _PATIENCE_SECONDS:
            looks.append(self._waiting_since + _PATIENCE_SECONDS)
        stop: list[int] = []
        # While calls wait, every node is about to be used.
        removable = 0 if load.waiting else present - max(self._limits.minimum, min(load.wanted, self._limits.maximum))
        idle = [(node, since) for node, since in load.idle_since.items() if since is not None]
        for node, since in sorted(idle, reverse=True)[: max(0, present)]:
            if len(stop) >= removable:
                break
            if now - since >= self._limits.idle_seconds:
                stop.append(node)
            else:
                looks.append(since + self._limits.idle_seconds)
        return Decision(start, tuple(stop), min(looks, default=None))

    def _needed_nodes(self, load: Load, now: float) -> int:
        """Return how many nodes there should be for what waits, whatever the maximum."""
        present = len(load.idle_since)
        needed = max(self._limits.minimum, load.wanted)
        coming = load.free_slots + load.starting * self._slots
        if load.waiting <= load.free_slots:
            self._waiting_since = None
            return needed
        if self._waiting_since is None:
            self._waiting_since = now
        # Without any node there is no reason to be patient.
        if present + load.starting and now - self._waiting_since < _PATIENCE_SECONDS:
            return needed
        missing = -(-max(0, load.waiting - coming) // self._slots)
        return max(needed, present + load.starting + missing)
