"""Training variants of published chat templates: edits that mark the assistant's turns. No torch.

A variant is chosen by the SHA-256 of a template's exact text. Its edits put ``{% generation %}``
around the text that TRL counts: content and end token, not the header of a turn. All variants but
one render as the published template does. Qwen 3's keeps the thoughts of earlier turns, as TRL's
does, because the published template drops them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.models.data.chat.published.defaults import split_defaults

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")

_OPEN, _CLOSE = "{%- generation %}", "{%- endgeneration %}"

_IS_ASSISTANT = "{%- if message['role'] == 'assistant' %}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A replacement by ``new`` of the text from ``start``, which occurs once, through the first
    ``end`` behind it. An empty ``end`` stands for the end of ``start``.
    """

    start: str
    end: str = ""
    new: str

    def apply(self, text: str) -> str:
        """Returns the text after the edit.

        Raises:
            ValueError: the text has no single place for the edit.
        """
        if text.count(self.start) != 1:
            raise ValueError(f"{text.count(self.start)} places for {self.start!r}")
        first = text.index(self.start)
        behind = first + len(self.start)
        last = text.index(self.end, behind) + len(self.end)
        return text[:first] + self.new + text[last:]


def is_marked(template: str) -> bool:
    """Returns whether a template marks the assistant's turns."""
    return _MARKED.search(template) is not None


def training_text(template: str) -> str | None:
    """Returns the text of a template that marks the assistant's turns: itself or its variant. None
    for an unknown template without marks.
    """
    if is_marked(template):
        return template
    head, body = split_defaults(template)
    edits = _VARIANTS.get(_sum(body))
    if edits is None:
        return None
    for edit in edits:
        body = edit.apply(body)
    return head + body


def keeps_rendering(template: str) -> bool:
    """Returns whether the training text renders as the template itself does."""
    return _sum(split_defaults(template)[1]) not in _OTHER_RENDERINGS


def _sum(template: str) -> str:
    return hashlib.sha256(template.encode()).hexdigest()


def _either(body: str) -> str:
    """Returns a template's text that prints ``body``, marked in turns of the assistant."""
    marked = f"{{% generation %}}{body}{{% endgeneration %}}"
    return f"{_IS_ASSISTANT}{marked}{{% else %}}{body}{{% endif %}}"


_LLAMA_BODY = "{{ message['content'] | trim + '<|eot_id|>' }}"
_LLAMA_HEADER = r"{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}"

_LLAMA_3 = (
    Edit(start="{% set content = '<|start_header_id|>'", new="{% set head = '<|start_header_id|>'"),
    Edit(start="'+ message['content'] | trim + '<|eot_id|>' %}", new="' %}"),
    Edit(start="{% set content = bos_token + content %}", new="{% set head = bos_token + head %}"),
    Edit(start="{{ content }}", new="{{ head }}" + _either(_LLAMA_BODY)),
)

_LLAMA_TURN = Edit(
    start=r"'<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}",
    new=r"'<|end_header_id|>\n\n' }}" + _either(_LLAMA_BODY),
)
_LLAMA_CALL_END = Edit(
    start='    {%- elif message.role == "tool" or message.role == "ipython" %}',
    new=f'        {_CLOSE}\n    {{%- elif message.role == "tool" or message.role == "ipython" %}}',
)
_LLAMA_3_1 = (
    _LLAMA_TURN,
    Edit(
        start="{%- if builtin_tools is defined and tool_call.name in builtin_tools %}",
        end=_LLAMA_HEADER,
        new=f"{_LLAMA_HEADER}{_OPEN}"
        "{%- if builtin_tools is defined and tool_call.name in builtin_tools %}",
    ),
    Edit(start="{%- else  %}", end=_LLAMA_HEADER, new="{%- else %}"),
    _LLAMA_CALL_END,
)
_LLAMA_3_2 = (
    _LLAMA_TURN,
    Edit(start=_LLAMA_HEADER, new=_LLAMA_HEADER + _OPEN),
    _LLAMA_CALL_END,
)

_QWEN_END = Edit(
    start="        {{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\" %}",
    new=f"        {{{{- '<|im_end|>\\n' }}}}\n        {_CLOSE}\n"
    '    {%- elif message.role == "tool" %}',
)
_QWEN_HEADER = r"{{- '<|im_start|>' + message.role + '\n' }}"

_QWEN_2_5 = (
    Edit(start=' or (message.role == "assistant" and not message.tool_calls) %}', new=" %}"),
    Edit(
        start="{{- '<|im_start|>' + message.role }}",
        end="{%- if message.content %}",
        new=f"{{{{- '<|im_start|>' + message.role }}}}{_OPEN}"
        "{%- if message.content or not message.tool_calls %}",
    ),
    _QWEN_END,
)
_QWEN_3 = (
    Edit(
        start="{%- if loop.index0 > ns.last_query_index %}",
        end="{{- '<|im_start|>' + message.role + '\\n' + content }}\n        {%- endif %}\n",
        new=f"{_QWEN_HEADER}{_OPEN}"
        r"{{- '<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' }}"
        r"{{- content.lstrip('\n') }}",
    ),
    _QWEN_END,
)
_QWEN_3_2507 = (
    Edit(
        start="{{- '<|im_start|>' + message.role + '\\n' + content }}\n"
        "        {%- if message.tool_calls %}",
        new=f"{_QWEN_HEADER}{_OPEN}{{{{- content }}}}{{%- if message.tool_calls %}}",
    ),
    _QWEN_END,
)

_GEMMA_BODY = "{{ message['content'] | trim + '<end_of_turn>\n' }}"
_GEMMA = (
    Edit(
        start="'<start_of_turn>' + role + '\n' + message['content'] | trim",
        end="}}",
        new="'<start_of_turn>' + role + '\n' }}" + _either(_GEMMA_BODY),
    ),
)
_GEMMA_3_BODY = (
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- else -%}"
    "{%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}{%- endif -%}"
    "{{ '<end_of_turn>\n' }}"
)
_GEMMA_3 = (
    Edit(
        start="    {%- if message['content'] is string -%}",
        end="{{ '<end_of_turn>\n' }}",
        new=_either(_GEMMA_3_BODY),
    ),
)
"""All parts of a list are texts here."""

_PHI_3 = (
    Edit(
        start="{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}",
        new="{{'<|assistant|>\n'}}{% generation %}{{ message['content'] + '<|end|>\n' }}"
        "{% endgeneration %}",
    ),
    Edit(
        start="{% else %}{{ eos_token }}{% endif %}",
        new="{% elif messages[-1]['role'] == 'assistant' %}{% generation %}{{ eos_token }}"
        "{% endgeneration %}{% else %}{{ eos_token }}{% endif %}",
    ),
)

_MISTRAL = (
    Edit(start='{{- "[TOOL_CALLS] [" }}', new=_OPEN + '{{- "[TOOL_CALLS] [" }}'),
    Edit(
        start='    {%- elif message["role"] == "assistant" %}',
        end="+ eos_token}}",
        new=f'        {_CLOSE}\n    {{%- elif message["role"] == "assistant" %}}{_OPEN}'
        '{{- " " + message["content"]|trim + eos_token}}' + _CLOSE,
    ),
)

_QWEN_3_DIGEST = "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8"

_VARIANTS: Mapping[str, tuple[Edit, ...]] = {
    "ba03a121d097859c7b5b9cd03af99aafe95275210d2876f642ad9929a150f122": _LLAMA_3,
    "e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65": _LLAMA_3_1,
    "5816fce10444e03c2e9ee1ef8a4a1ea61ae7e69e438613f3b17b69d0426223a4": _LLAMA_3_2,
    "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f": _QWEN_2_5,
    _QWEN_3_DIGEST: _QWEN_3,
    "64f85b198065d0fba2a81f37e10ed68161ce2c19a754c7100e67e0ca2ee9c326": _QWEN_3_2507,
    "ecd6ae513fe103f0eb62e8ab5bfa8d0fe45c1074fa398b089c93a7e70c15cfd6": _GEMMA,
    "7de1c58e208eda46e9c7f86397df37ec49883aeece39fb961e0a6b24088dd3c4": _GEMMA_3,
    "dcaee66df77bfbb789ec541fe713218da30225a526f1db97138fc39ee6dc56aa": _PHI_3,
    "78d976a442bcde2f0be15aafbb8e3050e1104f86732266f68403251b89982a90": _PHI_3,
    "e16746b40344d6c5b5265988e0328a0bf7277be86f1c335156eae07e29c82826": _MISTRAL,
}
"""Edits by the digest of the published text.

In order: Llama 3, 3.1, 3.2; Qwen 2.5, 3, 3 of 2507; Gemma 1 and 2, 3; Phi 3, 3.5; Mistral.
"""

_OTHER_RENDERINGS = frozenset((_QWEN_3_DIGEST,))
