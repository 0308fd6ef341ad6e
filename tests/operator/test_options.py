"""The operator's options from its environment."""

from __future__ import annotations

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy_operator.options import Options, load


def test_an_empty_environment_gives_the_defaults() -> None:
    assert load({"PATH": "/bin"}) == Options()


def test_every_kind_of_option_can_be_set() -> None:
    options = load(
        {
            "SKYPROXY_OPERATOR_WORKER_IMAGE": "mine",
            "SKYPROXY_OPERATOR_WORKER_UID": "",
            "SKYPROXY_OPERATOR_CONCURRENCY": "3",
            "SKYPROXY_OPERATOR_RESYNC_SECONDS": "1.5",
        }
    )
    assert (options.worker_image, options.worker_uid, options.concurrency, options.resync_seconds) == (
        "mine",
        None,
        3,
        1.5,
    )
    assert load({"SKYPROXY_OPERATOR_WORKER_UID": "7"}).worker_uid == 7


@pytest.mark.parametrize("text", ["many", "", "-1", "1.5"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="SKYPROXY_OPERATOR_CONCURRENCY"):
        load({"SKYPROXY_OPERATOR_CONCURRENCY": text})
