"""The lines that a program is told at its first use of a worker: in programs of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import skyproxy
from skyproxy import first_use
from skyproxy.cli.doctor import examine
from skyproxy.cli.main import main
from skyproxy.errors import ConfigurationError
from skyproxy.kubernetes.address import ClusterAddress
from tests.integration.programs import worker

pytestmark = pytest.mark.timeout(200)

USE = "import torch, skyproxy; torch.ones(2, device='sky:0').sum().item(); torch.ones(2).to('sky').tolist()"


def told(program: str, home: Path, **variables: str) -> list[str]:
    """What a program writes to its standard error, in an environment of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SKYPROXY_")}
    kept |= {"PYTHONPATH": os.pathsep.join(item for item in sys.path if item), "XDG_CONFIG_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=kept | variables, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_the_embedded_worker_has_one_line(tmp_path: Path) -> None:
    (line,) = told(USE, tmp_path)
    assert line.startswith("skyproxy: sky:0 is c")
    assert line.endswith("in a worker that this program started on this machine; nothing else is configured")


@pytest.mark.slow
def test_a_worker_that_was_chosen_has_a_line_with_its_address_and_who_chose_it(tmp_path: Path) -> None:
    with worker(tmp_path) as (url, token):
        (line,) = told(USE, tmp_path, SKYPROXY_URL=url, SKYPROXY_TOKEN=token)
        assert line.startswith("skyproxy: sky:0 is cpu")
        assert line.endswith(f"in the worker at {url}, from SKYPROXY_URL")
        kept = tmp_path / "kept"
        kept.write_text(token)
        contexts = tmp_path / "skyproxy" / "contexts"
        contexts.mkdir(parents=True)
        row = {"name": "far", "provider": "remote", "options": {"url": url, "token_file": str(kept)}}
        (contexts / "far.json").write_text(json.dumps(row))
        (line,) = told(USE, tmp_path, SKYPROXY_CONTEXT="far")
        assert line.endswith("in the worker of the saved context 'far' (remote)")
        # Whoever names a worker in the program knows which one it is.
        assert told(f"import skyproxy; skyproxy.connect({url!r}, token={token!r}); {USE}", tmp_path) == []
        assert told(USE, tmp_path, SKYPROXY_CONTEXT="far", SKYPROXY_ANNOUNCE_WORKER="0") == []


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has told of nothing, in an environment without variables of skyproxy's."""
    monkeypatch.setattr(first_use, "_told", set())
    for name in [name for name in os.environ if name.startswith("SKYPROXY_")]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("untold")
def test_a_misspelt_variable_is_named_once_and_its_value_never(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("SKYPROXY_TOKNE", "a-secret"), ("SKYPROXY_RECONECT", "1"), ("SKYPROXY_MARK", "mine")):
        monkeypatch.setenv(name, value)
    for _ in range(2):
        # It is told before anything is missed, because the token may stand in it.
        with pytest.raises(ConfigurationError, match="no token"):
            skyproxy.connect("ws://127.0.0.1:1")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("variable ")[2].partition(" ")[0] for line in lines] == [
        "SKYPROXY_MARK",
        "SKYPROXY_RECONECT",
        "SKYPROXY_TOKNE",
    ]
    assert lines[1].endswith("Did you mean SKYPROXY_RECONNECT?")
    assert lines[2].endswith("Did you mean SKYPROXY_TOKEN?")
    assert not any("a-secret" in line for line in lines)


@pytest.mark.usefixtures("untold")
def test_of_many_misspelt_variables_the_first_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(9):
        monkeypatch.setenv(f"SKYPROXY_XYZ{index}", "1")
    first_use.tell_misspelt_variables()
    first_use.tell_misspelt_variables()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert lines[-1] == "skyproxy: 4 more are not skyproxy's either. See all: skyproxy doctor"


@pytest.mark.usefixtures("untold")
@pytest.mark.parametrize(("command", "lines"), [("version", 1), ("doctor", 0)])
def test_a_command_names_it_but_for_doctor_which_has_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, lines: int
) -> None:
    monkeypatch.setenv("SKYPROXY_CONTXT", "dev")
    monkeypatch.setattr(sys, "argv", ["skyproxy", command, "--help"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.count("Did you mean SKYPROXY_CONTEXT?") == lines


@pytest.mark.usefixtures("untold")
def test_doctor_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPROXY_CONTXT", "a-secret")
    findings = [finding for finding, _ in zip(examine(ClusterAddress()), range(3), strict=False)]
    (found,) = [finding for finding in findings if finding.check == "SKYPROXY_CONTXT"]
    assert (found.state, found.hint) == ("warning", "Did you mean SKYPROXY_CONTEXT?")
    assert "a-secret" not in str(found)
