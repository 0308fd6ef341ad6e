"""Takes the pictures of the web view for docs/howto/web-view.md, of a program that trains; needs Chromium.

Run it in a checkout: `python -m docs.take_screenshots`. The pictures are beside the page.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.integration.programs import environment, wait_for
from tests.webview import training
from tests.webview.browser import Browser

FOLDER = Path(__file__).parent / "howto"
_SAMPLES = 12


def main() -> None:
    """Train with the web view open, and write what is seen."""
    command = [sys.executable, "-u", "train.py"]  # so that the page shows no path of this machine
    with (
        tempfile.TemporaryDirectory() as folder,
        Browser() as browser,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), cwd=_copied(folder)
        ) as program,
    ):
        assert program.stdin is not None
        assert program.stdout is not None
        try:
            with browser.page(program.stdout.readline().strip()) as page:
                assert program.stdout.readline() == "ready\n"
                points = "(document.querySelector('#ops polyline')?.getAttribute('points') || '').split(' ').length"
                while page.value(points) < _SAMPLES:
                    program.stdin.write("more\n")
                    program.stdin.flush()
                    assert program.stdout.readline() == "trained\n"
                wait_for(lambda: page.value("document.querySelectorAll('#profile rect').length"), "the profile is seen")
                page.screenshot(FOLDER / "web-view.png", 860)
                page.value("document.getElementById('profile-note').parentNode.scrollIntoView(); 0")
                page.screenshot(FOLDER / "web-view-profile.png", 300)
        finally:
            program.kill()


def _copied(folder: str) -> str:
    """The folder, with the program in it."""
    shutil.copy(training.__file__, Path(folder, "train.py"))
    return folder


if __name__ == "__main__":
    main()
