"""A model's chat template, rendered as Hugging Face renders it.

Templates come from a worker's bundle, so they run in jinja2's immutable
sandbox. The environment (trimmed blocks, loop controls, `tojson` without HTML
escapes, `raise_exception`, `strftime_now`, `generation` blocks) is the one
described in the transformers documentation on chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

# A chat turn as templates read it: role, and text or a list of typed parts.
Message = Mapping[str, Any]

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class ChatTemplateError(ValueError):
    """There is no template, or it does not take these messages."""


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template and the special tokens that it may name."""

    template: jinja2.Template
    special_tokens: Mapping[str, str]

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> ChatTemplate:
        """Finds the template among a bundle's files. Raises ChatTemplateError."""
        config = _read_json(files, "tokenizer_config.json")
        source = (
            _read_text(files, "chat_template.jinja")
            or _named_default(_read_json(files, "chat_template.json").get("chat_template"))
            or _bare_template(files)
            or _named_default(config.get("chat_template"))
        )
        if not source:
            raise ChatTemplateError("the model has no chat template")
        tokens = {**_read_json(files, "special_tokens_map.json"), **config}
        special = {name: _token_text(tokens.get(name)) for name in _SPECIAL_TOKENS}
        try:
            template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template is not valid: {error}") from error
        return cls(template, {name: text for name, text in special.items() if text})

    def render(self, messages: list[Message]) -> str:
        """The prompt text up to where the assistant begins. Raises ChatTemplateError."""
        try:
            return self.template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self.special_tokens,
            )
        except Exception as error:  # foreign code: it may fail in any way
            raise ChatTemplateError(f"the chat template refuses the messages: {error}") from error

    def render_turn(self, text: str, media: list[str], system: str | None = None) -> str:
        """One user turn: `media` ("image" or "video" each) first, then `text`.

        Raises ChatTemplateError, also where the template drops the text or
        does not understand media.
        """
        system_turn: list[Message] = []
        if system is not None:
            system_turn.append({"role": "system", "content": system})
        parts: list[dict[str, str]] = [{"type": kind} for kind in media]
        parts.append({"type": "text", "text": text})
        as_parts: list[Message] = [*system_turn, {"role": "user", "content": parts}]
        if media:
            return self._render_keeping(text, as_parts)
        # Templates of text models join strings; those of vision models walk over parts.
        try:
            return self._render_keeping(text, [*system_turn, {"role": "user", "content": text}])
        except ChatTemplateError:
            return self._render_keeping(text, as_parts)

    def _render_keeping(self, text: str, messages: list[Message]) -> str:
        prompt = self.render(messages)
        if text.strip() not in prompt or "{'type': " in prompt.replace(text, ""):
            raise ChatTemplateError("the chat template does not take media beside text")
        return prompt


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks training masks; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _read_text(files: Mapping[str, bytes], name: str) -> str:
    try:
        return files.get(name, b"").decode()
    except UnicodeDecodeError as error:
        raise ChatTemplateError(f"{name} is not UTF-8 text") from error


def _read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    text = _read_text(files, name)
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise ChatTemplateError(f"{name} is not JSON") from error
    return value if isinstance(value, dict) else {}


def _bare_template(files: Mapping[str, bytes]) -> str:
    """Workers also send the template as `chat_template`, bare or wrapped in JSON."""
    text = _read_text(files, "chat_template")
    try:
        return _named_default(json.loads(text).get("chat_template"))
    except (ValueError, AttributeError, RecursionError):
        return text


def _named_default(value: object) -> str:
    """The template itself, or the one called `default` of a list of named ones."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        named = {str(entry.get("name")): entry.get("template") for entry in entries}
        return str(named.get("default") or "")
    return ""


def _token_text(token: object) -> str:
    """A special token is stored as text or as an object with the text inside."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
