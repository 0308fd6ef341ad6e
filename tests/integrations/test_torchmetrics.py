"""Metrics of torchmetrics, updated batch by batch on a remote device: the values of the local CPU, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("torchmetrics")

from torchmetrics import MeanMetric, MetricCollection, classification, regression
from torchmetrics.text import Perplexity

_RANDOM = torch.Generator().manual_seed(0)
SCORES = torch.randn(64, 5, generator=_RANDOM).softmax(1)
CLASSES = torch.randint(0, 5, (64,), generator=_RANDOM)
CHANCES, BITS = torch.rand(64, 4, generator=_RANDOM), torch.randint(0, 2, (64, 4), generator=_RANDOM)
FOUND, WANTED = (torch.rand(64, generator=_RANDOM) + 0.1 for _ in range(2))
TASKS: dict[str, tuple[dict[str, Any], torch.Tensor, torch.Tensor]] = {
    "Binary": ({}, CHANCES[:, 0], BITS[:, 0]),
    "Multiclass": ({"num_classes": 5}, SCORES, CLASSES),
    "Multilabel": ({"num_labels": 4}, CHANCES, BITS),
}
NAMES = "Accuracy AUROC AveragePrecision ConfusionMatrix F1Score HammingDistance JaccardIndex MatthewsCorrCoef"
NAMES += " Precision PrecisionRecallCurve Recall ROC Specificity StatScores"
REGRESSION = "ConcordanceCorrCoef ExplainedVariance KendallRankCorrCoef LogCoshError MeanAbsoluteError"
REGRESSION += " MeanAbsolutePercentageError MeanSquaredError PearsonCorrCoef R2Score SpearmanCorrCoef"


def cases() -> dict[str, tuple[Callable[[], Any], torch.Tensor, torch.Tensor]]:
    made: dict[str, tuple[Callable[[], Any], torch.Tensor, torch.Tensor]] = {}
    for task, (options, found, wanted) in TASKS.items():
        for name in NAMES.split():
            kind = getattr(classification, task + name)
            made[task + name] = (lambda kind=kind, options=options: kind(**options), found, wanted)
    for name in REGRESSION.split():
        made[name] = (getattr(regression, name), FOUND, WANTED)
    made["Perplexity"] = (Perplexity, SCORES.view(4, 16, 5), CLASSES.view(4, 16))
    return made


CASES = cases()


def leaves(result: Any) -> list[torch.Tensor]:
    if isinstance(result, list | tuple):
        return [leaf for item in result for leaf in leaves(item)]
    return [result]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_metric_equals_the_local_one(name: str, sky1: str) -> None:
    make, found, wanted = CASES[name]
    results = []
    for device in (sky1, "cpu"):
        metric = make().to(device)
        half = len(found) // 2
        seen = []
        for rows in (slice(0, half), slice(half, None)):
            seen += leaves(metric(found[rows].to(device), wanted[rows].to(device)))
        results.append(seen + leaves(metric.compute()))
    assert all(ours.device == torch.device(sky1) for ours in results[0])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours.cpu().nan_to_num(-7), theirs.nan_to_num(-7))


def test_a_collection_is_moved_reset_and_used_again(sky1: str) -> None:
    metrics = MetricCollection(
        [classification.MulticlassAccuracy(5), classification.MulticlassF1Score(5)], compute_groups=True
    )
    remote, mean = metrics.clone().to(sky1), MeanMetric().to(sky1)
    for _ in range(2):
        ours, theirs = remote(SCORES.to(sky1), CLASSES.to(sky1)), metrics(SCORES, CLASSES)
        assert {name: value.item() for name, value in ours.items()} == {n: v.item() for n, v in theirs.items()}
        remote.reset()
        metrics.reset()
        mean.update(FOUND.to(sky1))
    assert mean.compute().device == torch.device(sky1)
    assert abs(mean.compute().item() - FOUND.mean().item()) < 1e-6
