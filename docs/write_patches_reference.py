"""Writes docs/reference/patches.md from the list of what skyproxy replaces; `make docs` compares the page with it.

python docs/write_patches_reference.py [--check]

The list is filled by a process that makes every replacement there is; it runs no worker.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "patches.md"
_LIMIT_SECONDS = 600

HEAD = """\
# What skyproxy replaces

A device that is written in Python has to answer where PyTorch asks C++, and where it decides by the names of devices
that it knows. skyproxy replaces what stands below and nothing else, all of it through `skyproxy/patching.py`:
`skyproxy.patching.PATCHES` is the list of your own process. This page is written from it by
`docs/write_patches_reference.py`, on torch {torch}; other versions have a few modes more or less. What a program
notices that imports skyproxy and never uses it: [nothing but this](../topics/unused.md).

`import skyproxy` alone, without torch, only leaves three finders in `sys.meta_path`, which wait for torch and for
transformers.

Each test was seen to fail without its row: `make proof` switches one row off at a time, runs its test, and
keeps what it said in `docs/patches_proof.json`. Rows with several places fall as a whole; `ARGS=--each` goes through
their places one by one.

`skyproxy.uninstall()` ends all sessions and puts everything back, but for the [few that cannot be](#what-stays);
`skyproxy.install()` makes the device anew. What somebody else has wrapped since then stays as they left it, with ours
inside. `os.register_at_fork` cannot forget a function; ours notes which line forks.
"""

STAYS = """\

## What stays

After `skyproxy.uninstall()` these are as they were with skyproxy, until the process ends. They do for a program on the
CPU or on a GPU of this machine what PyTorch's own would do if there were no such device.

| attribute | reason |
|---|---|
"""

_open = contextlib.ExitStack()
"""What must not end before the list is read."""


def _integration(name: str) -> Any:
    return importlib.import_module(f"skyproxy.integrations.{name}")


def _first_device() -> None:
    """What the first device does before it has a session."""
    for prepare in importlib.import_module("skyproxy.tensor.core.devices").DEVICES.before_new:
        prepare()
    importlib.import_module("skyproxy.tensor.torch_api.global_modes").follow([])


def _second_device() -> None:
    before_second = importlib.import_module("skyproxy.tensor.core.devices").DEVICES.before_second
    assert before_second is not None
    before_second()


def _other_device() -> None:
    before_other = importlib.import_module("skyproxy.tensor.core.devices").DEVICES.before_other
    assert before_other is not None
    before_other()


def _transformers() -> None:
    for name in ("generation.utils", "integrations.hub_kernels", "models.qwen2.modeling_qwen2"):
        importlib.import_module(f"transformers.{name}")


def _trainer() -> None:
    arguments = importlib.import_module("transformers.training_args")
    _integration("huggingface")._complete_transformers(arguments)


def _quiet() -> None:
    _open.enter_context(importlib.import_module("skyproxy.runtime.output")._ensure_mutable("stdout"))


def _worker() -> None:
    functions = "skyproxy_server.functions"
    for name in (f"{functions}.output", f"{functions}.terminal", "skyproxy.runtime.child_processes"):
        importlib.import_module(name).install()
    importlib.import_module("skyproxy_server.kernel_warnings")._install()


def _steps() -> Iterator[tuple[str, Callable[[], object]]]:
    """The moments, by their names in `patching.When`, each with what brings it about."""
    yield (
        "IMPORT",
        lambda: [importlib.import_module(name) for name in ("safetensors.torch", "torch", "skyproxy.tensor")],
    )
    yield "FIRST_DEVICE", _first_device
    yield "SECOND_DEVICE", _second_device
    yield "OTHER_DEVICE", _other_device
    yield "DYNAMO", lambda: importlib.import_module("torch._dynamo")
    yield "FLEX_ATTENTION", lambda: importlib.import_module("torch.nn.attention.flex_attention")
    yield "TRANSFORMERS", _transformers
    yield "HUGGINGFACE", _trainer
    yield "LIGHTNING", lambda: _integration("lightning")
    yield "QUIET", _quiet
    yield "WORKER", _worker


def collect() -> dict[str, Any]:
    """Make every replacement in this process; return the version of torch, and the sections of the page by moment.

    A section whose library is not installed here is missing.
    """
    skipped: set[str] = set()
    for name, step in _steps():
        try:
            step()
        except ImportError as error:
            if name == "IMPORT":
                raise
            print(f"{name}: {error}", file=sys.stderr)
            skipped.add(name)
    from skyproxy import patching

    sections = {}
    for when in patching.When:
        patches = [patch for patch in patching.PATCHES if patch.when is when]
        if when.name not in skipped:
            sections[when.name] = _section(when, patches)
    rows = _rows_to_prove(patching.PATCHES)
    _open.close()
    torch: Any = importlib.import_module("torch")
    stays = _stays([patch for patch in patching.PATCHES if patch.stays])
    version = ".".join(torch.__version__.split(".")[:2])
    return {"torch": version, "sections": {**sections, "STAYS": stays}, "rows": rows}


def _rows(patches: list[Any]) -> dict[tuple[str, str, str], list[str]]:
    """The places by what the rows of the page have in common: reason, test and file."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for patch in patches:
        names = rows.setdefault((patch.why, patch.test, patch.file), [])
        if patch.place not in names:
            names.append(patch.place)
    return rows


def _rows_to_prove(patches: list[Any]) -> list[dict[str, Any]]:
    return [{"why": why, "test": test, "places": places} for (why, test, _), places in _rows(patches).items()]


def _count(patches: list[Any]) -> str:
    """Count the attributes that a program finds changed which imports skyproxy and does nothing with it."""
    attributes = [patch for patch in patches if patch.owner is not None]
    named = [patch for patch in attributes if patch.file.endswith("/registration.py")]
    answers = [patch for patch in attributes if patch.file.endswith("/accelerator.py")]
    rest = len(attributes) - len(named) - len(answers)
    return (
        f"Of these {len(attributes)} attributes, PyTorch's own functions set {len(named)}, as for any new device; "
        f"{len(answers)} answer for\n`torch.accelerator`; {rest} are replaced one by one."
    )


def _section(when: str, patches: list[Any]) -> str:
    counted = [f"{_count(patches)}\n"] if any(patch.when.name == "IMPORT" for patch in patches) else []
    lines = [
        f"\n## As soon as {when}\n",
        *counted,
        "| what | because | the test that fails without it | in |",
        "|---|---|---|---|",
    ]
    for (why, test, file), places in _rows(patches).items():
        lines.append(f"| {', '.join(map(_code, places))} | {why} | `{test}` | `{file}` |")
    return "\n".join(lines) + "\n"


def _stays(patches: list[Any]) -> str:
    reasons: dict[str, list[str]] = {}
    for patch in patches:
        reasons.setdefault(patch.stays, []).append(_code(patch.place))
    return STAYS + "".join(f"| {', '.join(names)} | {reason} |\n" for reason, names in reasons.items())


def _code(place: str) -> str:
    return place if "`" in place or " " in place.split("[")[0] else f"`{place}`"


def collected() -> dict[str, Any]:
    """What `collect` gives in a process of its own.

    Raises:
        RuntimeError: if that process fails; with what it wrote.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--collect"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"the replacements cannot be collected:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def page(found: dict[str, Any]) -> str:
    """The page for all moments."""
    return HEAD.format(torch=found["torch"]) + "".join(found["sections"].values())


def problems(found: dict[str, Any] | None = None) -> Iterator[str]:
    """What the page says otherwise than the list; nothing where it was written on another torch.

    Sections of libraries that are not installed here are not compared.
    """
    found = found or collected()
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if text and f"on torch {found['torch']};" not in text:
        return
    for name, section in found["sections"].items():
        if section not in text:
            yield f"{PAGE.relative_to(ROOT)}: {name} is not what is replaced; run docs/write_patches_reference.py"


def main() -> int:
    """Write the page, or check it, or print what was collected; return the exit status."""
    sys.path.insert(0, str(ROOT))
    if "--check" in sys.argv:
        found_problems = list(problems())
        print("\n".join(found_problems) or f"{PAGE.relative_to(ROOT)} is what is replaced")
        return 1 if found_problems else 0
    if "--rows" in sys.argv:
        print(json.dumps(collected()["rows"]))
        return 0
    if "--collect" in sys.argv:
        print(json.dumps(collect()))
        return 0
    found = collected()
    PAGE.write_text(page(found), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(found['sections'])} sections")
    return 0


if __name__ == "__main__":
    sys.exit(main())
