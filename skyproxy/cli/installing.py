"""`skyproxy install`: puts the operator and its custom resource into a cluster."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Annotated

import typer

from skyproxy.cli.arguments import Kubeconfig, KubeContext, address_of
from skyproxy.cli.output import note, progress


class Overlay(StrEnum):
    """Which manifests."""

    BASE = "base"
    E2E = "e2e"
    OPENSHIFT = "openshift"


def install(
    overlay: Annotated[
        Overlay, typer.Option(help="base; with a Gateway API controller; or for OpenShift.")
    ] = Overlay.BASE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the manifests, and change nothing.")] = False,
    context: KubeContext = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Install skyproxy in a cluster, or bring it to this version. Needs an administrator's rights.

    The same as `kubectl apply --server-side -k` of the manifests that come with this package.
    """
    from skyproxy.kubernetes.manifests import apply_manifests, manifests_folder, render

    folder = manifests_folder(overlay.value)
    objects = render(folder)
    if dry_run:
        import yaml

        typer.echo(yaml.safe_dump_all(objects, sort_keys=False), nl=False)
        return

    async def work() -> None:
        with progress("Installing") as say:
            await apply_manifests(address_of(None, context, kubeconfig), objects, say)

    asyncio.run(work())
    note(f"Applied {len(objects)} objects of {overlay.value}. See: skyproxy doctor")
