"""`suspend` and `resume` of a worker over ssh, through a real sshd, while a program holds tensors there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyproxy.errors import ConnectError
from skyproxy.providers.ssh import SshWorker, find
from tests.cli.test_suspending import Notebook, undisturbed
from tests.providers.test_ssh import Host, host, process_of, run, slow_through_sshd, state, up

__all__ = ["host", "state"]
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def worker(host: Host) -> Iterator[SshWorker]:
    made = up(host)
    assert made.exit_code == 0, made.output
    found = find("gpu-box")
    assert found is not None
    yield found
    if find("gpu-box") is not None:
        found.stop(keep_environment=True)  # the next test installs nothing


def row() -> dict[str, object]:
    (found,) = json.loads(run("list", "--json").stdout)
    return dict(found)


@slow_through_sshd
def test_a_suspended_worker_on_a_host_comes_back_with_the_next_operation(
    host: Host, worker: SshWorker, tmp_path: Path
) -> None:
    notebook = Notebook(tmp_path)
    try:
        losses = [notebook.read(), notebook.step()]
        assert process_of(host)
        token = worker.token()
        result = run("suspend", "gpu-box")
        assert result.exit_code == 0, result.output
        assert "gpu-box is suspended: 1 session is suspended" in result.stdout
        assert (row()["phase"], row()["ready"]) == ("Suspended", False)
        assert "does not run" in run("suspend", "gpu-box").output
        with pytest.raises(ConnectError, match="skyproxy resume gpu-box"):
            worker.open()
        losses += [notebook.step(), notebook.step()]  # the first of them brings it back
        assert row()["phase"] == "Running"
        assert worker.token() == token
        assert run("suspend").exit_code == 0
        result = run("resume")
        assert (result.exit_code, result.stdout) == (0, "gpu-box is ready\n"), result.output
        losses.append(notebook.step())
        assert "the session goes on" in notebook.said.read_text()
    finally:
        notebook.close()
    assert losses == undisturbed(tmp_path, len(losses))


@slow_through_sshd
def test_down_of_a_suspended_worker_on_a_host_deletes_what_it_held(
    host: Host, worker: SshWorker, tmp_path: Path
) -> None:
    notebook = Notebook(tmp_path)
    try:
        notebook.read()
        assert run("suspend", "gpu-box").exit_code == 0
        assert list(host.home.rglob("*.safetensors"))
        ended = run("down", "gpu-box", "--keep-environment")
        assert ended.exit_code == 0, ended.output
        assert not list(host.home.rglob("*.safetensors"))
        assert find("gpu-box") is None
        notebook.step()
        assert notebook.process.wait(60) == 1
        assert "there is no worker 'gpu-box' any more" in notebook.said.read_text()
    finally:
        notebook.close()


@slow_through_sshd
def test_a_worker_that_runs_is_ended_without_a_last_snapshot(host: Host, worker: SshWorker, tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    try:
        notebook.read()
        ended = run("down", "gpu-box", "--keep-environment")
        assert ended.exit_code == 0, ended.output
        notebook.step()
        assert notebook.process.wait(60) == 1
        assert "this session is suspended" not in notebook.said.read_text()
    finally:
        notebook.close()
