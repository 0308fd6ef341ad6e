"""Programs of several kinds that a signal strikes at moments that are drawn; all by hand, see `signal_storms`."""

from __future__ import annotations

import pytest

from tests.integration import signal_storms


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("signal", "way", "program"),
    [
        ("SIGALRM", "before", "lists"),
        ("SIGTERM", "late", "second derivatives"),
        ("SIGUSR1", "faulthandler", "decoding"),
        ("SIGINT", "wakeup", "saving and loading"),
        ("SIGALRM", "late", "loaders with processes"),
    ],
)
def test_a_program_that_was_struck_is_sound(
    signal: str, way: str, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"--signal={signal}", f"--way={way}", f"--only={program}", "--seconds=2", "--strikes=20"]
    status = signal_storms.main(arguments)
    assert status == 0, capsys.readouterr().out
