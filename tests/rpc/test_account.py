"""What is told of a request that has ended."""

from __future__ import annotations

from router.request.record import Record
from router.rpc.account import OK, _attributes


def test_a_span_has_the_beginning_of_an_id_of_any_length() -> None:
    told = _attributes(Record("0123456789" * 1_000_000), OK, None)["mmrouter.request_id"]
    assert isinstance(told, str)
    assert told.startswith("0123456789") and len(told) == 128
