"""Environment variables that are meant for skyproxy by their names, and that nothing reads."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from skyproxy.settings import Settings
from skyproxy.variables import PREFIX, known_variables, misspelt_variables

ROOT = Path(__file__).resolve().parents[1]
NO_VARIABLES = {"SKYPROXY_END", "SKYPROXY_PORT"}
"""The end of a text in a shell's script, and what Kubernetes sets."""


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("SKYPROXY_TOKNE", "SKYPROXY_TOKEN"),
        ("SKYPROXY_RECONECT", "SKYPROXY_RECONNECT"),
        ("SKYPROXY_URI", "SKYPROXY_URL"),
        ("SKYPROXY_url", "SKYPROXY_URL"),
        ("skyproxy_token", "SKYPROXY_TOKEN"),
        ("SKYPORXY_TOKEN", "SKYPROXY_TOKEN"),
        ("SKYPROXYTOKEN", "SKYPROXY_TOKEN"),
        ("SKY_PROXY_URL", "SKYPROXY_URL"),
        ("SKYPROXY_CERT", "SKYPROXY_CERTIFICATE"),
        ("SKYPROXY_CONNECT_TIMEOUT", "SKYPROXY_CONNECT_TIMEOUT_SECONDS"),
        ("SKYPROXY_MAX_HANDELS", "SKYPROXY_MAX_HANDLES"),
        ("SKYPROXY_PORT", None),
        ("SKYPROXY_XYZZY", None),
        ("SKYPROXY_", None),
    ],
)
def test_a_misspelt_variable_has_the_nearest_known_name(name: str, near: str | None) -> None:
    assert misspelt_variables({name: "secret", "PATH": "/bin"}) == {name: near}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HTTPS_PROXY", "http://proxy:3128"),
        ("no_proxy", "localhost"),
        ("SKYPILOT_DEBUG", "1"),
        ("MY_SKYPROXY_NOTES", "mine"),
        ("_SKYPROXY_COMPLETE", "complete_bash"),
        ("SKYPROXY_OPERATOR_WORKER_IMAGE", "image"),
        ("SKYPROXY_E2E_KUBECONFIG", "file"),
        ("SKYPROXY_SERVICE_HOST", "10.0.0.1"),
        ("SKYPROXY_DEV_SERVICE_PORT_WSS", "8765"),
        ("SKYPROXY_DEV_PORT_8765_TCP_ADDR", "10.0.0.1"),
        ("SKYPROXY_PORT", "tcp://10.0.0.1:8765"),
    ],
)
def test_what_is_another_programs_is_none(name: str, value: str) -> None:
    assert misspelt_variables({name: value}) == {}


def test_every_setting_and_every_variable_that_the_code_names_is_known() -> None:
    known = known_variables()
    named = {
        name
        for folder in ("skyproxy", "skyproxy_server")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"(?<![A-Z_])SKYPROXY_[A-Z][A-Z_]*[A-Z]\b(?!_)", path.read_text(encoding="utf-8"))
    }
    assert {PREFIX + field.name.upper() for field in dataclasses.fields(Settings)} <= known
    assert named - known - NO_VARIABLES == set()
    assert misspelt_variables(dict.fromkeys(known, "1")) == {}
