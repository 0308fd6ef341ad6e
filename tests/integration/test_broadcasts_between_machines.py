"""A large broadcast to workers in networks of their own: over a cable between them, and where a firewall is silent."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import skyproxy as sky
from skyproxy.pools import relaying
from tests.integration import network

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(network.why_not()), reason=network.why_not() or "it can be")]
MIB = 1 << 20
PAYLOAD = os.urandom(8 * MIB)


def sent(pool: sky.Compute) -> list[float]:
    """The megabytes that each worker is sent in a broadcast."""
    before = [node._session.bytes_sent for node in pool.nodes]
    assert pool.broadcast(bytes.endswith, PAYLOAD, PAYLOAD[-99:]) == [True, True]
    return [(node._session.bytes_sent - other) / MIB for node, other in zip(pool.nodes, before)]


def test_workers_that_reach_each_other_pass_it_on_and_others_are_sent_it(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    with network.worker_behind_a_link(folders[0]) as one, network.worker_behind_a_link(folders[1]) as other:
        workers = sky.Remote([one.url, other.url], token=[one.token, other.token], insecure=True)
        with sky.Compute(provider=workers) as pool:
            assert pool.broadcast(len, "abc") == [3, 3]  # now they have the program's modules
            with network.cable_between(one, other):
                assert sent(pool) == [pytest.approx(8, abs=0.2), pytest.approx(0, abs=0.2)]
            assert not set(pool.nodes) & set(relaying._ALONE)
            with network.silence_between(one, other):
                began = time.monotonic()
                assert sent(pool) == [pytest.approx(8, abs=0.2)] * 2
                assert time.monotonic() - began < 60, "it has a bound"
            assert pool.nodes[1] in relaying._ALONE
            assert sent(pool) == [pytest.approx(8, abs=0.2)] * 2
