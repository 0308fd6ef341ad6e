"""What the operator counts, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

_BUCKETS_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


def _labelled(name: str, labels: Mapping[str, str]) -> str:
    if not labels:
        return name
    pairs = []
    for key, value in labels.items():
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        pairs.append(f'{key}="{escaped}"')
    return f"{name}{{{','.join(pairs)}}}"


class Counter:
    """A number that only grows, one for each set of labels."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._values: dict[tuple[tuple[str, str], ...], float] = {}

    def add(self, amount: float, **labels: str) -> None:
        """Counts."""
        key = tuple(labels.items())
        self._values[key] = self._values.get(key, 0.0) + amount

    def value(self, **labels: str) -> float:
        """What was counted with these labels."""
        return self._values.get(tuple(labels.items()), 0.0)

    def lines(self) -> Iterator[str]:
        """The text."""
        yield f"# HELP {self._name} {self._text}"
        yield f"# TYPE {self._name} counter"
        for key, value in sorted(self._values.items()):
            yield f"{_labelled(self._name, dict(key))} {value:g}"


class Histogram:
    """How long something took."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._counts = [0] * (len(_BUCKETS_SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Counts one."""
        place = next((index for index, bound in enumerate(_BUCKETS_SECONDS) if seconds <= bound), len(_BUCKETS_SECONDS))
        self._counts[place] += 1
        self._sum += seconds

    def lines(self) -> Iterator[str]:
        """The text."""
        yield f"# HELP {self._name} {self._text}"
        yield f"# TYPE {self._name} histogram"
        total = 0
        for bound, count in zip((*_BUCKETS_SECONDS, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self._name}_bucket{{le="{bound}"}} {total}'
        yield f"{self._name}_sum {self._sum:g}"
        yield f"{self._name}_count {total}"


class Gauge:
    """Numbers that are read when somebody asks."""

    def __init__(self, name: str, text: str, label: str) -> None:
        self._name = name
        self._text = text
        self._label = label
        self.read: Callable[[], Mapping[str, float]] = dict
        """The values by the label's value; an empty label value stands for no label."""

    def lines(self) -> Iterator[str]:
        """The text."""
        yield f"# HELP {self._name} {self._text}"
        yield f"# TYPE {self._name} gauge"
        for key, value in sorted(self.read().items()):
            yield f"{_labelled(self._name, {self._label: key} if key else {})} {value:g}"


class Metrics:
    """Everything that is counted."""

    def __init__(self) -> None:
        self.reconciles = Counter("skyproxy_operator_reconciles_total", "Looks at a Compute, by result.")
        self.requests = Counter("skyproxy_operator_api_requests_total", "Requests to the API server.")
        self.probes = Counter("skyproxy_operator_probes_total", "Questions to workers for their activity, by result.")
        self.pods = Counter("skyproxy_operator_pods_total", "Pods created and deleted.")
        self.reaped = Counter("skyproxy_operator_reaped_total", "Computes whose pods were removed, by reason.")
        self.duration = Histogram("skyproxy_operator_reconcile_seconds", "How long a look at a Compute took.")
        self.computes = Gauge("skyproxy_operator_computes", "Computes by phase.", "phase")
        self.queued = Gauge("skyproxy_operator_queued", "Computes that wait to be looked at.", "")
        self.leading = Gauge("skyproxy_operator_leading", "1 where this operator is the one that works.", "")

    def text(self) -> str:
        """All of it, for Prometheus."""
        parts = (
            self.reconciles,
            self.requests,
            self.probes,
            self.pods,
            self.reaped,
            self.duration,
            self.computes,
            self.queued,
            self.leading,
        )
        return "".join(line + "\n" for part in parts for line in part.lines())


METRICS = Metrics()
