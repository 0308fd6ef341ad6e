"""`torch.sky` is added at run time, so checkers do not know it; `skyproxy.sky` is the same, with types."""

from typing import assert_type

import torch

import skyproxy
from skyproxy.errors import UntrustedResultError


def measure(device: torch.device) -> dict[str, int]:
    assert_type(skyproxy.sky.device_count(), int)
    assert_type(skyproxy.sky.is_available(), bool)
    skyproxy.sky.synchronize(device)
    with skyproxy.sky.stream(skyproxy.sky.Stream(device)):
        start = skyproxy.sky.Event(enable_timing=True)
        start.record()
    graph = skyproxy.sky.SkyGraph()
    with skyproxy.sky.graph(graph):
        pass
    graph.replay()
    assert_type(skyproxy.sky.memory_allocated(device), int)
    return skyproxy.sky.stats()


def trusted(node: skyproxy.Node) -> object:
    try:
        return node.run(measure, node.device("cpu"))
    except UntrustedResultError as error:
        error.call.trust_worker()
        return error.call.result()
