"""The place where an actor lives: a rank of a pool, and the worker process that is this rank now."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from skyproxy.errors import ActorDiedError, ConfigurationError, SkyproxyError, text_of
from skyproxy.pools.output_view import TaskOutput
from skyproxy.runtime.actors import drop_actor, make_actor
from skyproxy.settings import SETTINGS

if TYPE_CHECKING:
    from skyproxy.functions import Payload
    from skyproxy.functions.call import Call
    from skyproxy.node import Node
    from skyproxy.pools.elastic_group import ElasticGroup
    from skyproxy.pools.ranks import RankGroup

logger = logging.getLogger("skyproxy")


class ActorPlace:
    """One actor on one rank: made there, and made again where its process was replaced. To a scheduler, a group of one.

    Attributes:
        name: the actor's class, for people.
        identity: names the actor on its worker.
        rank: in the pool.
        life: how often it was made.
        group: the pool's.
    """

    def __init__(
        self, group: RankGroup | ElasticGroup, rank: int, name: str, identity: str, payload: Payload, max_restarts: int
    ) -> None:
        """Make a place whose actor is not made yet.

        Args:
            group: the pool's.
            rank: where it is to live.
            name: of its class.
            identity: what it is called on its worker.
            payload: makes it there.
            max_restarts: how often it may be made again.
        """
        self.identity = identity
        self.name = name
        self.rank = rank
        self.life = 0
        self.group = group
        self._payload = payload
        self._max_restarts = max_restarts
        self._restarts = 0
        self._node: Node | None = None
        self._making: Call | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"actor {self.name} on rank {self.rank}"

    # --- what a scheduler asks of a group -----------------------------------------------------------------------------

    @property
    def nodes(self) -> list[Node]:
        """The connection to the process that has the actor; to that of its rank as long as none has it."""
        return [self._node if self._node is not None else self.group.nodes[self.rank]]

    @property
    def members(self) -> dict[int, Node]:
        """The same by rank, of which a group of one has 0 alone."""
        return {0: self.nodes[0]}

    def node_of(self, rank: int) -> Node | None:
        """The same."""
        return self.nodes[0]

    def ensure(self) -> None:
        """Nothing: `revive` was there before, for a call that may run on what it found."""

    def context(self, rank: int) -> dict[str, object]:
        """Return what goes beside a call."""
        return self.group.context(self.rank)

    def task(self, function: Callable[..., object]) -> Any:
        """The function as it goes to a rank, under the name of the actor's method."""
        return self.group.task(function)

    def output(self) -> TaskOutput:
        """Shows what the actor prints."""
        return TaskOutput(self.rank if len(self.group.members) > 1 else None)

    # --- its life -----------------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """True if the process that it was made in is the rank's, and there."""
        node = self._node
        return node is not None and node.alive and self.group.node_of(self.rank) is node

    @property
    def can_restart(self) -> bool:
        """True if it would be made again."""
        return self._restarts < self._max_restarts

    def holds(self, session: object) -> bool:
        """Return whether the tensors of a session live where the actor does."""
        return self.nodes[0]._session is session

    def revive(self) -> None:
        """Make the actor where it is not there.

        Raises:
            ActorDiedError: it died, and was made again as often as it may be; or it could not be made again.
            Exception: what its class raised, the first time.
        """
        with self._lock:
            if self.is_alive:
                return
            if self._node is None:
                self._make()
                return
            if not self.can_restart:
                raise self.death_error(None)
            self._restarts += 1
            logger.info("skyproxy: %s is being recreated (%d of %d times)", self, self._restarts, self._max_restarts)
            try:
                self._make()
            except Exception as error:
                raise ActorDiedError(
                    f"{self} died, and could not be recreated: {type(error).__name__}: {text_of(error)}"
                ) from error

    def _make(self) -> None:
        self.group.ensure()
        node = self.group.node_of(self.rank)
        if node is None:
            self.rank, node = self._another_rank()
        output = self.output()
        if self._closed.is_set():
            raise ConfigurationError(f"the pool of {self} is no longer running.")
        self._making = call = node.submit_payload(
            self._payload, on_output=output.write, name=self.name, results="value", context=self.context(0)
        )
        if self._closed.is_set():
            call.cancel()
        try:
            call.result()
        except BaseException:
            call.cancel()
            raise
        finally:
            self._making = None
            output.finish()
        self._node = node
        self.life += 1

    def _another_rank(self) -> tuple[int, Node]:
        """A rank that is there, with its connection: this one's own is gone for good.

        Raises:
            SessionLostError: none came in time.
        """
        while True:
            rank = self.group.wait_for_rank(SETTINGS.rank_start_timeout_seconds)
            node = self.group.node_of(rank)
            if node is not None:
                return rank, node

    def death_error(self, call: str | None, cause: BaseException | None = None) -> ActorDiedError:
        """The error for a call that the actor's death has ended, or that comes after it.

        Args:
            call: what ran, or waited; None where nothing did.
            cause: what is known of the end.
        """
        lost = cause or getattr(getattr(self._node, "_session", None), "lost", None)
        why = str(lost) if lost is not None else "its process was replaced after another task on this rank had failed"
        what = f"{self} died while {call} ran: {why}" if call is not None else f"{self} is dead: {why}"
        if self._max_restarts == 0:
            again = "It is not recreated; @actor(max_restarts=1) would do that, with a fresh state."
        elif self.can_restart:
            again = "The next call recreates it, with a fresh state; retry=True would repeat this one."
        else:
            again = f"It was recreated {self._restarts} times, as often as max_restarts says."
        return ActorDiedError(f"{what.rstrip('.')}. {again}")

    def outlived_error(self, call: str) -> ActorDiedError:
        """The error for a call that waited while the actor died and was made again."""
        return ActorDiedError(
            f"{self} died while {call} waited, and was recreated: the state that this call was for is lost. "
            "@actor(retry=True) would run such calls on the new one."
        )

    def close(self) -> None:
        """No call comes any more; one that makes the actor is ended."""
        self._closed.set()
        making = self._making
        if making is not None:
            making.cancel()

    def drop(self) -> None:
        """Have the worker let go of the actor, if it is there."""
        node = self._node
        if node is None or not self.is_alive:
            return
        try:
            node.submit(drop_actor, self.identity, results="value", context=self.context(0)).result()
        except (SkyproxyError, CancelledError) as error:  # the pool, or the worker, ends at this moment
            logger.debug("skyproxy: %s could not be told that it has ended: %s", self, error)


def new_place(
    group: RankGroup | ElasticGroup,
    kind: type,
    rank: int | None,
    loads: Mapping[int, int],
    arguments: tuple[tuple[object, ...], Mapping[str, object]],
    max_restarts: int,
) -> ActorPlace:
    """A place for an actor that is not made yet.

    Args:
        group: the pool's.
        kind: the actor's class.
        rank: where it must live; by default where its tensor arguments do, else where the fewest actors are.
        loads: how many actors each rank has; at least one rank.
        arguments: of the class.
        max_restarts: how often it may be made again.

    Raises:
        ConfigurationError: the arguments cannot be sent, or hold tensors that live elsewhere.
    """
    from skyproxy.functions import Payload

    identity = secrets.token_hex(16)
    task = group.task(make_actor)
    task.__qualname__ = kind.__name__
    payload = Payload.of(task, (identity, kind, *arguments))
    if payload.session is not None:
        home = next((r for r, node in group.members.items() if node._session is payload.session), None)
        if home is None or rank not in (None, home):
            where = "no process of this pool" if home is None else f"rank {home}, not on rank {rank}"
            raise ConfigurationError(
                f"the arguments of {kind.__name__} hold remote tensors that live on {where}. Move them first: "
                "x.to(pool.nodes[k].device(...)), or pass x.cpu()."
            )
        rank = home
    if rank is None:
        rank = min(loads, key=loads.__getitem__)
    return ActorPlace(group, rank, kind.__name__, identity, payload, max_restarts)
