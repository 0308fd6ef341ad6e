"""Values of a session that are saved by one program, and brought back by another one."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

import skyproxy
from skyproxy.errors import ConfigurationError, ConnectError, SnapshotError, UnknownNameError, UntrustedResultError
from skyproxy.loading import saved_names
from skyproxy.session.snapshot_copies import SnapshotCopy, WorkerCopies
from skyproxy.snapshots import documents
from skyproxy.snapshots.folder import MAGIC, SnapshotFolder
from skyproxy.snapshots.stores import LocalStore
from tests.integration.programs import run_program, worker


@pytest.fixture
def nodes(sky: str) -> Iterator[Callable[[], skyproxy.Node]]:
    """Embedded workers, none of which sees the files of another one."""
    made: list[skyproxy.Node] = []

    def launch() -> skyproxy.Node:
        made.append(skyproxy.launch_local("cpu"))
        return made[-1]

    yield launch
    for node in made:
        node.close()


def trained(device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8)).to(device)
    model[2].weight = model[0].weight  # tied
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, device)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    loss = model(torch.ones(4, 8, device=device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def test_training_goes_on_bit_for_bit_on_another_worker(nodes: Callable[[], skyproxy.Node], tmp_path: Path) -> None:
    with nodes() as node:
        model, optimizer = trained(node.devices[0])
        assert node.save(str(tmp_path / "a"), model=model, optimizer=optimizer) == str(tmp_path / "a")
        expected = [step(model, optimizer, node.devices[0]) for _ in range(3)]  # dropout draws
    other = nodes()
    assert skyproxy.restore(tmp_path / "a", other, trust=True) is other
    model, optimizer = other.get("model"), other.get("optimizer")
    assert model[2].weight is model[0].weight is optimizer.param_groups[0]["params"][0]
    assert [step(model, optimizer, other.devices[0]) for _ in range(3)] == expected


def test_what_shares_memory_does_so_again_and_is_as_it_was(nodes: Callable[[], skyproxy.Node], tmp_path: Path) -> None:
    node = nodes()
    base = torch.arange(24.0, device=node.devices[0])
    parts = {"row": base[3:9], "turned": base.view(4, 6).t(), "bits": base.view(torch.int32), "empty": base[:0]}
    large = torch.rand(3 << 20, device=node.devices[0])  # of several pieces
    half = torch.ones(2, 2, dtype=torch.complex64, device=node.devices[0]).conj()
    node.save(tmp_path / "a", base=base, parts=parts, plain=[1, "two", torch.ones(2)], large=large, half=half)
    expected = {name: (tensor.stride(), tensor.cpu()) for name, tensor in parts.items()}
    other = nodes()
    skyproxy.restore(tmp_path / "a", other)
    found = other.get("parts")
    assert {name: (tensor.stride(), tensor.dtype) for name, tensor in found.items()} == {
        name: (stride, tensor.dtype) for name, (stride, tensor) in expected.items()
    }
    assert all(torch.equal(found[name].cpu(), tensor) for name, (_, tensor) in expected.items())
    assert torch.equal(other.get("large").cpu(), large.cpu())
    assert other.get("half").is_conj()
    number, word, ours = other.get("plain")
    assert (number, word, ours.tolist(), ours.device.type) == (1, "two", [1, 1], "cpu")
    other.get("base").zero_()
    assert found["turned"].abs().sum().item() == 0
    assert sorted(other.named()) == ["base", "half", "large", "parts", "plain"]
    assert other.named()["row" if "row" in other.named() else "base"].tensors == 1
    with pytest.raises(UnknownNameError, match="'base'"):
        other.get("nothing")


def test_what_was_put_under_names_comes_back_under_them(sky: str, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    with worker(tmp_path / "one", "--sessions-in-process", "--snapshots", str(tmp_path / "s1")) as (url, token):
        with skyproxy.connect(url, token=token, session="exp", trust_worker=True) as node:
            shared = torch.ones(3, device=node.devices[0])
            node.put("first", {"x": shared})
            node.put("second", [shared, 7])
        # A later program saves what it has not got yet.
        with skyproxy.connect(url, token=token, session="exp", trust_worker=True) as node:
            node.save(tmp_path / "saved")
            node.save("worker:saved")
            assert node.get("second")[1] == 7
        with skyproxy.connect(url, token=token) as node:
            assert skyproxy.restore("worker:saved", node).get("first")["x"].tolist() == [1, 1, 1]
    with worker(tmp_path / "two", "--sessions-in-process", "--snapshots", str(tmp_path / "s2")) as (url, token):
        with skyproxy.connect(url, token=token, session="exp2", trust_worker=True) as node:
            skyproxy.restore(tmp_path / "saved", node)
            assert sorted(node.named()) == ["first", "second"]
            node.get("first")["x"].add_(1)
            assert node.get("second")[0].tolist() == [2, 2, 2]
        with skyproxy.connect(url, token=token, session="exp2", trust_worker=True) as node:
            assert node.get("first")["x"].tolist() == [2, 2, 2]


def test_the_default_dtype_is_as_it_was(tmp_path: Path) -> None:
    program = """
        import sys, torch, skyproxy
        torch.set_default_dtype(torch.float64)
        with skyproxy.launch_local("cpu") as node:
            node.save(sys.path[-1], x=torch.ones(2, device=node.devices[0]))
        torch.set_default_dtype(torch.float32)
        with skyproxy.launch_local("cpu") as node:
            skyproxy.restore(sys.path[-1], node)
            assert torch.get_default_dtype() is torch.float64
            y = torch.ones(2, device=node.devices[0])
            assert (y + node.get("x")).tolist() == [2, 2] and y.dtype is torch.float64
            print("as it was")
    """
    ended = run_program(program.replace("sys.path[-1]", repr(str(tmp_path / "a"))))
    assert ended.stdout.strip() == "as it was", ended.stderr


def test_an_address_of_fsspec_is_a_place_as_well(nodes: Callable[[], skyproxy.Node], tmp_path: Path) -> None:
    node = nodes()
    address = f"memory://saved/{tmp_path.name}"
    x = torch.rand(2 << 20, device=node.devices[0])
    for _ in range(3):
        x += 1
        node.save(address, x=x)
    skyproxy.restore(address, node)
    assert torch.equal(node.get("x").cpu(), x.cpu())
    x -= 1
    assert not torch.equal(node.get("x").cpu(), x.cpu())
    with pytest.raises(ConfigurationError, match="cannot be used"):
        node.save("nosuchthing://a/b", x=x)


def test_a_second_save_writes_what_has_changed(nodes: Callable[[], skyproxy.Node], tmp_path: Path) -> None:
    node = nodes()
    still, moving = (torch.rand(2 << 20, device=node.devices[0]) for _ in range(2))
    node.save(tmp_path / "a", still=still, moving=moving)
    (first,) = (tmp_path / "a").glob("pack-*")
    moving[0] = 5
    node.save(tmp_path / "a", still=still, moving=moving)
    later = {path.stat().st_size for path in (tmp_path / "a").glob("pack-*")} - {first.stat().st_size}
    assert len(later) == 1
    assert later.pop() < 5 << 20


def test_the_program_may_go_on_meanwhile(
    nodes: Callable[[], skyproxy.Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes()
    x = torch.zeros(2 << 20, device=node.devices[0])
    opened = WorkerCopies.open

    def change_first(self: WorkerCopies, name: str, number: str = "") -> SnapshotCopy:
        x.add_(1)
        assert x[0].item() == 1
        return opened(self, name, number)

    monkeypatch.setattr(WorkerCopies, "open", change_first)
    node.save(tmp_path / "a", x=x)
    assert skyproxy.restore(tmp_path / "a", node).get("x").abs().max().item() == 0


def test_a_protected_session_is_saved_and_restored_into(nodes: Callable[[], skyproxy.Node], tmp_path: Path) -> None:
    node = nodes()
    with skyproxy.protect(node=node) as protected:
        x = torch.ones(3, device=node.devices[0])
        node.save(tmp_path / "a", x=x)
        skyproxy.restore(tmp_path / "a", node)
        protected.snapshot()
        assert node.process_id is not None
        worker = node._worker
        assert worker is not None
        worker.stop()
        assert (node.get("x") + x).tolist() == [2, 2, 2]
        assert protected.recoveries == 1


# --- what is not believed, and what cannot be ------------------------------------------------------------------------


def test_a_pickle_needs_trust(nodes: Callable[[], skyproxy.Node], tmp_path: Path) -> None:
    node = nodes()
    node.save(tmp_path / "a", model=torch.nn.Linear(2, 2).to(node.devices[0]), x=torch.ones(2, device=node.devices[0]))
    skyproxy.restore(tmp_path / "a", node)
    assert node.get("x").tolist() == [1, 1]
    with pytest.raises(UntrustedResultError, match="trust=True"):
        node.get("model")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[skyproxy.Node, Path]]:
    folder = tmp_path_factory.mktemp("saved")
    with skyproxy.launch_local("cpu") as node:
        node.save(folder, x=torch.arange(4.0, device=node.devices[0]))
        yield node, folder


def rewritten(folder: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of what was saved, with another header, well signed."""
    shutil.copytree(folder, target)
    header = SnapshotFolder(folder)._header(1)
    change(header)
    (target / "snapshot-00000001.msgpack").unlink()
    copy = SnapshotFolder(target, "w" * 32)
    copy.claim()
    copy.store.remove("snapshot-00000001.msgpack")
    copy.add(documents.pack(header))
    return target


def _set(path: tuple[Any, ...], value: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: Any) -> None:
        for part in path[:-1]:
            header = header[part]
        header[path[-1]] = value

    return change


def _names(**values: Any) -> bytes:
    packed: bytes = msgpack.packb({"values": values, "modes": {}})
    return packed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set(("document", "torch"), "1.4.0"), "written with torch 1.4.0"),
        (_set(("document", "format"), 99), "the format 99"),
        (_set(("document", "devices"), [["cuda", 0]]), "needs the device cuda:0"),
        (_set(("names",), b""), "taken to protect a session"),
        (_set(("names",), b"\xc1"), "cannot be used"),
        (_set(("names",), _names(x=[b"", [1]])), "malformed"),
        (_set(("names",), _names(x=["text", 7])), "cannot be used"),
        (_set(("document", "slots"), []), "other tensors than were saved"),
        (_set(("document", "values", 0, 3), [1 << 40]), "cannot be used"),
        (_set(("contents",), []), "cannot be used"),
        (_set(("contents", 0, 0), b"x" * 32), "missing"),
        (_set(("pieces",), []), "missing"),
        (_set(("packs", 0), "../../etc/passwd"), "none of ours"),
    ],
)
def test_a_forged_one_is_refused_and_nothing_has_changed(
    saved: tuple[skyproxy.Node, Path], tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    node, folder = saved
    here = torch.ones(3, device=node.devices[0])
    torch.manual_seed(5)
    expected = torch.rand(2, device=node.devices[0]).tolist()
    torch.manual_seed(5)
    with pytest.raises(SnapshotError, match=words):
        skyproxy.restore(rewritten(folder, tmp_path / "forged", change), node)
    assert (here + 1).tolist() == [2, 2, 2]
    assert torch.rand(2, device=node.devices[0]).tolist() == expected
    assert [row for row in node._session.call("list_snapshots") if "x" in str(row)] == []
    skyproxy.restore(folder, node)
    assert node.get("x").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["snapshot", "pack"])
def test_one_that_was_cut_short_is_refused(saved: tuple[skyproxy.Node, Path], tmp_path: Path, kind: str) -> None:
    node, folder = saved
    shutil.copytree(folder, tmp_path / "cut")
    (path,) = (tmp_path / "cut").glob(f"{kind}-*")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(SnapshotError, match=r"cut short|not what was written"):
        skyproxy.restore(tmp_path / "cut", node)
    (path,) = (tmp_path / "cut").glob("snapshot-*")
    path.write_bytes(MAGIC)
    with pytest.raises(SnapshotError, match="cut short"):
        skyproxy.restore(tmp_path / "cut", node)
    with pytest.raises(SnapshotError, match="no snapshot at all"):
        skyproxy.restore(tmp_path / "nothing", node)


def test_no_space_leaves_what_was_saved_before(
    nodes: Callable[[], skyproxy.Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes()
    x = torch.ones(3, device=node.devices[0])
    node.save(tmp_path / "a", x=x)
    x += 1

    def full(self: LocalStore, draft: Path, name: str) -> None:
        raise OSError(28, "No space left on device", str(draft))

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "publish", full)
        with pytest.raises(SnapshotError, match=r"No space left on device.*saved there before is untouched"):
            node.save(tmp_path / "a", x=x)
    assert [path.name for path in (tmp_path / "a").iterdir() if path.name.endswith(".draft")] == []
    assert skyproxy.restore(tmp_path / "a", node).get("x").tolist() == [1, 1, 1]
    assert node._session.call("list_snapshots") == []


def test_what_cannot_be_saved_is_refused_by_name(nodes: Callable[[], skyproxy.Node], tmp_path: Path) -> None:
    node, other = nodes(), nodes()
    x = torch.ones(3, device=node.devices[0])
    with pytest.raises(ConfigurationError, match="nothing was named"):
        node.save(tmp_path / "a")
    with pytest.raises(ConfigurationError, match="another worker"):
        other.save(tmp_path / "a", x=x)
    with pytest.raises(ConfigurationError, match="needs the path"):
        node.save({"x": x})
    with pytest.raises(ConfigurationError, match="leave the path out"):
        node.save({"x": x}, "x.pt", y=x)
    with pytest.raises(ConfigurationError, match="cannot be kept, for it cannot be pickled"):
        node.save(tmp_path / "a", x=threading.Lock())
    for name in ("worker:", "worker:../x"):
        with pytest.raises(SnapshotError, match="cannot have the name"):
            node.save(name, x=x)
    assert not (tmp_path / "a").exists()


def test_a_worker_without_a_folder_says_so(sky: str, tmp_path: Path) -> None:
    with worker(tmp_path) as (url, token), skyproxy.connect(url, token=token) as node:
        x = torch.ones(3, device=node.devices[0])
        with pytest.raises(ConfigurationError, match="--snapshots FOLDER"):
            node.save(tmp_path / "a", x=x)
        with pytest.raises(ConfigurationError, match="--snapshots FOLDER"):
            skyproxy.restore(tmp_path / "a", node)
        assert saved_names.name_on_worker(tmp_path) == ""


def test_a_worker_without_room_for_one_more_session_says_so_at_once(sky: str, tmp_path: Path) -> None:
    with worker(tmp_path, "--snapshots", str(tmp_path / "snapshots"), SKYPROXY_MAX_SESSIONS="1") as (url, token):
        with skyproxy.connect(url, token=token) as node:
            x = torch.ones(3, device=node.devices[0])
            with pytest.raises(ConnectError, match="limit"):
                node.save(tmp_path / "a", x=x)
            assert not [path for path in (tmp_path / "snapshots").rglob("*") if path.is_file()]


def test_an_interrupt_while_the_worker_writes_leaves_nothing_on_its_volume(
    nodes: Callable[[], skyproxy.Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes()
    call = node._session.call
    taken: list[str] = []

    def interrupted(name: str, *arguments: Any) -> Any:
        answer = call(name, *arguments)
        if name == "save_snapshot":
            taken.append(arguments[0])
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(node._session, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        node.save(tmp_path / "a", x=torch.ones(3, device=node.devices[0]))
    assert call("list_snapshots", taken[0]) == []
