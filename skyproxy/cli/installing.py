"""`skyproxy install` and `uninstall`: put the operator and its custom resource into a cluster, and take them away."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Annotated

import typer

from skyproxy.cli.arguments import Kubeconfig, KubeContext, address_of
from skyproxy.cli.output import note, progress, show_line, warn
from skyproxy.errors import ConfigurationError
from skyproxy.kubernetes.address import load_yaml
from skyproxy.units import duration_seconds


class Overlay(StrEnum):
    """The manifests to install."""

    BASE = "base"
    E2E = "e2e"
    OPENSHIFT = "openshift"


def install(
    overlay: Annotated[
        Overlay, typer.Option(help="Plain (base), for a Gateway API controller, or for OpenShift.")
    ] = Overlay.BASE,
    namespace: Annotated[
        list[str] | None,
        typer.Option("--namespace", "-n", help="A namespace that may have workers; repeatable."),
    ] = None,
    all_namespaces: Annotated[
        bool,
        typer.Option(
            "--all-namespaces", "-A", help="Allow workers in all namespaces; the operator gets rights in all of them."
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the manifests and change nothing.")] = False,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Install skyproxy in a cluster, or upgrade it to this version. Requires administrator rights.

    The operator looks after the namespaces that you name, and has no rights in others; without a name, after those that
    it looks after already, or that of your kubeconfig. With --all-namespaces, and with an overlay other than base, it
    is the same as `kubectl apply --server-side -k` of the manifests that come with this package.
    """
    from skyproxy.kubernetes.client import ClusterClient
    from skyproxy.kubernetes.manifests import (
        apply_manifests,
        manifests_folder,
        narrowed,
        reach_of_installation,
        render,
    )

    if namespace and all_namespaces:
        raise ConfigurationError("--namespace and --all-namespaces cannot be used together. Leave one out.")
    objects = render(manifests_folder(overlay.value))
    address = address_of(None, context, kubeconfig)

    async def reach() -> list[str]:
        """The namespaces; none for all of them."""
        if all_namespaces or namespace or overlay is not Overlay.BASE:
            return list(namespace or ())
        async with ClusterClient(address) as client:
            found = await reach_of_installation(client, objects)
            return [client.namespace] if found is None else found

    async def work() -> list[str]:
        with progress("Installing") as say:
            names = await reach()
            await apply_manifests(address, narrowed(objects, names) if names else objects, say)
            return names

    if dry_run:
        yaml = load_yaml()
        shown = narrowed(objects, namespace) if namespace else objects
        show_line(yaml.safe_dump_all(shown, sort_keys=False).rstrip("\n"))
        return
    names = asyncio.run(work())
    where = f"in {', '.join(names)}" if names else "in every namespace"
    note(f"Applied skyproxy ({overlay.value}); workers can run {where}. See: skyproxy doctor")


def uninstall(
    overlay: Annotated[
        Overlay, typer.Option(help="What was installed: base, for a Gateway API controller, or for OpenShift.")
    ] = Overlay.BASE,
    delete_computes: Annotated[
        bool, typer.Option("--delete-computes", help="First shut down all workers in all namespaces of the cluster.")
    ] = False,
    keep_computes: Annotated[
        bool, typer.Option("--keep-computes", help="Keep Computes and their workers, without an operator.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted and change nothing.")] = False,
    timeout: Annotated[str, typer.Option(help="How long workers may take to shut down.")] = "5m",
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Remove skyproxy from a cluster. Requires administrator rights.

    While Computes exist, nothing is deleted unless you say what should happen to them.
    """
    from skyproxy.kubernetes.manifests import manifests_folder, remove_manifests, render

    if delete_computes and keep_computes:
        raise ConfigurationError("--delete-computes and --keep-computes cannot be used together. Leave one out.")
    objects = render(manifests_folder(overlay.value))
    if dry_run:
        for item in reversed(objects):
            show_line(f"{item['kind']} {item['metadata']['name']}")
        return
    fate = "delete" if delete_computes else "keep" if keep_computes else "refuse"
    seconds = duration_seconds(timeout, "--timeout")

    async def work() -> list[str]:
        with progress("Uninstalling") as say:
            address = address_of(None, context, kubeconfig)
            return await remove_manifests(address, objects, computes=fate, timeout_seconds=seconds, say=say)

    for line in asyncio.run(work()):
        warn(f"left in the cluster: {line}")
    note(f"skyproxy ({overlay.value}) was removed from the cluster.")
