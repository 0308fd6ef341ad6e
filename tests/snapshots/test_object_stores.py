"""Snapshots in a store that speaks S3: moto's, over HTTP, through s3fs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import skyproxy
from skyproxy.errors import SnapshotError
from skyproxy.snapshots.stores import open_store
from skyproxy_server.named_errors import NamedSessionElsewhereError
from skyproxy_server.snapshots.leases import NameLeases
from tests.server.snapshots.sessions import ADD_, Session, restored

pytest.importorskip("s3fs", reason="needs s3fs, which is not among the tests' packages: pip install s3fs")
pytest.importorskip("moto.server", reason="needs moto[server]")
import s3fs
from moto.server import ThreadedMotoServer


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A bucket, found by the variables that a user sets."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("snapshots")
        yield "s3://snapshots"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_a_session_goes_on_from_a_bucket(address: str) -> None:
    root = f"{address}/worker"
    with Session(root) as session:
        session.put(s1=torch.arange(6.0), s2=torch.rand(3 << 20))
        session.run(ADD_, 1, 1)
        other = restored(session, root)
        assert torch.equal(other.slots[1], session.slots[1])
        assert torch.equal(other.slots[2], session.slots[2])
        other.executor.end()
        session.run(ADD_, 1, 1)
        saved = session.call("save_snapshot", "s")
        assert saved["snapshot"] == "2"
        assert [row["snapshot"] for row in session.call("list_snapshots", "s")] == ["2", "1"]
        session.run(ADD_, 1, 1)
        session.call("save_snapshot", "s")
        assert [row["snapshot"] for row in session.call("list_snapshots", "s")] == ["3", "2"]
        assert session.call("delete_snapshot", "s")
        assert session.call("list_snapshots") == []
        assert open_store(f"{root}/token/s").files() == []


def test_what_a_bucket_holds_is_not_believed(address: str) -> None:
    root = f"{address}/spoilt"
    with Session(root) as session:
        session.put(s1=torch.rand(1000))
        session.call("save_snapshot", "s")
        place = open_store(f"{root}/token/s")
        (pack,) = [name for name in place.files() if name.startswith("pack")]
        content = bytearray(place.read(pack))
        content[-1] ^= 1
        place.write(pack, bytes(content))
        with Session(root, ops=False) as other:
            assert other.call("load_snapshot", "s")["type"] == "SnapshotError"
        place.write(pack, bytes(content[:-5]))
        with Session(root, ops=False) as other:
            assert other.call("load_snapshot", "s")["type"] == "SnapshotError"


def test_a_node_saves_to_a_bucket_and_another_one_restores_it(sky: str, address: str) -> None:
    place = f"{address}/experiment"
    with skyproxy.launch_local("cpu") as node:
        weights = torch.rand(300, 300)
        model = {"weights": weights.to(node.device("cpu"))}
        node.save(place, model=model, step=7)
    with skyproxy.launch_local("cpu") as node:
        skyproxy.restore(place, node)
        assert torch.equal(node.get("model")["weights"].cpu(), weights)
        assert node.get("step") == 7
        with pytest.raises(SnapshotError):
            skyproxy.restore(f"{address}/nothing", node)


def test_two_workers_of_a_bucket_know_of_each_others_named_sessions(address: str) -> None:
    root = open_store(f"{address}/names")
    one, other = NameLeases(root, 15.0), NameLeases(root, 15.0)
    other._machine = "elsewhere"
    one.acquire("token", "exp", take=False)
    other._pause = lambda seconds: one.beat()
    with pytest.raises(NamedSessionElsewhereError):
        other.acquire("token", "exp", take=False)
    one.settle("token", "exp", "")
    other.acquire("token", "exp", take=False)
    for worker in (one, other):
        worker.end()
    assert root.child("token").child(".workers").files() == []
