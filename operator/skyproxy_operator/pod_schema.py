"""The schema of a pod's fields, by the API's own types. Pure.

The API server leaves out what it does not know of a pod, in silence where nobody asks it to be strict, and a template
is merged long before a server sees it. So what has not the form of a pod is refused here, while the pods that run are
still there.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping

_LIST = re.compile(r"list\[(.+)\]")
_MAP = re.compile(r"dict\(str, (.+)\)")
_DIRECTIVE = "$patch"
_SCALARS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str, int, float),
}
"""Numbers can stand where texts do: quantities are texts for the API's types, and YAML makes numbers of them."""


def form_problems(value: object, kind: str, where: str) -> Iterator[str]:
    """Everything about a part of a pod that has not the form of one, a line each.

    Args:
        value: the part; null stands for taking a field away, wherever it is.
        kind: its type of the API, such as V1PodSpec.
        where: how the lines call it.
    """
    if value is None or kind in ("object", "datetime"):
        return
    if found := _LIST.fullmatch(kind):
        if not isinstance(value, list):
            yield f"{where}: it must be a list, and is {_name_of(value)}"
            return
        for index, item in enumerate(value):
            name = item.get("name") if isinstance(item, Mapping) else None
            yield from form_problems(item, found[1], f"{where}[{name if isinstance(name, str) else index}]")
    elif found := _MAP.fullmatch(kind):
        if not isinstance(value, Mapping):
            yield f"{where}: it must be an object, and is {_name_of(value)}"
            return
        for key, item in value.items():
            if key != _DIRECTIVE:
                yield from form_problems(item, found[1], f"{where}[{key}]")
    elif kind in _SCALARS:
        # bool is an int for Python.
        if not isinstance(value, _SCALARS[kind]) or (isinstance(value, bool) and kind != "bool"):
            yield f"{where}: it must be of the type {kind}, and is {_name_of(value)}"
    elif not isinstance(value, Mapping):
        yield f"{where}: it must be an object, and is {_name_of(value)}"
    else:
        known = _fields(kind)
        for key, item in value.items():
            if key in known:
                yield from form_problems(item, known[key], f"{where}.{key}")
            elif key != _DIRECTIVE:
                yield f"{where}.{key}: there is no such field{_suggestion(key, known)}"


@functools.cache
def _fields(kind: str) -> dict[str, str]:
    """The fields of one of the API's types, as they are written, each with its own type."""
    # Late: it takes a second, and most Computes have no template.
    from kubernetes_asyncio.client import models

    model = getattr(models, kind)
    return {model.attribute_map[name]: held for name, held in model.openapi_types.items()}


def _suggestion(key: object, known: Mapping[str, str]) -> str:
    import difflib

    found = difflib.get_close_matches(str(key), known, 1)
    return f"; did you mean {found[0]}?" if found else ""


def _name_of(value: object) -> str:
    kinds = {
        Mapping: "an object",
        list: "a list",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
    }
    return next(name for kind, name in kinds.items() if isinstance(value, kind))
