"""A notebook with a real kernel: pictures, magics, interrupts, restarts, top-level await."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.programs import worker
from tests.notebook.kernels import Kernel

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as made:
        made.succeed("%load_ext skyproxy")
        yield made


@pytest.fixture
def sky(kernel: Kernel) -> Kernel:
    """The kernel, with `torch`, `skyproxy` and a device."""
    kernel.succeed("import torch, skyproxy\nskyproxy.list_nodes() or torch.ones(1, device='sky:0');")
    return kernel


def trips(kernel: Kernel) -> int:
    return int(kernel.value("torch.sky.stats()['round_trips']"))


def test_the_extension_loads_before_anything_heavy(kernel: Kernel) -> None:
    with Kernel() as fresh:
        fresh.succeed("%load_ext skyproxy")
        assert fresh.value("import sys\n'torch' in sys.modules") == "False"
        assert "No sky device yet" in fresh.value("%sky status")
        fresh.succeed("%unload_ext skyproxy")
        assert "`%sky` not found" in fresh.run("%sky status").printed["stderr"]


def test_the_dashboard_is_a_frame_with_a_link_of_its_own(sky: Kernel) -> None:
    shown = [sky.succeed("%sky dashboard").result for _ in range(2)]
    links = [re.search(r'<iframe src="(http://127\.0\.0\.1:\d+/)#([\w-]{32})"', one["text/html"]) for one in shown]
    assert links[0] is not None
    assert links[1] is not None
    assert links[0][1] == links[1][1]  # one view
    assert links[0][2] != links[1][2]  # and a secret for each frame
    assert all(links[0][2] not in one["text/plain"] for one in shown)
    sky.succeed("skyproxy.ui().close()")


def test_a_tensor_is_shown_in_both_forms_for_one_fetch(sky: Kernel) -> None:
    sky.succeed("x = torch.arange(6., device='sky:0').reshape(2, 3)")
    before = trips(sky)
    shown = sky.succeed("x").result
    assert trips(sky) - before == 1
    assert shown["text/plain"] == "tensor([[0., 1., 2.],\n        [3., 4., 5.]], device='sky:0')"
    assert "float32 [2, 3] on sky:0, cpu of" in shown["text/html"]
    assert "[3., 4., 5.]" in shown["text/html"]


def test_a_parameter_is_shown_as_one(sky: Kernel) -> None:
    shown = sky.succeed("torch.nn.Linear(2, 1, device='sky:0').bias").result
    assert shown["text/plain"].startswith("Parameter containing:\ntensor([")
    assert "Parameter containing" in shown["text/html"]


def test_a_node_is_shown_without_asking_it(sky: Kernel) -> None:
    before = trips(sky)
    shown = sky.succeed("skyproxy.list_nodes()[0]").result
    assert trips(sky) == before
    assert "<th>sky:0</th>" in shown["text/html"]
    assert "embedded worker" in shown["text/html"]
    assert shown["text/plain"].startswith("<Node ws://127.0.0.1")


def test_status_names_devices_and_memory_and_what_was_sent(sky: Kernel) -> None:
    sky.succeed("kept = torch.ones(1 << 20, device='sky:0')")
    shown = sky.succeed("%sky status").result
    assert "sky:0" in shown["text/plain"]
    assert "connected" in shown["text/html"]
    assert "round trips: " in shown["text/plain"]
    assert "MiB of" in shown["text/html"]


FAILING = """def work(x):
    return torch.linalg.inv(x)

work(torch.zeros(2, 2, device='sky:0')).cpu()
"""


def test_an_error_names_the_cell_and_hides_what_is_below_it(sky: Kernel) -> None:
    plain = sky.run("y = torch.linalg.inv(torch.zeros(2, 2, device='sky:0'))\ny.cpu()")
    assert plain.status == "error"
    assert re.search(r"Cell In\[\d+\], line 1$", plain.error[1], re.MULTILINE), plain.error
    called = sky.run(FAILING)
    assert re.search(r"Cell In\[\d+\], line 2 in work$", called.error[1], re.MULTILINE), called.error
    for outcome in (plain, called):
        assert "ipykernel_" not in outcome.error[1]
        shown = re.sub(r"\x1b\[[0-9;]*m", "", outcome.traceback)
        frames = [line for line in shown.splitlines() if line.startswith(("File ", "Cell In["))]
        assert frames != []
        assert [line for line in frames if line.startswith("File ")] == []


def test_a_value_that_failed_shows_its_error_once_and_without_what_is_below_the_cell(sky: Kernel) -> None:
    sky.succeed("rows = torch.zeros(2, 3, device='sky:0')\nat = torch.full((1,), 9, device='sky:0')")
    sky.succeed("missing = torch.nn.functional.embedding(at, rows)")
    for cell in ("missing", "missing[0]"):
        outcome = sky.run(cell)
        assert outcome.status == "error"
        assert outcome.result == {}
        assert outcome.errors == 1
        assert re.search(r"Cell In\[\d+\], line 1$", outcome.error[1], re.MULTILINE), outcome.error
        assert "_mimebundle" not in outcome.traceback
        assert "index out of range" in outcome.traceback
    assert sky.value("rows.sum()") == "tensor(0., device='sky:0')"


def test_logs_are_the_workers(sky: Kernel) -> None:
    assert "skyproxy.server: devices: cpu:0" in sky.succeed("%sky logs").printed["stdout"]


def test_a_session_is_shown_with_what_it_keeps(sky: Kernel) -> None:
    assert "has no name" in sky.succeed("%sky session").printed["stdout"]
    sky.succeed(
        "from skyproxy.nodes import list_nodes\nnode = list_nodes()[0]\nnode._hold('exp1', take=False)\n"
        "kept = torch.ones(1 << 18, device='sky:0')\nnode.put('weights', kept)"
    )
    shown = sky.succeed("%sky session sky:0").printed["stdout"]
    assert "session 'exp1'" in shown
    assert "weights: 1.0 MiB in 1 tensors" in shown


def test_help_and_mistakes_say_what_there_is(sky: Kernel) -> None:
    assert "%%sky run" in sky.succeed("%sky").printed["stdout"]
    assert sky.run("%sky logs sky:7").error[0] == "UnknownDeviceError"
    assert sky.run("%sky run").error == ("ConfigurationError", "run takes a cell: begin it with %%sky run")
    assert "takes no cell" in sky.run("%%sky status\n1").error[1]


def test_every_command_of_skyproxy_is_there(sky: Kernel) -> None:
    assert "skyproxy" in sky.succeed("%sky version").printed["stdout"]
    failed = sky.run("%sky sreve")
    assert "sreve" in failed.printed["stdout"]
    assert failed.error[0] == "ConfigurationError"


def test_a_long_transfer_shows_a_bar_that_goes_away(sky: Kernel) -> None:
    sky.succeed("from skyproxy.session import progress\nprogress.PATIENCE_SECONDS = 0.0")
    outcome = sky.succeed("torch.zeros(64 << 20).to('sky:0');")
    assert any("<progress" in data["text/html"] for data in outcome.displays)
    assert outcome.displays[-1]["text/html"] == ""
    assert outcome.printed["stderr"] == ""
    sky.succeed("progress.PATIENCE_SECONDS = 1.0")


def test_top_level_await(sky: Kernel) -> None:
    assert sky.value("await skyproxy.fetch_async(torch.ones(2, device='sky:0'))") == "tensor([1., 1.])"
    assert sky.value("await torch.full((), 7, device='sky:0').item_async()") == "7"
    assert sky.value("await skyproxy.list_nodes()[0].synchronize_async()\n3") == "3"


QUEUED = """for _ in range(1500): x = x @ x
with observing(lambda what: print('waiting', flush=True)): x.sum().item()
"""


def test_an_interrupt_frees_the_worker_and_the_notebook_goes_on() -> None:
    """The products would take the worker minutes."""
    with Kernel(OMP_NUM_THREADS="1") as kernel:
        kernel.succeed(
            "%load_ext skyproxy\nimport torch, skyproxy\nfrom skyproxy.nodes import observing\n"
            "x = torch.full((1536, 1536), 1 / 1536, device='sky:0')\nkept = x[0, :3].cpu()\nbefore = x"
        )
        shown: list[str] = []

        def interrupt_when_shown(text: str) -> None:
            if "is working: " in text:
                if not shown:
                    kernel.interrupt()
                shown.append(text)

        outcome = kernel.run(QUEUED, on_display=interrupt_when_shown)
        assert outcome.error[0] == "KeyboardInterrupt"
        assert re.search(
            r"sky:0 is working: [\d,]+ operations queued, running aten::\w+ from Cell In\[\d+\], line 1", shown[-1]
        ), shown
        assert outcome.displays[-1]["text/plain"] == ""
        assert kernel.value("torch.ones(3, device='sky:0').sum().item()") == "3.0"
        assert kernel.value("torch.equal(before[0, :3].cpu(), kept)") == "True"
        touched = kernel.run("x.sum().item()")
        assert touched.error[0] == "CancelledOperationError"
        assert re.search(r"Cell In\[\d+\], line 1$", touched.error[1], re.MULTILINE), touched.error
        assert kernel.succeed("%sky queue").printed["stdout"] == "sky:0 has nothing to do\n"


def test_stop_cancels_wherever_it_strikes_in_a_cell(sky: Kernel) -> None:
    sky.succeed("y = torch.full((1536, 1536), 1 / 1536, device='sky:0')\ny[0, 0].item()")
    outcome = sky.run(
        "for _ in range(1000): y = y @ y\ntorch.sky.queue()\nprint('recorded', flush=True)\n"
        "import threading\nthreading.Event().wait(100)",
        on_print=lambda text: sky.interrupt() if "recorded" in text else None,
    )
    assert outcome.error[0] == "KeyboardInterrupt"
    assert sky.run("y.sum().item()").error[0] == "CancelledOperationError"
    sky.succeed("for _ in range(1000): y = torch.ones(1536, 1536, device='sky:0') @ y\n%sky cancel")
    assert sky.value("torch.ones(3, device='sky:0').sum().item()") == "3.0"


def test_after_a_restart_the_same_worker_is_there_and_has_the_weights(tmp_path: Path) -> None:
    upload = """
import torch, skyproxy
weights = torch.nn.Linear(1024, 1024, bias=False)
torch.nn.init.ones_(weights.weight)
weights.to("sky:0")
torch.sky.synchronize()
session = skyproxy.tensor.core.devices.DEVICES.of("sky:0").session
while session.call("blob_stats")["unhashed"]: pass
node = skyproxy.list_nodes()[0]
"""
    with worker(tmp_path, "--blob-bytes", str(64 << 20)) as (url, token):
        with Kernel(SKYPROXY_URL=url, SKYPROXY_TOKEN=token) as kernel:
            kernel.succeed(upload)
            assert kernel.value("node.url") == repr(url)
            kernel.restart()
            assert "NameError" in kernel.run("node").error[0]
            kernel.succeed(upload)
            assert kernel.value("node.url") == repr(url)
            assert kernel.value("torch.sky.stats()['bytes_saved']") == str(4 << 20)
            assert kernel.value("weights.weight.sum().item()") == str(float(1 << 20))


def test_a_worker_that_the_notebook_brought_up_outlives_its_kernel(tmp_path: Path) -> None:
    folders = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    with Kernel(**folders) as kernel:
        kernel.succeed("%load_ext skyproxy")
        try:
            kernel.succeed("%sky up mine --provider local")
            kernel.succeed("import torch, skyproxy\ntorch.ones(1, device='sky:0');")
            url = kernel.value("skyproxy.list_nodes()[0].url")
            assert "devices: cpu:0" in kernel.succeed("%sky logs").printed["stdout"]
            kernel.restart()
            kernel.succeed("%load_ext skyproxy\nimport torch, skyproxy\ntorch.ones(1, device='sky:0');")
            assert kernel.value("skyproxy.list_nodes()[0].url") == url
            assert "saved context 'mine'" in kernel.value("skyproxy.list_nodes()[0].source")
        finally:
            assert kernel.run("%sky down mine").status == "ok"


# --- cells on a worker -----------------------------------------------------------------------------------------------


def test_a_cell_runs_on_the_worker_and_leaves_what_it_set(sky: Kernel) -> None:
    sky.succeed("import os\nhere = os.getpid()\nfactor = 3\nx = torch.arange(4., device='sky:0')")
    outcome = sky.succeed(
        "%%sky run\nimport os, sys\nthere = os.getpid()\nprint('in', there)\nprint('careful', file=sys.stderr)\n"
        "assert type(x) is torch.Tensor and x.device.type == 'cpu'\ny = x * factor\ny.sum().item()"
    )
    assert outcome.result["text/plain"] == "18.0"
    there = sky.value("there")
    assert there != sky.value("here")
    assert outcome.printed == {"stdout": f"in {there}\n", "stderr": "careful\n"}
    assert sky.value("y.device, y.tolist()") == "(device(type='sky', index=0), [0.0, 3.0, 6.0, 9.0])"


def test_a_cell_changes_the_tensors_themselves(sky: Kernel) -> None:
    sky.succeed("w = torch.zeros(3, device='sky:0')")
    sky.succeed("%%sky run\nw += 2;")
    assert sky.value("w.tolist()") == "[2.0, 2.0, 2.0]"


def test_a_cell_takes_the_notebooks_functions_and_leaves_its_own(sky: Kernel) -> None:
    sky.succeed("base = 10\ndef plus(a): return a + base")
    sky.succeed("%%sky run\ndef twice(a): return 2 * plus(a)\nfirst = twice(1)")
    assert sky.value("first, twice(5)") == "(22, 30)"


def test_an_error_of_a_cell_has_its_class_and_its_line(sky: Kernel) -> None:
    outcome = sky.run("%%sky run\nvalues = {}\nvalues['missing']")
    assert outcome.error == ("KeyError", "'missing'")
    assert "values['missing']" in outcome.traceback
    assert sky.value("1 + 1") == "2"


def test_a_cell_that_is_no_python_is_refused_here(sky: Kernel) -> None:
    assert sky.run("%%sky run\n1 +").error[0] == "SyntaxError"


def test_a_cell_goes_to_the_worker_that_is_named(sky: Kernel) -> None:
    sky.succeed("second = skyproxy.launch_local('cpu')")
    sky.succeed("%%sky run sky:1\nimport os\nfirst_there = os.getpid()")
    assert sky.value("first_there == second.process_id") == "True"
    sky.succeed("second.close()")


def test_an_interrupt_ends_a_cell_and_leaves_the_worker(sky: Kernel) -> None:
    outcome = sky.run(
        "%%sky run\nimport threading\nprint('waiting', flush=True)\nwhile True:\n    threading.Event().wait(0.01)",
        on_print=lambda text: sky.interrupt() if "waiting" in text else None,
    )
    assert outcome.error[0] == "KeyboardInterrupt"
    sky.succeed("%%sky run\nafter = 5")
    assert sky.value("after") == "5"


def test_a_function_that_fails_on_the_worker_shows_the_lines_of_its_cell(sky: Kernel) -> None:
    sky.succeed("node = skyproxy.list_nodes()[0]")
    sky.succeed("def invert(x):\n    return 1 / x  # written in a cell")
    outcome = sky.run("node.run(invert, 0)")
    assert outcome.error[0] == "ZeroDivisionError"
    shown = re.sub(r"\x1b\[[0-9;]*m", "", outcome.traceback)
    assert re.search(r"Cell In\[\d+\], line 2, in invert\n\s+return 1 / x  # written in a cell", shown), shown
    assert "ipykernel_" not in shown


def test_functions_are_awaited_at_the_top_level(sky: Kernel) -> None:
    sky.succeed("import os\nnode = skyproxy.list_nodes()[0]\nother = await node.execute(lambda: os.getpid())")
    assert sky.value("other == node.process_id") == "True"
