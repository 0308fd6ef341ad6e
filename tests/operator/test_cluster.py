"""Requests to an API server that is a small HTTP server here; tests/e2e has the real one."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from skyproxy_operator import cluster as cluster_module
from skyproxy_operator.cluster import UNREADABLE, ApiError, ClusterConnection, path_of
from tests.operator.makers import make_compute, make_pod

SECRET = "c2VjcmV0LXRva2VuLXRoYXQtbm9ib2R5LXNlZXM="
ACCOUNT_TOKEN = "token-of-the-operators-account"


class Server:
    """Answers as it is told, and remembers what it was asked.

    Attributes:
        answers: status and body for each method and path; a coroutine function is called first.
        streams: what answers at a path instead, piece by piece.
        asked: method, path with query, headers and body of each request.
    """

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], Any] = {}
        self.streams: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {}
        self.asked: list[tuple[str, str, Any, Any]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        self.asked.append((request.method, request.path_qs, request.headers, json.loads(text) if text else None))
        if request.path in self.streams:
            return await self.streams[request.path](request)
        answer = self.answers.get((request.method, request.path))
        if callable(answer):
            answer = await answer()
        status, body = answer or (404, {"kind": "Status", "reason": "NotFound", "message": "not found"})
        if isinstance(body, str):
            return web.Response(status=status, text=body)
        return web.json_response(body, status=status)


def run(
    scenario: Callable[[Server, ClusterConnection], Awaitable[None]],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    timeout_seconds: float = 30.0,
) -> None:
    async def main() -> None:
        server = Server()
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", server.handle)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}],
            "users": [{"name": "u", "user": {"token": ACCOUNT_TOKEN}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }
        (folder / "config").write_text(yaml.safe_dump(kubeconfig))
        monkeypatch.setenv("KUBECONFIG", str(folder / "config"))
        cluster = await ClusterConnection.connect(timeout_seconds)
        try:
            await scenario(server, cluster)
        finally:
            await cluster.close()
            await runner.cleanup()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (("v1", "Pod", "lab"), "/api/v1/namespaces/lab/pods"),
        (("v1", "Secret", "lab", "a"), "/api/v1/namespaces/lab/secrets/a"),
        (("networking.k8s.io/v1", "NetworkPolicy", None), "/apis/networking.k8s.io/v1/networkpolicies"),
        (
            ("skyproxy.dev/v1alpha1", "Compute", "lab", "dev", "status"),
            "/apis/skyproxy.dev/v1alpha1/namespaces/lab/computes/dev/status",
        ),
        (("v1", "Pod", "lab", "../x"), "/api/v1/namespaces/lab/pods/..%2Fx"),
    ],
)
def test_paths(arguments: Any, path: str) -> None:
    assert path_of(*arguments) == path


def test_an_object_is_applied_with_our_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = make_pod(make_compute())

    async def scenario(server: Server, cluster: ClusterConnection) -> None:
        server.answers["PATCH", "/api/v1/namespaces/lab/pods/dev-0"] = (200, pod)
        assert await cluster.apply(pod) == pod
        ((_, path, headers, body),) = server.asked
        assert path.endswith("?fieldManager=skyproxy-operator&force=true")
        assert headers["Content-Type"] == "application/apply-patch+yaml"
        assert headers["Authorization"] == f"Bearer {ACCOUNT_TOKEN}"
        assert body == pod

    run(scenario, tmp_path, monkeypatch)


def test_what_is_not_there_is_none_and_what_is_there_already_is_false(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: Server, cluster: ClusterConnection) -> None:
        assert await cluster.read("v1", "Secret", "lab", "a") is None
        assert await cluster.served_kinds("gateway.networking.k8s.io") == {}
        exists = {"kind": "Status", "reason": "AlreadyExists", "message": 'pods "dev-0" already exists'}
        server.answers["POST", "/api/v1/namespaces/lab/pods"] = (409, exists)
        assert await cluster.create(make_pod(make_compute())) is False
        server.answers["POST", "/api/v1/namespaces/lab/pods"] = (201, {})
        assert await cluster.create(make_pod(make_compute())) is True

    run(scenario, tmp_path, monkeypatch)


def test_only_the_very_object_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Server, cluster: ClusterConnection) -> None:
        pod = make_pod(make_compute())
        for status in (200, 404, 409):
            server.answers["DELETE", "/api/v1/namespaces/lab/pods/dev-0"] = (status, {"message": "x"})
            await cluster.delete(pod)
        assert server.asked[0][3]["preconditions"] == {"uid": pod["metadata"]["uid"]}
        server.answers["DELETE", "/api/v1/namespaces/lab/pods/dev-0"] = (403, {"message": "no"})
        with pytest.raises(ApiError, match="Pod dev-0: no"):
            await cluster.delete(pod)

    run(scenario, tmp_path, monkeypatch)


def test_a_status_is_written_to_the_very_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Server, cluster: ClusterConnection) -> None:
        path = "/apis/skyproxy.dev/v1alpha1/namespaces/lab/computes/dev/status"
        mismatch = "metadata.uid: Invalid value: field is immutable"
        for status, message in ((200, ""), (404, "gone"), (409, "uid"), (422, mismatch)):
            server.answers["PATCH", path] = (status, {"message": message})
            await cluster.patch_status(make_compute(), {"phase": "Running"})
        assert server.asked[0][3] == {"metadata": {"uid": "uid-1"}, "status": {"phase": "Running"}}
        assert server.asked[0][2]["Content-Type"] == "application/merge-patch+json"
        server.answers["PATCH", path] = (422, {"message": "status.phase: Unsupported value"})
        with pytest.raises(ApiError, match="Unsupported"):
            await cluster.patch_status(make_compute(), {"phase": "x"})

    run(scenario, tmp_path, monkeypatch)


def test_the_best_version_of_each_kind_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Server, cluster: ClusterConnection) -> None:
        group = "gateway.networking.k8s.io"
        versions = [{"groupVersion": f"{group}/{name}", "version": name} for name in ("v1", "v1alpha3")]
        server.answers["GET", f"/apis/{group}"] = (200, {"versions": versions})
        server.answers["GET", f"/apis/{group}/v1"] = (200, {"resources": [{"kind": "HTTPRoute"}]})
        old = {"resources": [{"kind": "HTTPRoute"}, {"kind": "BackendTLSPolicy"}]}
        server.answers["GET", f"/apis/{group}/v1alpha3"] = (200, old)
        assert await cluster.served_kinds(group) == {"HTTPRoute": "v1", "BackendTLSPolicy": "v1alpha3"}

    run(scenario, tmp_path, monkeypatch)


def test_what_kueue_says_is_found_by_the_pod_and_missing_rights_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: Server, cluster: ClusterConnection) -> None:
        pod, path = make_pod(make_compute()), "/apis/kueue.x-k8s.io/v1beta1/namespaces/lab/workloads"
        assert await cluster.workload("v1beta1", pod) is None
        server.answers["GET", path] = (403, {"message": "no"})
        assert await cluster.workload("v1beta1", pod) is None
        server.answers["GET", path] = (200, {"items": []})
        assert await cluster.workload("v1beta1", pod) is None
        server.answers["GET", path] = (200, {"items": [{"metadata": {"name": "w"}}]})
        found = await cluster.workload("v1beta1", pod)
        assert found is not None
        assert (found["kind"], found["metadata"]["name"]) == ("Workload", "w")
        assert server.asked[-1][1].partition("?")[2] == "labelSelector=kueue.x-k8s.io/job-uid%3Dpod-0-0"
        server.answers["GET", path] = (500, {"message": "no"})
        with pytest.raises(ApiError):
            await cluster.workload("v1beta1", pod)

    run(scenario, tmp_path, monkeypatch)


def test_listed_objects_know_their_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Server, cluster: ClusterConnection) -> None:
        page = {"items": [{"metadata": {"name": "a"}}], "metadata": {"resourceVersion": "7", "continue": "more"}}
        rest = {"items": [{"metadata": {"name": "b"}}], "metadata": {"resourceVersion": "7"}}
        pages = iter([page, rest])

        async def answer() -> tuple[int, Any]:
            return 200, next(pages)

        server.answers["GET", "/api/v1/namespaces/lab/pods"] = answer
        items, version = await cluster.list_version("v1", "Pod", "lab", {"labelSelector": "x"})
        assert items == [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}} for name in "ab"]
        assert version == 7
        assert [path.partition("?")[2] for _, path, _, _ in server.asked] == [
            "labelSelector=x&limit=100",
            "labelSelector=x&limit=100&continue=more",
        ]

    run(scenario, tmp_path, monkeypatch)


def test_one_object_that_is_too_deep_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = '{"metadata": {"name": "deep"}, "spec": {"podTemplate": ' + '{"a": ' * 9000 + "1" + "}" * 9000 + "}}"
    fine = '{"metadata": {"name": "fine"}, "spec": {}}'
    path = "/apis/skyproxy.dev/v1alpha1/computes"

    async def scenario(server: Server, cluster: ClusterConnection) -> None:
        server.answers["GET", path] = (200, f'{{"items": [{deep}, {fine}], "metadata": {{"resourceVersion": "7"}}}}')
        items, version = await cluster.list_version("skyproxy.dev/v1alpha1", "Compute", None, {})
        assert [item["metadata"]["name"] for item in items] == ["deep", "fine"]
        assert version == 7
        lines = [f'{{"type": "ADDED", "object": {text}}}\n'.encode() for text in (deep, fine)]
        server.streams[path] = streaming(*lines)
        events = cluster.watch("skyproxy.dev/v1alpha1", "Compute", None, {}, silence_seconds=30, opened=lambda: None)
        assert [event["object"]["metadata"]["name"] async for event in events] == ["deep", "fine"]

    run(scenario, tmp_path, monkeypatch)


def streaming(
    *pieces: bytes, cut: bool = False, rest: asyncio.Event | None = None
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A handler that sends pieces one after the other, and then ends well, or in the middle of an answer."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        if rest is not None:
            await rest.wait()
        if cut:
            assert request.transport is not None
            request.transport.close()
        return response

    return handle


async def watched(cluster: ClusterConnection, opened: list[str], silence_seconds: float = 30) -> list[Any]:
    query = {"resourceVersion": "5"}
    events = cluster.watch(
        "v1", "Pod", "lab", query, silence_seconds=silence_seconds, opened=lambda: opened.append("opened")
    )
    return [event async for event in events]


@pytest.mark.parametrize("body", ["<html>Sign in</html>", "", "null", "[]", '"text"', '{"metadata": {"name": "de'])
def test_a_success_without_an_object_is_none(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Server, cluster: ClusterConnection) -> None:
        path = "/api/v1/namespaces/lab/pods"
        for place in (("GET", f"{path}/dev-0"), ("GET", path), ("POST", path), ("PATCH", f"{path}/dev-0")):
            server.answers[place] = (200, body)
        pod = make_pod(make_compute())
        told: list[Any] = []
        cluster.wrote = told.append
        for request in (
            cluster.read("v1", "Pod", "lab", "dev-0"),
            cluster.list_all("v1", "Pod", "lab", {}),
            cluster.list_version("v1", "Pod", "lab", {}),
            cluster.create(pod),
            cluster.apply(pod),
            cluster.annotate(pod, {"a": "b"}),
        ):
            with pytest.raises(ApiError, match="answered with what is no object") as caught:
                await request
            assert (caught.value.status, caught.value.reason) == (0, UNREADABLE)
        assert told == []

    run(scenario, tmp_path, monkeypatch)


def test_a_watch_brings_whole_events_however_they_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Server, cluster: ClusterConnection) -> None:
        server.streams["/api/v1/namespaces/lab/pods"] = streaming(b'{"type":"ADDED"}\n{"ty', b'pe":"MODIFIED"}', b"\n")
        opened: list[str] = []
        assert await watched(cluster, opened) == [{"type": "ADDED"}, {"type": "MODIFIED"}]
        assert opened == ["opened"]
        assert server.asked[0][1].partition("?")[2] == "resourceVersion=5&watch=true&allowWatchBookmarks=true"

    run(scenario, tmp_path, monkeypatch)


def test_a_watch_that_is_refused_or_lost_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Server, cluster: ClusterConnection) -> None:
        path, opened = "/api/v1/namespaces/lab/pods", []  # type: tuple[str, list[str]]
        server.answers["GET", path] = (410, {"reason": "Expired", "message": "too old resource version"})
        with pytest.raises(ApiError, match="too old") as caught:
            await watched(cluster, opened)
        assert (caught.value.status, caught.value.reason, opened) == (410, "Expired", [])
        # A connection that says nothing any more may be lost, which is no error: it is opened again.
        server.streams[path] = streaming(b'{"type":"ADDED"}\n', rest=asyncio.Event())
        assert await watched(cluster, opened, silence_seconds=0.2) == [{"type": "ADDED"}]
        server.streams[path] = streaming(b'{"type":"ADDED"}\n', cut=True)
        with pytest.raises(ApiError, match="connection was lost") as caught:
            await watched(cluster, opened)
        assert caught.value.status == 0
        for broken in (b"no JSON\n", b"null\n", b"\n", b"[]\n"):
            server.streams[path] = streaming(broken)
            with pytest.raises(ApiError, match="answered with what is no object") as caught:
                await watched(cluster, opened)
            assert (caught.value.status, caught.value.reason) == (0, UNREADABLE)

    run(scenario, tmp_path, monkeypatch)


def test_an_answer_without_an_end_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "MAX_ANSWER_BYTES", 1 << 20)
    read = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal read
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(4096):
            await response.write(b"x" * (1 << 16))
            read += 1
        return response

    async def scenario(server: Server, cluster: ClusterConnection) -> None:
        path = "/api/v1/namespaces/lab/pods"
        server.streams[path] = server.streams[f"{path}/a"] = endless
        with pytest.raises(ApiError, match="has more than 1048576 bytes") as caught:
            await watched(cluster, [])
        assert caught.value.status == 0
        with pytest.raises(ApiError, match="has more than 1048576 bytes"):
            await cluster.read("v1", "Pod", "lab", "a")
        # What is on its way in sockets comes on top.
        assert read < 1024

    run(scenario, tmp_path, monkeypatch)


def test_many_large_objects_are_listed_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "MAX_ANSWER_BYTES", 1 << 20)
    asked = []

    async def pages(request: web.Request) -> web.StreamResponse:
        begin, limit = int(request.query.get("continue", "0")), int(request.query["limit"])
        asked.append((begin, limit))
        items = [
            {"metadata": {"name": f"p{number}"}, "x": "x" * 100_000} for number in range(begin, min(begin + limit, 20))
        ]
        more = {"continue": str(begin + limit)} if begin + limit < 20 else {}
        return web.json_response({"metadata": {"resourceVersion": "7", **more}, "items": items})

    async def scenario(server: Server, cluster: ClusterConnection) -> None:
        server.streams["/api/v1/namespaces/lab/pods"] = pages
        items, version = await cluster.list_version("v1", "Pod", "lab", {})
        assert ([item["metadata"]["name"] for item in items], version) == ([f"p{number}" for number in range(20)], 7)
        assert asked == [(0, 100), (0, 25), (0, 6), (6, 6), (12, 6), (18, 6)]

    run(scenario, tmp_path, monkeypatch)


def test_no_refusal_forges_a_line_of_the_log() -> None:
    error = ApiError("Pod dev-0", 403, "Forbidden", "denied:\n2026-05-01 forged \x1b]52;c;x\x07")
    assert "\n" not in str(error)
    assert "\x1b" not in str(error)


def test_what_a_write_leaves_behind_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Server, cluster: ClusterConnection) -> None:
        told: list[Any] = []
        cluster.wrote = told.append
        compute = make_compute()
        made = make_pod(compute)
        server.answers["POST", "/api/v1/namespaces/lab/pods"] = (201, made)
        server.answers["DELETE", f"/api/v1/namespaces/lab/pods/{made['metadata']['name']}"] = (200, {"kind": "Status"})
        assert await cluster.create(made)
        await cluster.delete(made)
        assert told == [made]

    run(scenario, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (403, {"reason": "Forbidden", "message": "exceeded quota: x"}, "QuotaExceeded"),
        (500, "<html>no JSON</html>", "ApiError"),
        (503, "", "ApiError"),
    ],
)
def test_refusals_have_a_cause(
    status: int, body: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: Server, cluster: ClusterConnection) -> None:
        server.answers["GET", "/api/v1/namespaces/lab/secrets/a"] = (status, body)
        with pytest.raises(ApiError) as caught:
            await cluster.read("v1", "Secret", "lab", "a")
        assert (caught.value.status, caught.value.cause.reason) == (status, reason)

    run(scenario, tmp_path, monkeypatch)


def test_a_server_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Server, cluster: ClusterConnection) -> None:
        server.answers["GET", "/api/v1/namespaces/lab/secrets/a"] = asyncio.Event().wait
        with pytest.raises(ApiError, match=r"did not answer within 0\.3 s") as caught:
            await cluster.read("v1", "Secret", "lab", "a")
        assert caught.value.status == 0

    run(scenario, tmp_path, monkeypatch, timeout_seconds=0.3)


def test_a_server_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Server, cluster: ClusterConnection) -> None:
        cluster._client.configuration.host = "http://127.0.0.1:1"
        with pytest.raises(ApiError, match="cannot be reached"):
            await cluster.read("v1", "Secret", "lab", "a")

    run(scenario, tmp_path, monkeypatch)


def test_no_secret_and_no_token_is_logged_however_much_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def scenario(server: Server, cluster: ClusterConnection) -> None:
        secret = {"kind": "Secret", "metadata": {"name": "a", "namespace": "lab"}, "data": {"token": SECRET}}
        server.answers["GET", "/api/v1/namespaces/lab/secrets/a"] = (200, secret)
        server.answers["POST", "/api/v1/namespaces/lab/secrets"] = (201, secret)
        assert await cluster.read("v1", "Secret", "lab", "a") == secret
        await cluster.create({"apiVersion": "v1", **secret})

    run(scenario, tmp_path, monkeypatch)
    assert SECRET not in caplog.text
    assert ACCOUNT_TOKEN not in caplog.text
