"""Hugging Face on a pool: its libraries in the image, its token in every rank."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skyproxy.plugins.requirements import requirement, with_requirements
from skyproxy.runtime.instance import InstanceInfo
from skyproxy.runtime.lifecycle import environment
from skyproxy.runtime.plugin import Plugin

if TYPE_CHECKING:
    from skyproxy.pools.specification import PlannedPool
    from skyproxy.providers.image import Image

logger = logging.getLogger("skyproxy")


@dataclass(frozen=True)
class HuggingFacePlugin(Plugin):
    """`sky.plugins.huggingface(token=...)`: transformers, datasets and tokenizers are installed; the token is set.

    The token goes to the workers with the plugin, over the session; it is in no image, no log and no `repr`.

    Attributes:
        token: of the Hub; None for public models only.
        version: of transformers: "latest", "4.50.0", or a constraint.
        login: whether to log in with the token at bootstrap, so that a wrong one is noticed there.

    Example:
        ```python
        huggingface = skyproxy.plugins.huggingface(token=os.environ.get("HF_TOKEN"))
        pool = skyproxy.Compute(provider=skyproxy.Local(), plugins=[skyproxy.plugins.torch(), huggingface])
        ```
    """

    token: str | None = field(default=None, repr=False)
    version: str = "latest"
    login: bool = True

    def __post_init__(self) -> None:
        requirement("transformers", self.version)

    @property
    def name(self) -> str:
        return "huggingface"

    def transform(self, image: Image, cluster: PlannedPool) -> Image:
        """Adds the libraries."""
        return with_requirements(image, [requirement("transformers", self.version), "datasets", "tokenizers"])

    def around_process(self, info: InstanceInfo) -> contextlib.AbstractContextManager[object]:
        """HF_TOKEN, and the login."""
        return self._log_in() if self.token is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def _log_in(self) -> Iterator[None]:
        with environment({"HF_TOKEN": self.token}):
            if self.login:
                self._check()
            yield

    def _check(self) -> None:
        """Asks the Hub who the token belongs to. One that it refuses is an error; a Hub that is away is none."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        try:
            HfApi().whoami(token=self.token)
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status in (401, 403):
                # Without `from`: the Hub's own error quotes the request, and with it the token.
                raise PermissionError(
                    f"the Hugging Face Hub refused the token (HTTP {status}). Make a new one: "
                    "https://huggingface.co/settings/tokens"
                ) from None
            logger.warning("the Hugging Face Hub answered HTTP %d; the token is set, but was not checked", status)
        except Exception as error:
            logger.warning("the Hugging Face Hub cannot be reached (%s); the token is set, but was not checked", error)
