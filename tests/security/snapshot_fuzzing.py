"""Snapshots whose documents were changed, as a client can write them: each is refused, or gives what is the session's.

`python -m tests.security.snapshot_fuzzing --documents 20000` reports every document that ended a worker, held it,
raised another error than a refusal, or gave memory that the snapshot does not have. A document is known by its number:
`--seed 7 --documents 1` repeats it.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from skyproxy.errors import SkyproxyError, SnapshotError
from skyproxy.protocol import commands
from skyproxy.settings import SETTINGS
from skyproxy.snapshots.folder import Loaded
from skyproxy_server.session_state import SessionState
from skyproxy_server.snapshots.restore import restore, restore_named, restore_values
from tests.security.fuzzing import CALL_SECONDS, CANARY, Report, holds_canary
from tests.server.snapshots.sessions import ADD, ADD_, EMBED, RAND, Session, T

_CPU = ["cpu", None]
_MEMORY_BYTES = 3 << 30
_NUMBERS = (0, 1, 2, 3, 5, 7, -1, -2, 64, 1000, 2**31, 2**40, 2**53, 2**62, 2**63 - 1, -(2**63))
_WORDS = (
    "",
    "float32",
    "int64",
    "complex64",
    "qint8",
    "bool",
    "sparse_coo",
    "sparse_csr",
    "strided",
    "cpu",
    "cuda",
    "x",
)
_OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    1.5,
    float("nan"),
    float("inf"),
    b"",
    b"x" * 16,
    [],
    {},
    [0],
    [1, 1],
    [[]],
)
_OUTCOMES = ("refused", "restored", "leak", "error")


def sample(folder: Path) -> Loaded:
    """Save a session with values of every kind, and read it again."""
    with Session(folder) as session, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = torch.arange(12.0).view(3, 4)
        dense = torch.tensor([[0, 1.5, 0], [2.5, 0, 0]])
        session.put(s1=base, s2=base.t(), s3=base[1:, 2], s4=torch.view_as_real(torch.randn(2, 2).cfloat()))
        session.put(s5=torch.view_as_complex(session.slots[4]).conj(), s6=dense.to_sparse(), s7=dense.to_sparse_csr())
        session.put(s8=torch.randint(5, (4,)), s9=torch.tensor([9]), s10=torch.ones(3, dtype=torch.bfloat16))
        session.slots[11] = [torch.ones(2), 2.5, None]
        session.run(commands.DO, "new_generator", [12, _CPU], commands.DO, "record_event", [13, _CPU, True])
        session.run(RAND, 1, 14, ADD, 1, 14, 15, ADD_, 1, 15, T, 1, 16, EMBED, 1, 9, 17)
        session.run(commands.DO, "resize_storage", [10, 0], commands.DO, "set_modes", [{"default_dtype": "float64"}])
        saved = session.call("save_snapshot", "s")
        assert "snapshot" in saved, saved
        found: Loaded = session.snapshots._read(session.state, "s", "")
        return found


def change(document: Any, chance: random.Random) -> Any:
    """Return a copy of a document with a few things changed."""
    changed = copy.deepcopy(document)
    places = list(_places(changed))
    if chance.random() < 0.6:  # what is nearly right gets furthest
        holder, key = chance.choice([place for place in places if type(place[0][place[1]]) is int])
        holder[key] = max(holder[key] + chance.choice((-2, -1, 1, 2, 3, 8)), 0)
        return changed
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        holder, key = chance.choice(places)
        with suppress(LookupError, TypeError):  # an earlier change has taken it away
            _change_at(holder, key, places, chance)
    return changed


def _places(value: Any) -> Any:
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _change_at(holder: Any, key: Any, places: list[tuple[Any, Any]], chance: random.Random) -> None:
    before = holder[key]
    kind = chance.randrange(10)
    if kind < 4 and type(before) is int:
        holder[key] = chance.choice((before + 1, before - 1, -before, before * 2, before << 20, *_NUMBERS))
    elif kind < 4 and isinstance(before, str):
        holder[key] = chance.choice(_WORDS)
    elif kind < 6:
        other, place = chance.choice(places)
        holder[key] = copy.deepcopy(other[place])
    elif kind == 6:
        del holder[key]
    elif kind == 7 and isinstance(before, list) and before:
        before.append(copy.deepcopy(chance.choice(before)))
    else:
        holder[key] = chance.choice((*_NUMBERS, *_WORDS, *_OTHERS))


def outcome_of(found: Loaded, seed: int) -> str:
    """Bring a changed snapshot back in a session, and use all that it gives."""
    chance = random.Random(seed)
    document = change(found.document, chance)
    storages = [storage.clone() for storage in found.storages]
    if chance.random() < 0.1 and storages:
        storages[chance.randrange(len(storages))] = torch.zeros(chance.randrange(9), dtype=torch.uint8)
    for size in (1, 3, 17, 150, 4000):
        torch.full((size,), CANARY - (1 << 63), dtype=torch.int64)  # freed at once: what comes next may get it
    with tempfile.TemporaryDirectory() as folder, Session(folder, ops=False) as session:
        ways: list[Callable[[SessionState, Any, list[torch.Tensor], int], object]] = [restore, restore, _adopt, _named]
        try:
            chance.choice(ways)(session.state, document, storages, SETTINGS.max_handles)
        except SnapshotError:
            return "refused"
        for number in (ADD, ADD_, T):
            for slot in list(session.slots):
                with suppress(SkyproxyError):
                    session.run(number, *([slot, 90] if number == T else [slot, slot, 90]))
        return "leak" if holds_canary(session.executor) else "restored"


def _adopt(state: SessionState, document: Any, storages: list[torch.Tensor], max_handles: int) -> None:
    found = restore_values(state, document, storages, max_handles)
    found.install(found.tensors)


def _named(state: SessionState, document: Any, storages: list[torch.Tensor], max_handles: int) -> None:
    named = restore_named(state, document, storages, max_handles)
    tensors = [tensor for value in named.values.values() for tensor in value.tensors]
    state.values.slots.update(enumerate(tensors, 1))


def fuzz(seeds: range, tell: Callable[[str], object] = lambda line: None) -> Report:
    """Bring each changed document back in a process of its own; each finding is told at once."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        found = sample(Path(folder))
        for seed in seeds:
            outcome = _in_child(found, seed)
            kind = outcome.partition(":")[0]
            report.outcomes[kind] = report.outcomes.get(kind, 0) + 1
            if kind not in ("refused", "restored"):
                report.findings.append((kind, "snapshot", seed, outcome))
                tell(f"{kind}\t--seed {seed}\t{outcome}")
    return report


def _in_child(found: Loaded, seed: int) -> str:
    child = os.fork()
    if child == 0:
        status = _OUTCOMES.index("error")
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
            signal.alarm(CALL_SECONDS)
            status = _OUTCOMES.index(outcome_of(found, seed))
        except BaseException as error:
            sys.stderr.write(f"snapshot {seed}: {error!r:.300}\n")
            sys.stderr.flush()
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    if os.WIFSIGNALED(ended):
        return f"{'hang' if os.WTERMSIG(ended) == signal.SIGALRM else 'death'}: {os.WTERMSIG(ended)}"
    return _OUTCOMES[os.WEXITSTATUS(ended)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000, help="how many to bring back")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first one")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.documents)
    report = fuzz(seeds, lambda line: print(line, flush=True))
    print(report.outcomes)
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
