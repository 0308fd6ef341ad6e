"""Snapshots of a session, against writing the same bytes to the same disk.

    python benchmarks/snapshots.py [--mebibytes 512] [--folder DIR] [--rounds 5] [--hash sha256]

Each round writes, in turn: the bytes of the session's tensors with plain writes and an fsync; a first snapshot, of
which all is new; and a second one, before which a hundredth of the tensors has changed. It prints medians, and the
ratio of the first two, which should be at least 0.6. It then loads the snapshot, and compares. Pieces get their names
by the fastest hash that is installed, unless one is given.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from skyproxy.protocol.messages import Message
from skyproxy.settings import SETTINGS
from skyproxy.snapshots import hashes
from skyproxy.torch_codec import byte_view
from skyproxy_server.executor import Executor
from skyproxy_server.snapshots.requests import SessionSnapshots
from skyproxy_server.transfers import Transfers

TENSORS = 100


def session(root: Path) -> Executor:
    """A session without a client, whose snapshots lie in a folder."""
    sent: list[Message] = []
    made = Executor(
        [{"type": "cpu", "index": 0, "name": "CPU"}],  # type: ignore[list-item]
        sent.append,
        Transfers(SETTINGS.chunk_bytes),
        SETTINGS,
    )
    made.state.snapshots = SessionSnapshots(root, "token", lambda sequence: None, SETTINGS)
    return made


def plain_seconds(tensors: list[torch.Tensor], folder: Path) -> float:
    """The time that it takes to write the tensors' bytes, until they outlive a crash."""
    path = folder / "plain"
    begin = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for tensor in tensors:
            view, done = byte_view(tensor), 0
            while done < len(view):
                done += file.write(view[done:])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    path.unlink()
    return seconds


def snapshot_seconds(executor: Executor, name: str, hash_name: str) -> tuple[float, float, dict[str, object]]:
    """The time until the session goes on, until the snapshot outlives a crash, and what is said of it."""
    snapshots = executor.state.snapshots
    assert isinstance(snapshots, SessionSnapshots)
    found: list[object] = []
    begin = time.perf_counter()
    answer = snapshots.save(executor.state, name, wish=hash_name)
    goes_on = time.perf_counter() - begin
    snapshots.finish_writing()
    seconds = time.perf_counter() - begin
    answer.tell(found.append, found.append)
    (result,) = found
    if isinstance(result, Exception):
        raise result
    assert isinstance(result, dict)
    return goes_on, seconds, result


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default a temporary one")
    parser.add_argument("--hash", choices=(hashes.SHA256, hashes.BLAKE3), default=hashes.fastest())
    arguments = parser.parse_args()
    hashes.piece_hash(arguments.hash)  # or say that it is not here
    with tempfile.TemporaryDirectory(dir=arguments.folder) as text:
        folder = Path(text)
        executor = session(folder)
        count = (arguments.mebibytes << 20) // TENSORS // 4
        tensors = [torch.rand(count) for _ in range(TENSORS)]
        executor.state.values.slots.update(enumerate(tensors, 1))
        rows: list[tuple[float, ...]] = []
        for number in range(arguments.rounds):
            name = f"round-{number}"
            for tensor in tensors:
                tensor.uniform_()
            plain = plain_seconds(tensors, folder)
            goes_on, first, whole = snapshot_seconds(executor, name, arguments.hash)
            tensors[0].uniform_()
            _, second, part = snapshot_seconds(executor, name, arguments.hash)
            rows.append((plain, goes_on, first, second, int(str(part["written_bytes"])) / int(str(whole["bytes"]))))
            if number + 1 < arguments.rounds:
                executor.state.snapshots.delete(name, "")  # type: ignore[union-attr]
        plain, goes_on, first, second, written = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{arguments.mebibytes} MiB, median of {arguments.rounds}; pieces named by {arguments.hash}")
        print(f"  plain writes and fsync        {plain:7.3f} s")
        print(f"  first snapshot                {first:7.3f} s, {plain / first:.2f} of their bandwidth")
        print(f"    the session waits           {goes_on:7.3f} s of it")
        print(f"  second, 1% changed            {second:7.3f} s, {written:.1%} of the bytes written")
        other = session(folder)
        begin = time.perf_counter()
        other.state.snapshots.load(other.state, name, "")  # type: ignore[union-attr]
        print(f"  load                          {time.perf_counter() - begin:7.3f} s")
        assert all(torch.equal(other.state.values.slots[slot], value) for slot, value in enumerate(tensors, 1))  # type: ignore[arg-type]
        other.end()
        executor.end()


if __name__ == "__main__":
    main()
