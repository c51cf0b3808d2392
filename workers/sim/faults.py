"""Trouble on demand: what goes wrong with a call, and which calls it meets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import grpc

from router.units import parse_duration


@dataclass(frozen=True)
class Trouble:
    """What goes wrong with one call; the default is nothing."""

    # Fail with this status before any output.
    fail: grpc.StatusCode | None = None
    # Fail after so many chunks, with `break_status`.
    fail_after_chunks: int | None = None
    break_status: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    # Say nothing, until the caller gives up; after so many chunks (0: at once).
    hang_after_chunks: int | None = None
    # Answer as a worker whose queue is full.
    saturate: bool = False
    # End the stream with OK, without the Complete of any choice.
    end_without_complete: bool = False
    # Fail with this status and the trailer that says: read my capability again.
    constraint_failed: grpc.StatusCode | None = None
    # Seconds before the first output.
    slow_first: float = 0.0
    # The engine ends for good.
    die: bool = False
    # Milliseconds in the trailer grpc-retry-pushback-ms of a failure.
    pushback_ms: int | None = None


NO_TROUBLE = Trouble()


@dataclass(frozen=True)
class Rule:
    """`trouble` for the next `remaining` calls of `rpc` (None: for every call)."""

    rpc: str
    trouble: Trouble
    remaining: int | None = None


_SETTING = re.compile(r"\s*([a-z-]+)\s*(?:=\s*([^\s,;]+))?\s*")
_RULE = re.compile(r"\s*(?:(?P<rpc>[A-Z][A-Za-z]*)\s*:)?\s*(?:(?P<count>\d+)\s*\*)?(?P<rest>.*)")
_IN_PROMPT = re.compile(rb"\[\[sim:(.*?)\]\]", re.DOTALL)


def parse_trouble(text: str) -> Trouble:
    """`fail-after-chunks=3, slow-first=2s` and the like; ValueError for anything else."""
    trouble = NO_TROUBLE
    for part in re.split(r"[,;]", text):
        if not part.strip():
            continue
        match = _SETTING.fullmatch(part)
        if match is None:
            raise ValueError(f"not a directive of the simulator: {part.strip()!r}")
        trouble = _apply(trouble, match[1], match[2])
    if trouble == NO_TROUBLE:
        raise ValueError(f"no directive of the simulator in {text!r}")
    return trouble


def _apply(trouble: Trouble, name: str, value: str | None) -> Trouble:
    match name:
        case "fail" | "fail-before-output":
            return replace(trouble, fail=_status(value or "UNAVAILABLE"))
        case "fail-after-chunks":
            chunks, _, status = (value or "").partition(":")
            trouble = replace(trouble, fail_after_chunks=_count(name, chunks))
            return replace(trouble, break_status=_status(status)) if status else trouble
        case "hang":
            return replace(trouble, hang_after_chunks=0)
        case "hang-after-chunks":
            return replace(trouble, hang_after_chunks=_count(name, value))
        case "saturate":
            return replace(trouble, saturate=True)
        case "end-without-complete":
            return replace(trouble, end_without_complete=True)
        case "constraint-failed":
            return replace(trouble, constraint_failed=_status(value or "FAILED_PRECONDITION"))
        case "slow-first":
            return replace(trouble, slow_first=parse_duration(value or ""))
        case "die":
            return replace(trouble, die=True)
        case "pushback":
            return replace(trouble, pushback_ms=round(parse_duration(value or "") * 1000))
    raise ValueError(f"not a directive of the simulator: {name!r}")


def _status(name: str) -> grpc.StatusCode:
    try:
        return grpc.StatusCode[name.upper().replace("-", "_")]
    except KeyError:
        raise ValueError(f"not a gRPC status: {name!r}") from None


def _count(name: str, value: str | None) -> int:
    if value is None or not value.isdecimal():
        raise ValueError(f"{name} needs a whole number, as in {name}=3")
    return int(value)


def parse_rule(text: str) -> Rule:
    """`[RPC:][COUNT*]DIRECTIVES`, as `GetServerInfo: 3*fail=UNAVAILABLE`.

    Without an RPC it is for Generate, without a count for every call.
    ValueError for anything else.
    """
    match = _RULE.fullmatch(text)
    if match is None:
        raise ValueError(f"not a rule of the simulator: {text!r}")
    count = match["count"]
    return Rule(
        rpc=match["rpc"] or "Generate",
        trouble=parse_trouble(match["rest"]),
        remaining=None if count is None else int(count),
    )


def in_prompt(text: bytes) -> Trouble | None:
    """The directive that a prompt carries as `[[sim: …]]`; ValueError when it is malformed."""
    match = _IN_PROMPT.search(text)
    return None if match is None else parse_trouble(match[1].decode(errors="replace"))


class Troubles:
    """The rules in force. Each call takes at most one of them, the oldest first."""

    def __init__(self, rules: Iterable[str] = ()) -> None:
        self._rules = [parse_rule(text) for text in rules]

    def add(self, text: str) -> None:
        """Puts one more rule in force; ValueError when it is none."""
        self._rules.append(parse_rule(text))

    def clear(self) -> None:
        self._rules.clear()

    def take(self, rpc: str) -> Trouble:
        """What befalls the call that arrives now."""
        for at, rule in enumerate(self._rules):
            if rule.rpc != rpc:
                continue
            if rule.remaining is not None:
                if rule.remaining <= 1:
                    del self._rules[at]
                else:
                    self._rules[at] = replace(rule, remaining=rule.remaining - 1)
            return rule.trouble
        return NO_TROUBLE
