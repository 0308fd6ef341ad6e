"""The first line of a program loads what it needs, and no more; in processes of their own."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import skyproxy
from skyproxy.tensor.dispatch.fake_tensors import fake_mode, prepare
from tests.integration.programs import environment, succeed, worker

pytestmark = pytest.mark.timeout(200)

FIRST_VALUE = """
import json, sys
import torch, skyproxy

node = skyproxy.connect({url!r}, token={token!r})
value = (torch.ones(2, device="sky:0") + 1).sum().item()
print(json.dumps([value, "torch._dynamo" in sys.modules, torch.sky.stats()["round_trips"]]))
"""

LOADED = """
import json, sys
import torch, skyproxy

node = skyproxy.connect({url!r}, token={token!r})
assert (torch.ones(2, device="sky:0") + 1).sum().item() == 4.0
here = sorted(sys.modules)
print(json.dumps([here, node.run(lambda: sorted(sys.modules))]))
"""

UNLIKELY = """
import sys
import torch, skyproxy

node = skyproxy.connect({url!r}, token={token!r})
x = torch.ones(3, 2, device="sky:0", requires_grad=True)
torch.cdist(x, torch.zeros(4, 2, device="sky:0")).sum().backward()
y = torch.ones(2, 1, device="sky:0")
try:
    torch.add(y, torch.ones(2, 3, device="sky:0"), out=y)
    torch.sky.synchronize()
except RuntimeError as error:
    print(error)
print(x.grad.cpu().shape == x.shape, *node.run(lambda: sorted({{"sympy", "torch._dynamo"}} & set(sys.modules))))
"""

WITHOUT_US = """
import json, sys
import torch

at_first = sorted(sys.modules)

class Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return args[0]

x = torch.Tensor._make_wrapper_subclass(Wrapper, (2,))
torch.add(x, x)
print(json.dumps([at_first, sorted(sys.modules)]))
"""
OF_EITHER_SIDE = {"cloudpickle", "msgpack", "skyproxy", "websockets"} | set(sys.stdlib_module_names)
PACKAGES_OF_THE_FIRST_VALUE = {
    "functions", "jobs", "loading", "payloads", "protocol", "runtime", "session", "tensor", "transport"
}  # fmt: skip

FIRST_FAKE = """
import sys
import torch, skyproxy

node = skyproxy.connect({url!r}, token={token!r})
x = torch.tensor([[2.0, 1.0], [1.0, 2.0]], device="sky:0")
assert "torch._dynamo" not in sys.modules
with torch.device("sky:0"), torch.inference_mode(), torch.autocast("sky", torch.bfloat16):
    values = torch.linalg.lstsq(x.float(), torch.tensor([7.0, 5.0]).view(2, 1)).solution.view(2)  # has no rule
assert "torch._dynamo" in sys.modules
print(values.cpu().round().tolist())
"""


def has_ended(process_id: int) -> bool:
    """Return whether a process ends within a minute: a busy machine takes its time to bury one that was killed."""
    try:
        psutil.Process(process_id).wait(60)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


def test_a_first_value_waits_once_and_does_not_load_the_compiler_of_pytorch(tmp_path: Path) -> None:
    with worker(tmp_path) as (url, token):
        assert json.loads(succeed(FIRST_VALUE.format(url=url, token=token), timeout=100)) == [4.0, False, 1]


def packages(modules: set[str]) -> set[str]:
    """Return the packages of modules, but for private ones of Python and those that compiled modules make up."""
    names = {name.partition(".")[0] for name in modules}
    return {name for name in names if not name.startswith("_") and name != "cython_runtime"}


def test_a_first_value_loads_on_either_side_what_it_needs_and_no_more(tmp_path: Path) -> None:
    torch_alone, with_a_wrapper = map(set, json.loads(succeed(WITHOUT_US, timeout=100)))
    with worker(tmp_path) as (url, token):
        here, there = map(set, json.loads(succeed(LOADED.format(url=url, token=token), timeout=100)))
    ours = here - with_a_wrapper
    assert {name for name in ours if name.startswith("torch.")} == {
        name for name in here if name.startswith("torch.sky")
    }
    assert packages(ours) - OF_EITHER_SIDE <= {"safetensors", "torch"}
    parts = {name.split(".")[1] for name in ours if name.startswith("skyproxy.")}
    folders = {path.parent.name for path in Path(skyproxy.__path__[0]).glob("*/__init__.py")}
    assert parts & folders <= PACKAGES_OF_THE_FIRST_VALUE
    assert {name for name in ours if name.startswith("skyproxy.jobs.")} == {"skyproxy.jobs.node_jobs"}
    assert packages(there - torch_alone) - OF_EITHER_SIDE <= {"psutil", "skyproxy_server"}


def test_a_worker_loads_no_symbols_to_check_what_clients_ask_of_kernels(tmp_path: Path) -> None:
    with worker(tmp_path) as (url, token):
        *refusal, values = succeed(UNLIKELY.format(url=url, token=token), timeout=100).splitlines()
    assert "output with shape [2, 1] doesn't match the broadcast shape [2, 3]" in refusal[0]
    assert values == "True"


def test_what_the_first_fake_tensor_needs_is_loaded_as_at_the_top_of_a_program(tmp_path: Path) -> None:
    with worker(tmp_path) as (url, token):
        assert succeed(FIRST_FAKE.format(url=url, token=token), timeout=100) == "[3.0, 1.0]"


def test_nothing_is_loaded_ahead_once_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr("skyproxy.tensor.dispatch.fake_tensors.importlib.import_module", loaded.append)
    prepare(until=lambda: len(loaded) == 2)
    assert len(loaded) == 2


@pytest.mark.parametrize("answered", [False, True])
def test_garbage_is_collected_ahead_while_the_worker_is_waited_for(
    answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_mode()  # PyTorch's own modules are imported before nothing can be
    collected: list[str] = []
    monkeypatch.setattr("skyproxy.tensor.dispatch.fake_tensors.collect_loaded", lambda: collected.append("all"))
    monkeypatch.setattr("skyproxy.tensor.dispatch.fake_tensors.importlib.import_module", lambda name: None)
    prepare(until=lambda: answered)
    assert collected == ([] if answered else ["all"])


def test_a_worker_collects_garbage_but_not_what_it_loaded(sky: str) -> None:
    del sky
    collects, aside = skyproxy.list_nodes()[0].run(lambda: (gc.isenabled(), gc.get_freeze_count()))
    assert collects
    assert aside > 100_000


EARLY = """
import json, os, sys
import skyproxy
from skyproxy.session.early_worker import EARLY_WORKER

waits = skyproxy.start_early(), skyproxy.start_early()
early = EARLY_WORKER._worker.process_id
loaded = "torch" in sys.modules
{between}
import torch

value = (torch.ones(2, device="sky:0") + 1).sum().item()
used = skyproxy.list_nodes()[0].process_id == early
print(json.dumps([value, waits, loaded, used, EARLY_WORKER._worker is None, early]))
"""


@pytest.mark.parametrize(("between", "used"), [("", True), ("os.environ['A_VARIABLE'] = 'other'", False)])
def test_the_early_worker_is_the_one_that_sky_means_where_nothing_else_has_changed(
    between: str, used: bool, tmp_path: Path
) -> None:
    source = EARLY.format(between=between)
    *rest, early = json.loads(succeed(source, timeout=150, XDG_CONFIG_HOME=str(tmp_path)))
    assert rest == [4.0, [True, True], False, used, True]
    assert has_ended(early)


def test_a_worker_that_nobody_uses_ends_with_its_program(tmp_path: Path) -> None:
    source = """
    import skyproxy
    from skyproxy.session.early_worker import EARLY_WORKER

    assert skyproxy.start_early()
    print(EARLY_WORKER._worker.process_id)
    """
    assert has_ended(int(succeed(source, XDG_CONFIG_HOME=str(tmp_path))))


def test_a_connection_to_another_worker_ends_the_early_one(tmp_path: Path) -> None:
    source = """
    import skyproxy
    from skyproxy.session.early_worker import EARLY_WORKER

    assert skyproxy.start_early()
    early = EARLY_WORKER._worker
    skyproxy.connect({url!r}, token={token!r})
    early._process.wait(60)
    assert EARLY_WORKER._worker is None and not early.is_running
    assert not skyproxy.start_early()
    """
    with worker(tmp_path) as (url, token):
        succeed(source.format(url=url, token=token), timeout=100, XDG_CONFIG_HOME=str(tmp_path))


def test_nothing_starts_early_where_another_worker_is_meant(tmp_path: Path) -> None:
    source = """
    import skyproxy
    from skyproxy.session.early_worker import EARLY_WORKER

    assert not skyproxy.start_early()
    assert EARLY_WORKER._worker is None
    """
    succeed(source, SKYPROXY_URL="ws://127.0.0.1:9", XDG_CONFIG_HOME=str(tmp_path))
    saved = "import skyproxy.contexts as c; c.ContextStore().save(c.Context('other', 'ssh', {}))"
    succeed(saved, XDG_CONFIG_HOME=str(tmp_path))
    succeed(source, XDG_CONFIG_HOME=str(tmp_path))


def test_a_process_of_multiprocessing_that_runs_the_main_file_anew_starts_nothing(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing\n"
        "import skyproxy\n"
        "started = skyproxy.start_early()\n"
        "def answer(queue):\n"
        "    queue.put(started)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    child = context.Process(target=answer, args=(queue,))\n"
        "    child.start()\n"
        "    print(started, queue.get(timeout=100))\n"
        "    child.join()\n"
    )
    variables = environment(XDG_CONFIG_HOME=str(tmp_path))
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout.split() == ["True", "False"]
