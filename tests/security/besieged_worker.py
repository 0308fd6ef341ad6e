"""A worker that hostile clients attack, and an honest one that trains beside them."""

from __future__ import annotations

import itertools
import re
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import torch

import skyproxy
from skyproxy.protocol.call_messages import CallStart
from skyproxy.protocol.messages import Message
from skyproxy.transport.websocket_transport import WebSocketTransport
from tests.integration.programs import port_in, start_worker, wait_for
from tests.security.hostile_messages import Attack, Tally

HONEST = "honest-0123456789abcdef0123456789"
HOSTILE = "hostile-0123456789abcdef0123456789"
KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "in-process": (("--sessions-in-process",), "operations"),
    "processes": (("--session-processes", "--session-memory", str(1 << 30)), "operations"),
    "in-process-functions": (("--sessions-in-process",), "operations, functions"),
    "processes-functions": (("--session-processes", "--session-memory", str(1 << 30)), "operations, functions"),
}
"""Kinds of workers: their options, and the scopes of the hostile token."""
CANARY = 0x5EC2E7BADC0FFEE1
_MOST_LOG_LINES_PER_ATTACK = 60
_MOST_GROWTH_BYTES = 1 << 30
_MOST_LINE_CHARACTERS = 20_000
"""With control characters, of which each is four."""
_GRACE_SECONDS = 3.0


@dataclass
class SiegeReport:
    """What attacks did to a worker, its memory, its log and the honest client beside them.

    Attributes:
        problems: what must not be.
        attacks: how many there were.
        trainings: how often the honest client trained meanwhile.
    """

    tally: Tally = field(default_factory=Tally)
    problems: list[str] = field(default_factory=list)
    attacks: int = 0
    trainings: int = 0
    grown_bytes: int = 0

    def words(self) -> str:
        sent, survived = sum(self.tally.sent.values()), sum(self.tally.survived.values())
        return (
            f"{self.attacks} attacks, {self.tally.sessions} sessions, {self.tally.resumed} taken up again, "
            f"{self.tally.refused} refused; {sent} messages, {survived} of them survived; {self.trainings} trainings "
            f"beside them; {self.grown_bytes >> 20} MiB more memory; by class {dict(self.tally.sent)}"
        )


class BesiegedWorker:
    """A worker with two tokens, as a program."""

    def __init__(self, kind: str, folder: Path) -> None:
        options, scopes = KINDS[kind]
        tokens = folder / "tokens"
        tokens.mkdir()
        for name, text in (("honest", HONEST), ("hostile", f"{HOSTILE}\nscopes: {scopes}\nsessions: 24\n")):
            path = tokens / name
            path.write_text(text, encoding="ascii")
            path.chmod(0o600)
        self.log_file, self.folder = folder / "log", folder
        self.is_apart = "--session-processes" in options
        (folder / "kept" / "snapshots").mkdir(parents=True)
        with self.log_file.open("wb") as log:
            self.process = start_worker(
                tokens,
                log,
                *options,
                "--snapshots",
                str(folder / "kept" / "snapshots"),
                SKYPROXY_CALL_GRACE_SECONDS=str(_GRACE_SECONDS),
                SKYPROXY_SESSION_GRACE_SECONDS=str(_GRACE_SECONDS),
                SKYPROXY_CLOSE_TIMEOUT_SECONDS="0.5",
            )
        try:
            self.port = int(wait_for(lambda: port_in(self.log_file, self.process), "the worker listens", 100))
        except BaseException:
            self.end()
            raise

    def connect(self, token: str = HONEST) -> skyproxy.Node:
        return skyproxy.connect(f"ws://127.0.0.1:{self.port}", token=token)

    def get(self, path: str) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", headers={"Authorization": f"Bearer {HONEST}"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return bytes(response.read())

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def memory_bytes(self) -> int:
        """Memory of the worker's own process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"RssAnon:\s+(\d+) kB", status)
        return int(found[1]) << 10 if found is not None else 0

    def sessions(self) -> int:
        import json

        return int(json.loads(self.get("/activity"))["sessions"])

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()


def train(device: str) -> list[torch.Tensor]:
    """A short training with dropout; its losses, each waited for, and its weights."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4)).to(device)
    inputs, targets = torch.randn(64, 16).to(device), torch.randint(4, (64,)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [torch.tensor(losses), *(parameter.detach().cpu() for parameter in model.parameters())]


def recorded_calls(worker: BesiegedWorker) -> tuple[CallStart, ...]:
    """The messages by which a client of ours begins calls of harmless functions, in all ways that there are."""
    found: list[CallStart] = []
    send = WebSocketTransport.send

    def note(self: WebSocketTransport, message: Message) -> None:
        if isinstance(message, CallStart):
            found.append(message)
        send(self, message)

    WebSocketTransport.send = note  # type: ignore[method-assign]
    try:
        with worker.connect() as node:
            here, there = torch.ones(3), torch.ones(3, device=node.devices[0])
            node.run(divmod, 7, 2)
            node.submit(divmod, 7, 0).exception(60)
            node.run(torch.add, here, here[1:].sum())
            node.run(torch.add, there, there)
            node.run(torch.nn.Linear(2, 2).state_dict)
            node.submit(divmod, 7, 2, isolate=True).result(60)
            node.submit(divmod, 7, 2, debug=True, timeout=30.0).result(60)
            node.submit(print, "text", results="value").result(60)
    finally:
        WebSocketTransport.send = send  # type: ignore[method-assign]
    return tuple(
        CallStart(one.call, one.task, one.sizes, tuple(bytes(item) for item in one.buffers))
        for one in found
        if one.buffers
    )


class HonestClient:
    """Trains again and again, until it is told to stop; each time must end in the same bits."""

    def __init__(self, node: skyproxy.Node) -> None:
        self._device = str(node.devices[0])
        self._alone = train(self._device)
        self._secret = torch.full((1 << 16,), CANARY - (1 << 63), dtype=torch.int64, device=self._device)
        self.problem = ""
        self.trainings = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="honest client")
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                # What it frees is memory that holds its numbers.
                (self._secret + 0).sum().item()
                if not all(map(torch.equal, train(self._device), self._alone)):
                    self.problem = "an honest client's training came out otherwise"
                    return
                self.trainings += 1
        except Exception as error:
            self.problem = f"an honest client failed: {error!r:.300}"

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()


def besiege(kind: str, folder: Path, seconds: float, seed: int = 0, attacks: int = 1 << 30) -> SiegeReport:
    """Attack a worker of this kind for a while, and look what it has come to."""
    report = SiegeReport()
    worker = BesiegedWorker(kind, folder)
    try:
        tasks = recorded_calls(worker) if "functions" in kind else ()
        with worker.connect() as node:
            honest = HonestClient(node)
            try:
                _attack(worker, report, seconds, seed, attacks, tasks)
                _wait_for_sessions(worker, report)
            finally:
                honest.stop()
            report.trainings = honest.trainings
            report.problems += [honest.problem] * bool(honest.problem)
        _look(worker, report)
    finally:
        worker.end()
    return report


def _attack(
    worker: BesiegedWorker, report: SiegeReport, seconds: float, seed: int, attacks: int, tasks: tuple[CallStart, ...]
) -> None:
    forbidden = CANARY.to_bytes(8, "little")
    before: int | None = None
    until = time.monotonic() + seconds
    for number in itertools.count(seed):
        if time.monotonic() >= until or number - seed >= attacks or worker.process.poll() is not None:
            break
        attack = Attack(worker.port, HOSTILE, number, report.tally, forbidden, tasks, worker.is_apart)
        try:
            attack.run()
        except OSError as error:
            report.problems.append(f"attack {number}: the worker does not answer: {error!r}")
            break
        report.problems += [f"attack {number}: {leak}" for leak in attack.leaks]
        report.attacks += 1
        if report.attacks == 20:
            before = worker.memory_bytes()
    if worker.process.poll() is None:
        report.grown_bytes = worker.memory_bytes() - (before or worker.memory_bytes())
    if report.grown_bytes > _MOST_GROWTH_BYTES:
        report.problems.append(f"the worker's memory grew by {report.grown_bytes >> 20} MiB")


def _wait_for_sessions(worker: BesiegedWorker, report: SiegeReport) -> None:
    """All hostile sessions end with their connections, or soon after."""
    if worker.process.poll() is not None:
        report.problems.append(f"the worker has ended with {worker.process.returncode}: {worker.log[-2000:]}")
        return
    try:
        wait_for(lambda: worker.sessions() <= 1, "hostile sessions end", 60)
    except (AssertionError, OSError) as error:
        report.problems.append(f"a session hangs: {error!r:.300}")


def _look(worker: BesiegedWorker, report: SiegeReport) -> None:
    log = worker.log
    for sign in ("Traceback", "internal error", "killed by signal", "Segmentation", "Exception in thread", "\x1b"):
        for line in [line for line in log.splitlines() if sign in line][:3]:
            report.problems.append(f"the log says: {line:.600}")
    if re.search(r"^2026-01-01 ERROR forged", log, re.MULTILINE):
        report.problems.append("a line of the log was forged")
    if log.count("\n") > _MOST_LOG_LINES_PER_ATTACK * (report.attacks + 10):
        report.problems.append(f"{log.count(chr(10))} lines of the log after {report.attacks} attacks")
    strange = {path.name for path in (worker.folder / "kept").iterdir()} - {"snapshots"}
    strange |= {path.name for path in worker.folder.iterdir()} - {"kept", "log", "tokens"}
    if strange:
        report.problems.append(f"files outside of their folder: {sorted(strange)}")
    longest = max(map(len, log.splitlines()), default=0)
    if longest > _MOST_LINE_CHARACTERS:
        report.problems.append(f"a line of the log has {longest} characters")
    if HONEST in log or HOSTILE in log:
        report.problems.append("the log holds a token")
