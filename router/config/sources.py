"""Where settings come from, and which source wins: defaults < file < environment < flags."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, ValidationError
from pydantic_settings import SettingsError

from router.config.settings import TABLES, Settings

# What Kubernetes tells each pod of a Service that is called mmrouter, or mmrouter-SOMETHING.
_OF_A_SERVICE = re.compile(
    r"MMROUTER_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?"
    r"|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


class ConfigError(ValueError):
    """A setting is wrong; the message has a line for each."""


def load(flags: dict[str, Any], file: str | Path | None = None) -> Settings:
    """The settings in effect. `flags` are fields given on the command line.

    Raises `ConfigError`.
    """
    values = _read_file(Path(file)) if file else {}
    # pydantic-settings ranks init values over the environment, the file belongs below it.
    below = {key: value for key, value in values.items() if not _in_environment(key)}
    merged: dict[str, Any] = {**below, **flags}
    try:
        # Fields with environment aliases take their init value under the first alias.
        return Settings(**{_init_name(key): value for key, value in merged.items()})
    except ValidationError as error:
        raise ConfigError("\n".join(_problem(entry) for entry in error.errors())) from error
    except SettingsError as error:
        # Tables alone are read as JSON there.
        names = ", ".join(f"MMROUTER_{name.upper()}" for name in sorted(TABLES))
        raise ConfigError(f"{names}: not a JSON object") from error


def unknown_variables(environment: Iterable[str]) -> list[tuple[str, str]]:
    """The names among them that look like a setting and are none, each with the nearest
    setting's variable, or with nothing where none is near.
    """
    prefix, fields = "MMROUTER_", [field.upper() for field in Settings.model_fields]
    unknown = []
    for name in sorted(environment):
        wanted = name.upper().removeprefix(prefix)
        if wanted in (name.upper(), *fields) or _OF_A_SERVICE.fullmatch(name.upper()):
            continue
        nearest = get_close_matches(wanted, fields, n=1)
        unknown.append((name, prefix + nearest[0] if nearest else ""))
    return unknown


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    unknown = sorted(set(values) - set(Settings.model_fields))
    if unknown:
        raise ConfigError(f"{path}: unknown key: {', '.join(unknown)}")
    return values


def _environment_names(field: str) -> tuple[str, ...]:
    alias = Settings.model_fields[field].validation_alias
    if isinstance(alias, AliasChoices):
        return tuple(str(choice) for choice in alias.choices)
    return (f"MMROUTER_{field.upper()}",)


def _in_environment(field: str) -> bool:
    present = {name.upper() for name in os.environ}
    return any(name in present for name in _environment_names(field))


def _init_name(field: str) -> str:
    alias = Settings.model_fields[field].validation_alias
    return str(alias.choices[0]) if isinstance(alias, AliasChoices) else field


def _problem(error: Any) -> str:
    first, *rest = [str(part) for part in error["loc"]] or [""]
    # Names of models are as they are.
    name = ".".join([first.removeprefix("MMROUTER_").lower(), *rest])
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = "unknown key"
    return f"{name}: {message}" if name else message
