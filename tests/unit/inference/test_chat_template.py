# SPDX-License-Identifier: Apache-2.0
"""Chat templates and tokenizers without transformers give what transformers gives."""

from __future__ import annotations

import json
import os
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.generic.loading import model_folder
from anyaccel.inference.text import chat_template
from anyaccel.inference.text.chat_template import ChatTemplate
from anyaccel.inference.text.tokenizer import (
    TextTokenizer,
    TransformersTokenizer,
    end_tokens,
    load_text_tokenizer,
    load_tokenizer,
)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# What published templates use: namespaces, loop controls, filters, tojson, macros, exceptions, generation blocks.
RICH = """\
{{- bos_token }}
{%- set ns = namespace(system='', count=0) %}
{%- macro shown(m) %}[{{ m['role'] | upper }}]{{ m.content | trim }}{% endmacro %}
{%- for m in messages %}
    {%- if m['role'] == 'system' %}
        {%- set ns.system = m['content'] %}
        {%- continue %}
    {%- endif %}
    {%- if (m['role'] == 'user') != (ns.count % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant') }}
    {%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if m.role == 'assistant' %}{% generation %}{{ shown(m) }}{% endgeneration %}{% else %}{{ shown(m) }}{% endif %}
    {{- eos_token if loop.last and not add_generation_prompt else '' }}
{%- endfor %}
{%- if tools is defined and tools %}{{ tools | tojson }}{% endif %}
{{- {'system': ns.system, 'html': '<a & b>'} | tojson }}
{{- strftime_now('%Y') | length }}
{%- if add_generation_prompt %}[ASSISTANT]{% endif %}
"""
TALK = [
    {"role": "system", "content": "Be brief. Ü"},
    {"role": "user", "content": "  Hello <b>there</b>  "},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "What's 2+2?"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("source", [CHATML, RICH])
@pytest.mark.parametrize("messages", [TALK, TALK[1:2], TALK[1:]])
def test_rendering_is_that_of_transformers(source: str, messages: list[dict[str, str]]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template([messages], chat_template=source, add_generation_prompt=True, **SPECIAL)
    assert ChatTemplate(source, SPECIAL).render(messages) == rendered[0][0]


def test_tools_and_other_variables_are_those_of_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = RICH + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    function = {"name": "clock", "description": "Tells the time <now>.", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    rendered: Any = render_jinja_template(
        [TALK], tools=tools, chat_template=source, add_generation_prompt=True, enable_thinking=False, **SPECIAL
    )
    given = {"enable_thinking": False, "messages": [], "bos_token": "other"}
    assert ChatTemplate(source, SPECIAL).render(TALK, tools=tools, more=given) == rendered[0][0]


def test_a_template_that_fails_is_named() -> None:
    with pytest.raises(ModelError, match="chat template does not take this conversation: Range too big"):
        ChatTemplate("{% for i in range(1000000000) %}x{% endfor %}", {}).render(TALK[1:2])


def test_text_that_is_not_utf8_is_refused(folder: Path) -> None:
    tokenizer = TextTokenizer(folder)
    text = os.fsdecode(b"caf\xff")
    with pytest.raises(UsageError, match="not valid UTF-8: byte 0xff after 'caf'"):
        tokenizer.encode(text)
    with pytest.raises(UsageError, match="byte 0xff"):
        tokenizer.chat([{"role": "user", "content": text}])
    with pytest.raises(UsageError, match="unpaired surrogate"):
        tokenizer.encode("\ud83d")


def test_template_may_refuse_and_may_not_reach_out() -> None:
    with pytest.raises(ModelError, match="must alternate"):
        ChatTemplate(RICH, SPECIAL).render([TALK[1], TALK[1]])
    with pytest.raises(ModelError, match="cannot be read"):
        ChatTemplate("{% for %}", {})
    for harm in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception.__globals__ }}"):
        try:
            text = ChatTemplate(harm, {}).render(TALK)
        except ModelError:
            continue
        assert text.strip() == ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from tokenizers.decoders import ByteLevel

    words = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {**SPECIAL, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_tokens_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), load_text_tokenizer(folder)
    assert isinstance(ours, TextTokenizer)
    for text in ("Hello wörld", "", "<s>tagged</s>"):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.has_chat_template
    assert ours.chat(TALK) == list(
        theirs.apply_chat_template(TALK, add_generation_prompt=True, return_dict=True)["input_ids"]
    )
    assert ours.end_tokens == [2]


def test_template_of_a_file_of_its_own_comes_first(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = TextTokenizer(folder)
    assert tokenizer.decode(tokenizer.chat(TALK)) == TALK[0]["content"]
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
    assert not TextTokenizer(folder).has_chat_template
    with pytest.raises(ModelError, match="no chat template"):
        TextTokenizer(folder).chat(TALK)


@pytest.mark.parametrize("kind", [TextTokenizer, TransformersTokenizer])
def test_a_template_may_be_replaced(kind: Any, folder: Path, tmp_path: Path) -> None:
    tokenizer = TextTokenizer(folder) if kind is TextTokenizer else TransformersTokenizer(load_tokenizer(folder))
    file = tmp_path / "own.jinja"
    file.write_text("{{ bos_token }}{{ messages[-1].content }}!{{ 'with tools' if tools }}")
    tokenizer.set_template(file)
    assert tokenizer.has_chat_template and tokenizer.template(tools=True) == tokenizer.template() == file.read_text()
    assert tokenizer.render(TALK, [{"type": "function"}]) == f"<s>{TALK[-1]['content']}!with tools"
    file.write_text("{% if %}")
    with pytest.raises(ModelError, match=re.escape(f"{file}: its chat template cannot be read")):
        tokenizer.set_template(file)


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "LlamaTokenizerFast"])
@pytest.mark.parametrize("around", [None, "<s> $A", "<s> $A </s>", "$A </s>"])
def test_tokens_around_a_text_are_those_of_transformers(name: str, around: str | None, folder: Path) -> None:
    """Whatever flags the configuration has: tokenizer.json says it."""
    from tokenizers import Tokenizer, processors
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    given = json.loads(tokenizer.to_str())
    if around is None:
        given["post_processor"] = None
        (folder / "tokenizer.json").write_text(json.dumps(given))
    else:
        tokenizer.post_processor = processors.TemplateProcessing(around, special_tokens=[("<s>", 1), ("</s>", 2)])
        tokenizer.save(str(folder / "tokenizer.json"))
    for flags in product((None, True, False), (None, True, False)):
        more = {f"add_{end}_token": flag for end, flag in zip(("bos", "eos"), flags, strict=True) if flag is not None}
        (folder / "tokenizer_config.json").write_text(json.dumps({**SPECIAL, "tokenizer_class": name, **more}))
        theirs, ours = AutoTokenizer.from_pretrained(folder), TextTokenizer(folder)
        for text in ("ab", "<s>ab", "ab</s>", ""):
            assert ours.encode(text) == theirs(text)["input_ids"], (flags, text)
            assert ours.encode(text, special=False) == theirs(text, add_special_tokens=False)["input_ids"]


_NAMED = {
    "default": "plain{{ messages[0].content }}",
    "tool_use": "{{ tools | length }} tools",
    "rag": "{{ documents }}",
}


@pytest.mark.parametrize("place", ["list", "files"])
def test_the_template_for_tools_is_taken_with_tools(place: str, folder: Path) -> None:
    from transformers import AutoTokenizer

    config = json.loads((folder / "tokenizer_config.json").read_text())
    if place == "list":
        config["chat_template"] = [{"name": name, "template": source} for name, source in _NAMED.items()]
    else:
        (folder / "chat_template.jinja").write_text(_NAMED["default"])
        (folder / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(_NAMED[name])
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = TextTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    wrapped = TransformersTokenizer(theirs)
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
    for given in (None, tools):
        wanted = theirs.apply_chat_template(TALK, tools=given, tokenize=False, add_generation_prompt=True)
        assert ours.render(TALK, given) == wrapped.render(TALK, given) == wanted
        assert (
            ours.template(given is not None)
            == wrapped.template(given is not None)
            == _NAMED["tool_use" if given else "default"]
        )
    assert ours.has_chat_template and wrapped.has_chat_template


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 0.1 s"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}text{% endfor %}{% endfor %}", "more than 0.1 s"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
            "more than 0.1 s",
        ),
        ("{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "a text of 13"),
        ("{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}", "a text of 13"),
        ("{{ 'a' * 100000000000 }}", "a text of 100000000000 characters"),
    ],
)
def test_a_template_without_an_end_is_ended(source: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a slow machine a text of 64 Mi characters takes longer than this to make.
    monkeypatch.setattr(chat_template, "_MOST_SECONDS", 0.1 if said == "more than 0.1 s" else 60)
    with pytest.raises(ModelError, match=said):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


def test_operators_of_texts_and_numbers_do_what_they_do_in_jinja() -> None:
    import jinja2

    source = (
        "{% for m in messages %}{{ m.role ~ ': ' ~ (m.content ~ 1) ~ none ~ nothing }}{% else %}{{ 'a' ~ 'b' }}"
        "{% endfor %}{{ 'x' + 'y' }}{{ [1] + [2] }}{{ 'ab' * 3 }}{{ 7 % 4 * 2 + 1 }}{{ '%s-%d' % ('a', 3) }}"
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x ~ loop.index }}{% endfor %}"
        "{% macro f(a, b='c' ~ 'd') %}{{ a ~ b }}{% endmacro %}{{ f('e' ~ 'f') }}"
    )
    messages = [{"role": "user", "content": "hi"}]
    assert ChatTemplate(source, {}).render(messages) == jinja2.Template(source).render(messages=messages)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": 3}'])
def test_damaged_tokenizer_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_text_tokenizer(tmp_path)


def test_a_cache_that_cannot_be_written_is_no_hindrance(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from anyaccel.inference.checkpoints.model_path import default_model_file

    monkeypatch.setenv("ANYACCEL_CACHE_DIR", "/proc/none")
    tokenizer = load_text_tokenizer(default_model_file())
    assert tokenizer.decode(tokenizer.encode("Why is the sky blue?")) == "Why is the sky blue?"
    assert tokenizer.has_chat_template
    assert any("is not kept" in message for message in caplog.messages)
    with pytest.raises(ModelError, match=r"cannot be written .*set ANYACCEL_CACHE_DIR"):
        model_folder(default_model_file())


def test_end_tokens() -> None:
    assert end_tokens({"eos_token_id": [2, 7]}, {"eos_token_id": 3}) == [2, 7]
    assert end_tokens({}, {"eos_token_id": 3}) == [3]
    assert end_tokens({}, {}) == []
