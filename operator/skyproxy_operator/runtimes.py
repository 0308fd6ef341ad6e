"""Runtimes: what a platform team fills in for Computes that name one, what these may change, and their limits. Pure.

A runtime is a ConfigMap in the operator's own namespace, where users write nothing. A Compute keeps the text that its
pods were made of in its status as long as it has pods: a runtime that changes ends no running worker.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import UnionType
from typing import Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from skyproxy.errors import ConfigurationError
from skyproxy.units import limit_seconds, quantity
from skyproxy_operator.compute_spec import ComputeSpec, SpecItem
from skyproxy_operator.options import Options

Object = Mapping[str, Any]

RUNTIME_KEY = "runtime.yaml"
"""The part of the ConfigMap that has the runtime."""
_MAX_TEXT = 64 << 10
"""It is kept in the status of every Compute that uses it."""
_PARTS = {"description", "spec", "overrides", "limits", "namespaces"}
_LIMITS = {"nodes", "resources", "idleTimeout", "maxLifetime"}
_NOT_THEIRS = {"runtime", "suspend"}
_DEFAULTS: dict[str, Any] = {
    "nodes": 1,
    "procsPerNode": 1,
    "port": 8765,
    "sharedMemory": "2Gi",
    "suspend": False,
    "restartPolicy": {"maxRestarts": 3, "backoffSeconds": 5, "resetSeconds": 600},
}
"""Values that the API server fills in: a Compute that has one of them has not said anything."""


@dataclass(frozen=True)
class Runtime:
    """A runtime as its text says it.

    Attributes:
        spec: fields of a Compute's spec, for Computes that do not have them.
        overrides: patterns of the fields of those that a Compute may have, too.
        limits: the most that a Compute gets: nodes, resources of each node, idleTimeout, maxLifetime.
        namespaces: patterns of those whose Computes may name it.
    """

    spec: Mapping[str, Any]
    overrides: tuple[str, ...] = ()
    limits: Mapping[str, Any] | None = None
    namespaces: tuple[str, ...] = ("*",)


@dataclass(frozen=True)
class Resolution:
    """A Compute with what its runtime fills in.

    Attributes:
        compute: the Compute, with the whole spec, and the record in its status.
        record: the part of its status that says which runtime it has; None without one.
        is_news: whether it became outdated with this look.
    """

    compute: dict[str, Any]
    record: dict[str, Any] | None
    is_news: bool


def resolve(compute: dict[str, Any], runtimes: Mapping[str, str], *, has_pods: bool, options: Options) -> Resolution:
    """Fill in what the runtime of a Compute has.

    Args:
        compute: the Compute, as the API server gave it.
        runtimes: the texts of the installation's runtimes by their names.
        has_pods: whether there are pods of it: they keep what they were made of.
        options: those of the installation.

    Raises:
        ValueError: there is no such runtime, it cannot be used, or the Compute asks for what it does not allow; each
            line names it.
    """
    spec, status = compute.get("spec") or {}, compute.get("status") or {}
    name, before = spec.get("runtime") or None, status.get("runtime") or {}
    namespace = compute["metadata"]["namespace"]
    if name is None:
        if options.require_runtime:
            raise ValueError(
                f"spec.runtime: this installation has every Compute name one{_list_choices(runtimes, namespace)}"
            )
        rest = {"status": {key: value for key, value in status.items() if key != "runtime"}} if before else {}
        return Resolution({**compute, "spec": spec, **rest}, None, is_news=False)
    kept = before.get("template") if has_pods and before.get("name") == name else None
    text = kept if kept is not None else runtimes.get(name)
    if text is None:
        raise ValueError(f"spec.runtime: this installation has no runtime {name}{_list_choices(runtimes, namespace)}")
    runtime = parse(name, text)
    if not _may_use(runtime, namespace):
        raise ValueError(
            f"spec.runtime: {name} is not for the namespace {namespace}{_list_choices(runtimes, namespace, but=name)}"
        )
    whole = _fill_in(name, runtime, spec)
    found = [*_find_excess(whole, runtime.limits or {})]
    if found:
        raise ValueError("\n".join(f"{line}, which is the limit of runtime {name}" for line in found))
    outdated = kept is not None and runtimes.get(name) != kept
    record = {"name": name, "template": text, "outdated": outdated}
    news = outdated and not before.get("outdated", False)
    return Resolution({**compute, "spec": whole, "status": {**status, "runtime": record}}, record, news)


def lifetime_seconds(compute: Object) -> float | None:
    """Return the lifetime of the pods of a Compute whose spec cannot be used, as far as it can be read; None for no
    end. What became of the spec must not give pods more time than their runtime does.
    """
    own = _readable_seconds((compute.get("spec") or {}).get("maxLifetime"))
    record = (compute.get("status") or {}).get("runtime") or {}
    try:
        runtime = parse(str(record["name"]), str(record["template"]))
    except (KeyError, TypeError, ValueError, RecursionError):
        return own
    given = _readable_seconds(runtime.spec.get("maxLifetime"))
    if own is None or (given is not None and not _may_change(runtime, "maxLifetime")):
        own = given
    known = [seconds for seconds in (own, _readable_seconds((runtime.limits or {}).get("maxLifetime"))) if seconds]
    return min(known, default=None)


def _readable_seconds(value: float | str | None) -> float | None:
    try:
        return limit_seconds(value)
    except ConfigurationError:
        return None


def change_message(name: str) -> str:
    """Return what people are told when a runtime of a running worker changes."""
    return f"The runtime {name} has changed. The Pods that run stay as they are; those of the next start will have it."


@functools.lru_cache(maxsize=256)
def parse(name: str, text: str) -> Runtime:
    """The runtime that a text says.

    Raises:
        ValueError: it has not the form of one.
    """
    # Late: only installations that have runtimes need it.
    import yaml

    def refuse(problem: object) -> ValueError:
        return ValueError(f"the runtime {name} cannot be used, and the platform's team must see to it: {problem}")

    if len(text.encode()) > _MAX_TEXT:
        raise refuse(f"it is longer than {_MAX_TEXT} bytes")
    try:
        # A Compute's status has a copy of the text, and aliases of aliases make any amount of some lines.
        has_alias = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader))
        parts: Any = None if has_alias else yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as exc:
        raise refuse(exc) from None
    if has_alias:
        raise refuse("it has an alias of YAML (*name); write out what that stands for")
    problem = next(_form_problems(parts), None)
    if problem is not None:
        raise refuse(problem)
    runtime = Runtime(
        parts.get("spec") or {},
        tuple(parts.get("overrides") or ()),
        parts.get("limits") or {},
        tuple(parts.get("namespaces") or ("*",)),
    )
    try:
        ComputeSpec.parse("runtime", SpecItem(**runtime.spec))  # type: ignore[typeddict-item]
        list(_find_excess({}, runtime.limits or {}))
    except (ValueError, ConfigurationError) as exc:
        raise refuse(exc) from None
    return runtime


def _form_problems(parts: object) -> Iterator[str]:
    if not isinstance(parts, Mapping):
        yield "it is no object with spec, overrides, limits and namespaces"
        return
    yield from (f"there is no {key} in a runtime" for key in sorted(map(str, parts.keys() - _PARTS)))
    kinds: dict[str, type] = {"spec": Mapping, "limits": Mapping, "overrides": list, "namespaces": list}
    for key, kind in kinds.items():
        if parts.get(key) is not None and not isinstance(parts[key], kind):
            yield f"{key} must be {'a list' if kind is list else 'an object'}"
            return
    spec, limits = parts.get("spec") or {}, parts.get("limits") or {}
    known = get_type_hints(SpecItem)
    yield from (f"spec.{key}: a Compute has no such field" for key in sorted(map(str, spec.keys() - known.keys())))
    yield from (f"spec.{key}: it has not the form of a Compute's" for key in spec if not _fits(spec[key], known[key]))
    yield from (f"spec.{key}: it is the Compute's own" for key in sorted(spec.keys() & _NOT_THEIRS))
    yield from (f"limits.{key}: there are limits of {', '.join(sorted(_LIMITS))}" for key in limits.keys() - _LIMITS)
    for key in ("overrides", "namespaces"):
        if not all(isinstance(row, str) for row in parts.get(key) or ()):
            yield f"{key} must be texts"
    nodes = limits.get("nodes", 1)
    if not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 1:
        yield "limits.nodes must be a number from 1 on"
    if not isinstance(limits.get("resources", {}), Mapping):
        yield "limits.resources must be an object"


def _fits(value: object, kind: Any) -> bool:
    """Return whether a value has the form of such a type; for what users write, the schema of Computes sees to it."""
    if kind is object:
        return True
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(kind))
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        needed = {key for key, hint in hints.items() if kind.__total__ and get_origin(hint) is not NotRequired}
        return (
            isinstance(value, Mapping)
            and needed <= value.keys()
            and all(key in hints and _fits(item, hints[key]) for key, item in value.items())
        )
    if get_origin(kind) is NotRequired:
        return _fits(value, get_args(kind)[0])
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(item, get_args(kind)[0]) for item in value)
    if get_origin(kind) is Mapping:
        of_keys, of_values = get_args(kind)
        return isinstance(value, Mapping) and all(
            _fits(key, of_keys) and _fits(item, of_values) for key, item in value.items()
        )
    # True is a number for Python.
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _list_choices(runtimes: Mapping[str, str], namespace: str, *, but: str = "") -> str:
    """Say which runtimes a namespace has."""
    names = []
    for name, text in sorted(runtimes.items()):
        try:
            if name != but and _may_use(parse(name, text), namespace):
                names.append(name)
        except ValueError:
            continue
    return f". There are: {', '.join(names)}" if names else ", and there is none for this namespace"


def _may_change(runtime: Runtime, key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in runtime.overrides)


def _may_use(runtime: Runtime, namespace: str) -> bool:
    return any(fnmatchcase(namespace, pattern) for pattern in runtime.namespaces)


def _fill_in(name: str, runtime: Runtime, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of a Compute with what it has not said itself.

    Raises:
        ValueError: it says what the runtime keeps for itself.
    """
    said = {key: value for key, value in spec.items() if value is not None and value != _DEFAULTS.get(key)}
    # The runtime's own although it has none: a template reaches everything that the others say, and claims get devices
    # that are counted among no resources.
    own = {"podTemplate"} | ({"resourceClaims"} if (runtime.limits or {}).get("resources") else set())
    closed = [key for key in sorted(said) if (key in runtime.spec or key in own) and not _may_change(runtime, key)]
    if closed:
        may = f"it may have its own {', '.join(runtime.overrides)}" if runtime.overrides else "none may be changed"
        raise ValueError("\n".join(f"spec.{key}: the runtime {name} keeps it for itself; {may}" for key in closed))
    return {**spec, **runtime.spec, **{key: _merge(runtime.spec.get(key), value) for key, value in said.items()}}


def _merge(base: Any, own: Any) -> Any:
    """Return a field of both: objects key by key, lists of named things by their names, the rest the Compute's."""
    if isinstance(base, Mapping) and isinstance(own, Mapping):
        return {**base, **{key: _merge(base.get(key), value) for key, value in own.items()}}
    rows = [*base, *own] if isinstance(base, list) and isinstance(own, list) else []
    if rows and all(isinstance(row, Mapping) and "name" in row for row in rows):
        return list({row["name"]: row for row in rows}.values())
    return own


def _find_excess(spec: Mapping[str, Any], limits: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a spec has too much of, with the most that there may be.

    Raises:
        ConfigurationError: a limit is none.
    """
    if "nodes" in limits and spec.get("nodes", 1) > limits["nodes"]:
        yield f"spec.nodes: {spec['nodes']} are more than {limits['nodes']}"
    for key, most in (limits.get("resources") or {}).items():
        largest, asked = quantity(most, f"limits.resources[{key}]"), (spec.get("resources") or {}).get(key, 0)
        if quantity(asked, f"spec.resources[{key}]") > largest:
            yield f"spec.resources[{key}]: {asked} is more than {most}"
    for key in ("idleTimeout", "maxLifetime"):
        longest, asked = limit_seconds(limits.get(key), f"limits.{key}"), limit_seconds(spec.get(key), f"spec.{key}")
        if longest is not None and spec and (asked is None or asked > longest):
            yield f"spec.{key}: {spec.get(key) or 'no end'} is longer than {limits[key]}"
