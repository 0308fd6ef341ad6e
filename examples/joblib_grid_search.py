"""A grid search of scikit-learn whose fits run on a pool. Needs scikit-learn on both sides.

python examples/joblib_grid_search.py --nodes 2
"""

from __future__ import annotations

import argparse

from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from sklearn.svm import SVC

import skyproxy as sky


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    arguments = parser.parse_args()

    pixels, labels = load_digits(return_X_y=True)
    search = GridSearchCV(SVC(), {"C": [0.1, 1.0, 10.0], "gamma": [0.0005, 0.001, 0.01]}, cv=3)
    with sky.Compute(provider=sky.Local(), nodes=arguments.nodes, plugins=[sky.plugins.sklearn()]):
        search.fit(pixels[:900], labels[:900])  # every fit is a task of the pool
    print(f"best: {search.best_params_}, accuracy {search.score(pixels[900:], labels[900:]):.1%}")


if __name__ == "__main__":
    main()
