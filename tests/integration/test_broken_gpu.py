"""Workers whose GPU breaks, as `broken_gpu` plays it: who is told what, what ends, and what goes on."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy.errors import SessionLostError
from skyproxy_server.endings import LOST_STATUS
from skyproxy_server.limits import are_sessions_separable
from tests.integration.broken_gpu import play_gpu
from tests.integration.busy_workers import within
from tests.integration.programs import ROOT, port_in, run_program, start_worker, wait_for
from tests.server.isolation.workers import Worker

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="looks at processes by POSIX calls")

SOON_SECONDS = 10.0
ECC = "uncorrectable ECC error encountered"


def here(offset: int = 0) -> str:
    """The place of the line that asks, or of one behind it, as errors name it."""
    frame = sys._getframe(1)
    return f"recorded at {__file__}:{frame.f_lineno + offset} in {frame.f_code.co_name}"


def test_the_session_is_told_where_and_is_over_and_the_next_worker_is_another(sky: str) -> None:
    with skyproxy.launch_local("cpu") as node:
        node.run(play_gpu)
        place = node.devices[0]
        x, kept = torch.arange(10.0, device=place), torch.ones(4, device=place)
        assert (kept + kept).sum().item() == 8
        with within(SOON_SECONDS), pytest.raises(SessionLostError) as caught:
            place_in_code = here(1)
            x[torch.tensor([100], device=place)].add(1).sum().item()
        said = str(caught.value)
        assert "(CUDA error: device-side assert triggered; Assertion `index out of bounds` failed)" in said
        assert f"it was noticed at aten::add.Tensor, {place_in_code}. " in said
        assert f"check their operands on the GPU, the latest first: aten::index.Tensor, {place_in_code}. " in said
        assert "SKYPROXY_LAUNCH_BLOCKING=1 finds the statement" in said
        assert caught.value.process_ended
        assert not node.alive
        for use in (kept.sum().item, lambda: torch.sky.synchronize(place), lambda: node.run(os.getpid)):
            with within(SOON_SECONDS), pytest.raises(SessionLostError) as again:
                use()
            assert str(again.value) == said
        assert node._worker is not None
        assert wait_for(lambda: node._worker._process.poll(), "the worker ends") == LOST_STATUS
    with skyproxy.launch_local("cpu") as fresh:
        assert torch.ones(3, device=fresh.devices[0]).sum().item() == 3


def test_an_error_that_leaves_the_context_is_one_operation_s(sky: str) -> None:
    with skyproxy.launch_local("cpu") as node:
        node.run(play_gpu, "too many resources requested for launch", is_final=False)
        x = torch.arange(3.0, device=node.devices[0])
        with pytest.raises(skyproxy.errors.RemoteError, match="too many resources"):
            (-x + x).sum().item()
        assert (x + x).sum().item() == 6


def test_all_sessions_of_the_process_are_told_and_it_ends(sky: str, tmp_path: Path) -> None:
    token, log = tmp_path / "token", tmp_path / "log"
    token.write_text("x" * 40, encoding="ascii")
    token.chmod(0o600)
    with log.open("wb") as stderr:
        process = start_worker(token, stderr, "--sessions-in-process")
    try:
        url = f"ws://127.0.0.1:{wait_for(lambda: port_in(log, process), 'the worker listens')}"
        with skyproxy.connect(url, token="x" * 40) as one, skyproxy.connect(url, token="x" * 40) as other:
            one.run(play_gpu)
            theirs = torch.ones(3, device=other.devices[0])
            assert theirs.sum().item() == 3
            with within(SOON_SECONDS), pytest.raises(SessionLostError, match=r"Another session shared that process"):
                (-torch.ones(3, device=one.devices[0])).sum().item()
            with within(SOON_SECONDS), pytest.raises(SessionLostError, match=r"another session of the same process"):
                theirs.sum().item()
            assert not one.alive
            assert not other.alive
        assert process.wait(10) == LOST_STATUS
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not are_sessions_separable(), reason="session processes need Linux")
def test_a_session_with_a_process_of_its_own_ends_alone(sky: str, tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    try:
        with worker.connect() as one, worker.connect() as other:
            one.run(play_gpu)
            theirs = torch.ones(3, device=other.devices[0])
            with within(SOON_SECONDS), pytest.raises(SessionLostError, match="device-side assert triggered") as caught:
                (-torch.ones(3, device=one.devices[0])).sum().item()
            assert caught.value.process_ended
            assert "shared" not in str(caught.value)
            assert theirs.sum().item() == 3
            assert other.alive
            with worker.connect() as fresh:
                assert torch.ones(3, device=fresh.devices[0]).sum().item() == 3
        assert worker.process.poll() is None
        wait_for(lambda: f"exited with status {LOST_STATUS}" in worker.log, "its end is noted")
    finally:
        worker.end()


def test_a_function_that_breaks_it_is_told_by_its_own_error_or_by_the_end_of_its_worker(sky: str) -> None:
    def index() -> float:
        return torch.arange(3.0).neg().sum().item()

    with skyproxy.launch_local("cpu") as node:
        x = torch.ones(3, device=node.devices[0])
        node.run(play_gpu)
        with (
            within(SOON_SECONDS),
            pytest.raises((RuntimeError, SessionLostError), match="device-side assert") as caught,
        ):
            node.run(index)
        assert isinstance(caught.value, SessionLostError) or "process ends" in str(caught.value.__notes__)
        with within(SOON_SECONDS), pytest.raises(SessionLostError, match="a kernel failed on the GPU"):
            x.sum().item()
        assert not node.alive
        assert node._worker is not None
        assert wait_for(lambda: node._worker._process.poll(), "the worker ends", 10) == LOST_STATUS


def test_a_protected_program_goes_on_with_another_worker(sky: str, capfd: pytest.CaptureFixture[str]) -> None:
    with skyproxy.launch_local("cpu") as node:
        node.run(play_gpu, ECC)
        place = node.devices[0]
        total = torch.ones(3, device=place)
        protected = skyproxy.protect(node=node)
        total += 1
        total = total + total[torch.tensor([0, 1, 2], device=place)]
        assert total.tolist() == [4, 4, 4]
        assert (protected.recoveries, node.alive) == (1, True)
        assert ECC in capfd.readouterr().err
        assert "noticed" not in str(node._session._failures.loss)


def test_a_program_whose_every_worker_breaks_ends(sky: str, tmp_path: Path) -> None:
    """Each worker that goes on does the same operations again; `sitecustomize` breaks the GPU of each."""
    played = """
    import sys

    if "skyproxy_server" in sys.orig_argv:
        from tests.integration.broken_gpu import play_gpu

        play_gpu()
    """
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(played), encoding="utf-8")
    source = """
    import skyproxy, torch

    node = skyproxy.launch_local("cpu")
    x, place = torch.ones(3, device="sky:0"), torch.arange(3, device="sky:0")
    protected = skyproxy.protect(node=node)
    try:
        x[place].add(x).sum().item()
    except skyproxy.errors.SessionLostError as error:
        print(protected.recoveries, error)
    """
    done = run_program(source, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert "so did the worker before it, over the same operations" in done.stdout, done.stderr
    assert "aten::index.Tensor, recorded at" in done.stdout
    assert done.stdout.startswith("1 ")


def test_where_each_operation_is_waited_for_the_error_comes_at_its_line(sky: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent(
            """
            import skyproxy, torch
            from tests.integration.broken_gpu import play_gpu
            node = skyproxy.launch_local("cpu")
            node.run(play_gpu)
            x, place = torch.ones(3, device="sky:0"), torch.arange(3, device="sky:0")
            y = x[place]
            y.add(x).sum().item()
            """
        ),
        encoding="utf-8",
    )
    source = f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"
    done = run_program(source, SKYPROXY_LAUNCH_BLOCKING="1")
    assert done.returncode == 1
    error = done.stderr[done.stderr.rindex("Traceback") :]
    assert f". It was aten::index.Tensor, recorded at {path}:7 in <module>. " in error
    frames = [line for line in error.splitlines() if line.startswith("  File")]
    assert frames[-1] == f'  File "{path}", line 7, in <module>', "none of ours"
