"""The kinds of programs that `scenario_fuzz` draws, each a function of a `Run`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance.scenarios.graphs import graphs
from tests.conformance.scenarios.lifetimes import lifetimes
from tests.conformance.scenarios.loops import loops
from tests.conformance.scenarios.threads import threads
from tests.conformance.scenarios.trainings import trainings
from tests.conformance.scenarios.writes import writes

if TYPE_CHECKING:
    from tests.conformance.scenario_fuzz import Scenario

KINDS: dict[str, Scenario] = {
    "writes": writes,
    "loops": loops,
    "lifetimes": lifetimes,
    "graphs": graphs,
    "threads": threads,
    "trainings": trainings,
}
