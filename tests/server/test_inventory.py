"""What devices a worker says it has, on machines of all kinds."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy_server.inventory import inventory

GPU = SimpleNamespace(name="H200", total_memory=141 << 30, major=9, minor=0, multi_processor_count=132, uuid="GPU-1")


def machine(
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[SimpleNamespace],
    cuda: str | None = "12.8",
    *,
    hip: str | None = None,
    cudnn: bool = True,
) -> None:
    fake = SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda, hip=hip),
        cuda=SimpleNamespace(device_count=lambda: len(gpus), get_device_properties=lambda index: gpus[index]),
        get_num_threads=lambda: 4,
        backends=SimpleNamespace(
            mkldnn=SimpleNamespace(is_available=lambda: True), cudnn=SimpleNamespace(is_available=lambda: cudnn)
        ),
        ops=SimpleNamespace(
            mkldnn=SimpleNamespace(
                _is_mkldnn_bf16_supported=lambda: True,
                _is_mkldnn_fp16_supported=lambda: False,
            )
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", fake)


def kinds(choice: str) -> list[tuple[str, int]]:
    return [(row["type"], row["index"]) for row in inventory(choice)]


def test_with_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, [GPU, GPU])
    assert kinds("auto") == [("cuda", 0), ("cuda", 1), ("cpu", 0)]
    assert kinds("cuda") == [("cuda", 0), ("cuda", 1)]
    assert kinds("cpu") == [("cpu", 0)]
    row = inventory("cuda")[0]
    assert row["name"] == "H200"
    assert row["total_memory_bytes"] == 141 << 30
    assert row["compute_capability"] == [9, 0]


def test_cudnn_is_told_of_where_pytorch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, [GPU])
    assert inventory("cuda")[0]["cudnn"] is True
    for others in ({"cudnn": False}, {"hip": "6.4"}):  # ROCm's library goes by the same name
        machine(monkeypatch, [GPU], **others)  # type: ignore[arg-type]
        assert "cudnn" not in inventory("cuda")[0]


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, [])
    assert kinds("auto") == [("cpu", 0)]
    assert inventory("cpu")[0]["onednn_lstm"] == ["float32", "bfloat16"]
    with pytest.raises(ConfigurationError, match=r"sees no CUDA device.*nvidia-smi"):
        inventory("cuda")


def test_with_a_torch_that_knows_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, [], cuda=None)
    with pytest.raises(ConfigurationError, match="built without CUDA"):
        inventory("cuda")


def test_an_unknown_choice() -> None:
    with pytest.raises(ConfigurationError, match="'tpu'"):
        inventory("tpu")


def test_this_machine_for_real() -> None:
    pytest.importorskip("torch")
    row = inventory("cpu")[0]
    assert row["type"] == "cpu"
    assert row["name"]
    assert row["threads"] >= 1
    assert set(row["onednn_lstm"]) <= {"float32", "bfloat16", "float16"}
    if sys.platform == "linux":
        assert row["total_memory_bytes"] > 1 << 20
