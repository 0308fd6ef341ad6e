"""Says whether the tree can be released under a tag, and prints what the changelog says of that version.

    python .ci/release.py v0.2.0             # the notes of the release, or what is wrong
    python .ci/release.py v0.2.0 --begin     # gives what is unreleased that version and today's date

The version is in pyproject.toml and nowhere else; the changelog has a section for each.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_TAG = re.compile(r"v(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)")
_UNRELEASED = "## [Unreleased]"


def notes(tag: str, pyproject: str, changelog: str) -> str:
    """Return what the changelog says of a version.

    Args:
        tag: "v" and the version.
        pyproject: the text of pyproject.toml.
        changelog: the text of CHANGELOG.md.

    Raises:
        ValueError: the tag, the version and the changelog do not fit together; says how.
    """
    found = _TAG.fullmatch(tag)
    if found is None:
        raise ValueError(f"{tag!r} is no tag of a release; v1.2.3 and v1.2.3rc1 are")
    version = tomllib.loads(pyproject)["project"]["version"]
    if version != found[1]:
        raise ValueError(f"the tag says {found[1]}, and pyproject.toml {version}")
    sections = re.split(r"^(?=## \[)", changelog, flags=re.MULTILINE)
    for section in sections:
        head, _, body = section.partition("\n")
        if re.fullmatch(rf"## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", head.strip()):
            if not body.strip():
                raise ValueError(f"the changelog says nothing of {version}")
            return body.strip() + "\n"
    raise ValueError(f"the changelog has no section '## [{version}] - YYYY-MM-DD'")


def begun(tag: str, pyproject: str, changelog: str, today: datetime.date) -> tuple[str, str]:
    """Return pyproject.toml and the changelog with what is unreleased as the version of a tag.

    Raises:
        ValueError: the tag is none, or the changelog has that version already.
    """
    found = _TAG.fullmatch(tag)
    if found is None:
        raise ValueError(f"{tag!r} is no tag of a release; v1.2.3 and v1.2.3rc1 are")
    version = found[1]
    if f"## [{version}]" in changelog or _UNRELEASED not in changelog:
        raise ValueError(f"the changelog has {version} already, or nothing unreleased")
    head = f"{_UNRELEASED}\n\n## [{version}] - {today.isoformat()}"
    replaced, count = re.subn(r'^version = "[^"]*"', f'version = "{version}"', pyproject, count=1, flags=re.MULTILINE)
    if count != 1:
        raise ValueError("pyproject.toml has no line for the version")
    return replaced, changelog.replace(_UNRELEASED, head, 1)


def main() -> int:
    """Print the notes of a release, or begin one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tag", help="v and the version")
    parser.add_argument("--begin", action="store_true", help="change pyproject.toml and CHANGELOG.md")
    arguments = parser.parse_args()
    pyproject, changelog = ROOT / "pyproject.toml", ROOT / "CHANGELOG.md"
    texts = pyproject.read_text(encoding="utf-8"), changelog.read_text(encoding="utf-8")
    try:
        if arguments.begin:
            replaced = begun(arguments.tag, *texts, datetime.datetime.now(datetime.UTC).date())
            for path, text in zip((pyproject, changelog), replaced, strict=True):
                path.write_text(text, encoding="utf-8")
        else:
            print(notes(arguments.tag, *texts), end="")
    except ValueError as error:
        print(f"not released: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
