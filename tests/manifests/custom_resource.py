"""The custom resource as an API server applies it: defaults, schema, rules. For tests without a server."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import jsonschema

from tests.manifests.kustomization import MANIFESTS, documents

Schema = dict[str, Any]

(CRD,) = documents(MANIFESTS / "base/crd.yaml")
(VERSION,) = CRD["spec"]["versions"]
SCHEMA: Schema = VERSION["schema"]["openAPIV3Schema"]


def walk(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Each schema inside, with its path."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from walk(inner, f"{path}.{name}")
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from walk(schema["additionalProperties"], f"{path}{{}}")


def with_defaults(schema: Schema, value: Any) -> Any:
    """A value with the schema's defaults where it has none."""
    if isinstance(value, dict):
        result = copy.deepcopy(value)
        for name, inner in schema.get("properties", {}).items():
            if name not in result and "default" in inner:
                result[name] = copy.deepcopy(inner["default"])
            if name in result:
                result[name] = with_defaults(inner, result[name])
        return result
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(schema["items"], item) for item in value]
    return value


def json_schema(schema: Schema) -> Schema:
    """The same in plain JSON Schema, where what the server would prune is an error: a misspelt field, most likely."""
    result = {key: value for key, value in schema.items() if not key.startswith("x-") and key != "default"}
    if schema.get("format") in ("int64", "int32"):
        result.pop("format")
    if "properties" in schema:
        result["properties"] = {name: json_schema(inner) for name, inner in schema["properties"].items()}
        result["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    if isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = json_schema(schema["additionalProperties"])
    if "items" in schema:
        result["items"] = json_schema(schema["items"])
    return result


_OBJECT_SCHEMA = json_schema(SCHEMA)
_OBJECT_SCHEMA["properties"]["metadata"] = {"type": "object"}
_VALIDATOR = jsonschema.Draft202012Validator(_OBJECT_SCHEMA)


def schema_problems(item: dict[str, Any]) -> list[str]:
    """What the schema says against an object."""
    return [f"{error.json_path}: {error.message}" for error in _VALIDATOR.iter_errors(item)]


def rules(schema: Schema = SCHEMA) -> Iterator[tuple[str, str, str]]:
    """Each rule: where it is, the expression, the message."""
    for path, inner in walk(schema):
        for rule in inner.get("x-kubernetes-validations", ()):
            yield path, rule["rule"], rule["message"]


def rule_problems(value: Any, old: Any = None, schema: Schema = SCHEMA) -> list[str]:
    """The messages of the rules that a value breaks; those about a change only where there is an old value."""
    import celpy

    environment = celpy.Environment()
    found = []
    for rule in schema.get("x-kubernetes-validations", ()):
        names = {"self": celpy.json_to_cel(value)}
        if "oldSelf" in rule["rule"]:
            if old is None:
                continue
            names["oldSelf"] = celpy.json_to_cel(old)
        program = environment.program(environment.compile(rule["rule"]))
        if not program.evaluate(names):
            found.append(rule["message"])
    if isinstance(value, dict):
        before = old if isinstance(old, dict) else {}
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                found += rule_problems(value[name], before.get(name), inner)
    if isinstance(value, list) and "items" in schema:
        # Elements of a map-like list are compared with those that had the same key; others with none.
        keys = schema.get("x-kubernetes-list-map-keys")
        for item in value:
            same = [other for other in old or () if keys and all(item.get(key) == other.get(key) for key in keys)]
            found += rule_problems(item, same[0] if same else None, schema["items"])
    return found
