"""A hostile worker, and what functions that ran there give back."""

from __future__ import annotations

import ast
import asyncio
import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import skyproxy
from skyproxy.errors import RemoteFunctionError, SkyproxyError, UntrustedResultError
from skyproxy.functions import project_sync
from skyproxy.node import Node
from skyproxy.payloads.pickling import Pickler
from skyproxy.settings import Settings
from skyproxy_server.functions import call as worker_call
from skyproxy_server.functions import call_errors
from skyproxy_server.functions.results import ResultWriter
from skyproxy_server.listener import Listener, serve
from skyproxy_server.worker_host import WorkerHost

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-that-nobody-should-see-anywhere"
SETTINGS = Settings(close_timeout_seconds=0.3)
CPU = {"type": "cpu", "index": 0, "name": "cpu"}
RAN = "SKYPROXY_TEST_RAN"
"""A variable of the environment: functions have copies of this module's globals."""


def ran() -> list[str]:
    return os.environ.get(RAN, "").split(",")[1:]


@pytest.fixture(scope="module")
def listener() -> Iterator[Listener]:
    made = serve("127.0.0.1", 0, TOKEN, WorkerHost([CPU], SETTINGS, functions=True), settings=SETTINGS)
    yield made
    made.close()


@pytest.fixture
def node(listener: Listener) -> Iterator[Node]:
    os.environ.pop(RAN, None)
    with skyproxy.connect(f"ws://127.0.0.1:{listener.port}", token=TOKEN) as made:
        yield made
    os.environ.pop(RAN, None)


def note(text: str) -> str:
    os.environ[RAN] = os.environ.get(RAN, "") + "," + text
    return text


class Bomb:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return note, ("it exploded",)


class BombError(Exception):
    def __reduce__(self) -> Any:
        return note, ("it exploded",)


@dataclass
class Loss:
    value: float
    tensor: torch.Tensor


class OwnError(ValueError):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code
        note("a constructor")


def test_an_object_of_an_untrusted_worker_is_refused_by_name_and_not_lost(node: Node) -> None:
    with pytest.raises(UntrustedResultError, match=r"returned a .*Bomb at \['x'\]\[0\].*trust_worker=True") as caught:
        node.run(lambda: {"x": [Bomb()], "y": torch.ones(2)})
    assert ran() == []
    call = caught.value.call
    with pytest.raises(UntrustedResultError):
        call.result()
    call.trust_worker()
    result = call.result()
    assert (result["x"], ran()) == (["it exploded"], ["it exploded"])
    assert call.result() is result
    assert ran() == ["it exploded"]


def test_a_worker_that_does_not_ask_is_refused_too(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def pickles(self: ResultWriter, value: Any) -> Any:
        return Pickler(lambda tensor: None).pickle(Bomb()), []

    monkeypatch.setattr(ResultWriter, "pickle", pickles)
    with pytest.raises(UntrustedResultError, match="returned a pickle"):
        node.run(lambda: 1)
    assert ran() == []


def test_an_error_of_an_untrusted_worker_is_no_pickle(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(error: BaseException, plain: bool = False) -> Any:
        words = {"type": "Bomb\x1b]52;c;", "message": "m\x1b[2J", "traceback": "t\x1b[2J"}
        return words, Pickler(lambda tensor: None).pickle(BombError())

    monkeypatch.setattr(call_errors, "describe_error", describe)
    with pytest.raises(RemoteFunctionError) as caught:
        node.run(lambda: 1 / 0)
    assert ran() == []
    assert "\x1b" not in str(caught.value) + str(caught.value.__cause__)


def test_errors_come_back_as_what_they_were(node: Node) -> None:
    def fails(code: int) -> None:
        raise OwnError(code)

    with pytest.raises(OwnError, match="code 7") as caught:
        node.run(fails, 7)
    assert caught.value.code == 7
    assert ran() == ["a constructor"]  # on the worker, and not here
    assert "in fails" in str(caught.value.__cause__)
    with pytest.raises(ZeroDivisionError):
        node.run(lambda: 1 / 0)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopAsyncIteration, GeneratorExit])
def test_no_error_of_a_worker_ends_the_program_or_a_loop(node: Node, kind: type[BaseException]) -> None:
    def fails() -> None:
        raise kind("so")

    name = r"sys\.exit" if kind is SystemExit else kind.__name__
    with pytest.raises(RemoteFunctionError, match=name):
        node.run(fails)


def test_plain_results_need_no_trust(node: Node) -> None:
    device = node.device("cpu")
    weights = torch.arange(4.0, device=device)

    def work(tensor: torch.Tensor) -> Any:
        tensor += 1
        return {
            "same": tensor,
            "view": tensor[1:],
            "loss": Loss(0.5, tensor.sum()),
            "names": ("a", {"b"}),
            "size": tensor.shape,
        }

    result = node.run(work, weights)
    assert result["same"] is weights
    assert weights.tolist() == [1, 2, 3, 4]
    weights.zero_()
    assert result["view"].tolist() == [0, 0, 0]
    assert type(result["loss"]) is Loss
    assert result["loss"].tensor.item() == 10
    assert (result["names"], result["size"]) == (("a", {"b"}), torch.Size([4]))
    state = node.run(lambda: torch.nn.Linear(2, 2).state_dict())
    assert type(state).__name__ == "RemoteStateDict"


def test_an_item_that_is_refused_waits_until_the_worker_is_trusted(node: Node) -> None:
    def items() -> Iterator[Any]:
        yield 1
        yield Bomb()
        yield 3
        return Bomb()

    call = node.submit(items)
    iterator = iter(call)
    assert next(iterator) == 1
    for _ in range(2):
        with pytest.raises(UntrustedResultError):
            next(iterator)
    assert ran() == []
    call.trust_worker()
    assert list(iterator) == ["it exploded", 3]


def test_an_item_that_is_refused_in_an_event_loop_waits_too(node: Node) -> None:
    async def work() -> list[Any]:
        call = node.submit(lambda: (Bomb() for _ in range(2)))
        with pytest.raises(UntrustedResultError):
            async for _ in call:
                pass
        call.trust_worker()
        return [item async for item in call]

    assert asyncio.run(work()) == ["it exploded"] * 2


def test_who_trusts_a_worker_gets_its_objects(listener: Listener) -> None:
    os.environ.pop(RAN, None)
    with skyproxy.connect(f"ws://127.0.0.1:{listener.port}", token=TOKEN, trust_worker=True) as node:
        assert node.run(Bomb) == "it exploded"
        with pytest.raises(UntrustedResultError):
            node.submit(Bomb, trust_worker=False).result()
    with skyproxy.connect(f"ws://127.0.0.1:{listener.port}", token=TOKEN) as node:
        assert node.submit(Bomb, trust_worker=True).result() == "it exploded"


def test_the_environment_trusts_workers(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    from skyproxy.settings import load

    monkeypatch.setattr("skyproxy.nodes.SETTINGS", load({"SKYPROXY_TRUST_WORKER": "1"}))
    with skyproxy.connect(f"ws://127.0.0.1:{listener.port}", token=TOKEN) as node:
        assert node.run(Bomb) == "it exploded"


def test_a_worker_that_this_program_started_is_trusted() -> None:
    with skyproxy.launch_local("cpu") as node:
        assert node._runner.trusted


def test_pools_trust_what_their_provider_started_and_no_others() -> None:
    from skyproxy.providers.base import Endpoint, WorkerSpec
    from skyproxy.providers.remote import Remote

    assert Endpoint("ws://127.0.0.1:1", "t").trusted
    for given, trusted in ((None, False), (True, True)):
        remote = Remote(["ws://127.0.0.1:1"], token="t", trust_worker=given)
        launched = asyncio.run(remote.launch(WorkerSpec("pool"), lambda progress: None))
        assert [endpoint.trusted for endpoint in launched.endpoints] == [trusted]


@pytest.mark.parametrize(
    "value",
    [{}, {"tensors": []}, {"tensors": 3, "bases": []}, {"tensors": [], "bases": 5}, {"tensors": [[]], "bases": []}]
    + [{"tensors": [["reference", ["float32", [1], [1], 0], False, False, ["cpu", 9], 0, 4, -1, -1]], "bases": []}]
    + [{"tensors": [["reference", 1]], "bases": [], "form": "plain"}, {"tensors": [], "bases": [], "form": "plain"}],
)
def test_a_malformed_result_is_an_error_and_the_next_call_works(
    node: Node, monkeypatch: pytest.MonkeyPatch, value: dict[str, Any]
) -> None:
    with monkeypatch.context() as patch:

        def emit(self: Any, kind: str, result: Any, returning: Any) -> None:
            self.has_run()
            self.events.add(kind, dict(value), Pickler(lambda tensor: None).pickle(1), [])

        patch.setattr(worker_call.FunctionCall, "_emit_value", emit)
        with pytest.raises(SkyproxyError):
            node.submit(int).result(20)
    assert node.submit(int).result(20) == 0


ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    7,
    1 << 62,
    1 << 63,
    1.5,
    float("inf"),
    "",
    "x",
    "\x1b]52;c;x\x07",
    b"",
    b"x",
)
ODD += (
    [],
    {},
    [[]],
    [1],
    ["x"],
    {"a": 1},
    [["reference", ["float32", [2], [1], 0], False, False, ["cpu", 0], 0, 8, -1, -1]],
)
WORDS: dict[str, Any] = {
    "form": "plain",
    "tensors": [],
    "bases": [],
    "changed": [],
    "simple": False,
    "not_plain": "x",
    "exception": "x",
    "type": "ValueError",
    "message": "m",
    "traceback": "t",
    "failed": False,
    "text": "t",
    "stream": "stdout",
    "lost": 0,
    "waits": {},
    "reason": "r",
}


def hostile_events(chance: random.Random) -> Iterator[tuple[str, dict[str, Any], object]]:
    """Some events of any kind, and one that ends the call."""
    for kind in [*chance.choices(("output", "stream", "item", "started"), k=chance.randrange(3)), None]:
        words = {key: value for key, value in WORDS.items() if chance.random() < 0.5}
        for key in chance.sample(sorted(WORDS), chance.randrange(4)):
            words[key] = chance.choice(ODD)
        yield kind or chance.choice(("result", "error")), words, chance.choice((1, [], {"a": torch.ones(2)}, "x"))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_worker_says_of_a_call_it_ends_with_a_value_or_an_error_of_ours(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    chance = random.Random(seed)
    own = worker_call.FunctionCall._emit_value
    is_hostile = False

    def emit(self: Any, kind: str, result: Any, returning: Any) -> None:
        if not is_hostile:
            return own(self, kind, result, returning)
        self.has_run()
        for event, words, value in hostile_events(chance):
            pickled = Pickler(lambda tensor: None).pickle(value) if chance.random() < 0.7 else None
            self.events.add(event, words, pickled, [])
        return None

    def connect() -> Node:
        node = skyproxy.connect(f"ws://127.0.0.1:{listener.port}", token=TOKEN)
        assert node.run(int) == 0
        return node

    monkeypatch.setattr(
        project_sync.ProjectSync, "update", lambda self, hurry=False: None
    )  # a call of its own, of many files
    monkeypatch.setattr(worker_call.FunctionCall, "_emit_value", emit)
    refusals: list[str] = []
    node = connect()
    for _ in range(40):
        is_hostile = True
        try:
            value = node.submit(int).result(20)  # a time-out is a call that nobody ends
            if isinstance(value, Iterator):
                list(itertools.islice(value, 3))
        except Exception as error:
            refusals.append("".join([str(error), *getattr(error, "__notes__", [])]))
            # Others are those of the function, as the worker says.
            assert isinstance(error, SkyproxyError) or "on the worker" in refusals[-1], refusals[-1]  # noqa: PT017
        is_hostile = False
        if not node.alive:
            node.close()
            node = connect()
    node.close()
    assert len(refusals) > 10
    assert "\x1b" not in "".join(refusals)
    assert "could not be delivered" not in caplog.text


# --- where pickles are read -------------------------------------------------------------------------------------------

_READERS = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "_pickle", "copyreg", "jsonpickle"}
ALLOWED = {
    # Clients write these, and workers read what clients sent, who may run code there anyway.
    ("skyproxy/payloads/exceptions.py", "import copyreg"),
    ("skyproxy/payloads/pickling.py", "import cloudpickle.cloudpickle"),
    ("skyproxy/payloads/pickling.py", "import cloudpickle"),
    ("skyproxy/payloads/pickling.py", "import pickle"),
    ("skyproxy/payloads/pickling.py", "from pickle"),
    ("skyproxy/payloads/projects.py", "import cloudpickle"),
    # On a worker; a client reads there what it has just written itself.
    ("skyproxy/payloads/sent_actors.py", "import pickle"),
    ("skyproxy/payloads/sent_actors.py", "Unpickler"),
    ("skyproxy/functions/payload.py", "import pickle"),  # for the name of an error
    ("skyproxy/functions/runner.py", "import cloudpickle"),  # writes
    ("skyproxy/pools/ranks.py", "import cloudpickle"),  # writes
    ("skyproxy/pools/relaying.py", "import pickle"),  # for buffers that are sent as they are
    ("skyproxy/runtime/lifecycle.py", "import pickle"),  # on a worker
    ("skyproxy/runtime/child_processes.py", "import cloudpickle"),  # what processes of one function send each other
    ("skyproxy/runtime/child_processes.py", "import cloudpickle.cloudpickle"),
    ("skyproxy/runtime/child_processes.py", "import pickle"),
    ("skyproxy/runtime/sent_classes.py", "import cloudpickle.cloudpickle"),  # what makes classes, for those who read
    ("skyproxy/runtime/sources.py", "import cloudpickle.cloudpickle"),  # says how code is written
    ("skyproxy/runtime/project_code.py", "import pickle"),  # on a worker
    ("skyproxy_server/functions/call.py", "import pickle"),
    ("skyproxy_server/functions/call.py", "Unpickler"),
    ("skyproxy_server/functions/isolated_call.py", "import pickle"),  # writes, for a process that it has started
    ("skyproxy_server/functions/isolated_process.py", "import pickle"),  # what its worker wrote
    ("skyproxy_server/functions/shared_globals.py", "Unpickler"),
    ("skyproxy_server/functions/shared_globals.py", "import pickle"),  # writes, to tell two values apart
    ("skyproxy_server/functions/shared_globals.py", "import cloudpickle.cloudpickle"),
    ("skyproxy_server/isolation/visits.py", "torch.load"),  # plain tensors only, of another session's process
    ("skyproxy/loading/worker_side.py", "torch.load"),  # on a worker
    ("skyproxy/jobs/function_process.py", "Unpickler"),  # on a worker: what a client that may run functions sent
    # What a client reads of a worker; all ask whether it is trusted.
    ("skyproxy/functions/adoption.py", "Unpickler"),
    ("skyproxy/functions/call.py", "Unpickler"),
    ("skyproxy/jobs/results.py", "Unpickler"),
    ("skyproxy/loading/node_names.py", "Unpickler"),
    ("skyproxy/loading/node_names.py", "import pickle"),  # for the name of an error
    ("skyproxy/functions/code_cache.py", "import cloudpickle.cloudpickle"),  # for a setting of its own; it writes
    ("skyproxy/tensor/torch_api/subclasses.py", "import copyreg"),  # says how a class is written
    # Code that is written here, or by the user of a notebook.
    ("skyproxy/notebook/cells.py", "exec"),
    ("skyproxy/notebook/cells.py", "eval"),
    ("skyproxy/tensor/programs/compiled_call.py", "exec"),
    ("skyproxy/tensor/dispatch/dependencies.py", "eval"),
    ("skyproxy/tensor/dispatch/memoized_calls.py", "eval"),
    ("skyproxy_server/signatures.py", "exec"),
}


def places_that_make_code_of_bytes(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"import {item.name}" for item in node.names if item.name.partition(".")[0] in _READERS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _READERS:
            yield f"from {node.module}"
        elif isinstance(node, ast.ImportFrom):
            yield from (item.name for item in node.names if item.name == "Unpickler")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            yield node.func.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            if isinstance(node.func.value, ast.Name) and node.func.value.id in ("torch", "numpy", "np", "joblib"):
                yield f"{node.func.value.id}.load"


def test_pickles_are_read_in_listed_places_only() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), place)
        for package in ("skyproxy", "skyproxy_server", "operator")
        for path in (ROOT / package).rglob("*.py")
        for place in places_that_make_code_of_bytes(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == ALLOWED
