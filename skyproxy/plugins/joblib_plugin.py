"""joblib on a pool: `joblib.Parallel` and what builds on it run on the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyproxy.errors import ConfigurationError
from skyproxy.plugins.requirements import requirement, with_requirements
from skyproxy.runtime.plugin import Plugin

if TYPE_CHECKING:
    from skyproxy.pools.specification import PlannedPool
    from skyproxy.providers.image import Image


@dataclass(frozen=True)
class JoblibPlugin(Plugin):
    """`sky.plugins.joblib()`: inside the pool's `with` block, `joblib.Parallel` runs on the pool by default.

    The backend is named "sky", so another pool or other numbers can be chosen in place:
    `with joblib.parallel_config("sky", pool=pool, n_jobs=8): ...`

    Attributes:
        version: of joblib: "latest", "1.4.0", or a constraint.
        n_jobs: how many tasks run at once where `Parallel` does not say; -1 for one on each rank.

    Example:
        ```python
        with skyproxy.Compute(provider=skyproxy.Local(), nodes=2, plugins=[skyproxy.plugins.joblib()]):
            print(joblib.Parallel()(joblib.delayed(pow)(x, 2) for x in range(4)))  # [0, 1, 4, 9]
        ```
    """

    version: str = "latest"
    n_jobs: int = -1

    def __post_init__(self) -> None:
        requirement("joblib", self.version)

    @property
    def name(self) -> str:
        return "joblib"

    def transform(self, image: Image, cluster: PlannedPool) -> Image:
        """Adds joblib."""
        return with_requirements(image, [requirement("joblib", self.version)])

    @staticmethod
    def register() -> None:
        """Makes joblib know the backend "sky" where no pool has the plugin; again and again does no harm.

        Example:
            ```python
            skyproxy.plugins.joblib.register()
            with joblib.parallel_config("sky", pool=pool):
                print(joblib.Parallel()(joblib.delayed(pow)(x, 2) for x in range(4)))  # [0, 1, 4, 9]
            ```
        """
        import joblib

        from skyproxy.plugins.joblib_backend import SkyBackend

        joblib.register_parallel_backend("sky", SkyBackend)

    def around_client(self, pool: object) -> contextlib.AbstractContextManager[Any]:
        """`Parallel` without a word about its backend uses the pool, on the thread of the `with` block."""
        return _default_backend(pool, self.n_jobs)


@contextlib.contextmanager
def _default_backend(pool: object, n_jobs: int) -> Iterator[None]:
    try:
        import joblib
    except ModuleNotFoundError as error:
        raise ConfigurationError("the joblib plugin needs joblib on the client too. Try: pip install joblib") from error
    JoblibPlugin.register()
    with joblib.parallel_config("sky", n_jobs=n_jobs, pool=pool):
        yield
