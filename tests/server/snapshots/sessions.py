"""Sessions of a worker without a connection, with a folder for their snapshots."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from skyproxy.protocol import commands
from skyproxy.protocol.messages import Batch, Failure, Message, Reply, Sequence
from skyproxy.settings import SETTINGS
from skyproxy_server.executor import Executor
from skyproxy_server.snapshots.requests import SessionSnapshots
from skyproxy_server.transfers import Transfers

CALL, DEFINE, DO, EXPECT, FETCH, RELEASE, REPLAY = (
    commands.CALL,
    commands.DEFINE,
    commands.DO,
    commands.EXPECT,
    commands.FETCH,
    commands.RELEASE,
    commands.REPLAY,
)
ADD, ADD_, RAND, EMBED, T = range(commands.FIRST_SIGNATURE, commands.FIRST_SIGNATURE + 5)
OPS = [
    [DEFINE, ADD, ["aten::add.Tensor", ["t", "t"], {}, ["n"]]],
    [DEFINE, ADD_, ["aten::add_.Tensor", ["t", "t"], {}, ["x"]]],
    [DEFINE, RAND, ["aten::rand_like", ["t"], {}, ["n"]]],
    [DEFINE, EMBED, ["aten::embedding", ["t", "t"], {}, ["n"]]],
    [DEFINE, T, ["aten::t", ["t"], {}, ["n"]]],
]
DEVICES = [{"type": "cpu", "index": 0, "name": "CPU"}]


class Session:
    """A session, and what it sent.

    Attributes:
        jumps: the numbers that its connection was to count from.
    """

    def __init__(
        self,
        root: Path | str,
        owner: str = "token",
        *,
        ops: bool = True,
        most_bytes: int | None = None,
        **limits: float,
    ) -> None:
        self.sent: list[Message] = []
        self.jumps: list[int] = []
        settings = dataclasses.replace(SETTINGS, **limits)
        self.transfers = Transfers(settings.chunk_bytes)
        self.executor = Executor(DEVICES, self.sent.append, self.transfers, settings)  # type: ignore[arg-type]
        self.state = self.executor.state
        self.snapshots = SessionSnapshots(root, owner, self.jumps.append, settings, most_bytes)
        self.state.snapshots = self.snapshots
        self.sequence = 0
        if ops:
            self.run(*[item for definition in OPS for item in definition])

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.end()

    def run(self, *stream: Any, buffers: tuple[bytes, ...] = ()) -> None:
        self.sequence += 1
        with self.state.modes:
            self.executor.run(Batch(Sequence(self.sequence), list(stream), buffers))
        if self.jumps:
            self.sequence = self.jumps.pop()

    def call(self, name: str, *arguments: Any) -> Any:
        """The answer of a control, or the failure's record."""
        self.run(CALL, 77, name, list(arguments))
        if name == "save_snapshot":
            self.snapshots.finish_writing()
        return self._answer()

    def call_now(self, name: str, *arguments: Any) -> Any:
        """The same; a snapshot may be under way."""
        self.run(CALL, 77, name, list(arguments))
        return self._answer()

    def _answer(self) -> Any:
        answer = self.sent[-1]
        if isinstance(answer, Failure):
            return answer.error
        assert isinstance(answer, Reply)
        return answer.value

    @property
    def slots(self) -> dict[int, Any]:
        return self.state.values.slots

    def put(self, **values: torch.Tensor) -> None:
        self.slots.update({int(name[1:]): value for name, value in values.items()})


def restored(session: Session, root: Path | str, **limits: int) -> Session:
    """Another session that goes on where this one is."""
    saved = session.call("save_snapshot", "s")
    assert "snapshot" in saved, saved
    other = Session(root, ops=False, **limits)
    loaded = other.call("load_snapshot", "s")
    assert loaded == {"snapshot": saved["snapshot"], "sequence": saved["sequence"], "bytes": saved["bytes"]}, loaded
    assert other.sequence == session.sequence
    return other
