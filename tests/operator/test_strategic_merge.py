"""Strategic merge patches: what Kubernetes does with the same objects."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyproxy_operator.strategic_merge import merged

CASES: list[tuple[str, Any, Any, Any]] = [
    ("objects merge", {"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}, {"a": {"x": 1, "y": 3}}),
    ("null removes", {"a": 1, "b": 2}, {"a": None}, {"b": 2}),
    ("null of nothing is nothing", {"a": 1}, {"z": None}, {"a": 1}),
    (
        "containers merge by name",
        {"containers": [{"name": "w", "image": "i", "env": [{"name": "A", "value": "1"}]}]},
        {"containers": [{"name": "w", "env": [{"name": "B", "value": "2"}]}]},
        {
            "containers": [
                {"name": "w", "image": "i", "env": [{"name": "B", "value": "2"}, {"name": "A", "value": "1"}]}
            ]
        },
    ),
    (
        "another container is added",
        {"containers": [{"name": "w"}]},
        {"containers": [{"name": "sidecar", "image": "s"}]},
        {"containers": [{"name": "sidecar", "image": "s"}, {"name": "w"}]},
    ),
    (
        "mounts merge by path",
        {"volumeMounts": [{"mountPath": "/tmp", "name": "tmp"}]},
        {"volumeMounts": [{"mountPath": "/tmp", "name": "disk"}]},
        {"volumeMounts": [{"mountPath": "/tmp", "name": "disk"}]},
    ),
    (
        "tolerations are replaced",
        {"tolerations": [{"key": "a"}]},
        {"tolerations": [{"key": "b"}]},
        {"tolerations": [{"key": "b"}]},
    ),
    ("texts are replaced", {"args": ["a", "b"]}, {"args": ["c"]}, {"args": ["c"]}),
    (
        "an element is deleted",
        {"env": [{"name": "A"}, {"name": "B"}]},
        {"env": [{"name": "A", "$patch": "delete"}]},
        {"env": [{"name": "B"}]},
    ),
    (
        "deleting what is not there",
        {"env": [{"name": "B"}]},
        {"env": [{"name": "A", "$patch": "delete"}]},
        {"env": [{"name": "B"}]},
    ),
    ("an object is replaced", {"s": {"a": 1}}, {"s": {"$patch": "replace", "b": 2}}, {"s": {"b": 2}}),
    ("an object is deleted", {"s": {"a": 1}}, {"s": {"$patch": "delete"}}, {"s": {}}),
    (
        "a list is replaced",
        {"env": [{"name": "A"}]},
        {"env": [{"$patch": "replace"}, {"name": "B"}]},
        {"env": [{"name": "B"}]},
    ),
    (
        "a probe is removed",
        {"containers": [{"name": "w", "readinessProbe": {}}]},
        {"containers": [{"name": "w", "readinessProbe": None}]},
        {"containers": [{"name": "w"}]},
    ),
    ("finalizers come together", {"finalizers": ["a"]}, {"finalizers": ["a", "b"]}, {"finalizers": ["a", "b"]}),
]


@pytest.mark.parametrize(("name", "original", "patch", "result"), CASES, ids=[case[0] for case in CASES])
def test_patches(name: str, original: Any, patch: Any, result: Any) -> None:
    before = copy.deepcopy((original, patch))
    assert merged(original, patch) == result
    assert (original, patch) == before


@pytest.mark.parametrize(
    ("original", "patch"),
    [
        ({"containers": [{"name": "w"}]}, {"containers": [{"image": "x"}]}),
        ({"containers": [{"name": "w"}]}, {"containers": ["x"]}),
        ({"containers": [{"name": "w"}]}, {"containers": {"name": "w"}}),
        ({"securityContext": {"a": 1}}, {"securityContext": [1]}),
    ],
)
def test_what_does_not_fit_is_refused(original: Any, patch: Any) -> None:
    with pytest.raises(ValueError, match=r"containers|securityContext"):
        merged(original, patch)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text("abc", min_size=1, max_size=2), VALUES, max_size=4)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(OBJECTS, OBJECTS)
def test_applying_a_patch_again_changes_nothing(original: Any, patch: Any) -> None:
    try:
        once = merged(original, patch)
    except ValueError:
        return
    assert merged(once, patch) == once
