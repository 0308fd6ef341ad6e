"""A cluster as the tests use it: kubectl, plain requests, waits that watch instead of polling."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.e2e.control_plane.processes import bound

Object = dict[str, Any]


class ApiError(Exception):
    """The API server said no.

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Cluster:
    """One user's view of a cluster.

    Requests go through `kubectl proxy` on a Unix socket, so that every way to log in that a kubeconfig knows works.

    Attributes:
        kubeconfig: the user's.
        local: whether the cluster is this run's own, on this machine.
    """

    def __init__(self, kubectl: str, kubeconfig: Path, directory: Path, *, local: bool) -> None:
        self._kubectl = kubectl
        self.kubeconfig = kubeconfig
        self.local = local
        self.socket = directory / f"{kubeconfig.stem}.socket"
        self._proxy = subprocess.Popen(
            bound([kubectl, f"--kubeconfig={kubeconfig}", "proxy", f"--unix-socket={self.socket}"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._proxy.stdout is not None
        self._proxy.stdout.readline()  # "Starting to serve on ..."

    def close(self) -> None:
        """Ends the proxy."""
        self._proxy.terminate()
        self._proxy.communicate()

    # --------------------------------------------------------------------------------------------------------- kubectl

    @property
    def environment(self) -> dict[str, str]:
        """This process's variables, with the user's kubeconfig."""
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig)}

    def kubectl_command(self, *arguments: str) -> list[str]:
        """A command line of kubectl, for `environment`."""
        return [self._kubectl, *arguments]

    def try_kubectl(self, *arguments: str, text: str | None = None, seconds: float = 120) -> Any:
        """Runs kubectl; gives the ended process with stdout and stderr as text."""
        return subprocess.run(
            self.kubectl_command(*arguments),
            input=text,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=self.environment,
            check=False,
        )

    def kubectl(self, *arguments: str, text: str | None = None, seconds: float = 120) -> str:
        """Runs kubectl and gives its output.

        Raises:
            AssertionError: it failed; with what it said.
        """
        ended = self.try_kubectl(*arguments, text=text, seconds=seconds)
        assert ended.returncode == 0, f"kubectl {' '.join(arguments)}:\n{ended.stdout}{ended.stderr}"
        return str(ended.stdout)

    # -------------------------------------------------------------------------------------------------------- requests

    @contextlib.contextmanager
    def _response(
        self, method: str, path: str, body: Any, params: dict[str, str], seconds: float
    ) -> Iterator[http.client.HTTPResponse]:
        connection = _UnixConnection(self.socket, seconds)
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            query = f"?{urlencode(params)}" if params else ""
            data = None if body is None else json.dumps(body)
            connection.request(method, path + query, data, {"Content-Type": kind})
            response = connection.getresponse()
            if response.status >= 400:
                text = response.read().decode(errors="replace")
                try:
                    text = json.loads(text)["message"]
                except (ValueError, KeyError):
                    pass
                raise ApiError(response.status, text)
            yield response
        finally:
            connection.close()

    def request(self, method: str, path: str, body: Any = None, **params: str) -> Object:
        """One request.

        Raises:
            ApiError: with the status and the server's message.
        """
        with self._response(method, path, body, params, 60) as response:
            answer: Object = json.loads(response.read())
            return answer

    def get(self, path: str, **params: str) -> Object:
        """Reads an object or a list."""
        return self.request("GET", path, **params)

    def find(self, path: str) -> Object | None:
        """Reads an object that may not be there."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def items(self, path: str, **params: str) -> list[Object]:
        """Reads a list."""
        found: list[Object] = self.get(path, **params)["items"]
        return found

    def create(self, path: str, body: Object) -> Object:
        """Creates an object in a collection."""
        return self.request("POST", path, body)

    def patch(self, path: str, body: Object) -> Object:
        """Merges into an object."""
        return self.request("PATCH", path, body)

    def delete(self, path: str, **params: str) -> None:
        """Deletes an object, or a collection; what is not there is as good as deleted."""
        try:
            self.request("DELETE", path, **params)
        except ApiError as error:
            if error.status != 404:
                raise

    # ----------------------------------------------------------------------------------------------------------- waits

    def wait(self, path: str, holds: Callable[[Object | None], Any], what: str, seconds: float = 60) -> Any:
        """Waits until something holds for one object, which may not be there: then it is None.

        Returns:
            What `holds` gave.

        Raises:
            AssertionError: the time is over; with the object as it is.
        """
        collection, _, name = path.rpartition("/")

        def one(items: dict[str, Object]) -> Any:
            return holds(next(iter(items.values()), None))

        return self.wait_all(collection, one, what, seconds, fieldSelector=f"metadata.name={name}")

    def wait_all(
        self, path: str, holds: Callable[[dict[str, Object]], Any], what: str, seconds: float = 60, **params: str
    ) -> Any:
        """Waits until something holds for a collection, given as objects by name (with the namespace, if of several).

        Returns:
            What `holds` gave.

        Raises:
            AssertionError: the time is over; with the objects as they are.
        """
        deadline = time.monotonic() + seconds
        items: dict[str, Object] = {}
        while True:
            listed = self.get(path, **params)
            items = {_uid(item): item for item in listed["items"]}
            if result := holds(_by_name(items)):
                return result
            version = listed["metadata"]["resourceVersion"]
            for kind, item in self._changes(path, params, version, deadline):
                if kind == "ERROR":
                    break
                if kind == "DELETED":
                    items.pop(_uid(item), None)
                elif kind != "BOOKMARK":
                    items[_uid(item)] = item
                if result := holds(_by_name(items)):
                    return result
            if time.monotonic() > deadline:
                shown = json.dumps([_brief(item) for item in items.values()], indent=1)
                raise AssertionError(f"not within {seconds:g} s: {what}; {path} {params or ''} is\n{shown}")

    def _changes(
        self, path: str, params: dict[str, str], version: str, deadline: float
    ) -> Iterator[tuple[str, Object]]:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        query = {**params, "watch": "1", "resourceVersion": version, "timeoutSeconds": str(int(left) + 1)}
        try:
            with self._response("GET", path, None, query, left) as response:
                while line := response.readline():
                    event = json.loads(line)
                    yield event["type"], event["object"]
        except (TimeoutError, http.client.HTTPException, ConnectionError, ApiError):
            return


def _uid(item: Object) -> str:
    return str(item["metadata"]["uid"])


def _by_name(items: dict[str, Object]) -> dict[str, Object]:
    return {item["metadata"]["name"]: item for item in items.values()}


def _brief(item: Object) -> Object:
    """An object without what nobody reads in a failure."""
    meta = {k: v for k, v in item["metadata"].items() if k not in ("managedFields", "annotations")}
    return {**item, "metadata": meta}


def condition(item: Object | None, kind: str) -> Object:
    """A condition of an object; empty when it has none."""
    conditions = (item or {}).get("status", {}).get("conditions") or []
    return next((c for c in conditions if c["type"] == kind), {})
