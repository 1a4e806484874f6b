# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501  what models write is one line
"""What models write in each format of tool calls and of thoughts, and what it means."""

from __future__ import annotations

from typing import Any

from anyaccel.serve.requests.tools.format import ParsedCall

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"type": "object", "properties": {"lat": {"type": "number"}, "unit": {"enum": ["C", "F"]}}},
        "exact": {"type": ["boolean", "null"]},
    },
    "required": ["city"],
}
CLOCK: dict[str, Any] = {"type": "object", "properties": {}}
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}

OSLO = ParsedCall("weather", '{"city": "Oslo"}')
NOON = ParsedCall("clock", "{}")

# format -> one call of `weather`, and what is written instead of it where `clock` is called, too.
WRITTEN: dict[str, tuple[str, str]] = {
    "harmony": (
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
        "<|start|>assistant<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}<|call|>",
    ),
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    ),
    "qwen3-coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    ),
    "seed-oss": (
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=clock>\n</function>\n</seed:tool_call>",
    ),
    "minimax-m2": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n</invoke>\n'
        '<invoke name="clock">\n</invoke>\n</minimax:tool_call>',
    ),
    "deepseek-v3.2": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="clock">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ),
    "deepseek-v4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="clock">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    ),
    "glm-4.5": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>\n"
        "<tool_call>clock\n</tool_call>",
    ),
    "kimi-k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>',
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Oslo"}<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>'
        "{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "deepseek-v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Oslo"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n'
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek-v3.1": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "cohere": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo"}}\n]'
        "<|END_ACTION|>",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo"}},\n'
        '    {"tool_call_id": "1", "tool_name": "clock", "parameters": {}}\n]<|END_ACTION|>',
    ),
    "command-r": (
        'Action:\n```json\n[\n    {\n        "tool_name": "weather",\n        "parameters": {"city": "Oslo"}\n    }\n]\n```',
        'Action:\n```json\n[\n    {"tool_name": "weather", "parameters": {"city": "Oslo"}},\n'
        '    {"tool_name": "clock", "parameters": {}}\n]\n```',
    ),
    "gemma-4": (
        '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>',
        '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|><|tool_call>call:clock{}<tool_call|>',
    ),
    "gemma": (
        "<start_function_call>call:weather{city:<escape>Oslo<escape>}<end_function_call>",
        "<start_function_call>call:weather{city:<escape>Oslo<escape>}<end_function_call>"
        "<start_function_call>call:clock{}<end_function_call>",
    ),
    "nemotron": (
        '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>',
        '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "clock", "arguments": {}}]</TOOLCALL>',
    ),
    "phi-4": (
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>',
        'functools[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "clock", "arguments": {}}]',
    ),
    "granite": (
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]',
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "clock", "arguments": {}}]',
    ),
    "lfm2": (
        '<|tool_call_start|>[weather(city="Oslo")]<|tool_call_end|>',
        '<|tool_call_start|>[weather(city="Oslo"), clock()]<|tool_call_end|>',
    ),
    "olmo3": (
        '<function_calls>\nweather(city="Oslo")\n</function_calls>',
        '<function_calls>\nweather(city="Oslo")\nclock()\n</function_calls>',
    ),
    "hunyuan": (
        '<tool_calls>[{"name": "weather", "arguments": {"city": "Oslo"}}]</tool_calls>',
        '<tool_calls>[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "clock", "arguments": {}}]</tool_calls>',
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]',
        '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]clock{}',
    ),
    "pythonic": ('[weather(city="Oslo")]', '[weather(city="Oslo"), clock()]'),
    "llama3": (
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}',
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "clock", "parameters": {}}',
    ),
}  # fmt: skip

# A template's way to write a call, which the format is known by; `c` is the function.
_JSON = "{{ {'name': c.name, 'arguments': c.arguments} | tojson }}"
TEMPLATES: dict[str, str] = {
    "harmony": "<|channel|>commentary to=functions.{{ c.name }} <|constrain|>json<|message|>{{ c.arguments | tojson }}<|call|>",
    "hermes": f"<tool_call>\n{_JSON}\n</tool_call>",
    "qwen3-coder": "<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments | items %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "seed-oss": "<seed:tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments | items %}<parameter={{ k }}>"
    "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="{{ c.name }}">\n{% for k, v in c.arguments | items %}'
    '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n'
    "</minimax:tool_call>",
    "deepseek-v3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="{{ c.name }}">\n{% for k, v in c.arguments | items %}'
    '<｜DSML｜parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">'
    "{{ v if v is string else v | tojson }}</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "deepseek-v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{{ c.name }}">\n{% for k, v in c.arguments | items %}'
    '<｜DSML｜parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">'
    "{{ v if v is string else v | tojson }}</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    "glm-4.5": "<tool_call>{{ c.name }}\n{% for k, v in c.arguments | items %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>",
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ c.name }}:0<|tool_call_argument_begin|>"
    "{{ c.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n"
    "{{ c.arguments | tojson }}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments | tojson }}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "cohere": "<|START_ACTION|>[{{ {'tool_call_id': '0', 'tool_name': c.name, 'parameters': c.arguments} | tojson }}]"
    "<|END_ACTION|>",
    "command-r": "Action:\n```json\n[{{ {'tool_name': c.name, 'parameters': c.arguments} | tojson }}]\n```",
    "gemma-4": "<|tool_call>call:{{ c.name }}{{ c.arguments | tojson | replace('\"', '<|\"|>') }}<tool_call|>",
    "gemma": "<start_function_call>call:{{ c.name }}{{ c.arguments | tojson | replace('\"', '<escape>') }}"
    "<end_function_call>",
    "nemotron": f"<TOOLCALL>[{_JSON}]</TOOLCALL>",
    "phi-4": f"<|tool_call|>{_JSON}<|/tool_call|>",
    "granite": f"{{# <|start_of_role|> #}}<|tool_call|>[{_JSON}]",
    "lfm2": "<|tool_call_start|>[{{ c.name }}({% for k, v in c.arguments | items %}{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %})]<|tool_call_end|>",
    "olmo3": "<function_calls>\n{{ c.name }}({% for k, v in c.arguments | items %}{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %})\n</function_calls>",
    "hunyuan": f"<tool_calls>[{_JSON}]</tool_calls>",
    "mistral": f"[TOOL_CALLS][{_JSON}]",
    "pythonic": "{# [func_name1(params_name1=...)] #}[{{ c.name }}({% for k, v in c.arguments | items %}{{ k }}="
    "{{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})]",
    "llama3": "{# <|start_header_id|> tools #}{{ {'name': c.name, 'parameters': c.arguments} | tojson }}",
}  # fmt: skip


# format, text, and its content and calls
def _weather(arguments: str) -> ParsedCall:
    return ParsedCall("weather", arguments)


EDGES: list[tuple[str, str, str, list[ParsedCall]]] = [
    (  # a number that is marked as a text; JSON; an argument that the schema has not; lines of a text
        "deepseek-v3.2",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="days" string="true">7</｜DSML｜parameter>'
        '<｜DSML｜parameter name="tags" string="false">["a"]</｜DSML｜parameter>\n<｜DSML｜parameter name="more" string="true">7'
        '</｜DSML｜parameter><｜DSML｜parameter name="city" string="true">a\n"b"</｜DSML｜parameter></｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "",
        [ParsedCall("weather", '{"days": 7, "tags": ["a"], "more": "7", "city": "a\\n\\"b\\""}')],
    ),
    (
        "deepseek-v4",
        '<｜DSML｜tool_calls><｜DSML｜invoke name="clock"><｜DSML｜parameter name="a">1</｜DSML｜parameter>'
        '<｜DSML｜parameter name="b" string="true">2</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>',
        '<｜DSML｜tool_calls><｜DSML｜invoke name="clock"><｜DSML｜parameter name="a">1</｜DSML｜parameter>'
        '<｜DSML｜parameter name="b" string="true">2</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>',
        [],
    ),
    ("hermes", '<tool_call>{"name": "clock"}', "", [NOON]),
    ("hermes", "<tool_call>{broken</tool_call> and more", "<tool_call>{broken</tool_call> and more", []),
    (
        "hermes",
        '<tool_call>{"name": "clock", "arguments": {"x": "a \\" </tool_call> b\\\\"}}</tool_call>\n'
        '<tool_call>{"name": "clock"}</tool_call>',
        "",
        [ParsedCall("clock", '{"x": "a \\" </tool_call> b\\\\"}'), NOON],
    ),
    (
        "hermes",
        '<tool_call>{"name: 1}</tool_call>\n<tool_call>{"name": "clock"}</tool_call>',
        '<tool_call>{"name: 1}</tool_call>',
        [NOON],
    ),
    ("hermes", 'Wait.\n\n<tool_call>\n{"name": "clock"}\n</tool_call>\n\nDone.', "Wait.Done.", [NOON]),
    ("hermes", "a\n\n<tool_call> is a mark\n", "a\n\n<tool_call> is a mark\n", []),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "O\ns"}}</tool_call>', "", [_weather('{"city": "O\\ns"}')]),
    ("hermes", "a <tool> b <tool_cal", "a <tool> b <tool_cal", []),
    ("hermes", "{}", "{}", []),
    ("hermes", "", "", []),
    # The outer tags are missing; a value of several lines; values by their types.
    (
        "qwen3-coder",
        "Well.\n<function=weather>\n<parameter=city>\na\n<b>\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        '<parameter=tags>\n["x", "1"]\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>',
        "Well.",
        [_weather('{"city": "a\\n<b>\\n", "days": 3, "tags": ["x", "1"], "exact": true}')],
    ),
    ("qwen3-coder", "<function=weather><parameter=city>7</parameter></function>", "", [_weather('{"city": "7"}')]),
    ("qwen3-coder", "<function=weather><parameter=days>a few</parameter></function>", "", [_weather('{"days": "a few"}')]),
    ("qwen3-coder", "<function=weather><parameter=exact>null</parameter></function>", "", [_weather('{"exact": null}')]),
    ("qwen3-coder", "Use <function=f and", "Use <function=f and", []),
    (
        "qwen3-coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n",
        [],
    ),
    (
        "glm-4.5",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Os lo</arg_value><arg_key>days</arg_key>"
        "<arg_value>-1</arg_value></tool_call>",
        "",
        [_weather('{"city": "Os lo", "days": -1}')],
    ),
    ("glm-4.5", "<tool_call>other\n<arg_key>x</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>", "", [ParsedCall("other", '{"x": [1]}')]),
    ("minimax-m2", '<minimax:tool_call>\n<invoke name="clock">\n</invoke>', "", [NOON]),
    ("minimax-m2", "<minimax:tool_call>\nnothing\n</minimax:tool_call>", "<minimax:tool_call>\nnothing\n</minimax:tool_call>", []),
    ("kimi-k2", '<|tool_call_begin|>functions.clock:3<|tool_call_argument_begin|>{}<|tool_call_end|>', "", [ParsedCall("clock", "{}", "functions.clock:3")]),
    ("deepseek-v3.1", 'Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}', "Hm.", [NOON]),
    ("gemma-4", '<|tool_call>call:weather{city:<|"|>a, b:{c}<|"|>,where:{lat:1.5,unit:<|"|>C<|"|>},tags:[<|"|>x<|"|>,<|"|><y<|"|>],exact:true}<tool_call|>', "", [_weather('{"city": "a, b:{c}", "where": {"lat": 1.5, "unit": "C"}, "tags": ["x", "<y"], "exact": true}')]),
    ("gemma", "<start_function_call>call:weather{city:<b}<end_function_call>", "<start_function_call>call:weather{city:<b}<end_function_call>", []),
    ("gemma", "<start_function_call>call:weather{city:<escape>42<escape>,days:<escape>42<escape>}<end_function_call>", "", [_weather('{"city": "42", "days": 42}')]),
    ("gemma-4", "<|tool_call>call:weather{where:{lat:3.}}<tool_call|>", "", [_weather('{"where": {"lat": 3.0}}')]),
    ("kimi-k2", "<|tool_call_begin|>clock:0 <|tool_call_argument_begin|>{} <|tool_call_end|>", "", [ParsedCall("clock", "{}", "functions.clock:0")]),
    ("qwen3-coder", "<function=weather><parameter=tags>['a', None]</parameter><parameter=where>{'lat': 1}</parameter></function>", "", [_weather('{"tags": ["a", null], "where": {"lat": 1}}')]),
    ("qwen3-coder", "<function=weather><parameter=tags>[a]</parameter></function>", "", [_weather('{"tags": "[a]"}')]),
    ("glm-4.5", "  \n  <tool_call>clock</tool_call>", "", [NOON]),
    ("glm-4.5", "  \n  <tool_call> is", "  \n  <tool_call> is", []),
    ("hermes", "  \n ", "  \n ", []),
    ("llama3", '{"name": "weather", "parameters": {"city": "Oslo"}}', "", [OSLO]),
    ("llama3", '{"name": "clock"} {"name": "nobody"}', '{"name": "nobody"}', [NOON]),
    ("llama3", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3", "plain", "plain", []),
    ("pythonic", "[weather(city='O\\'s', days=-2, tags=['a', \"]\"], where={'lat': 1.0}, exact=None), clock()] Done.", "Done.", [_weather('{"city": "O\'s", "days": -2, "tags": ["a", "]"], "where": {"lat": 1.0}, "exact": null}'), NOON]),
    ("pythonic", "[weather(days=1e999)]", "[weather(days=1e999)]", []),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>', '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>', []),
    ("kimi-k2", '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"days": 1e999}<|tool_call_end|>', '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"days": 1e999}<|tool_call_end|>', []),
    ("qwen3-coder", "<function=weather><parameter=days>1e999</parameter></function>", "", [_weather('{"days": "1e999"}')]),
    ("olmo3", "<function_calls>weather(city='O\\'s', days=2)\n\nclock() </function_calls>", "", [_weather('{"city": "O\'s", "days": 2}'), NOON]),
    ("olmo3", "<function_calls>weather(city='x')]</function_calls>", "<function_calls>weather(city='x')]</function_calls>", []),
    ("olmo3", "<function_calls></function_calls>", "<function_calls></function_calls>", []),
    ("pythonic", "[weather(city=true)]", "", [_weather('{"city": true}')]),
    ("pythonic", "[1, 2] are numbers", "[1, 2] are numbers", []),
    ("pythonic", "[weather(1)]", "[weather(1)]", []),
    ("pythonic", "[weather(city=open('x'))]", "[weather(city=open('x'))]", []),
    ("pythonic", "[nobody(a=1)]", "[nobody(a=1)]", []),
    ("mistral", 'Well.[TOOL_CALLS]clock[CALL_ID]a1b2c3d4e[ARGS]{}', "Well.", [ParsedCall("clock", "{}", "a1b2c3d4e")]),
    ("phi-4", "import functools\n\nfunctools[0]", "import functools\n\nfunctools[0]", []),
    ("phi-4", '<|tool_call|>{"name": "clock", "arguments": {}}<|/tool_call|>', "", [NOON]),
    ("granite", '<tool_call>[{"arguments": {"city": "Oslo"}, "name": "weather"}]', "", [OSLO]),
    ("nemotron", "<TOOLCALL>[]</TOOLCALL>", "<TOOLCALL>[]</TOOLCALL>", []),
]  # fmt: skip

# format, whether the prompt has opened the thoughts, the text, the thoughts and the rest
THOUGHTS: list[tuple[str, bool, str, str, str]] = [
    ("think", False, "<think>Hm.</think>\n\nYes.", "Hm.", "Yes."),
    ("think", False, "\n <think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("think", True, "Hm.</think>\n\nYes.", "Hm.", "Yes."),
    ("think", False, " Yes <think>.", "", " Yes <think>."),
    ("think", True, "Hm.</thin", "Hm.</thin", ""),
    ("mistral", False, "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    ("seed-oss", False, "<seed:think>Hm.<seed:cot_budget_reflect>I have.</seed:cot_budget_reflect></seed:think>Yes.", "Hm.<seed:cot_budget_reflect>I have.</seed:cot_budget_reflect>", "Yes."),
    ("cohere", False, "<|START_THINKING|>Hm.<|END_THINKING|>\n<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Hm.", "Yes."),
    ("cohere", False, "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "", "Yes."),
    ("cohere", False, "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[]", "Hm.", "<|START_ACTION|>[]"),
    ("gemma-4", False, "<|channel>thought\nHm.<channel|>Yes.", "Hm.", "Yes."),
    ("granite", False, "Here's my thought process: Hm. Here is my response: Yes.", " Hm. ", " Yes."),
    ("granite", False, "Here is", "", "Here is"),
    ("apriel", True, "Hm.\n[BEGIN FINAL RESPONSE]\nYes.\n[END FINAL RESPONSE]", "Hm.\n", "Yes."),
    ("hunyuan", False, "<think>\nHm.\n</think>\n<answer>\nYes.\n\nNo.\n</answer>", "\nHm.\n", "Yes.\n\nNo."),
    ("hunyuan", False, "<answer>\nYes.", "", "Yes."),
    ("ernie", True, "Hm.\n</think>\n\n<response>\nYes.\n</response>\n", "Hm.\n", "Yes."),
]  # fmt: skip

# text, thoughts, content and calls of harmony's messages
MESSAGES: list[tuple[str, str, str, list[ParsedCall]]] = [
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>", "Hm.", "Yes.", []),
    ("<|channel|>final<|message|>Yes.", "", "Yes.", []),
    ("<|channel|>final <|constrain|>JSON<|message|>{}", "", "{}", []),
    ("<|channel|>commentary to=functions.clock<|message|>now<|call|>", "", "", [ParsedCall("clock", "now")]),
    ("Yes.", "", "Yes.", []),
    (
        "<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|channel|>analysis<|message|>B.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather"
        ' <|constrain|>json<|message|>{"city":"Oslo"}<|call|>',
        "A.\n\nB.",
        "I look.",
        [OSLO],
    ),
    ('<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}', "", "", [OSLO]),
    ("<|channel|>commentary to=functions.clock<|message|>", "", "", [NOON]),
    ("<|channel|>analysis to=browser.search<|message|>{}<|call|>", "{}", "", []),
    ("<|channel|>analysis<|message|>Hm, <|chan", "Hm, <|chan", "", []),
    ("<|channel|>fin", "", "", []),
]  # fmt: skip
