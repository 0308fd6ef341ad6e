"""Says what images and instances are made of, and what is known against it, from the locks.

    python .ci/audit.py sbom     # writes build/sbom/NAME.cdx.json, in the form of CycloneDX
    python .ci/audit.py audit    # asks for known vulnerabilities; where nobody can be asked, it says so and ends with 0

Each lock has its own list: `worker` and `operator` are the images, `installer` is what instances begin with.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from lock import LOCKS, ROOT

# What the tools say when they cannot reach anybody. Everything else that goes wrong is an error.
_NOBODY = (
    "ConnectionError",
    "ConnectTimeout",
    "Max retries exceeded",
    "Name or service not known",
    "NewConnectionError",
    "ProxyError",
    "ReadTimeout",
    "Temporary failure in name resolution",
    "Could not connect",
)
_SECONDS = 300


def sbom(folder: Path) -> int:
    """Write a bill of materials for each lock."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in LOCKS.items():
        target = folder / f"{name}.cdx.json"
        command = [sys.executable, "-m", "cyclonedx_py", "requirements", "--output-reproducible", "--of", "JSON"]
        subprocess.run([*command, "--output-file", str(target), str(path)], check=True, timeout=_SECONDS)
        print(target.relative_to(ROOT) if target.is_relative_to(ROOT) else target)
    return 0


def audit() -> int:
    """Ask for known vulnerabilities of everything that is locked; 1 where there are some, 2 where asking failed."""
    status = 0
    for name, path in LOCKS.items():
        command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes", "--progress-spinner", "off"]
        done = subprocess.run(
            [*command, "--format", "json", "--requirement", str(path)],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        text, found = verdict(name, done.stdout, done.stderr)
        print(text)
        status = max(status, found)
    return status


def verdict(name: str, output: str, problems: str) -> tuple[str, int]:
    """What the answer about a lock says, and the status that it ends with.

    Args:
        name: of the lock.
        output: what pip-audit wrote, as JSON.
        problems: what it wrote beside it.
    """
    try:
        rows = json.loads(output)["dependencies"]
    except (ValueError, KeyError, TypeError):
        if any(word in problems for word in _NOBODY):
            return f"{name}: not audited, because nobody could be asked about vulnerabilities from here", 0
        return f"{name}: the audit failed: {problems.strip()[-500:]}", 2
    # An index that does not tell about vulnerabilities is no proof that there are none.
    skipped = [row["name"] for row in rows if "skip_reason" in row]
    bad = [f"{row['name']} {row['version']}: {item['id']}" for row in rows for item in row.get("vulns", ())]
    parts = [f"{len(rows) - len(skipped)} of {len(rows)} packages audited"]
    parts += [f"not audited: {', '.join(skipped)}"] if skipped else []
    return "\n  ".join([f"{name}: {'; '.join(parts)}", *bad]), int(bool(bad))


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sbom", "audit"))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "sbom", help="where bills of materials go")
    arguments = parser.parse_args()
    return sbom(arguments.folder) if arguments.what == "sbom" else audit()


if __name__ == "__main__":
    sys.exit(main())
