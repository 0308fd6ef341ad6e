"""Workers that run already, started by somebody else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from skyproxy.errors import ConfigurationError, WorkerStartError
from skyproxy.providers.base import Endpoint, Progress, Report, WorkerSpec, refuse_options
from skyproxy.providers.image import Image
from skyproxy.settings import SETTINGS

TOKEN_VARIABLE = "SKYPROXY_TOKEN"


class Remote:
    """Workers at known addresses. They are used as they are, and stay when the pool ends.

    Attributes:
        name: "remote".
        urls: one for each worker process, in the order of ranks.

    Example:
        ```python
        where = skyproxy.Remote(["wss://a.example:8765", "wss://b.example:8765"], token="...")
        with skyproxy.Compute(provider=where) as pool:
            train() @ pool
        ```
    """

    name = "remote"

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | Sequence[str] | None = None,
        token_file: str | Path | None = None,
        certificate: str | Path | None = None,
        server_name: str | None = None,
        insecure: bool = False,
        trust_worker: bool | None = None,
    ) -> None:
        """Says where; connects to nothing yet.

        Args:
            urls: "wss://host:8765", "ws://host:8765" or links ("sky://..."), in the order of ranks.
            token: of all workers, or one for each; the variable SKYPROXY_TOKEN by default.
            token_file: a file that holds the token of all workers, in place of `token`. It is read again when a worker
                takes the former one no more, so that a pool outlives a token that is replaced.
            certificate: whom to trust and nobody else, for "wss://": a PEM file, PEM text, or the fingerprint
                ("sha256:...") of the workers' own certificate.
            server_name: the name in the workers' certificate, where it is not the host of the url.
            insecure: whether "ws://" may go to other machines, where everybody on the way can read the token.
            trust_worker: whether functions may return any object, as a pickle that may run any code here; by default
                they return plain data.

        Raises:
            ConfigurationError: an url is none, there are not as many tokens, or both token and token_file are given.
        """
        if isinstance(urls, str):
            raise ConfigurationError(f"Remote({urls!r}): a list of urls is expected. Write Remote([{urls!r}]).")
        self.urls = tuple(urls)
        if not self.urls:
            raise ConfigurationError(
                "Remote([]) has no worker. Give the url of one or more: Remote(['wss://host:8765'])."
            )
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("ws", "wss", "sky") or not parts.hostname:
                raise ConfigurationError(
                    f"Remote: {url!r} is not the URL of a worker. Use ws://host:port or wss://host:port, or the link "
                    "that `skyproxy serve --tls` prints."
                )
        self._tokens = None if token is None else [token] * len(self.urls) if isinstance(token, str) else list(token)
        if self._tokens is not None and len(self._tokens) != len(self.urls):
            raise ConfigurationError(
                f"Remote: {len(self.urls)} urls and {len(self._tokens)} tokens. Give one for each."
            )
        if token is not None and token_file is not None:
            raise ConfigurationError("Remote: both token= and token_file= were given. Give one.")
        self._token_file = None if token_file is None else Path(token_file)
        self._certificate = certificate
        self._server_name = server_name
        self._insecure = insecure
        self._trusted = SETTINGS.trust_worker if trust_worker is None else trust_worker

    @property
    def process_count(self) -> int:
        """The number of worker processes."""
        return len(self.urls)

    async def launch(self, spec: WorkerSpec, report: Report) -> RemoteWorkers:
        """Checks that what is asked for is what there is; see `Provider.launch`."""
        if spec.world_size != len(self.urls):
            raise ConfigurationError(
                f"Remote() has {len(self.urls)} urls, and nodes={spec.nodes} with procs_per_node={spec.procs_per_node} "
                f"needs {spec.world_size}. Leave nodes= out, or give as many urls."
            )
        refuse_options("Remote()", spec.options)
        image = Image(base=spec.image) if isinstance(spec.image, str) else spec.image or Image()
        cannot = {
            "image": image.base,
            "image: python": image.python,
            "image: requirements": image.requirements,
            "image: apt": image.apt,
            "image: includes": image.includes,
            "env": {**image.env, **spec.env},
            "volumes": spec.volumes,
            "idle_timeout": spec.idle_timeout_seconds,
            "max_lifetime": spec.max_lifetime_seconds,
        }
        wanted = [name for name, value in cannot.items() if value]
        if wanted:
            raise ConfigurationError(
                f"Remote() uses workers that are already running, and cannot give them {', '.join(wanted)}. Set that "
                "where they are started."
            )
        report(Progress("bootstrapping", None, f"using {len(self.urls)} workers that are already running"))
        tokens = self._tokens or [self._current_token()] * len(self.urls)
        endpoints = [
            Endpoint(
                url,
                token,
                node=rank // spec.procs_per_node,
                rank=rank,
                local_rank=rank % spec.procs_per_node,
                address=urlsplit(url).hostname or "127.0.0.1",
                certificate=self._certificate,
                server_name=self._server_name,
                insecure=self._insecure,
                trusted=self._trusted,
                renew=None if self._tokens else self._renew,
            )
            for rank, (url, token) in enumerate(zip(self.urls, tokens))
        ]
        return RemoteWorkers(endpoints, image)

    def single_nodes(self, spec: WorkerSpec) -> NoReturn:
        """Refuse: these workers are not ours to start.

        Raises:
            ConfigurationError: always; whoever started these workers can start others.
        """
        raise ConfigurationError(
            f"Remote() uses workers that are already running, and can neither start nor end one: nodes=Nodes(...) is "
            f"not for it. Leave nodes= out, to use all {len(self.urls)}."
        )

    def _current_token(self) -> str:
        return _token_of_environment() if self._token_file is None else _token_of_file(self._token_file)

    def _renew(self) -> tuple[str, None]:
        return self._current_token(), None


class RemoteWorkers:
    """The workers that `Remote` found.

    Attributes:
        endpoints: where they listen, in the order of ranks.
        unbuilt_image: what nobody installed for us, and is therefore checked.
    """

    def __init__(self, endpoints: list[Endpoint], image: Image) -> None:
        self.endpoints = endpoints
        self.unbuilt_image = image

    async def close(self) -> None:
        """Nothing: they are not ours."""

    async def logs(self, rank: int) -> str:
        """An empty text: their logs are where they were started."""
        return ""

    async def restart(self, rank: int) -> Endpoint:
        """Refuse: these workers are not ours to start.

        Raises:
            WorkerStartError: always; whoever started it can start it again.
        """
        raise WorkerStartError(
            f"rank {rank} ({self.endpoints[rank].url}) is gone, and Remote() cannot start it again. Start it "
            "where it ran."
        )


def _token_of_file(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"Remote(): the token file {path} cannot be read: {error}.") from error
    if not token:
        raise ConfigurationError(f"Remote(): the token file {path} is empty.")
    return token


def _token_of_environment() -> str:
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise ConfigurationError(f"Remote(): no token. Pass token=..., or set {TOKEN_VARIABLE}.")
    return token
