"""Programs that share a worker do not see each other, and nobody uses a worker without its token."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import skyproxy
from skyproxy.errors import SessionLostError
from tests.integration.programs import rows, started, succeed, worker


def test_after_the_death_of_the_worker_nothing_hangs(sky: str) -> None:
    with skyproxy.launch_local("cpu") as node:
        x = torch.ones(3, device=node.devices[0])
        x.cpu()
        psutil.Process(node.process_id).kill()
        for _ in range(3):
            with pytest.raises(SessionLostError):
                x.sum().item()


CLIENT = """
import json, os, sys, torch, skyproxy
number = int(sys.stdin.readline())
torch.manual_seed(number)
tensors = [torch.full((50,), float(number * 1000 + i), device="sky:0") for i in range(50)]
drawn = torch.rand(3, device="sky:0")
for i in range(0, 50, 3):
    tensors[i] = tensors[i] + 0
print(json.dumps("ready"), flush=True)
sys.stdin.readline()
good = all(bool((t == number * 1000 + i).all()) for i, t in enumerate(tensors))
drawn = torch.cat([drawn, torch.rand(3, device="sky:0")])
torch.manual_seed(number)
print(json.dumps([good, torch.equal(drawn.cpu(), torch.cat([torch.rand(3), torch.rand(3)]))]), flush=True)
sys.stdin.readline()
del tensors
torch.sky.synchronize()
print(json.dumps("done"), flush=True)
"""


def test_two_processes_on_one_worker_do_not_see_each_other(tmp_path: Path) -> None:
    with worker(tmp_path) as (url, token):
        extra = {"SKYPROXY_URL": url, "SKYPROXY_TOKEN": token}
        with started(CLIENT, **extra) as first, started(CLIENT, **extra) as second:

            def say(program, text: str) -> object:
                program.stdin.write(text + "\n")
                program.stdin.flush()
                line = program.stdout.readline()
                assert line, program.stderr.read()
                return rows(line)[0]

            assert say(first, "1") == "ready"
            assert say(second, "2") == "ready"
            assert say(first, "") == [True, True]
            assert say(first, "") == "done"  # its tensors are gone, the other's are not
            assert say(second, "") == [True, True]


def test_two_sessions_of_one_process_on_one_worker(tmp_path: Path) -> None:
    with worker(tmp_path) as (url, token):
        with skyproxy.connect(url, token=token) as a, skyproxy.connect(url, token=token) as b:
            x, y = torch.arange(5.0, device=a.devices[0]), torch.arange(5.0, device=b.devices[0]) * 10
            assert (x + 1).tolist() == [1, 2, 3, 4, 5]
            assert (y + 1).tolist() == [1, 11, 21, 31, 41]
            with pytest.raises(RuntimeError, match="same device"):
                x + y
            a.close()
            assert (y + 2).tolist() == [2, 12, 22, 32, 42]


@pytest.fixture
def local_node(sky: str) -> Iterator[skyproxy.Node]:
    with skyproxy.launch_local("cpu") as node:
        yield node


def test_a_worker_cannot_be_used_without_its_token(local_node: skyproxy.Node) -> None:
    host, port = local_node.url.removeprefix("ws://").split(":")
    request = (
        f"GET / HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(request.encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 401")


def test_the_token_is_in_no_list_of_processes(local_node: skyproxy.Node) -> None:
    token = local_node._worker.token  # type: ignore[union-attr]
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # one of an earlier test that has just ended
            assert token not in " ".join(process.cmdline())
            assert token not in " ".join(process.environ().values())
    assert token not in " ".join(psutil.Process().cmdline())


def test_an_unencrypted_worker_for_other_machines_is_refused(tmp_path: Path) -> None:
    source = """
    import sys
    from skyproxy_server.__main__ import main
    sys.exit(0 if main(["--host", "0.0.0.0", "--port", "0", "--device", "cpu", "--log-level", "error"]) == 2 else 1)
    """
    import subprocess

    from tests.integration.programs import run_program

    done: subprocess.CompletedProcess[str] = run_program(source, SKYPROXY_TOKEN="t" * 40)
    assert done.returncode == 0
    assert "without TLS" in done.stderr


def test_a_definition_is_never_executed_as_source_text() -> None:
    """What a client may name is looked up in tables; text of its making stands in no generated code."""
    from skyproxy.errors import ProtocolError
    from skyproxy_server.signatures import Signature

    evil = "__import__('os').system('false')"
    for definition in (
        ["aten::relu", [evil], {}, ["n"]],
        ["aten::add.Tensor", ["t", "t"], {evil: "v"}, ["n"]],
        ["aten::add.Tensor", ["t", "t"], {"alpha": evil}, ["n"]],
        ["aten::relu", ["t"], {}, [evil]],
        ["aten::relu", [["c", evil, 1]], {}, ["n"]],
        ["aten::relu", [["k", evil]], {}, ["n"]],
    ):
        with pytest.raises(ProtocolError):
            Signature(definition, on_cpu=True)
    for name in (evil, f"aten::{evil}", "aten::__class__", "builtins::eval", "aten::relu.__globals__"):
        refused = Signature([name, ["t"], {}, ["n"]], on_cpu=True)
        with pytest.raises(NotImplementedError):
            refused.handler({0: None, 1: torch.ones(1)}, [32, 1, 2], 0)


def test_plain_imports_need_no_worker() -> None:
    succeed("import skyproxy, torch; assert torch.sky.is_available(); assert not torch.sky.is_initialized()")


CHILD = """
import torch, skyproxy

def answer(model, queue):
    x = torch.ones(2, 3, device="sky:0")
    queue.put((model(x).detach(), skyproxy.list_nodes()[0].url))
    queue.close()
    queue.join_thread()
"""
PARENT = """
import multiprocessing, torch, skyproxy, child
model = torch.nn.Linear(3, 3).to("sky:0")
context = multiprocessing.get_context("spawn")
queue = context.Queue()
process = context.Process(target=child.answer, args=(model, queue))
process.start()
values, url = queue.get()
process.join()
assert values.device == torch.device("sky:0"), values.device
assert torch.equal(values.cpu(), model(torch.ones(2, 3, device="sky:0")).cpu())
print(process.exitcode, url == skyproxy.list_nodes()[0].url)
"""


@pytest.mark.slow
def test_a_spawned_process_has_a_session_of_its_own_and_gets_copies(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD, encoding="utf-8")
    assert succeed(PARENT, timeout=240, cwd=tmp_path) == "0 False"
    with worker(tmp_path) as (url, token):
        assert succeed(PARENT, timeout=240, cwd=tmp_path, SKYPROXY_URL=url, SKYPROXY_TOKEN=token) == "0 True"
