"""`skyproxy doctor`: what is in order on the way from here to a worker, what is not, and how to mend it."""

from __future__ import annotations

import asyncio
import os
import platform
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer
from rich.text import Text

from skyproxy import torch_versions
from skyproxy.cli.arguments import Json, Kubeconfig, KubeContext, Namespace, ProviderName, address_of
from skyproxy.cli.exit_codes import ExitCode
from skyproxy.cli.findings import Finding
from skyproxy.cli.fleet import WorkerAccess
from skyproxy.cli.fleets import access_of_environment, fleet_of
from skyproxy.cli.output import console, progress, show_json
from skyproxy.contexts import CONTEXT_VARIABLE, ContextStore
from skyproxy.errors import SkyproxyError, visible
from skyproxy.extras import install_command
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.variables import misspelt_variables, remedy

_SLOW_SECONDS = 0.1
_MARKS = {
    "ok": "[green]ok[/]",
    "warning": "[yellow]warning[/]",
    "broken": "[red]broken[/]",
    "skipped": "[dim]skipped[/]",
}


def doctor(
    namespace: Namespace = None, context: KubeContext = None, kubeconfig: Kubeconfig = None, as_json: Json = False
) -> None:
    """Check this machine, the chosen worker and the cluster, and say how to fix problems; exit 1 if there are any."""
    findings = []
    with progress("Looking") as say:
        for finding in examine(address_of(namespace, context, kubeconfig), say):
            findings.append(finding)
    if as_json:
        show_json([asdict(finding) for finding in findings])
    else:
        out = console()
        width = max(len(finding.check) for finding in findings)
        for finding in findings:
            mark = _MARKS[finding.state] + " " * (8 - len(finding.state))
            out.print(f"{mark}{finding.check:<{width}}  ", end="")
            out.print(Text(visible(finding.message)))
            if finding.hint:
                out.print(Text(" " * (10 + width) + visible(finding.hint), style="dim"))
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(int(ExitCode.FAILED))


def examine(address: ClusterAddress, say: Callable[[str], None] = lambda _: None) -> Iterator[Finding]:
    """All checks, in the order in which things depend on one another."""
    yield _python()
    yield _torch()
    yield from _variables()
    yield _library("kubernetes_asyncio", "kubernetes", "for clusters")
    say("Looking for a worker")
    yield from _context()
    yield from _worker()
    yield from _local_workers()
    say("Asking the cluster")
    from skyproxy.cli.cluster_checks import examine_cluster

    yield from asyncio.run(examine_cluster(address))


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _torch() -> Finding:
    try:
        found = version("torch")
    except PackageNotFoundError:
        return Finding("torch", "broken", "not installed", install_command("torch"))
    if (caution := torch_versions.caution(found)) is not None:
        return Finding("torch", "warning", f"{found} has not been tested", caution)
    return Finding("torch", "ok", found)


def _variables() -> Iterator[Finding]:
    """Name the environment variables that are meant for skyproxy and that nothing reads; not their values."""
    for name, near in misspelt_variables().items():
        yield Finding(name, "warning", "not a variable of skyproxy; it has no effect", remedy(near))


def _library(name: str, extra: str, purpose: str) -> Finding:
    try:
        return Finding(name, "ok", version(name))
    except PackageNotFoundError:
        return Finding(name, "skipped", f"not installed; needed {purpose}", install_command(extra))


def _context() -> Iterator[Finding]:
    if url := os.environ.get("SKYPROXY_URL"):
        if os.environ.get("SKYPROXY_TOKEN"):
            yield Finding("sky:0", "ok", f"the worker at SKYPROXY_URL={url}")
        else:
            yield Finding(
                "sky:0", "broken", f"SKYPROXY_URL={url} without a token", "Set SKYPROXY_TOKEN, or unset both."
            )
        return
    try:
        context = ContextStore().chosen()
    except SkyproxyError as error:
        yield Finding("sky:0", "broken", str(error), f"Unset {CONTEXT_VARIABLE}, or: skyproxy context list")
        return
    if context is None:
        yield Finding("sky:0", "ok", "an embedded worker: nothing else is chosen")
        return
    yield Finding("sky:0", "ok", f"the saved context {context.name!r} ({context.provider})")
    if path := context.options.get("token_file"):
        yield _private("token file", Path(path))


def _private(check: str, path: Path) -> Finding:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return Finding(
            check, "broken", f"{path}: {error.strerror}", "Connect again: skyproxy connect URL --token-file FILE"
        )
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        return Finding(check, "warning", f"others can read {path}", f"chmod 600 {path}")
    return Finding(check, "ok", str(path))


def _worker() -> Iterator[Finding]:
    """Check that the worker that sky:0 means answers, and fits."""
    url = os.environ.get("SKYPROXY_URL")
    if url and not os.environ.get("SKYPROXY_TOKEN"):
        return  # it was said already
    access: WorkerAccess | None = None
    try:
        access = _choose_access()
        if access is None:
            return
        report = access.report()
        began = time.monotonic()
        access.report()
        seconds = time.monotonic() - began
    except (SkyproxyError, OSError) as error:
        hint = (
            "SKYPROXY_URL goes before saved contexts. Correct it, or unset it."
            if url
            else "See: skyproxy status; or choose another: skyproxy context use NAME"
        )
        yield Finding("worker", "broken", str(error), hint)
        return
    finally:
        if access is not None:
            access.close()
    state = "warning" if seconds > _SLOW_SECONDS else "ok"
    hint = "Each value that is read waits that long; see docs/topics/performance.md." if state == "warning" else ""
    yield Finding("worker", state, f"answers via {access.via} within {seconds * 1000:.0f} ms", hint)
    yield from _versions(report.get("software", {}))


def _choose_access() -> WorkerAccess | None:
    access = access_of_environment()
    if access is not None:
        return access
    context = ContextStore().chosen()
    if context is None:
        return None
    return asyncio.run(fleet_of(context.provider, ClusterAddress.of_options(context.options)).access(context.name))


def _versions(theirs: dict[str, str]) -> Iterator[Finding]:
    for name, parts, consequence in (
        ("skyproxy", 2, "the protocol may differ"),
        ("torch", 2, "operations that differ between them fail"),
    ):
        try:
            own = version(name)
        except PackageNotFoundError:
            continue
        other = theirs.get(name, "unknown")
        same = own.split("+")[0].split(".")[:parts] == other.split("+")[0].split(".")[:parts]
        hint = "" if same else f"Use the same on both sides: {consequence}."
        yield Finding(f"worker's {name}", "ok" if same else "warning", f"{other}, here {own}", hint)


def _local_workers() -> Iterator[Finding]:
    rows = asyncio.run(fleet_of(ProviderName.LOCAL, ClusterAddress()).rows())
    lost = [row.name for row in rows if row.phase == "Lost"]
    if lost:
        names = ", ".join(lost)
        yield Finding(
            "local workers",
            "warning",
            f"exited on their own: {names}",
            f"skyproxy logs {lost[0]}; skyproxy down {lost[0]}",
        )
    elif rows:
        yield Finding("local workers", "ok", ", ".join(f"{row.name} ({row.phase})" for row in rows))
