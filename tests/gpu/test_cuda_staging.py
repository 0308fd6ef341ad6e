"""Large tensors to and from a real CUDA worker: bit for bit, in order with the ops around them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import skyproxy
from skyproxy.node import Node
from skyproxy_server.cuda_staging import own_streams

MIB = 1 << 20


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with skyproxy.launch_local("cuda") as made:
        yield made


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128])
def test_values_come_back_bit_for_bit(node: Node, dtype: torch.dtype) -> None:
    count = 5 * MIB // dtype.itemsize + 3
    source = torch.randint(-100, 100, (count,)).to(dtype)
    for _ in range(3):
        assert torch.equal(source.to(node.devices[0]).cpu(), source)


def test_strides_and_offsets_survive(node: Node) -> None:
    source = torch.randn(8, 16, 64, 64).contiguous(memory_format=torch.channels_last)
    remote = source.to(node.devices[0])
    assert remote.stride() == source.stride()
    assert torch.equal(remote.cpu(), source)
    assert torch.equal(remote[3:].cpu(), source[3:])
    assert torch.equal(remote[:, ::2].cpu(), source[:, ::2])


def test_ops_wait_for_what_arrives_and_writers_for_what_leaves(node: Node) -> None:
    device = node.devices[0]
    for number in range(20):
        source = torch.full((4 * MIB,), float(number))
        remote = source.to(device)
        fetched = skyproxy.prefetch(remote * 2, remote)
        remote.add_(1)
        assert torch.equal(remote.cpu(), source + 1)
        del fetched


def test_memory_is_not_reused_before_its_copy_is_done(node: Node) -> None:
    device = node.devices[0]
    heavy = torch.randn(2048, 2048).to(device)
    for number in range(20):
        product = heavy @ heavy @ heavy
        del product
        assert torch.equal((torch.full((4 * MIB,), number).to(device) + 0).cpu(), torch.full((4 * MIB,), number))


def test_a_block_computes_on_a_stream_of_its_own() -> None:
    before = torch.cuda.current_stream()
    with own_streams([{"type": "cuda", "index": 0}]):
        assert torch.cuda.current_stream() != before
        assert torch.cuda.current_device() == before.device.index
    assert torch.cuda.current_stream() == before
