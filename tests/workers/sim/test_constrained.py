"""Answers in a demanded shape."""

from __future__ import annotations

import json

import grpc
import pytest

from router.wire import engine
from tests.workers.sim.client import client_of, prompt
from workers.sim.constrained import shape


def under_schema(schema: object) -> object:
    params = engine.SamplingParams(json_schema=json.dumps(schema))
    parsed: object = json.loads(shape("said", params))
    return parsed


async def test_a_choice_is_one_of_those_offered_and_the_same_again() -> None:
    choice = engine.ChoiceConstraint(choices=["yes", "no", "perhaps"])
    async with client_of() as client:
        answers = [await client.say(prompt(f"q{at}", choice=choice)) for at in range(12)]
        assert answers[0] == await client.say(prompt("q0", choice=choice))
    assert set(answers) <= {"yes", "no", "perhaps"}
    assert len(set(answers)) > 1


async def test_json_holds_the_sentence() -> None:
    async with client_of() as client:
        plain = await client.say(prompt("x"))
        assert json.loads(await client.say(prompt("x", json_object=True))) == {"answer": plain}


def test_a_schema_is_filled() -> None:
    schema = {
        "$defs": {"part": {"type": "object", "properties": {"n": {"type": "integer"}}}},
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "short": {"type": "string", "maxLength": 2},
            "kind": {"enum": ["a", "b"]},
            "parts": {"type": "array", "minItems": 2, "items": {"$ref": "#/$defs/part"}},
            "sure": {"type": "boolean"},
            "none": {"anyOf": [{"type": "null"}, {"type": "string"}]},
            "share": {"type": "number", "minimum": 0.5},
        },
    }
    assert under_schema(schema) == {
        "text": "said",
        "short": "sa",
        "kind": "a",
        "parts": [{"n": 0}, {"n": 0}],
        "sure": True,
        "none": None,
        "share": 0.5,
    }


def test_a_schema_that_refers_to_itself_ends() -> None:
    schema = {"type": "object", "properties": {"inner": {"$ref": "#"}}}
    assert under_schema(schema)


@pytest.mark.parametrize("schema", ["{", "[]", '{"$ref": "#/$defs/none"}', '{"anyOf": 5}'])
async def test_a_schema_that_is_none_is_the_clients_fault(schema: str) -> None:
    async with client_of() as client:
        error = await client.refusal(prompt("x", json_schema=schema))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
