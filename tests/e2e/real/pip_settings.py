"""`python pip_settings.py FILE`: this machine's settings of pip in one file, and the folders they name, a line each.

A build of an image then finds packages where this machine does.
"""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

# What belongs to one environment, and to no image.
_LEFT_OUT = (
    "user",
    "target",
    "prefix",
    "root",
    "cache-dir",
    "disable-pip-version-check",
    "no-input",
    "require-virtualenv",
)


def settings() -> dict[str, str]:
    """The settings that hold for every command of pip: files first, environment variables over them."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found: dict[str, str] = {}
    for line in sorted(told.stdout.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in ("global", "install", ":env:") and key not in _LEFT_OUT:
            found[key] = str(ast.literal_eval(value))
    return found


def folders(values: dict[str, str]) -> set[Path]:
    """The folders of this machine that settings lead to."""
    found = set()
    for word in " ".join(values.values()).split():
        parts = urlsplit(word)
        path = Path(parts.path)
        if parts.scheme not in ("", "file") or not path.is_absolute() or not path.exists():
            continue
        # The pages of an index link to files beside it.
        found.add(path.parent if parts.scheme == "file" or path.is_file() else path)
    return found


def main(target: Path) -> None:
    """Write the file, and print the folders."""
    values = settings()
    config = configparser.RawConfigParser()
    config["global"] = values
    with target.open("w", encoding="utf-8") as file:
        config.write(file)
    for folder in sorted(folders(values)):
        print(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
