"""Requests, errors, watches and logs against a server that answers as the test says."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web

from skyproxy.errors import ClusterError, ConfigurationError
from skyproxy.kubernetes import client as module
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.kubernetes.client import ClusterClient

pytestmark = pytest.mark.timeout(60)
T = TypeVar("T")


def use(kubeconfig: Path, work: Callable[[ClusterClient], Awaitable[T]]) -> T:
    async def run() -> T:
        async with ClusterClient(ClusterAddress(kubeconfig=str(kubeconfig))) as client:
            return await work(client)

    return asyncio.run(run())


def refusal(status: int, reason: str = "", message: str = "no", **more: Any) -> Any:
    return web.json_response({"kind": "Status", "reason": reason, "message": message, **more}, status=status)


def compute(name: str, version: int = 1, **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"kind": "Compute", "metadata": metadata, "spec": {}, "status": status}


def listing(version: int, *items: dict[str, Any]) -> Any:
    return web.json_response({"metadata": {"resourceVersion": str(version)}, "items": list(items)})


def fails(server: Any, kubeconfig: Path, answer: Any, path: str = "/api/v1/nodes") -> ClusterError:
    async def handler(request: Any) -> Any:
        return answer

    server.handler = handler
    with pytest.raises(ClusterError) as caught:
        use(kubeconfig, lambda client: client.request("GET", path))
    return caught.value


def test_a_request_bears_the_token_and_names_its_namespace(server: Any, kubeconfig: Path) -> None:
    async def handler(request: Any) -> Any:
        return listing(1, compute("a"))

    server.handler = handler
    found = use(kubeconfig, lambda client: client.list_computes())
    assert [item["metadata"]["name"] for item in found] == ["a"]
    assert server.requests == ["GET /apis/skyproxy.dev/v1alpha1/namespaces/team/computes"]
    assert server.tokens == ["Bearer secret-token"]


def test_apply_is_server_side_and_ours(server: Any, kubeconfig: Path) -> None:
    bodies = []

    async def handler(request: Any) -> Any:
        bodies.append((request.content_type, json.loads(await request.text())))
        return web.json_response({})

    server.handler = handler
    manifest = {"metadata": {"name": "a"}, "spec": {"nodes": 2}}
    use(kubeconfig, lambda client: client.apply(manifest))
    assert server.requests[0].startswith("PATCH ")
    assert server.requests[0].endswith("/computes/a?fieldManager=skyproxy&force=true")
    assert bodies == [("application/apply-patch+yaml", manifest)]


def test_nothing_of_that_name_is_none_and_no_error(server: Any, kubeconfig: Path) -> None:
    async def handler(request: Any) -> Any:
        return refusal(404, "NotFound", details={"name": "a", "kind": "computes"})

    server.handler = handler
    assert use(kubeconfig, lambda client: client.get("a")) is None
    assert use(kubeconfig, lambda client: client.delete("a")) is False


def test_a_cluster_without_skyproxy_is_told_from_a_missing_name(server: Any, kubeconfig: Path) -> None:
    # What the API server says of a path that it does not know.
    answers = [web.Response(status=404, text="404 page not found\n"), refusal(404, "NotFound", details={})]
    for answer in answers:

        async def handler(request: Any, answer: Any = answer) -> Any:
            return answer

        server.handler = handler
        with pytest.raises(ClusterError, match="skyproxy install"):
            use(kubeconfig, lambda client: client.get("a"))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda: refusal(403, "Forbidden", "nodes is forbidden"), "you may not do that.*nodes is forbidden"),
        (lambda: refusal(422, "Invalid", "spec.nodes: must be >= 1"), "spec.nodes: must be >= 1"),
        (lambda: web.Response(status=502, text="<html>bad gateway"), "bad gateway"),
        (lambda: web.Response(text="not JSON"), "not JSON"),
        (lambda: refusal(401, "Unauthorized"), "does not accept your credentials"),
    ],
)
def test_a_refusal_says_what_the_server_said(server: Any, kubeconfig: Path, answer: Any, says: str) -> None:
    async def handler(request: Any) -> Any:
        return answer()

    server.handler = handler
    with pytest.raises(ClusterError, match=says):
        use(kubeconfig, lambda client: client.request("GET", "/api/v1/nodes"))


def test_one_object_that_is_too_deep_hides_no_other(server: Any, kubeconfig: Path) -> None:
    deep = json.dumps(compute("deep")).replace('"spec": {}', '"spec": ' + '{"a": ' * 9000 + "1" + "}" * 9000)
    text = f'{{"metadata": {{"resourceVersion": "1"}}, "items": [{deep}, {json.dumps(compute("fine"))}]}}'

    async def handler(request: Any) -> Any:
        return web.Response(text=text, content_type="application/json")

    server.handler = handler
    found = use(kubeconfig, lambda client: client.list_computes())
    assert [item["metadata"]["name"] for item in found] == ["deep", "fine"]


def test_a_server_that_is_away_is_named(kubeconfig: Path, server: Any) -> None:
    server.close()
    with pytest.raises(ClusterError, match=f"{server.url} cannot be asked") as caught:
        use(kubeconfig, lambda client: client.request("GET", "/api"))
    assert caught.value.status == 0


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_expired_credentials_of_a_plugin_are_made_anew(server: Any, kubeconfig: Path, tmp_path: Path) -> None:
    counter, plugin = tmp_path / "count", tmp_path / "plugin"
    plugin.write_text(
        f'#!/bin/sh\necho x >> {counter}\nn=$(wc -l < {counter} | tr -d " ")\n'
        'echo \'{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",'
        ' "status": {"token": "\'"t$n"\'"}}\'\n'
    )
    plugin.chmod(stat.S_IRWXU)
    user = f"{{exec: {{apiVersion: client.authentication.k8s.io/v1, command: {plugin}, interactiveMode: Never}}}}"
    kubeconfig.write_text(kubeconfig.read_text().replace("{token: secret-token}", user))

    async def handler(request: Any) -> Any:
        valid = request.headers["Authorization"] == "Bearer t2"
        return web.json_response({"fine": True}) if valid else refusal(401, "Unauthorized")

    server.handler = handler
    assert use(kubeconfig, lambda client: client.request("GET", "/api")) == {"fine": True}
    assert server.tokens == ["Bearer t1", "Bearer t2"]


# --- addresses ----------------------------------------------------------------------------------------------------


def resolve(**given: Any) -> ClusterAddress:
    return asyncio.run(ClusterAddress(**given).resolved())


def test_an_address_is_resolved_once_and_for_all(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    found = resolve()
    assert found == ClusterAddress("team", "mine", str(kubeconfig))
    assert ClusterAddress.of_options(found.options) == found
    assert resolve(context="bare").namespace == "default"
    assert resolve(namespace="other").namespace == "other"


def test_an_address_that_leads_nowhere_says_what_there_is(
    kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=r"no context 'yours'. It has: bare, mine"):
        resolve(kubeconfig=str(kubeconfig), context="yours")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        resolve(kubeconfig=str(tmp_path / "absent"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match="no Kubernetes cluster is configured"):
        resolve()


# --- watches ------------------------------------------------------------------------------------------------------


class Stream:
    """A watch's answer, piece by piece."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._response = web.StreamResponse()

    async def __aenter__(self) -> Stream:
        await self._response.prepare(self._request)
        return self

    async def __aexit__(self, *_: object) -> None:
        # The connection breaks; a proper end would be `write_eof`.
        if self._request.transport is not None:
            self._request.transport.abort()

    async def say(self, kind: str, item: dict[str, Any]) -> None:
        await self.raw(json.dumps({"type": kind, "object": item}) + "\n")

    async def raw(self, text: str) -> None:
        await self._response.write(text.encode())

    async def hold(self) -> None:
        await asyncio.Event().wait()


def watched(server: Any, kubeconfig: Path, count: int, script: Callable[[Any, int], Awaitable[Any]]) -> list[Any]:
    """The first `count` changes of a watch whose every request `script` answers; it is told the request's number."""
    number = 0

    async def handler(request: Any) -> Any:
        nonlocal number
        number += 1
        return await script(request, number)

    server.handler = handler

    async def work(client: ClusterClient) -> list[Any]:
        seen = []
        changes = client.watch("/watched")
        async for kind, item in changes:
            seen.append((kind, item.get("metadata", {}).get("name"), item.get("metadata", {}).get("resourceVersion")))
            if len(seen) == count:
                break
        await changes.aclose()
        return seen

    return use(kubeconfig, work)


def test_a_watch_goes_on_where_it_broke(server: Any, kubeconfig: Path) -> None:
    async def script(request: Any, number: int) -> Any:
        if "watch" not in request.query:
            return listing(5, compute("a", 4))
        async with Stream(request) as stream:
            if number == 2:
                await stream.say("MODIFIED", compute("a", 6))
                await stream.say("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
                await stream.say("ADDED", compute("b", 10))
                return None
            assert request.query["resourceVersion"] == "10"
            await stream.say("DELETED", compute("b", 11))
            await stream.hold()

    seen = watched(server, kubeconfig, 4, script)
    assert seen == [("ADDED", "a", "4"), ("MODIFIED", "a", "6"), ("ADDED", "b", "10"), ("DELETED", "b", "11")]


@pytest.mark.parametrize("how", ["event", "answer"])
def test_an_expired_history_is_listed_again_and_what_vanished_is_deleted(
    server: Any, kubeconfig: Path, how: str
) -> None:
    async def script(request: Any, number: int) -> Any:
        if "watch" not in request.query:
            return listing(5, compute("a", 1), compute("b", 2)) if number == 1 else listing(50, compute("b", 40))
        if number == 2:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            if how == "answer":
                return web.json_response(gone, status=410)
            async with Stream(request) as stream:
                await stream.say("ERROR", gone)
                return None
        async with Stream(request) as stream:
            await stream.hold()

    seen = watched(server, kubeconfig, 4, script)
    assert seen == [("ADDED", "a", "1"), ("ADDED", "b", "2"), ("DELETED", "a", "1"), ("MODIFIED", "b", "40")]


def test_half_a_line_is_not_taken_for_an_event(server: Any, kubeconfig: Path) -> None:
    async def script(request: Any, number: int) -> Any:
        if "watch" not in request.query:
            return listing(5, compute("a", 5)) if number == 1 else listing(7, compute("a", 7))
        async with Stream(request) as stream:
            if number == 2:
                line = json.dumps({"type": "MODIFIED", "object": compute("a", 6)})
                await stream.raw(line[: len(line) // 2])
                return None
            await stream.say("MODIFIED", compute("a", 6))
            await stream.hold()

    assert watched(server, kubeconfig, 2, script)[0] == ("ADDED", "a", "5")


def test_a_line_in_two_pieces_is_one_event(server: Any, kubeconfig: Path) -> None:
    async def script(request: Any, number: int) -> Any:
        if "watch" not in request.query:
            return listing(5)
        async with Stream(request) as stream:
            line = json.dumps({"type": "ADDED", "object": compute("ä", 6)}, ensure_ascii=False) + "\n"
            data = line.encode()
            cut = data.index("ä".encode()) + 1
            await stream._response.write(data[:cut])
            await asyncio.sleep(0)
            await stream._response.write(data[cut:])
            await stream.hold()

    assert watched(server, kubeconfig, 2, script) == [("ABSENT", None, None), ("ADDED", "ä", "6")]


def test_an_overloaded_server_is_asked_again_and_a_refusal_is_raised(server: Any, kubeconfig: Path) -> None:
    async def script(request: Any, number: int) -> Any:
        if number == 1:
            return refusal(503)
        if number == 2:
            return refusal(429)
        return refusal(403, "Forbidden", "may not watch")

    with pytest.raises(ClusterError, match="may not watch"):
        watched(server, kubeconfig, 1, script)
    assert len(server.requests) == 3


def test_delete_waits_until_it_is_gone_and_not_for_its_successor(server: Any, kubeconfig: Path) -> None:
    old = compute("a", 3)
    new = {**compute("a", 9), "metadata": {"name": "a", "uid": "another", "resourceVersion": "9"}}

    async def handler(request: Any) -> Any:
        if request.method == "DELETE":
            assert await request.json() == {"propagationPolicy": "Foreground"}
            return web.json_response(old)
        if "watch" not in request.query:
            return listing(4, old)
        async with Stream(request) as stream:
            await stream.say("MODIFIED", old)
            await stream.say("ADDED", new)
            await stream.hold()

    server.handler = handler
    assert use(kubeconfig, lambda client: client.delete("a")) is True


# --- logs ---------------------------------------------------------------------------------------------------------


def test_a_followed_log_loses_and_repeats_nothing_over_a_drop(
    server: Any, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamps = ["2026-01-01T00:00:01.1Z", "2026-01-01T00:00:01.12Z", "2026-01-01T00:00:01.12Z", "2026-01-01T00:00:02Z"]
    lines = [f"{stamp} line {number}\n" for number, stamp in enumerate(stamps)]
    real_sleep = asyncio.sleep
    monkeypatch.setattr(module.asyncio, "sleep", lambda _seconds: real_sleep(0))
    asked = []

    async def handler(request: Any) -> Any:
        if not request.path.endswith("/log"):
            phase = "Running" if len(asked) < 2 else "Succeeded"
            return web.json_response({"metadata": {"name": "p"}, "status": {"phase": phase}})
        asked.append(dict(request.query))
        if len(asked) == 1:
            async with Stream(request) as stream:
                # One of the two lines of the same instant got through.
                await stream.raw("".join(lines[:2]))
                return None
        return web.Response(text="".join(lines))

    server.handler = handler

    async def work(client: ClusterClient) -> list[str]:
        return [line async for line in client.logs("p", follow=True, tail=10)]

    assert use(kubeconfig, work) == [f"line {number}" for number in range(4)]
    assert asked[0] == {"timestamps": "true", "follow": "true", "tailLines": "10"}
    assert asked[1] == {"timestamps": "true", "follow": "true", "sinceTime": "2026-01-01T00:00:01Z"}


def test_a_log_without_timestamps_is_shown_as_it_is(server: Any, kubeconfig: Path) -> None:
    async def handler(request: Any) -> Any:
        return web.Response(text="line 1\n\nlast")

    server.handler = handler

    async def work(client: ClusterClient) -> list[str]:
        return [line async for line in client.logs("p")]

    assert use(kubeconfig, work) == ["line 1", "", "last"]
