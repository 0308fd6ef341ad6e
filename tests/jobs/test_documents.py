"""What a job's process is told to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyproxy.errors import ConfigurationError
from skyproxy.functions.scripts import describe_script
from skyproxy.jobs.documents import function_document, new_name, read_document, script_document
from skyproxy.jobs.options import JobOptions
from skyproxy.runtime.instance import InstanceInfo
from skyproxy_server.auth import Identity
from skyproxy_server.jobs.records import asked_record, checked_job_name


@pytest.mark.parametrize(
    "title", ["train", "my script (2)", "../../x", "é", "", "<lambda>", "x" * 200, "-a", "Model.fit"]
)
def test_a_name_that_is_made_up_is_one(title: str) -> None:
    assert checked_job_name(new_name(title)) != checked_job_name(new_name(title))


def test_the_document_of_a_script_has_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    script = describe_script(tmp_path / "a.py", ["--x", 1], env={"A": 1})
    (tmp_path / "payload").write_bytes(script_document(script, InstanceInfo(peers=())))
    document = read_document(tmp_path / "payload")
    assert document["script"]["args"] == ["--x", "1"]
    assert InstanceInfo.from_mapping(document["info"]) == InstanceInfo(peers=())


def test_what_cannot_be_pickled_is_told() -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(ConfigurationError, match=r"cannot be sent as a job.*made inside"):
        function_document(lambda: lock, (), {}, plain=True, shares_files=True)


def test_a_device_of_this_program_is_refused() -> None:
    import skyproxy

    skyproxy.install()
    with pytest.raises(ConfigurationError, match="device of this program"):
        function_document(print, (torch.device("sky", 0),), {}, plain=True, shares_files=True)


@pytest.mark.parametrize("max_restarts", [-1, 1.5, "2", None])
def test_restarts_are_a_number(max_restarts: object) -> None:
    with pytest.raises(ConfigurationError, match="max_restarts"):
        JobOptions(max_restarts=max_restarts).request("t", "script")  # type: ignore[arg-type]


def test_a_worker_takes_what_options_ask_for() -> None:
    asked = JobOptions("mine", 3, 2.5, {"A": 1}).request("t", "script", (1, 2))
    record = asked_record(asked, Identity("me"), 9.0)
    assert (record.name, record.max_restarts, record.grace_seconds, record.env) == ("mine", 3, 2.5, {"A": "1"})
    assert asked_record(JobOptions().request("t", "function"), Identity("me"), 9.0).grace_seconds == 9.0
