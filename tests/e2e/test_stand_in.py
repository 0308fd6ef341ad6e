"""The kubelet stand-in behaves as a kubelet does, as far as the other tests depend on it.

The same tests hold for real nodes (`make e2e-real`), so that what the two do differently fails on one of them.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosedOK, InvalidStatus
from websockets.sync.client import unix_connect

from tests.e2e.cluster import Cluster, Object, condition
from tests.e2e.computes import process_of
from tests.e2e.conftest import wants_real
from tests.e2e.control_plane.control_plane import ControlPlane
from tests.e2e.kubelet.pods import KILL_ANNOTATION

pytestmark = pytest.mark.usefixtures("control_plane")

_SERVER = (
    "import http.server, signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0));"
    "http.server.SimpleHTTPRequestHandler.protocol_version = 'HTTP/1.1';"
    "http.server.ThreadingHTTPServer(('0.0.0.0', 8080), http.server.SimpleHTTPRequestHandler).serve_forever()"
)

# An image that real nodes have; the stand-in runs what is on this machine.
_IMAGE = "ghcr.io/skyproxy/worker:0.1.0"

# The proxies in between end a connection late after a client's close.
_TUNNEL: Any = {"subprotocols": ["v4.channel.k8s.io"], "close_timeout": 0.5}


def pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


def run_pod(cluster: Cluster, namespace: str, name: str, *command: str, pod: Any = None, **container: Any) -> str:
    """Creates a Pod with one container; gives its path."""
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 2,
        "securityContext": {"runAsUser": 0},
        **(pod or {}),
        "containers": [{"name": "main", "image": _IMAGE, "command": list(command), "workingDir": "/", **container}],
    }
    cluster.create(pods(namespace), {"metadata": {"name": name, "labels": {"app": name}}, "spec": spec})
    return f"{pods(namespace)}/{name}"


def ended(pod: Object | None) -> bool:
    return pod is not None and pod["status"].get("phase") in ("Succeeded", "Failed")


def is_ready(pod: Object | None) -> bool:
    return condition(pod, "Ready").get("status") == "True"


def state_of(pod: Object | None) -> Object:
    statuses = (pod or {}).get("status", {}).get("containerStatuses") or [{}]
    return dict(statuses[0])


def output(cluster: Cluster, path: str) -> str:
    """The log of a Pod that has to end by itself, and well."""
    pod = cluster.wait(path, lambda found: found if ended(found) else None, "the pod ends")
    log = cluster.kubectl("logs", f"--namespace={pod['metadata']['namespace']}", pod["metadata"]["name"])
    assert pod["status"]["phase"] == "Succeeded", log
    return log


def test_variables_come_from_values_fields_secrets_and_config_maps(cluster: Cluster, namespace: str) -> None:
    base = f"/api/v1/namespaces/{namespace}"
    cluster.create(f"{base}/secrets", {"metadata": {"name": "s"}, "stringData": {"PASSWORD": "from a secret"}})
    cluster.create(f"{base}/configmaps", {"metadata": {"name": "c"}, "data": {"COLOUR": "blue"}})
    path = run_pod(
        cluster,
        namespace,
        "variables",
        *("sh", "-c", 'echo "$PLAIN|$WHO|$IP|$PASSWORD|$COLOUR|$1"', "sh", "$(PLAIN)!"),
        env=[
            {"name": "BASE", "value": "plain"},
            {"name": "PLAIN", "value": "$(BASE) $(UNKNOWN)"},
            {"name": "WHO", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "s", "key": "PASSWORD"}}},
        ],
        envFrom=[{"configMapRef": {"name": "c"}}],
    )
    log = output(cluster, path).strip()
    address = cluster.get(path)["status"]["podIP"]
    assert log == f"plain $(UNKNOWN)|variables|{address}|from a secret|blue|plain $(UNKNOWN)!"


def test_volumes_are_where_the_pod_mounts_them_and_nowhere_else(cluster: Cluster, namespace: str) -> None:
    base = f"/api/v1/namespaces/{namespace}"
    cluster.create(f"{base}/secrets", {"metadata": {"name": "s"}, "stringData": {"token": "abc"}})
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    cluster.create(f"{base}/persistentvolumeclaims", {"metadata": {"name": "data"}, "spec": claim})
    volumes = {
        "volumes": [
            {"name": "secret", "secret": {"secretName": "s"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
        ]
    }
    mounts = [
        {"name": "secret", "mountPath": "/var/run/place/secret"},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "data", "mountPath": "/made/for/data"},
    ]
    script = (
        "cat /var/run/place/secret/token; echo; echo kept > /made/for/data/file; echo x > /dev/shm/file;"
        "(echo no > /var/run/place/secret/other) 2>/dev/null && echo writable; touch /anywhere && echo rootfs"
    )
    first = run_pod(cluster, namespace, "first", "sh", "-c", script, pod=volumes, volumeMounts=mounts)
    assert output(cluster, first).split() == ["abc", "rootfs"]
    # Another Pod finds what the claim holds, and nothing of the rest.
    script = "cat /made/for/data/file; ls /dev/shm; (echo x > /anywhere) 2>/dev/null || echo read-only"
    second = run_pod(
        *(cluster, namespace, "second", "sh", "-c", script),
        pod=volumes,
        volumeMounts=mounts,
        securityContext={"readOnlyRootFilesystem": True},
    )
    assert output(cluster, second).split() == ["kept", "read-only"]
    assert not Path("/anywhere").exists()
    assert not Path("/made").exists()
    volume = cluster.get(f"{base}/persistentvolumeclaims/data")["spec"]["volumeName"]
    cluster.delete(first)
    cluster.delete(second)
    cluster.delete(f"{base}/persistentvolumeclaims/data")
    cluster.wait(f"/api/v1/persistentvolumes/{volume}", lambda found: found is None, "the volume is removed")


def test_a_container_runs_as_the_user_it_asks_for(cluster: Cluster, namespace: str) -> None:
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
    cluster.create(path, {"metadata": {"name": "data"}, "spec": claim})
    pod = {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10002, "fsGroup": 10003},
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    }
    script = "id -u; id -g; id -G; echo x > /data/file && echo written; touch /root/x 2>/dev/null || echo refused"
    mounts = [{"name": "data", "mountPath": "/data"}]
    made = run_pod(cluster, namespace, "user", "sh", "-c", script, pod=pod, volumeMounts=mounts)
    assert output(cluster, made).splitlines() == ["10001", "10002", "10002 10003", "written", "refused"]


def test_a_pod_without_its_secret_waits_for_it(cluster: Cluster, namespace: str) -> None:
    volumes = {"volumes": [{"name": "secret", "secret": {"secretName": "late"}}]}
    mounts = [{"name": "secret", "mountPath": "/secret"}]
    path = run_pod(cluster, namespace, "waiting", "cat", "/secret/word", pod=volumes, volumeMounts=mounts)
    cluster.wait_all(
        f"/api/v1/namespaces/{namespace}/events",
        lambda events: any('secret "late" not found' in e["message"] for e in events.values()),
        "an event names the secret",
    )
    assert cluster.get(path)["status"]["phase"] == "Pending"
    secret = {"metadata": {"name": "late"}, "stringData": {"word": "here"}}
    cluster.create(f"/api/v1/namespaces/{namespace}/secrets", secret)
    assert output(cluster, path).strip() == "here"


def test_services_reach_ready_pods_by_address_and_name(cluster: Cluster, namespace: str) -> None:
    probe = {"httpGet": {"port": 8080, "path": "/etc/hostname"}, "periodSeconds": 1}
    path = run_pod(
        *(cluster, namespace, "web", "python", "-c", _SERVER),
        pod={"hostname": "web", "subdomain": "nodes"},
        readinessProbe=probe,
        ports=[{"name": "http", "containerPort": 8080}],
    )
    services = f"/api/v1/namespaces/{namespace}/services"
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    cluster.create(services, {"metadata": {"name": "web"}, "spec": {"selector": {"app": "web"}, "ports": ports}})
    headless = {"clusterIP": "None", "selector": {"app": "web"}, "ports": [{"name": "http", "port": 8080}]}
    cluster.create(services, {"metadata": {"name": "nodes"}, "spec": headless})
    cluster.wait(path, is_ready, "the pod is ready")
    wanted = f"""
import time, urllib.request
for url in ("http://web/", "http://web.{namespace}.svc/", "http://web.nodes.{namespace}.svc.cluster.local:8080/"):
    for attempt in range(100):
        try:
            print(urllib.request.urlopen(url, timeout=5).status)
            break
        except OSError as error:
            time.sleep(0.2)
    else:
        raise SystemExit(f"{{url}}: {{error}}")
"""
    assert output(cluster, run_pod(cluster, namespace, "client", "python", "-c", wanted)).split() == ["200"] * 3


def test_the_api_server_is_reachable_from_a_pod_with_its_account(cluster: Cluster, namespace: str) -> None:
    script = """
import pathlib, ssl, urllib.request, os
account = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")
context = ssl.create_default_context(cafile=account / "ca.crt")
url = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}/api/v1/namespaces"
request = urllib.request.Request(url, headers={"Authorization": "Bearer " + (account / "token").read_text()})
try:
    urllib.request.urlopen(request, context=context)
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
    log = output(cluster, run_pod(cluster, namespace, "caller", "python", "-c", script))
    assert log.startswith("403 ")
    assert f"system:serviceaccount:{namespace}:default" in log


def test_logs_can_be_followed_and_cut(cluster: Cluster, namespace: str) -> None:
    path = run_pod(cluster, namespace, "talker", "sh", "-c", "echo one; echo two; read line </gate; echo $line")
    # A kubelet looks once a second, and may see it only when it has ended.
    cluster.wait(path, lambda found: state_of(found).get("state", {}).keys() & {"running", "terminated"}, "it runs")
    command = ["logs", f"--namespace={namespace}", "talker"]
    followed = cluster.kubectl(*command, "--follow")  # until the container ends, which it does: there is no /gate
    assert followed.startswith("one\ntwo\n")
    assert cluster.kubectl(*command, "--tail=1") == followed.splitlines(keepends=True)[-1]
    stamped = [line.partition(" ") for line in cluster.kubectl(*command, "--timestamps").splitlines()]
    assert [text for _, _, text in stamped] == followed.splitlines()
    assert all(stamp.startswith("20") and stamp.endswith("Z") for stamp, _, _ in stamped)
    assert cluster.kubectl(*command, "--since-time=2100-01-01T00:00:00Z") == ""


def test_port_forward_reaches_the_pod_through_the_api_server(cluster: Cluster, namespace: str) -> None:
    path = run_pod(
        *(cluster, namespace, "web", "python", "-c", _SERVER),
        readinessProbe={"tcpSocket": {"port": 8080}, "periodSeconds": 1},
    )
    cluster.wait(path, is_ready, "the pod is ready")
    uri = f"ws://localhost{path}/portforward?ports=8080"
    with unix_connect(str(cluster.socket), uri, **_TUNNEL) as tunnel:
        assert tunnel.recv(10) == b"\x00" + struct.pack("<H", 8080)
        assert tunnel.recv(10) == b"\x01" + struct.pack("<H", 8080)
        tunnel.send(b"\x00GET /etc/hostname HTTP/1.1\r\nHost: web\r\n\r\n")
        answer = tunnel.recv(10)
        assert answer.startswith(b"\x00HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    ("accept", "taken"),
    [("*/*", True), ("application/json, */*", True), ("application/json", False), ("text/plain", False)],
)
def test_a_tunnel_is_refused_to_who_accepts_only_some_kind_of_answer(
    cluster: Cluster, namespace: str, accept: str, taken: bool
) -> None:
    path = run_pod(cluster, namespace, "sleeper", "sleep", "1000")
    cluster.wait(path, is_ready, "the pod is ready")
    uri = f"ws://localhost{path}/portforward?ports=8080"
    options = {**_TUNNEL, "additional_headers": {"Accept": accept}}
    if taken:
        with unix_connect(str(cluster.socket), uri, **options):
            return
    with pytest.raises(InvalidStatus) as refused, unix_connect(str(cluster.socket), uri, **options):
        pass
    assert refused.value.response.status_code == 406


def test_a_port_that_nobody_serves_ends_the_tunnel(cluster: Cluster, namespace: str) -> None:
    path = run_pod(cluster, namespace, "sleeper", "sleep", "1000")
    cluster.wait(path, is_ready, "the pod is ready")
    uri = f"ws://localhost{path}/portforward?ports=9"
    told = []
    with unix_connect(str(cluster.socket), uri, **_TUNNEL) as tunnel, pytest.raises(ConnectionClosedOK):
        while True:
            told.append(tunnel.recv(10))
    # More often than not a real node closes it before it has said why; the stand-in never says why.
    assert [text[:3] for text in told[:2]] == [b"\x00\t\x00", b"\x01\t\x00"][: len(told)]
    assert all(b"refused" in text for text in told[2:])


@pytest.mark.timeout(240)
def test_an_image_that_is_missing_is_reported_as_such(cluster: Cluster, namespace: str) -> None:
    path = run_pod(cluster, namespace, "imageless", "true", image="registry.invalid/worker:1")
    waiting = cluster.wait(
        path,
        lambda found: (
            (w := state_of(found).get("state", {}).get("waiting", {})).get("reason") == "ImagePullBackOff" and w
        ),
        "the image cannot be pulled",
    )
    assert "registry.invalid/worker:1" in waiting["message"]
    cluster.delete(path)
    # A kubelet notices once its try to pull has ended, which takes as long as names take that nobody knows.
    cluster.wait(path, lambda found: found is None, "the pod is gone", 150)


def test_a_failing_container_is_restarted_with_its_last_words(cluster: Cluster, namespace: str) -> None:
    path = run_pod(
        *(cluster, namespace, "crashing", "sh", "-c", "echo the last words; exit 3"),
        pod={"restartPolicy": "Always"},
        terminationMessagePolicy="FallbackToLogsOnError",
    )
    status = cluster.wait(
        path,
        lambda found: (
            (s := state_of(found)).get("state", {}).get("waiting", {}).get("reason") == "CrashLoopBackOff" and s
        ),
        "the container is backed off",
    )
    assert status["lastState"]["terminated"]["exitCode"] == 3
    assert status["lastState"]["terminated"]["message"] == "the last words\n"
    cluster.wait(path, lambda found: state_of(found).get("restartCount", 0) >= 1, "the container is started again")


def test_a_killed_container_reports_the_reason_that_was_asked_for(
    cluster: Cluster, namespace: str, stand_in: None
) -> None:
    path = run_pod(cluster, namespace, "hungry", "sleep", "1000")
    cluster.wait(path, lambda found: "running" in state_of(found).get("state", {}), "the container runs")
    cluster.patch(path, {"metadata": {"annotations": {KILL_ANNOTATION: "main=OOMKilled"}}})
    pod = cluster.wait(path, lambda found: found if ended(found) else None, "the pod ends")
    terminated = state_of(pod)["state"]["terminated"]
    assert (terminated["reason"], terminated["exitCode"]) == ("OOMKilled", 137)


def test_deletion_is_graceful_and_leaves_no_process(
    cluster: Cluster, namespace: str, request: pytest.FixtureRequest
) -> None:
    script = "trap 'echo bye > /dev/termination-log; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    path = run_pod(cluster, namespace, "polite", "sh", "-c", script)
    status = cluster.wait(path, lambda found: (s := state_of(found)).get("containerID") and s, "the container runs")
    process_id = process_of(status["containerID"])
    os.kill(process_id, 0)
    log = subprocess.Popen(
        cluster.kubectl_command("logs", f"--namespace={namespace}", "polite", "--follow"),
        stdout=subprocess.PIPE,
        env=cluster.environment,
        text=True,
    )
    assert log.stdout is not None
    assert log.stdout.readline() == "up\n"
    cluster.delete(path)
    cluster.wait(path, lambda found: found is None, "the pod is gone")
    # A real kubelet may ask containerd about the container just after it was removed, and send what that says.
    rest = "(rpc error: code = NotFound .*)?" if wants_real(request.config) else ""
    assert re.fullmatch(rest, log.communicate(timeout=30)[0])
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


def test_pods_that_ask_for_too_many_gpus_wait_until_one_is_free(cluster: Cluster, namespace: str) -> None:
    wanted = {"limits": {"nvidia.com/gpu": "2"}}
    first = run_pod(cluster, namespace, "first", "sleep", "1000", resources=wanted)
    cluster.wait(first, is_ready, "the first pod runs")
    second = run_pod(cluster, namespace, "second", "true", resources=wanted)
    refused = cluster.wait(
        second,
        lambda found: (c := condition(found, "PodScheduled")).get("status") == "False" and c,
        "the second pod is refused",
    )
    assert refused["reason"] == "Unschedulable"
    assert "Insufficient nvidia.com/gpu" in refused["message"]
    cluster.delete(first)
    assert output(cluster, second) == ""


def test_containers_do_not_see_the_runs_credentials(
    cluster: Cluster, namespace: str, control_plane: ControlPlane, stand_in: None
) -> None:
    path = run_pod(cluster, namespace, "curious", "ls", "-A", str(control_plane.directory))
    assert output(cluster, path) == ""
