"""Structured output: the sentence in the shape that the request demands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from router.wire import engine
from workers.sim.refused import invalid

# Schemas that refer to themselves end here.
DEEPEST = 32


def shape(sentence: str, params: engine.SamplingParams) -> str:
    """`sentence` as the constraint of `params` lets it be said.

    A choice is picked by the sentence's hash; JSON holds the sentence in its
    strings. Regular expressions, grammars and structural tags change nothing.
    Refused with INVALID_ARGUMENT for a schema that cannot be read.
    """
    match params.WhichOneof("constraint"):
        case "choice":
            return _choice(sentence, list(params.choice.choices))
        case "json_object":
            return json.dumps({"answer": sentence})
        case "json_schema":
            return json.dumps(_instance(sentence, _schema(params.json_schema)))
    return sentence


def _choice(sentence: str, choices: list[str]) -> str:
    if not choices:
        raise invalid("the constraint offers no choice")
    digest = blake3(sentence.encode()).digest(length=4)
    return choices[int.from_bytes(digest, "little") % len(choices)]


def _schema(text: str) -> Mapping[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise invalid("json_schema is not JSON") from error
    if not isinstance(schema, dict):
        raise invalid("json_schema is not a JSON object")
    return schema


def _instance(sentence: str, root: Mapping[str, Any]) -> object:
    """A value that the schema admits: every property there, every list as short as may be."""

    def of(schema: object, depth: int) -> object:
        if not isinstance(schema, dict) or depth > DEEPEST:
            return None
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return schema["enum"][0]
        if "$ref" in schema:
            return of(_resolved(root, str(schema["$ref"])), depth + 1)
        for name in ("anyOf", "oneOf", "allOf"):
            if schema.get(name):
                return of(schema[name][0], depth + 1)
        kind = schema.get("type", "object" if "properties" in schema else "string")
        match kind[0] if isinstance(kind, list) and kind else kind:
            case "object":
                properties = schema.get("properties", {})
                return {name: of(inner, depth + 1) for name, inner in properties.items()}
            case "array":
                inner = of(schema.get("items", {}), depth + 1)
                return [inner] * max(int(schema.get("minItems", 0)), 0)
            case "integer" | "number":
                return schema.get("minimum", 0)
            case "boolean":
                return True
            case "null":
                return None
        shortest, longest = int(schema.get("minLength", 0)), schema.get("maxLength")
        return sentence.ljust(shortest, ".")[:longest]

    try:
        return of(root, 0)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise invalid("json_schema is not a schema") from error


def _resolved(root: Mapping[str, Any], reference: str) -> object:
    """What a local reference such as `#/$defs/name` points to."""
    found: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        if part:
            found = found[part.replace("~1", "/").replace("~0", "~")]
    return found
