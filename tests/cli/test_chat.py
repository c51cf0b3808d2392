import json

import pytest

from router.cli.chat import ChatTemplate, ChatTemplateError

PARTS = (
    "{%- for m in messages %}<{{ m.role }}>"
    "{%- if m.content is string %}{{ m.content }}"
    "{%- else %}{%- for p in m.content %}"
    "{%- if p.type == 'image' %}[IMG]{%- elif p.type == 'video' %}[VID]"
    "{%- else %}{{ p.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def template(source: str, **config: object) -> ChatTemplate:
    return ChatTemplate.from_files(
        {
            "chat_template.jinja": source.encode(),
            "tokenizer_config.json": json.dumps(config).encode(),
        }
    )


def test_media_come_before_the_text_in_order() -> None:
    prompt = template(PARTS).render_turn("what?", ["image", "video", "image"], system="short")
    assert prompt == "<system>short<user>[IMG][VID][IMG]what?<assistant>"


def test_text_alone_is_a_string_for_templates_that_join_strings() -> None:
    source = "{{ messages[0]['content'] + '!' }}"
    assert template(source).render_turn("hi", []) == "hi!"


def test_text_alone_is_a_part_for_templates_that_walk_over_parts() -> None:
    source = "{% for p in messages[0].content %}{{ p.text }}{% endfor %}"
    assert template(source).render_turn("hi", []) == "hi"


@pytest.mark.parametrize(
    "source", ["{{ messages[0]['content'] }}", "{{ messages[0].role }}", "{{ 1 / 0 }}"]
)
def test_a_template_that_does_not_take_media_is_refused(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        template(source).render_turn("hi", ["image"])


def test_special_tokens_are_texts_or_objects() -> None:
    chat = template(
        "{{ bos_token }}{{ eos_token }}{{ messages[0].content }}",
        bos_token={"content": "<s>", "special": True},
        eos_token="</s>",
    )
    assert chat.render_turn("x", []) == "<s></s>x"


def test_blocks_are_trimmed_as_by_transformers() -> None:
    source = (
        "{% if true %}\n    {% for m in messages %}\n{{ m.content }}\n    {% endfor %}\n{% endif %}"
    )
    assert template(source).render_turn("hi", []) == "hi\n"


def test_tojson_keeps_characters_and_html_as_they_are() -> None:
    source = "{{ {'k': 'é<b>&'} | tojson }}{{ messages[0].content }}"
    assert template(source).render_turn("x", []) == '{"k": "é<b>&"}x'


def test_loop_controls_and_generation_blocks_are_known() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% break %}{% endfor %}"
    )
    assert template(source).render_turn("x", []) == "x"


def test_raise_exception_reaches_the_user() -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        template(source).render_turn("x", [])


def test_strftime_now_gives_the_date() -> None:
    prompt = template("{{ strftime_now('%Y') }} {{ messages[0].content }}").render_turn("x", [])
    assert len(prompt.split()[0]) == 4


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        template(source + "{{ messages[0].content }}").render_turn("x", [])


def wrapped(value: object) -> bytes:
    return json.dumps({"chat_template": value}).encode()


NAMED = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": b"yes", "tokenizer_config.json": wrapped("no")},
        {"chat_template.json": wrapped("yes"), "tokenizer_config.json": wrapped("no")},
        {"chat_template": b"yes", "tokenizer_config.json": wrapped("no")},
        {"chat_template": wrapped("yes")},
        {"tokenizer_config.json": wrapped("yes")},
        {"tokenizer_config.json": wrapped(NAMED)},
    ],
)
def test_the_template_is_found_wherever_it_is_kept(files: dict[str, bytes]) -> None:
    assert ChatTemplate.from_files(files).render([]) == "yes"


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config.json": b"{}"},
        {"tokenizer_config.json": b"not json"},
        {"chat_template.jinja": b"\xff\xfe"},
        {"chat_template.jinja": b"{% if %}"},
        {"tokenizer_config.json": wrapped([{"name": "tool_use", "template": "no"}])},
        {"tokenizer_config.json": wrapped(["no", None, [], {"name": []}])},
        {"tokenizer_config.json": b"[" * 100_000},
    ],
)
def test_a_missing_or_broken_template_is_said(files: dict[str, bytes]) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate.from_files(files)
