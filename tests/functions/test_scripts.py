"""What torchrun is told about a script, and which files travel with it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from skyproxy.errors import ConfigurationError, ProtocolError
from skyproxy.functions import scripts
from skyproxy.functions.scripts import Script, describe_script, pack_for
from skyproxy.runtime.instance import InstanceInfo, Peer
from skyproxy.runtime.project_code import pack_files, unpack_files


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "train").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("X = 1\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    return tmp_path


def node(number: int, of: int = 2) -> InstanceInfo:
    peers = tuple(Peer(rank, rank, f"10.0.0.{rank}") for rank in range(of))
    return InstanceInfo(
        node=number, total_nodes=of, head_addr="10.0.0.0", head_port=4000, peers=peers, rank=number, world_size=of
    )


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no script 'trian\.py'"):
        describe_script("trian.py")
    with pytest.raises(ConfigurationError, match="there is no script"):
        describe_script(tmp_path)  # a folder


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "gpus", None])
def test_a_count_of_processes_that_cannot_be_meant_is_refused(project: Path, count: object) -> None:
    with pytest.raises(ConfigurationError, match="nproc_per_node="):
        describe_script(project / "train", procs_per_node=count)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [-1, True, "3"])
def test_a_count_of_restarts_that_cannot_be_meant_is_refused(project: Path, count: object) -> None:
    with pytest.raises(ConfigurationError, match="max_restarts="):
        describe_script(project / "train", max_restarts=count)  # type: ignore[arg-type]


def test_arguments_are_texts(project: Path) -> None:
    script = describe_script(project / "train", ["--lr", 1e-3, Path("x")], env={"N": 3})
    assert script.args == ("--lr", "0.001", "x")
    assert script.env == {"N": "3"}


def test_nodes_that_see_this_machine_get_no_files(project: Path) -> None:
    script = pack_for(describe_script(project / "train"), shares_files=True)
    assert script.files is None
    assert script.directory == os.getcwd()


def test_other_nodes_get_the_script_and_what_lies_beside_it(project: Path, tmp_path: Path) -> None:
    script = pack_for(describe_script(project / "train"), shares_files=False)
    assert script.directory is None
    assert script.files is not None
    place = tmp_path / "there"
    unpack_files(place, script.files)
    found = {path.relative_to(place / "0").as_posix() for path in place.rglob("*") if path.is_file()}
    assert {"train", "helper.py", "package/__init__.py"} <= found
    assert (place / "0" / "train").read_text() == "import helper\n"


def test_files_cannot_leave_their_folder(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="cannot be called"):
        unpack_files(tmp_path / "there", pack_files({(0, "../outside"): b""}))
    assert not (tmp_path / "outside").exists()


class TestOptions:
    """What the agent of a node is told."""

    def test_a_single_node_meets_where_others_do_not_reach_it(self) -> None:
        told = scripts._options(Script("x.py", procs_per_node="gpu", run="abc"), node(0, of=1))
        assert told[:2] == ["--nproc-per-node=gpu", "--max-restarts=0"]
        assert {"--local-addr=127.0.0.1", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=abc"} <= set(told)

    def test_ranks_are_in_the_order_of_nodes(self) -> None:
        told = scripts._options(Script("x.py"), node(1))
        assert {"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.0", "--local-addr=10.0.0.1"} <= set(told)

    def test_restarts_need_a_place_to_meet_again(self) -> None:
        head = scripts._options(Script("x.py", max_restarts=2, run="abc"), node(0))
        other = scripts._options(Script("x.py", max_restarts=2, run="abc"), node(1))
        assert {"--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=abc", "--rdzv-endpoint=10.0.0.0:4000"} <= set(
            head
        )
        assert "--rdzv-conf=is_host=1" in head
        assert "--rdzv-conf=is_host=0" in other


def test_failed_processes_are_named(tmp_path: Path) -> None:
    report = tmp_path / "failures.json"
    row = {"rank": 3, "local_rank": 1, "exit_code": -signal.SIGKILL, "message": ""}
    report.write_text(json.dumps([row, row | {"rank": 2, "exit_code": 1, "message": "ValueError: x"}]))
    text = scripts._failure(Script("/a/train.py"), 1, report)
    assert "train.py failed: rank 3 (process 1 of this node) was ended by SIGKILL" in text
    assert "rank 2 (process 1 of this node) ended with exit code 1: ValueError: x" in text


def test_an_agent_that_left_no_word_is_named(tmp_path: Path) -> None:
    text = scripts._failure(Script("pkg.train", is_module=True), 2, tmp_path / "none")
    assert text.startswith("pkg.train was not run to its end: torchrun's agent ended with exit code 2")
