"""PyTorch's distributed training on four ranks: two nodes with two processes each, on gloo."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import skyproxy as sky
from skyproxy.errors import RankErrors, SessionLostError

pytestmark = pytest.mark.timeout(300)

RANKS = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    plugins = [
        sky.plugins.torch(backend="gloo"),
        sky.plugins.huggingface(),
        sky.plugins.accelerate(),
        sky.plugins.coordination(),
    ]
    with sky.Compute(provider=sky.Local(device="cpu"), nodes=2, procs_per_node=2, plugins=plugins) as opened:
        yield opened


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(96, 6, generator=generator), torch.randint(0, 3, (96,), generator=generator)


@sky.compute
def environment() -> dict[str, Any]:
    import torch.distributed as dist

    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    found: dict[str, Any] = {name: int(os.environ[name]) for name in names}
    return found | {
        "initialized": dist.is_initialized(),
        "backend": dist.get_backend(),
        "rank": dist.get_rank(),
        "info": sky.instance_info(),
        "pid": os.getpid(),
        "store": os.environ["MASTER_ADDR"],
    }


def test_every_rank_is_a_process_with_its_place_in_the_group(pool: Any) -> None:
    found = environment() @ pool
    assert [row["rank"] for row in found] == [0, 1, 2, 3]
    assert [row["RANK"] for row in found] == [0, 1, 2, 3]
    assert [row["LOCAL_RANK"] for row in found] == [0, 1, 0, 1]
    assert [row["NODE_RANK"] for row in found] == [0, 0, 1, 1]
    assert {row["WORLD_SIZE"] for row in found} == {4}
    assert {row["LOCAL_WORLD_SIZE"] for row in found} == {2}
    assert {row["backend"] for row in found} == {"gloo"}
    assert len({row["pid"] for row in found}) == RANKS
    assert {row["MASTER_PORT"] for row in found} == {found[0]["info"].head_port}
    assert found[3]["info"].is_head is False
    assert [peer.rank for peer in found[0]["info"].peers] == [0, 1, 2, 3]


def test_a_task_for_one_rank_finds_the_group_too(pool: Any) -> None:
    assert (environment() >> pool)["initialized"] is True


@sky.compute
@sky.stdout(only="head")
def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    wrapped = DistributedDataParallel(model)
    sampler = DistributedSampler(TensorDataset(x, y))
    loader = DataLoader(TensorDataset(torch.arange(len(x)), x, y), batch_size=8, sampler=sampler)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.2)
    taken = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, dtype=torch.float64)
        for rows, batch_x, batch_y in loader:
            taken.append(rows.tolist())
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(wrapped(batch_x), batch_y)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(rows), len(rows)], dtype=torch.float64)
        dist.all_reduce(total)
        print(f"epoch {epoch}: loss {total[0] / total[1]:.4f}")
    return {
        "taken": taken,
        "loss": (total[0] / total[1]).item(),
        "gradients": [parameter.grad for parameter in model.parameters()],
        "parameters": [parameter.detach() for parameter in model.parameters()],
    }


def test_ddp_gives_what_one_process_would(pool: Any, capfd: pytest.CaptureFixture) -> None:
    x, y = data()
    results = train(network(), x, y, 2) @ pool
    steps = len(results[0]["taken"])
    for epoch in (range(steps // 2), range(steps // 2, steps)):
        seen = [row for result in results for step in epoch for row in result["taken"][step]]
        assert sorted(seen) == list(range(96))  # each sample once an epoch, over all ranks
    assert results[0]["taken"][0] != results[0]["taken"][steps // 2]  # set_epoch

    for other in results[1:]:
        for mine, theirs in zip(results[0]["gradients"], other["gradients"], strict=True):
            assert torch.equal(mine, theirs)
        for mine, theirs in zip(results[0]["parameters"], other["parameters"], strict=True):
            assert torch.equal(mine, theirs)
    assert len({result["loss"] for result in results}) == 1

    reference = network()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.2)
    for step in range(steps):
        rows = [row for result in results for row in result["taken"][step]]
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(x[rows]), y[rows]).backward()
        optimizer.step()
    for mine, theirs in zip(reference.parameters(), results[0]["parameters"], strict=True):
        torch.testing.assert_close(theirs, mine.detach(), rtol=1e-5, atol=1e-6)

    out = capfd.readouterr().out
    assert out.count("epoch 0: loss") == 1  # the head alone prints
    assert out.count("epoch 1: loss") == 1


@sky.compute
def finetune() -> dict[str, Any]:
    import tempfile

    from datasets import Dataset
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    rows = [[i % 7, (3 * i) % 11, (5 * i) % 13] for i in range(64)]
    examples = Dataset.from_dict({"input_ids": rows, "labels": [row[0] % 2 for row in rows]})
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=2,
            per_device_train_batch_size=4,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(model, arguments, train_dataset=examples).train()
    return {
        "rank": arguments.process_index,
        "world_size": arguments.world_size,
        "mode": str(arguments.parallel_mode),
        "weights": model.classifier.weight.detach(),
    }


def test_the_trainer_of_hugging_face_finds_the_group(pool: Any) -> None:
    results = finetune() @ pool
    assert [result["rank"] for result in results] == [0, 1, 2, 3]
    assert {result["world_size"] for result in results} == {RANKS}
    assert {result["mode"] for result in results} == {"ParallelMode.DISTRIBUTED"}
    for other in results[1:]:
        assert torch.equal(results[0]["weights"], other["weights"])


@sky.compute
def accelerated() -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(wrapped(torch.full((1, 2), float(accelerator.process_index))).sum())
    optimizer.step()
    return {
        "index": accelerator.process_index,
        "local": accelerator.local_process_index,
        "count": accelerator.num_processes,
        "weight": model.weight.tolist(),
    }


def test_accelerate_finds_all_ranks_with_no_configuration(pool: Any) -> None:
    results = accelerated() @ pool
    assert [result["index"] for result in results] == [0, 1, 2, 3]
    assert [result["local"] for result in results] == [0, 1, 0, 1]
    assert {result["count"] for result in results} == {RANKS}
    assert [result["weight"] for result in results] == [[[-1.5, -1.5]]] * RANKS  # the mean of 0, 1, 2, 3


@sky.compute
@sky.stdout(only=lambda info: info.rank in (1, 3))
def speak() -> None:
    print(f"rank {sky.instance_info().rank} speaks")


@sky.compute
@sky.silent
def quiet() -> None:
    print("never")
    while sky.plugins.counter("loud").value < RANKS:  # until the others have printed beside this task
        time.sleep(0.01)
    print("nor now", file=sys.stderr)


@sky.compute
def loud() -> None:
    print(f"rank {sky.instance_info().rank} is loud")
    sky.plugins.counter("loud").add()


def test_a_predicate_chooses_who_prints(pool: Any, capfd: pytest.CaptureFixture) -> None:
    speak() @ pool
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == ["[1] rank 1 speaks", "[3] rank 3 speaks"]


def test_a_silent_task_silences_nobody_beside_it(pool: Any, capfd: pytest.CaptureFixture) -> None:
    running = quiet().on(0) > pool
    loud() @ pool
    running.result(100)
    seen = capfd.readouterr()
    assert sorted(seen.out.splitlines()) == [f"[{rank}] rank {rank} is loud" for rank in range(RANKS)]
    assert "nor now" not in seen.err


@sky.compute
@sky.integrations.torch(backend="gloo")
def below() -> int:
    import torch.distributed as dist

    return dist.get_rank()


@sky.integrations.torch
@sky.compute
def above() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def test_the_decorator_beside_the_plugin_joins_nothing_twice(pool: Any) -> None:
    assert below() @ pool == [0, 1, 2, 3]
    assert above() @ pool == [0, 1, 2, 3]


@sky.compute
def coordinated(path: str, rounds: int) -> list[int]:
    counted = []
    for _ in range(rounds):
        with sky.plugins.lock("file", timeout_seconds=100):
            file = Path(path)
            file.write_text(str(int(file.read_text()) + 1))  # loses counts if two do it at once
        counted.append(sky.plugins.counter("all").add())
        sky.plugins.barrier("round", timeout_seconds=100)
    return counted


def test_ranks_meet_count_and_exclude_each_other(pool: Any, tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("0")
    results = coordinated(str(path), 5) @ pool
    assert path.read_text() == str(5 * RANKS)
    assert sorted(number for counted in results for number in counted) == list(range(1, 5 * RANKS + 1))
    for step in range(5):  # nobody is a round ahead
        assert sorted(counted[step] for counted in results) == list(range(step * RANKS + 1, (step + 1) * RANKS + 1))


@sky.compute
def lonely_barrier() -> None:
    sky.plugins.barrier("lonely", timeout_seconds=0.5)


def test_a_barrier_names_who_did_not_come(pool: Any) -> None:
    with pytest.raises(TimeoutError, match=r"barrier 'lonely': rank 1, 2, 3 did not arrive"):
        lonely_barrier().on(0) >> pool


# --- what fails ------------------------------------------------------------------------------------------------------


@sky.compute
def fail_on(rank: int) -> float:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has no data")
    value = torch.ones(1)
    dist.all_reduce(value)  # for ever, if nobody ends it
    return value.item()


def test_one_failing_rank_ends_the_others_and_all_are_reported(pool: Any) -> None:
    port = (environment() >> pool)["MASTER_PORT"]
    with pytest.raises(RankErrors) as caught:
        fail_on(2) @ pool
    error = caught.value
    assert error.first == 2
    assert isinstance(error.by_rank[2], ValueError)
    assert "rank 2 has no data" in str(error.by_rank[2])
    assert "fail_on" in str(error.by_rank[2].__cause__)  # the remote traceback
    assert sorted(error.by_rank) == [0, 1, 2, 3]
    assert any("stopped because rank 2 had failed" in note for note in error.by_rank[0].__notes__)

    assert fail_on(-1) @ pool == [4.0] * RANKS  # the next generation works
    assert (environment() >> pool)["MASTER_PORT"] != port


@sky.compute
def die_on(rank: int, path: str) -> None:
    import multiprocessing
    import signal
    import subprocess

    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == rank:
        # A forked process has this one's connections to its peers, as the workers of a DataLoader do.
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(10_000,))
        forked.start()
        other = subprocess.Popen(["sleep", "10000"])
        Path(path).write_text(f"{forked.pid} {other.pid} {time.time()}")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def test_a_killed_rank_is_named_within_five_seconds_and_replaced(pool: Any, tmp_path: Path) -> None:
    before = [row["pid"] for row in environment() @ pool]
    died = tmp_path / "died"
    with pytest.raises(RankErrors) as caught:
        die_on(1, str(died)) @ pool
    reported = time.time()
    *children, moment = died.read_text().split()
    assert reported - float(moment) < 5  # far from any timeout of a collective
    assert caught.value.first == 1
    assert isinstance(caught.value.by_rank[1], SessionLostError)
    assert "failed on rank 1" in str(caught.value)
    assert not alive(before[1])
    assert [child for child in map(int, children) if alive(child)] == []

    after = [row["pid"] for row in environment() @ pool]
    assert [row["rank"] for row in environment() @ pool] == [0, 1, 2, 3]
    assert after[1] != before[1]
    assert [after[rank] for rank in (0, 2, 3)] == [before[rank] for rank in (0, 2, 3)]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@sky.compute
def get_stuck_on(rank: int) -> None:
    if sky.instance_info().rank == rank:
        time.sleep(10_000)  # C code that no exception reaches
    raise ValueError("not stuck")


def test_a_rank_that_cannot_be_stopped_is_started_anew(pool: Any) -> None:
    before = [row["pid"] for row in environment() @ pool]
    with pytest.raises(RankErrors) as caught:
        get_stuck_on(3) @ pool
    assert "did not stop within 2 s" in "".join(caught.value.by_rank[3].__notes__)
    after = [row["pid"] for row in environment() @ pool]
    assert after[:3] == before[:3]
    assert after[3] != before[3]
    assert not alive(before[3])


def test_nothing_outlives_the_pool(pool: Any) -> None:
    # The last test of the module: it closes the pool that the others used.
    pids = [row["pid"] for row in environment() @ pool]
    pool.close()
    assert [pid for pid in pids if alive(pid)] == []
