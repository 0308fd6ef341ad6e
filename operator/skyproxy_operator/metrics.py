"""Metrics of the operator, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily

_untyped: Any = prometheus_client
_BUCKETS_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class ComputesByPhase:
    """The number of Computes in each phase, counted when somebody asks.

    Attributes:
        read: gives the number of Computes by phase.
    """

    def __init__(self) -> None:
        self.read: Callable[[], Mapping[str, float]] = dict

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Count, as the registry of prometheus_client wants it."""
        family = GaugeMetricFamily("skyproxy_operator_computes", "Computes by phase.", labels=["phase"])
        for phase, count in sorted(self.read().items()):
            family.add_metric([phase], count)
        yield family


class Metrics:
    """Everything that is counted, in a registry of its own."""

    def __init__(self) -> None:
        _untyped.disable_created_metrics()
        self.registry = registry = CollectorRegistry()
        prefix = "skyproxy_operator_"
        self.reconciles = Counter(
            f"{prefix}reconciles", "Reconciliations of Computes, by result.", ["result"], registry=registry
        )
        self.requests = Counter(
            f"{prefix}api_requests", "Requests to the API server.", ["method", "status"], registry=registry
        )
        self.lists = Counter(
            f"{prefix}lists", "How often all objects of a kind were listed.", ["kind"], registry=registry
        )
        self.probes = Counter(
            f"{prefix}probes", "Requests to workers for their activity, by result.", ["result"], registry=registry
        )
        self.pods = Counter(
            f"{prefix}pods", "Pods created, deleted and removed by force.", ["action"], registry=registry
        )
        self.reaped = Counter(
            f"{prefix}reaped", "Computes whose pods were removed, by reason.", ["reason"], registry=registry
        )
        self.duration = Histogram(
            f"{prefix}reconcile_seconds",
            "How long the reconciliation of a Compute took.",
            buckets=_BUCKETS_SECONDS,
            registry=registry,
        )
        self.first_look = Histogram(
            f"{prefix}first_look_seconds",
            "How long a new Compute, or a new spec, waited until it was reconciled.",
            buckets=_BUCKETS_SECONDS,
            registry=registry,
        )
        self.queued = Gauge(f"{prefix}queued", "Computes that wait to be reconciled.", registry=registry)
        self.leading = Gauge(f"{prefix}leading", "1 if this operator is the leader.", registry=registry)
        self.computes = ComputesByPhase()
        registry.register(self.computes)
        ProcessCollector(registry=registry)


METRICS = Metrics()
