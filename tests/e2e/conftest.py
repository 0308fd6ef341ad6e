"""Fixtures of the end-to-end tests: one cluster for the whole run.

Its own control plane and kubelet stand-in, or the cluster of the kubeconfig in SKYPROXY_E2E_KUBECONFIG.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.computes import User
from tests.e2e.control_plane import binaries
from tests.e2e.control_plane.addresses import take_slot
from tests.e2e.control_plane.control_plane import ControlPlane
from tests.e2e.control_plane.stand_in import NODES, StandIn
from tests.e2e.installation import Installation

GIVEN = "SKYPROXY_E2E_KUBECONFIG"
KEEP = "SKYPROXY_E2E_KEEP"
_HERE = Path(__file__).parent
_DIRECTORY = pytest.StashKey[Path]()
_SHOWN_LINES = 30
_SHOWN_CHARACTERS = 400
_NEEDED = ("setpriv", "unshare", "nsenter", "mount", "ip", "chroot")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here is an e2e test, and may wait for a busy machine."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(300))
            if "control_plane" in getattr(item, "fixturenames", ()) and os.environ.get(GIVEN):
                item.add_marker(
                    pytest.mark.skip(reason=f"needs the kubelet stand-in, and {GIVEN} gives a real cluster")
                )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Shows with a failure what the components wrote last: where CI runs, nobody can look at files afterwards."""
    report = yield
    directory = item.session.stash.get(_DIRECTORY, None)
    if report.failed and directory is not None and item.path.is_relative_to(_HERE):
        logs = [*directory.glob("pod-logs/skyproxy-system_*"), directory / "kubelet.log"]
        for path in filter(Path.exists, logs):
            lines = path.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
            report.sections.append((path.name, "\n".join(line[:_SHOWN_CHARACTERS] for line in lines)))
    return report


@pytest.fixture(scope="session")
def run_directory(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Where the run keeps its files. Stays when a test failed, or when SKYPROXY_E2E_KEEP is set."""
    path = request.session.stash[_DIRECTORY] = Path(tempfile.mkdtemp(prefix="skyproxy-e2e-"))
    yield path
    if request.session.testsfailed or os.environ.get(KEEP):
        print(f"\nend-to-end run: logs are in {path}")
    else:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def control_plane(run_directory: Path) -> Iterator[ControlPlane]:
    """The run's own control plane, with nodes whose Pods are processes."""
    if os.geteuid() != 0:
        pytest.fail(f"the kubelet stand-in makes namespaces and mounts: run as root, or give a cluster by {GIVEN}")
    if missing := [name for name in _NEEDED if shutil.which(name) is None]:
        pytest.fail(f"missing: {', '.join(missing)}. On Debian: apt-get install util-linux mount iproute2 coreutils")
    slot = take_slot()
    plane = ControlPlane(binaries.ensure(), run_directory, slot)
    stand_in = StandIn(plane)
    try:
        plane.start()
        stand_in.start()
        yield plane
        plane.check()
        stand_in.check()
    finally:
        stand_in.stop()
        plane.stop()
        os.close(slot.lock)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, run_directory: Path) -> Iterator[Cluster]:
    """The cluster, as an administrator sees it."""
    given = os.environ.get(GIVEN)
    if given:
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            pytest.fail(f"{GIVEN} is set, but there is no kubectl")
        made = Cluster(kubectl, Path(given), run_directory, local=False)
    else:
        plane = request.getfixturevalue("control_plane")
        made = Cluster(binaries.ensure()["kubectl"], plane.kubeconfig, run_directory, local=True)
    try:
        if made.local:
            made.wait_all("/api/v1/nodes", lambda nodes: len(nodes) == len(NODES), "all nodes are registered")
        yield made
    finally:
        made.close()


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own, in which Pods can be made; deleted afterwards, without waiting."""
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    cluster.create("/api/v1/namespaces", {"metadata": {"name": name}})
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    # Before 1.24 a Pod is refused until its account has a token.
    cluster.wait(account, lambda found: found and (not cluster.local or found.get("secrets")), "the default account")
    yield name
    cluster.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture(scope="session")
def installation(cluster: Cluster, run_directory: Path) -> Installation:
    """skyproxy, installed; the operator works."""
    made = Installation(cluster, run_directory)
    made.apply()
    made.wait_available()
    return made


@pytest.fixture
def user(cluster: Cluster, namespace: str, installation: Installation, tmp_path: Path) -> User:
    """Someone with a kubeconfig and a namespace."""
    return User(cluster, namespace, tmp_path)
