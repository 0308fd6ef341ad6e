"""This machine's own GPU beside `sky`: whose turn it is to be PyTorch's one accelerator.

Without a GPU, what C++ says is asked inside a turn; tests/gpu/test_beside_local_cuda.py has the real thing.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyproxy import patching
from skyproxy.tensor.torch_api import local_accelerator
from skyproxy.tensor.torch_api.local_accelerator import EngineInTurns, Turns, loaded_byte


def says() -> str:
    """The name of our device in C++, and with it whether it is the accelerator."""
    return torch._C._get_privateuse1_backend_name()


@pytest.fixture
def turns(sky: str) -> Iterator[Turns]:
    flag = local_accelerator._find()
    assert flag is not None
    assert flag.value == 1
    yield Turns(flag)
    assert flag.value == 1


def test_the_byte_is_found_by_the_code_of_processors() -> None:
    load = b"\x0f\xb6\x05" + struct.pack("<i", 0x1000) + b"\x84\xc0\x0f\x95\xc0\xc3"
    assert loaded_byte(load, 0x400000, "x86_64") == 0x401007
    assert loaded_byte(b"\xf3\x0f\x1e\xfa" + load, 0x400000, "AMD64") == 0x40100B
    backwards = b"\x0f\xb6\x05" + struct.pack("<i", -7)
    assert loaded_byte(backwards, 0x400000, "x86_64") == 0x400000
    # adrp x8, 3 pages on; add x8, x8, #0x678; ldarb w8, [x8]
    arm = struct.pack("<3I", 0x90000008 | 3 << 29, 0x91000108 | 0x678 << 10, 0x08DFFC00 | 8 << 5 | 8)
    assert loaded_byte(arm, 0x400123000, "arm64") == 0x400126678
    assert loaded_byte(struct.pack("<I", 0xD503245F) + arm, 0x400122FFC, "aarch64") == 0x400126678
    # adrp x0, one page back; ldrb w0, [x0, #0x10]
    arm = struct.pack("<3I", 0x90000000 | 3 << 29 | 0x7FFFF << 5, 0x39400000 | 0x10 << 10, 0xD65F03C0)
    assert loaded_byte(arm, 0x400123000, "arm64") == 0x400122010


def test_the_byte_is_found_in_the_wheels_of_other_systems() -> None:
    """Words and addresses of torch 2.13's function; on Linux the byte's own symbol says where it is."""
    linux = struct.pack("<6I", 0x900008A0, 0x9137A000, 0x08DFFC00, 0x72001C1F, 0x1A9F07E0, 0xD65F03C0)
    assert loaded_byte(linux, 0x457AD0, "aarch64") == 0x56BDE8
    macos = struct.pack("<4I", 0xF00004C8, 0x912A4108, 0x38BFC100, 0xD65F03C0)
    assert loaded_byte(macos, 0xF010, "arm64") == 0xAAA90


@pytest.mark.parametrize("machine", ["x86_64", "arm64", "riscv64"])
def test_other_code_is_believed_nothing(machine: str) -> None:
    assert loaded_byte(b"\x55\x48\x89\xe5" * 8, 0x400000, machine) is None


def test_a_turn_decides_what_the_accelerator_is(turns: Turns) -> None:
    assert says() == "sky"
    with turns.take("local"):
        assert says() == "privateuseone"
        with turns.take("sky"):
            assert says() == "sky"
        with turns.take("local"):
            assert says() == "privateuseone"
        assert says() == "privateuseone"
    assert says() == "sky"
    with pytest.raises(KeyError), turns.take("local"):
        raise KeyError
    assert says() == "sky"


def test_turns_of_one_kind_overlap_and_those_of_the_other_wait(turns: Turns) -> None:
    both = threading.Barrier(2)
    ended: list[str] = []

    def together() -> None:
        with turns.take("local"):
            both.wait(20)  # neither would come here alone
            assert says() == "privateuseone"
            ended.append("local")

    threads = [threading.Thread(target=together) for _ in range(2)]
    with turns.take("sky"):
        for thread in threads:
            thread.start()
        assert says() == "sky"
        ended.append("sky")
    for thread in threads:
        thread.join(20)
    assert ended == ["sky", "local", "local"]


def test_a_wait_for_a_turn_ends(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_accelerator, "_TURN_SECONDS", 0.01)
    failed: list[str] = []

    def wait() -> None:
        try:
            with turns.take("local"):
                pass
        except RuntimeError as error:
            failed.append(str(error))

    with turns.take("sky"):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(20)
    assert failed
    assert "backward on sky in another thread did not end" in failed[0]


class Engine:
    """Notes what C++ says while it runs."""

    def __init__(self, error: str = "") -> None:
        self.said: list[str] = []
        self._error = error

    def run_backward(self, outputs: tuple[object, ...], *args: object) -> str:
        self.said.append(says())
        if self._error:
            raise RuntimeError(self._error)
        return "done"


class Node:
    """A node of a graph, as far as it is looked at."""

    def __init__(self, device: str, following: Node | None) -> None:
        self._input_metadata = [SimpleNamespace(device=torch.device(device))]
        self.next_functions = ((following, 0), (None, 0))


def edge_to(*devices: str) -> Any:
    """A gradient edge to a chain of nodes on these devices."""
    node: Node | None = None
    for device in reversed(devices):
        node = Node(device, node)
    return SimpleNamespace(node=node, output_nr=0)


def test_backward_on_the_machines_own_gpu_is_what_it_was(
    turns: Turns, sky: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_accelerator, "TURNS", turns)
    monkeypatch.setattr(local_accelerator, "_local_type", "cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    engine = Engine()
    for edge, said in (
        (edge_to("cuda"), "privateuseone"),
        (edge_to("cpu", "cpu", "cuda"), "privateuseone"),
        (edge_to("cpu", sky), "sky"),
        (edge_to("cpu", "cpu"), "sky"),
    ):
        assert EngineInTurns(engine).run_backward((edge,)) == "done"
        assert engine.said.pop() == said
    assert EngineInTurns(engine).run_backward((torch.ones(2, device=sky, requires_grad=True).sum(),)) == "done"
    assert engine.said == ["sky"]


def test_the_engine_stays_as_the_name_of_the_device_does(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`skyproxy.uninstall()` takes no name back, and `install()` finds the engine as it left it."""
    monkeypatch.setattr(local_accelerator, "_local_type", "cuda")
    variable: Any = torch.autograd.variable.Variable  # type: ignore[attr-defined]
    monkeypatch.setattr(variable, "_execution_engine", Engine())
    monkeypatch.setattr(patching, "PATCHES", [])
    for _ in range(2):
        local_accelerator.install()
    assert isinstance(variable._execution_engine, EngineInTurns)
    assert [patch.name for patch in patching.PATCHES if patch.stays] == ["_execution_engine"]


def test_backward_on_the_cpu_takes_no_turn_while_no_gpu_is_in_use(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_accelerator, "TURNS", turns)
    monkeypatch.setattr(local_accelerator, "_local_type", "cuda")
    engine = Engine()
    loss = (torch.ones(2, requires_grad=True) * 2).sum()
    with turns.take("sky"):  # of another thread, it would be waited for
        thread = threading.Thread(target=EngineInTurns(engine).run_backward, args=((loss,),))
        thread.start()
        thread.join(20)
        assert engine.said == ["sky"]


def test_a_graph_of_both_is_refused_in_words(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_accelerator, "TURNS", turns)
    monkeypatch.setattr(local_accelerator, "_local_type", "cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    engine = EngineInTurns(Engine("opt_ready_stream && opt_parent_stream INTERNAL ASSERT FAILED"))
    with pytest.raises(RuntimeError, match=r"tensors of both sky and cuda.*Cut the graph where they meet"):
        engine.run_backward((edge_to("cuda"),))
    monkeypatch.setattr(local_accelerator, "TURNS", Turns())
    with pytest.raises(RuntimeError, match="in a process that has imported skyproxy"):
        engine.run_backward((edge_to("cuda"),))
    with pytest.raises(RuntimeError, match="something else"):
        EngineInTurns(Engine("something else")).run_backward((edge_to("cuda"),))


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a build of PyTorch for CUDA; make matrix has one")
def test_fake_tensors_of_cuda_go_backward_beside_sky(sky: str) -> None:
    """What the engine asserts does not come; without a GPU it says that there is none."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        loss = (torch.ones(3, device="cuda", requires_grad=True) * 2).sum()
        if torch.cuda.is_available():
            loss.backward()
            return
        with pytest.raises(RuntimeError, match="hasPrimaryContext"):
            loss.backward()
