"""`python -m skyproxy_server.bootstrap WANTED ...`: installs packages where they are missing, then becomes the worker.

What the image brings stays; what it lacks, or has in another version, goes into an environment over it in the home
folder, which a Pod can write. WANTED is JSON: "requirements", and "steps", the arguments of the installer, one list for
each of its runs. All other arguments are the worker's.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any

from skyproxy.runtime.requirements import is_satisfied

_FINISHED = "finished"


def main(arguments: list[str]) -> int:
    """Installs what is missing and becomes the worker; returns only where the installer failed, with its status."""
    wanted = json.loads(arguments[0])
    python = sys.executable
    if "lock" in wanted or not all(map(is_satisfied, wanted["requirements"])):
        place = Path.home() / ".skyproxy" / hashlib.sha256(arguments[0].encode()).hexdigest()[:16]
        try:
            python = ensure_installed(place, wanted)
        except subprocess.CalledProcessError as error:
            # Its own output says why; it is the end of the log, which becomes the Pod's termination message.
            print(f"skyproxy: the packages could not be installed: {error}", file=sys.stderr)
            return error.returncode or 1
    os.execv(python, [python, "-m", "skyproxy_server", *arguments[1:]])


def ensure_installed(place: Path, wanted: dict[str, Any]) -> str:
    """The interpreter of an environment that has what is wanted over what this one has; made once.

    Raises:
        subprocess.CalledProcessError: the installer failed.
    """
    python = place / "bin" / "python"
    if not (place / _FINISHED).exists():
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        (site,) = place.glob("lib/python*/site-packages")
        # addsitedir, not a bare path: packages that are installed for development are lines in such files themselves.
        own = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        line = "import site; " + "; ".join(f"site.addsitedir({folder!r})" for folder in own)
        (site / "zz-skyproxy-image.pth").write_text(line + "\n", encoding="utf-8")
        if "lock" in wanted:
            text = zlib.decompress(base64.b64decode(wanted["lock"]["text"]))
            (place / wanted["lock"]["name"]).write_bytes(text)
        for step in wanted["steps"]:
            command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-cache-dir", *step]
            subprocess.run(command, check=True, cwd=place)  # where a step finds the locked requirements
        (place / _FINISHED).touch()
    return str(python)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
