"""The command line's flags, one for each field."""

from __future__ import annotations

import argparse
import types
import typing
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from router.config.settings import TABLES, Settings
from router.units import format_duration, format_size, parse_duration, parse_size


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A flag `--a-b` for each field, unset unless given."""
    for name, info in Settings.model_fields.items():
        if name in TABLES:
            continue
        flag = f"--{name.replace('_', '-')}"
        text = info.description or ""
        kind = _plain(info.annotation)
        shown = _shown(info.default, info.metadata)
        if shown:
            text += f" (default: {shown})"
        text = text.replace("%", "%%")
        common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        elif typing.get_origin(kind) is Literal:
            parser.add_argument(flag, choices=typing.get_args(kind), **common)
        elif typing.get_origin(kind) is tuple:
            parser.add_argument(flag, action="append", metavar="NAME", **common)
        else:
            parser.add_argument(flag, metavar=_metavar(kind, info.metadata), **common)


def flags_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields that were given on the command line."""
    given = {k: v for k, v in vars(arguments).items() if k in Settings.model_fields}
    return {k: ",".join(v) if isinstance(v, list) else v for k, v in given.items()}


def _plain(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    return annotation


def _validators(metadata: list[Any]) -> set[Any]:
    return {entry.func for entry in metadata if isinstance(entry, BeforeValidator)}


def _metavar(kind: Any, metadata: list[Any]) -> str:
    if parse_duration in _validators(metadata):
        return "TIME"
    if parse_size in _validators(metadata) or "bytes" in str(kind):
        return "SIZE"
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _shown(default: Any, metadata: list[Any]) -> str:
    if default is None or default in ("", ()):
        return ""
    if parse_duration in _validators(metadata):
        return format_duration(default)
    if parse_size in _validators(metadata):
        return format_size(default)
    return str(default)
