"""Strategic merge patches over pods, as `kubectl patch` and the API server apply them.

Objects merge, null removes, lists of things with a name merge by that name, other lists are replaced, and `$patch` says
`delete` or `replace`. `$setElementOrder` and `$deleteFromPrimitiveList`, which only tools write, are not known here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "ownerReferences": "uid",
    "schedulingGates": "name",
}
"""Lists of a pod that merge, and by what, as the API's own types are marked."""

_LIST_OF_TEXTS = {"finalizers"}
_DIRECTIVE = "$patch"


def merged(original: Mapping[str, object], patch: Mapping[str, object]) -> dict[str, object]:
    """`original` with `patch` over it; neither is changed.

    Raises:
        ValueError: the patch cannot be applied: an object where a list is, or a list element without its key.
    """
    if patch.get(_DIRECTIVE) == "replace":
        return {
            key: _strip_directives(value) for key, value in patch.items() if key != _DIRECTIVE and value is not None
        }
    if patch.get(_DIRECTIVE) == "delete":
        return {}
    result = copy.deepcopy(dict(original))
    for key, value in patch.items():
        if key == _DIRECTIVE:
            continue
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged_value(key, result.get(key), value)
    return result


def _merged_value(key: str, original: object, patch: object) -> object:
    if isinstance(patch, Mapping):
        if original is not None and not isinstance(original, Mapping):
            raise ValueError(f"{key} is a {type(original).__name__}, and an object cannot be merged into it")
        return merged(original or {}, patch)
    if isinstance(patch, list):
        if original is not None and not isinstance(original, list):
            raise ValueError(f"{key} is an object, and a list cannot be merged into it")
        if key in _MERGE_KEYS:
            return _merged_list(key, _MERGE_KEYS[key], original or [], patch)
        if key in _LIST_OF_TEXTS:
            return [*(original or []), *(item for item in patch if item not in (original or []))]
    elif isinstance(original, Mapping | list):
        kind = "list" if isinstance(original, list) else "object"
        raise ValueError(f"{key} is a {kind}, and {patch!r} cannot take its place")
    return copy.deepcopy(patch)


def _merged_list(name: str, key: str, original: list[object], patch: list[object]) -> list[object]:
    if any(isinstance(item, Mapping) and item == {_DIRECTIVE: "replace"} for item in patch):
        return [_strip_directives(item) for item in patch if item != {_DIRECTIVE: "replace"}]
    result = copy.deepcopy(original)
    added = []
    for item in patch:
        if not isinstance(item, Mapping) or key not in item:
            raise ValueError(f"an element of {name} has no {key}, so it cannot be told which one it changes")
        place = next(
            (index for index, old in enumerate(result) if isinstance(old, Mapping) and old.get(key) == item[key]), None
        )
        if item.get(_DIRECTIVE) == "delete":
            if place is not None:
                del result[place]
        elif place is None:
            added.append(_strip_directives(item))
        else:
            former = result[place]
            assert isinstance(former, Mapping), "only objects have a key"
            result[place] = merged(former, item)
    # The API server puts new elements first; what is there keeps its order.
    return added + result


def _strip_directives(value: object) -> object:
    """A copy without directives and nulls."""
    if isinstance(value, Mapping):
        return {key: _strip_directives(item) for key, item in value.items() if key != _DIRECTIVE and item is not None}
    if isinstance(value, list):
        return [_strip_directives(item) for item in value]
    return value
