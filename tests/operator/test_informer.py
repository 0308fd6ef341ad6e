"""What is kept of a cluster: lists, changes, our own writes, and what happens when a watch is interrupted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from skyproxy_operator import informer as module
from skyproxy_operator.cluster import UNREADABLE, ApiError
from skyproxy_operator.informer import Informer, ObjectStore, View, compute_of, view_of
from skyproxy_operator.names import COMPUTE_LABEL
from tests.operator.virtual_time import run_virtually

Object = dict[str, Any]
Script = list[Any]


def pod(name: str, version: int, compute: str = "dev", **more: Any) -> Object:
    metadata = {"name": name, "namespace": "lab", "resourceVersion": str(version), "labels": {COMPUTE_LABEL: compute}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, **more}


def event(kind: str, item: Object) -> Object:
    return {"type": kind, "object": item}


def bookmark(version: int) -> Object:
    return event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(version)}})


class Told:
    """Remembers the changes that a store told of."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, str, bool]] = []

    def __call__(self, change: str, item: Object, listed: bool) -> None:
        self.changes.append((change, item["metadata"]["name"], listed))


def names(items: list[Object]) -> list[str]:
    return [item["metadata"]["name"] for item in items]


# --- the store --------------------------------------------------------------------------------------------------------


def test_a_store_shows_what_was_listed_and_what_has_changed_since() -> None:
    told = Told()
    store = ObjectStore(compute_of, told)
    store.replace([pod("a", 3), pod("b", 4), pod("x", 5, "other")], 5)
    store.change("MODIFIED", pod("b", 6, phase="Running"))
    store.change("ADDED", pod("c", 7))
    store.change("DELETED", pod("a", 8))
    assert names(store.group("lab", "dev")) == ["b", "c"]
    assert store.get("lab", "b") == pod("b", 6, phase="Running")
    assert (store.get("lab", "a"), store.group("else", "dev"), store.version) == (None, [], 8)
    listed = [("ADDED", "a", True), ("ADDED", "b", True), ("ADDED", "x", True)]
    assert told.changes == [*listed, ("MODIFIED", "b", False), ("ADDED", "c", False), ("DELETED", "a", False)]


def test_a_list_shows_what_went_while_nobody_watched() -> None:
    told = Told()
    store = ObjectStore(compute_of, told)
    store.replace([pod("a", 3), pod("b", 4), pod("c", 5)], 5)
    told.changes.clear()
    store.replace([pod("b", 4), pod("c", 9), pod("d", 8)], 10)
    assert names(store.group("lab", "dev")) == ["b", "c", "d"]
    assert told.changes == [("MODIFIED", "c", True), ("ADDED", "d", True), ("DELETED", "a", True)]


def test_an_object_that_changes_its_compute_is_in_one_group_only() -> None:
    store = ObjectStore(compute_of, Told())
    store.replace([pod("a", 3)], 3)
    store.change("MODIFIED", pod("a", 4, "other"))
    assert (names(store.group("lab", "dev")), names(store.group("lab", "other"))) == ([], ["a"])


@pytest.mark.parametrize(
    "overtaking",
    [
        lambda store: store.change("MODIFIED", pod("a", 12, phase="theirs")),
        lambda store: store.replace([pod("a", 12, phase="theirs")], 15),
    ],
)
def test_what_we_wrote_is_seen_until_the_stream_has_come_there(overtaking: Callable[[ObjectStore], None]) -> None:
    store = ObjectStore(compute_of, Told())
    store.replace([pod("a", 3)], 5)
    store.wrote(pod("a", 10, phase="ours"))
    store.wrote(pod("new", 11))
    # Older news, of the same object and of another one, and an older list do not hide it.
    store.change("MODIFIED", pod("a", 7, phase="before"))
    store.change("ADDED", pod("b", 8))
    store.replace([pod("a", 7, phase="before"), pod("b", 8)], 9)
    assert store.get("lab", "a") == pod("a", 10, phase="ours")
    assert names(store.group("lab", "dev")) == ["a", "b", "new"]
    overtaking(store)
    assert store.get("lab", "a") == pod("a", 12, phase="theirs")
    assert "new" not in names(store.group("lab", "dev"))


def test_an_answer_that_comes_later_than_the_news_brings_nothing_back() -> None:
    store = ObjectStore(compute_of, Told())
    store.replace([pod("a", 3)], 5)
    store.change("DELETED", pod("a", 9))
    store.wrote(pod("a", 8))
    assert store.get("lab", "a") is None
    store.change("BOOKMARK", bookmark(20)["object"])
    store.wrote(pod("b", 15))
    assert (store.version, store.get("lab", "b")) == (20, None)


@pytest.mark.parametrize("version", ["", "abc", "\u0663", "1.5", None])
def test_a_version_that_is_no_number_is_refused(version: Any) -> None:
    item = pod("a", 1)
    item["metadata"]["resourceVersion"] = version
    with pytest.raises(ApiError, match="is not a number"):
        ObjectStore(compute_of, Told()).change("ADDED", item)


def test_the_writes_before_a_server_was_set_back_are_forgotten() -> None:
    store = ObjectStore(compute_of, Told())
    store.replace([pod("a", 3)], 500)
    store.wrote(pod("new", 501))
    store.replace([pod("a", 3)], 40)
    assert (names(store.group("lab", "dev")), store.version) == (["a"], 40)
    store.wrote(pod("b", 41))
    assert names(store.group("lab", "dev")) == ["a", "b"]


def _without(*path: str) -> Object:
    item: Object = pod("b", 9)
    part: Any = item
    for key in path[:-1]:
        part = part[key]
    del part[path[-1]]
    return item


STRANGE = [
    _without("metadata"),
    _without("metadata", "name"),
    _without("metadata", "namespace"),
    _without("metadata", "resourceVersion"),
    {**pod("b", 9), "metadata": None},
    {"metadata": {**pod("b", 9)["metadata"], "labels": ["no labels"]}},
]


@pytest.mark.parametrize("strange", STRANGE)
def test_what_cannot_be_understood_changes_nothing(strange: Object) -> None:
    told = Told()
    store = ObjectStore(compute_of, told)
    store.replace([pod("a", 3), pod("b", 4)], 5)
    told.changes.clear()
    wrong = (ApiError, LookupError, TypeError, AttributeError)
    with pytest.raises(wrong):
        store.replace([pod("a", 8), strange], 10)
    for kind in ("ADDED", "MODIFIED", "DELETED"):
        with pytest.raises(wrong):
            store.change(kind, strange)
    # Half of a list would be pods that seem to be gone.
    assert store.group("lab", "dev") == [pod("a", 3), pod("b", 4)]
    assert (store.version, told.changes) == (5, [])


# --- the informer -----------------------------------------------------------------------------------------------------


class Api:
    """An API server with a script: what each list answers, and what each watch brings before it ends.

    Attributes:
        asked: "list", or the version from which was watched, with the time of the loop.
    """

    def __init__(self, lists: Script, watches: Script) -> None:
        self._lists, self._watches = iter(lists), iter(watches)
        self.asked: list[tuple[float, str]] = []
        self.wrote: Callable[[Object], None] = lambda _: None

    def _note(self, what: str) -> None:
        self.asked.append((asyncio.get_running_loop().time(), what))

    async def list_version(self, *_: Any) -> tuple[list[Object], int]:
        self._note("list")
        answer = next(self._lists)
        if isinstance(answer, Exception):
            raise answer
        items, version = answer
        return items, version

    async def watch(
        self,
        _api: str,
        _kind: str,
        _namespace: str | None,
        query: dict[str, str],
        *,
        opened: Any,
        silence_seconds: float,
    ) -> AsyncGenerator[Object, None]:
        self._note(query["resourceVersion"])
        opened()
        for step in next(self._watches, [asyncio.Event()]):
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                await step.wait()
            else:
                yield step


def follow(api: Api, until: Callable[[Informer], bool]) -> ObjectStore:
    """Run an informer, in virtual time, until something holds."""
    store = ObjectStore(compute_of, Told())

    async def main() -> None:
        informer = Informer(api, store, "v1", "Pod")  # type: ignore[arg-type]
        work = asyncio.create_task(informer.run())
        try:
            async with asyncio.timeout(10_000):
                await informer.synced()
                while not until(informer):
                    await asyncio.sleep(0.01)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    run_virtually(main())
    return store


LOST = ApiError("watch of Pod", 0, "Unreachable", "the connection was lost")


def test_a_watch_that_was_interrupted_goes_on_where_it_was() -> None:
    api = Api([([pod("a", 3)], 5)], [[event("ADDED", pod("b", 7)), bookmark(30), LOST], [event("ADDED", pod("c", 31))]])
    store = follow(api, lambda informer: len(informer.store) == 3)
    assert [what for _, what in api.asked[:3]] == ["list", "5", "30"]
    assert names(store.group("lab", "dev")) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "end",
    [
        ApiError("watch of Pod", 410, "Expired", "too old resource version"),
        event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}),
        event("MODIFIED", {"metadata": {}}),
    ],
)
def test_what_the_server_has_forgotten_is_listed_anew(end: Any) -> None:
    api = Api([([pod("a", 3), pod("b", 4)], 5), ([pod("b", 4)], 90)], [[end]])
    store = follow(api, lambda informer: informer.store.version == 90)
    assert [what for _, what in api.asked[:3]] == ["list", "5", "list"]
    assert names(store.group("lab", "dev")) == ["b"]


def test_a_server_that_does_not_answer_is_asked_less_and_less_often() -> None:
    refused = ApiError("list of Pod", 503, "", "etcd is gone")
    api = Api([*[refused] * 12, ([], 1)], [])
    follow(api, lambda _: True)
    times = [when for when, what in api.asked if what == "list"]
    pauses = [round(after - before, 3) for before, after in itertools.pairwise(times)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 6]


def test_a_watch_that_ends_at_once_is_not_asked_for_in_a_circle() -> None:
    api = Api([([], 1)], [[]] * 5)
    follow(api, lambda _: len(api.asked) == 6)
    watches = [when for when, what in api.asked if what != "list"]
    assert watches[-1] - watches[0] >= 7.4


@pytest.mark.parametrize(
    "end",
    [
        ApiError("watch of Pod", 500, "InternalError", "etcd event received with PrevKv=nil"),
        ApiError("watch of Pod", 429, "TooManyRequests", "too many requests"),
        ApiError("watch of Pod", 0, UNREADABLE, "the API server answered with what is no object"),
        event("ERROR", {"kind": "Status", "code": 500, "message": "unable to decode an event"}),
    ],
)
def test_a_version_that_a_server_cannot_go_on_from_is_left_after_three_tries(end: Any) -> None:
    api = Api([([pod("a", 3)], 5), ([pod("a", 8)], 90)], [[end]] * 3)
    store = follow(api, lambda informer: informer.store.version == 90)
    assert [what for _, what in api.asked[:5]] == ["list", "5", "5", "5", "list"]
    assert store.objects() == [pod("a", 8)]


def test_a_server_that_cannot_be_reached_keeps_its_version() -> None:
    api = Api([([pod("a", 3)], 5)], [[LOST]] * 6)
    follow(api, lambda _: len(api.asked) == 8)
    assert [what for _, what in api.asked] == ["list", *["5"] * 7]


def catch_up(api: Api) -> ObjectStore:
    """Run an informer until it has its first list and one watch, and let it catch up once."""
    store = ObjectStore(compute_of, Told())

    async def main() -> None:
        informer = Informer(api, store, "v1", "Pod")  # type: ignore[arg-type]
        work = asyncio.create_task(informer.run())
        await informer.synced()
        async with asyncio.timeout(10_000):
            await informer.catch_up()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    run_virtually(main())
    return store


def test_who_catches_up_sees_what_the_watch_has_not_brought_yet_and_keeps_the_watch() -> None:
    refused = ApiError("list of Pod", 503, "", "etcd is gone")
    api = Api([([pod("a", 3)], 5), refused, ([pod("b", 8)], 9)], [])
    store = catch_up(api)
    assert [what for _, what in api.asked] == ["list", "5", "list", "list"]
    assert (names(store.group("lab", "dev")), store.version) == (["b"], 9)


def test_a_list_that_is_older_than_the_watch_changes_nothing() -> None:
    class Slow(Api):
        async def list_version(self, *place: Any) -> tuple[list[Object], int]:
            answer = await super().list_version(*place)
            await asyncio.sleep(1)  # meanwhile the watch goes on
            return answer

    api = Slow([([pod("a", 3)], 5), ([pod("a", 3)], 7)], [[event("DELETED", pod("a", 8)), event("ADDED", pod("c", 9))]])
    store = catch_up(api)
    assert (names(store.group("lab", "dev")), store.version) == (["c"], 9)


@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED", "DELETED"])
def test_news_that_are_older_than_the_list_change_nothing(kind: str) -> None:
    told = Told()
    store = ObjectStore(compute_of, told)
    store.replace([pod("a", 8)], 9)
    told.changes.clear()
    store.change(kind, pod("a", 6, phase="before"))
    store.change(kind, pod("b", 7))
    assert (store.objects(), store.version, told.changes) == ([pod("a", 8)], 9, [])
    store.change("DELETED", pod("a", 10))
    assert store.objects() == []


# --- the view ---------------------------------------------------------------------------------------------------------


def test_nothing_is_decided_while_a_watch_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    informer = Informer(Api([], []), ObjectStore(compute_of, Told()), "v1", "Pod")  # type: ignore[arg-type]
    view = View({"Pod": [informer]})
    view.check_current(20)
    informer._lost_at = 90.0
    view.check_current(20)
    now[0] = 111.0
    with pytest.raises(ApiError, match=r"watch of Pod: nothing has been heard about them for 21 s"):
        view.check_current(20)


def test_a_view_of_some_namespaces_sees_each_in_its_own_stream() -> None:
    api = Api([], [])
    view = view_of(api, ["lab", "field"], lambda *_: None)  # type: ignore[arg-type]
    assert view.watches("Service")
    assert not view.watches("Secret")
    view.wrote(pod("a", 3))
    view.wrote({"kind": "Secret", "metadata": {"name": "s", "namespace": "lab", "resourceVersion": "4"}})
    api.wrote(pod("b", 4))
    assert names(view.pods("lab", "dev")) == ["a", "b"]
    assert (view.pods("field", "dev"), view.pods("elsewhere", "dev"), view.compute("lab", "dev")) == ([], [], None)
    assert view.computes() == []


def test_runtimes_are_those_of_one_namespace_and_no_other_config_maps() -> None:
    told: list[str] = []
    view = view_of(Api([], []), ["lab"], lambda kind, *_: told.append(kind), "system")  # type: ignore[arg-type]
    (informer,) = view._informers["Runtime"]
    assert (informer.namespace, informer._query) == ("system", {"labelSelector": "skyproxy.dev/runtime"})
    assert not view.watches("ConfigMap")
    metadata = {"name": "a100", "namespace": "system", "resourceVersion": "3"}
    informer.store.change("ADDED", {"kind": "ConfigMap", "metadata": metadata, "data": {"runtime.yaml": "spec: {}"}})
    informer.store.change("ADDED", {"kind": "ConfigMap", "metadata": {**metadata, "name": "b"}})
    assert view.runtimes() == {"a100": "spec: {}", "b": ""}
    assert told == ["Runtime", "Runtime"]
    assert view_of(Api([], []), ["lab"], lambda *_: None).runtimes() == {}  # type: ignore[arg-type]


# --- a server that sends no bookmarks ---------------------------------------------------------------------------------

HOURS = 6
REMEMBERED_SECONDS = 300
"""etcd is compacted that often by Kubernetes; what was before, no watch can begin with."""
CHANGES = {
    60.0: ("ADDED", "a"),
    2_000.3: ("ADDED", "b"),
    # Nothing for two hours, and then while an old watch has just ended.
    9_200.1: ("DELETED", "a"),
    9_200.2: ("ADDED", "c"),
    21_000.0: ("DELETED", "b"),
}


class Silent:
    """An API server whose version grows by everybody's writes, and whose watches tell of our kind alone."""

    def __init__(self) -> None:
        self.lists = 0
        self.refused = 0
        self.wrote: Callable[[Object], None] = lambda _: None

    @staticmethod
    def version(when: float) -> int:
        return 1_000 + int(when * 10)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def list_version(self, *_: Any) -> tuple[list[Object], int]:
        self.lists += 1
        there: dict[str, Object] = {}
        for when, (kind, name) in CHANGES.items():
            if when <= self.now():
                there[name] = pod(name, self.version(when))
                if kind == "DELETED":
                    del there[name]
        return list(there.values()), self.version(self.now())

    async def watch(self, *place: Any, silence_seconds: float, opened: Any) -> AsyncGenerator[Object, None]:
        since = int(place[-1]["resourceVersion"])
        if since < self.version(self.now() - REMEMBERED_SECONDS):
            self.refused += 1
            raise ApiError("watch of Pod", 410, "Expired", "too old resource version")
        opened()
        for when, (kind, name) in CHANGES.items():
            if self.version(when) <= since:
                continue
            if when - self.now() > silence_seconds:
                break
            await asyncio.sleep(max(when - self.now(), 0.0))
            yield event(kind, pod(name, self.version(when)))
        await asyncio.sleep(silence_seconds)


def test_hours_without_a_bookmark_lose_nothing_and_cost_a_list_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Silent()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(module.time, "monotonic", loop.time)
        seen: dict[tuple[str, str], float] = {}
        store = ObjectStore(
            compute_of, lambda kind, item, _: seen.setdefault((kind, item["metadata"]["name"]), loop.time()) and None
        )
        informer = Informer(server, store, "v1", "Pod")  # type: ignore[arg-type]
        work = asyncio.create_task(informer.run())
        stale = 0.0
        while loop.time() < HOURS * 3600:
            await asyncio.sleep(1.0)
            stale = max(stale, informer.stale_seconds())
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        late = {change: seen[change] - when for when, change in CHANGES.items()}
        assert max(late.values()) <= 1.0
        assert names(store.group("lab", "dev")) == ["c"]
        # Looks fail where it is more than 20 s.
        assert stale <= 1.0

    run_virtually(main())
    assert server.refused > 10
    assert server.lists <= HOURS * 3600 / REMEMBERED_SECONDS + 1
