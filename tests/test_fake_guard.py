"""The guard of fake tensors on PyTorch 2.11 for CUDA, without CUDA."""

from __future__ import annotations

import threading

import pytest
import torch

from skyproxy import fake_guard, torch_versions
from tests.integration.programs import succeed


@pytest.fixture
def setters(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that have set the guard, as on a machine that needs it."""
    found: list[threading.Thread] = []
    monkeypatch.setattr(fake_guard, "_is_kept", False)
    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: found.append(threading.current_thread()))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    return found


def test_one_thread_sets_it_and_stays(setters: list[threading.Thread]) -> None:
    for _ in range(2):
        fake_guard.keep_guard()
    (setter,) = setters
    assert setter.is_alive()
    assert setter.daemon
    assert setter is not threading.current_thread()


@pytest.mark.parametrize(("version", "cuda"), [("2.12.0+cu130", "13.0"), ("2.11.0+cpu", None)])
def test_other_builds_need_none(
    version: str, cuda: str | None, setters: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    fake_guard.keep_guard()
    assert setters == []


TWO_GRAPHS = """
import torch, skyproxy

x = torch.ones(3, device="sky:0", requires_grad=True)
torch.compile(lambda x: x.sin() * x, backend="sky", options={"worker": "inductor"})(x).sum().backward()
assert torch.allclose(x.grad.cpu(), torch.ones(3).sin() + torch.ones(3).cos())
"""


@pytest.mark.skipif(
    torch.version.cuda is None or torch_versions.minor(torch.__version__) != (2, 11), reason="other builds need none"
)
def test_a_worker_compiles_two_graphs() -> None:
    succeed(TWO_GRAPHS, timeout=180)
