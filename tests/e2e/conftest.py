"""Fixtures of the end-to-end tests: one cluster for the whole run.

Its own control plane with the kubelet stand-in, or with real nodes (`--real`), or the cluster of the kubeconfig in
SKYPROXY_E2E_KUBECONFIG.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cel import server as cel
from tests.e2e.cluster import Cluster, Object, condition
from tests.e2e.computes import User
from tests.e2e.control_plane import binaries
from tests.e2e.control_plane import real_nodes as real
from tests.e2e.control_plane import stand_in as stand_ins
from tests.e2e.control_plane.addresses import Slot, take_slot
from tests.e2e.control_plane.control_plane import ControlPlane
from tests.e2e.control_plane.real_nodes import RealNodes
from tests.e2e.control_plane.stand_in import StandIn
from tests.e2e.installation import Installation

GIVEN = "SKYPROXY_E2E_KUBECONFIG"
KEEP = "SKYPROXY_E2E_KEEP"
_HERE = Path(__file__).parent
_DIRECTORY = pytest.StashKey[Path]()
_SHOWN_LINES = 30
_SHOWN_CHARACTERS = 400
_NEEDED = ("setpriv", "unshare", "nsenter", "mount", "ip", "chroot")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The choice of what is run on."""
    parser.addoption("--real", action="store_true", help="run Pods on real nodes (make e2e-real)")
    parser.addoption(
        "--cel", action="store_true", help="build the server for CEL rules if it is missing (make e2e-cel)"
    )


def wants_real(config: pytest.Config) -> bool:
    """Whether the run is to have real nodes. Without tests of this folder there is no such option."""
    return bool(config.getoption("--real", False))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Everything here is an e2e test, and may wait for a busy machine."""
    real_ones = wants_real(config)
    has_rules = bool(config.getoption("--cel", False)) or cel.is_cached()
    for item in items:
        if not item.path.is_relative_to(_HERE):
            continue
        item.add_marker(pytest.mark.e2e)
        item.add_marker(pytest.mark.timeout(600 if real_ones else 300))
        names = getattr(item, "fixturenames", ())
        if os.environ.get(GIVEN) and {"control_plane", "stand_in", "real_nodes"} & set(names):
            reason = f"needs a control plane of its own, and {GIVEN} gives a cluster"
        elif real_ones and "stand_in" in names:
            reason = "needs Pods that are plain processes, as on the kubelet stand-in"
        elif not real_ones and (item.get_closest_marker("real") or "real_nodes" in names):
            reason = "needs real nodes: make e2e-real"
        elif item.get_closest_marker("cel") and not has_rules:
            reason = "needs an API server that evaluates CEL rules: make e2e-cel"
        else:
            continue
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Shows with a failure what the components wrote last: where CI runs, nobody can look at files afterwards."""
    report = yield
    directory = item.session.stash.get(_DIRECTORY, None)
    if report.failed and directory is not None and item.path.is_relative_to(_HERE):
        logs = [
            *directory.glob("pod-logs/skyproxy-system_*"),
            *directory.glob("nodes/*/log/pods/skyproxy-system_*/*/*.log"),
            directory / "kubelet.log",
            directory / "nodes.log",
        ]
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


class Surroundings:
    """The run's own control plane and its nodes.

    Attributes:
        plane: the control plane.
        real: the real nodes; None where Pods are processes.
        nodes: how many nodes there are.
    """

    def __init__(self, plane: ControlPlane, real: RealNodes | None, nodes: int) -> None:
        self.plane = plane
        self.real = real
        self.nodes = nodes


def _check_machine(needed: tuple[str, ...], packages: str) -> None:
    if os.geteuid() != 0:
        pytest.fail(f"nodes are made of namespaces and mounts: run as root, or give a cluster by {GIVEN}")
    if missing := [name for name in needed if shutil.which(name) is None]:
        pytest.fail(f"missing: {', '.join(missing)}. On Debian: apt-get install {packages}")


@contextlib.contextmanager
def _with_stand_in(slot: Slot, directory: Path) -> Iterator[Surroundings]:
    _check_machine(_NEEDED, "util-linux mount iproute2 coreutils")
    plane = ControlPlane(binaries.ensure(), directory, slot)
    stand_in = StandIn(plane)
    try:
        plane.start()
        stand_in.start()
        yield Surroundings(plane, None, len(stand_ins.NODES))
        plane.check()
        stand_in.check()
    finally:
        stand_in.stop()
        plane.stop()


@contextlib.contextmanager
def _with_real_nodes(slot: Slot, directory: Path) -> Iterator[Surroundings]:
    _check_machine(real.NEEDED, real.PACKAGES)
    programs = binaries.ensure(nodes=True)
    nodes = RealNodes(slot, directory, programs, real.images())
    plane = ControlPlane(programs, directory, slot, nodes.address)
    try:
        nodes.start(plane)
        plane.start()
        yield Surroundings(plane, nodes, len(real.NODES))
        plane.check()
        nodes.check()
    finally:
        nodes.stop()
        plane.stop()


@pytest.fixture(scope="session")
def surroundings(request: pytest.FixtureRequest, run_directory: Path) -> Iterator[Surroundings]:
    """What the run itself starts."""
    slot = take_slot()
    make = _with_real_nodes if wants_real(request.config) else _with_stand_in
    try:
        with make(slot, run_directory) as made:
            yield made
    finally:
        os.close(slot.lock)


@pytest.fixture(scope="session")
def control_plane(surroundings: Surroundings) -> ControlPlane:
    """The run's own control plane."""
    return surroundings.plane


@pytest.fixture(scope="session")
def stand_in(surroundings: Surroundings) -> None:
    """Nodes whose Pods are processes of this machine."""


@pytest.fixture(scope="session")
def real_nodes(surroundings: Surroundings) -> RealNodes:
    """Nodes with kubelet and containerd."""
    assert surroundings.real is not None
    return surroundings.real


def is_ready(node: Object) -> bool:
    """Whether Pods may be bound to a node."""
    return condition(node, "Ready").get("status") == "True" and not node["spec"].get("taints")


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
        own = request.getfixturevalue("surroundings")
        made = Cluster(binaries.ensure()["kubectl"], own.plane.kubeconfig, run_directory, local=True)
    try:
        if made.local:
            made.wait_all(
                "/api/v1/nodes",
                lambda nodes: len(nodes) == own.nodes and all(map(is_ready, nodes.values())),
                "all nodes are ready",
                120,
            )
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
