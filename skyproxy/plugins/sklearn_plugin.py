"""scikit-learn on a pool: whatever takes `n_jobs` runs on the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyproxy.plugins.joblib_plugin import JoblibPlugin
from skyproxy.plugins.requirements import requirement, with_requirements

if TYPE_CHECKING:
    from skyproxy.pools.specification import PlannedPool
    from skyproxy.providers.image import Image


@dataclass(frozen=True)
class SklearnPlugin(JoblibPlugin):
    """`sky.plugins.sklearn()`: searches, cross-validation and ensembles with `n_jobs` run on the pool.

    Attributes:
        version: of scikit-learn: "latest", "1.5.0", or a constraint. The client's own is best: models travel by pickle.
        n_jobs: how many tasks run at once where the estimator does not say; -1 for one on each rank.

    Example:
        ```python
        with skyproxy.Compute(provider=skyproxy.Local(), nodes=2, plugins=[skyproxy.plugins.sklearn()]):
            search = GridSearchCV(SVC(), {"C": [0.1, 1.0, 10.0]}).fit(*load_iris(return_X_y=True))
            print(search.best_params_)
        ```
    """

    @property
    def name(self) -> str:
        return "sklearn"

    def transform(self, image: Image, cluster: PlannedPool) -> Image:
        """Adds scikit-learn, which brings joblib."""
        return with_requirements(image, [requirement("scikit-learn", self.version)])
