"""README's lines and the command line where a user's environment is unusual."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.programs import environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.name != "posix", reason="homes and locales are chosen by variables"),
]

LINES = """
import torch, skyproxy
x = torch.arange(4.0, device="sky")
print((x * x).sum().item())
"""
_NOBODY = "127.0.0.1:9"  # the port of a service that discards what it is told, where there is one
PROXIES = {
    **dict.fromkeys(("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "WS_PROXY"), f"http://{_NOBODY}"),
    **dict.fromkeys(("ALL_PROXY", "all_proxy"), f"socks5://{_NOBODY}"),
}
CASES: dict[str, tuple[tuple[str, ...], dict[str, str | None]]] = {
    "proxies that do not answer": ((), dict(PROXIES)),
    "isolated from variables": (("-I",), {}),
    "without assertions": (("-O",), {}),
    "warnings are errors": (("-W", "error"), {}),
    "no home": ((), {"HOME": None, "USER": None, "LOGNAME": None}),
    "an ASCII locale": (("-X", "utf8=0"), {"LC_ALL": "C", "LANG": "C", "PYTHONCOERCECLOCALE": "0"}),
    "a name of other letters": ((), {"USER": "jürgen", "LOGNAME": "jürgen"}),
}


def variables(changes: dict[str, str | None]) -> dict[str, str]:
    made = environment(**{name: value for name, value in changes.items() if value is not None})
    del made["PYTHONWARNINGS"]
    return {name: value for name, value in made.items() if changes.get(name, value) is not None}


@pytest.mark.parametrize("case", CASES)
def test_readmes_lines_run(case: str, tmp_path: Path) -> None:
    options, changes = CASES[case]
    folder = tmp_path / "eine Mappe für mich"
    folder.mkdir()
    home = {name: str(folder) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")}
    (folder / "my lines.py").write_text(LINES)
    done = subprocess.run(
        [sys.executable, *options, str(folder / "my lines.py")],
        env=variables({**home, **changes}),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "14.0\n"), done.stderr
    assert done.stderr == ""


def test_a_worker_is_started_found_and_ended_in_a_folder_with_spaces_behind_a_proxy(tmp_path: Path) -> None:
    folder = tmp_path / "eine Mappe für mich"
    folder.mkdir()
    home = {
        name: str(folder / part) for name, part in (("HOME", ""), ("XDG_CONFIG_HOME", "a b"), ("XDG_STATE_HOME", "ü"))
    }
    given = variables({**home, **PROXIES, "USER": "jürgen"})

    def types(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "skyproxy.cli.main", *words],
            env=given,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    types("up", "dev", "--provider", "local", "--gpus", "0")
    try:
        (row,) = json.loads(types("list", "--json"))
        assert (row["name"], row["ready"]) == ("dev", True)
        (folder / "my lines.py").write_text(LINES)
        assert types("run", "--on", "dev", "my lines.py") == "14.0\n"
        assert "session" in types("logs", "dev")
    finally:
        assert types("down", "dev") == "dev is gone\n"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes everywhere")
def test_a_home_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    home = {name: str(tmp_path) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")}
    done = subprocess.run(
        [sys.executable, "-m", "skyproxy.cli.main", "up", "dev", "--provider", "local", "--gpus", "0"],
        env=variables(dict(home)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    tmp_path.chmod(0o700)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert str(tmp_path) in done.stderr
