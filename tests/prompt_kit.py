"""A small tokenizer and chat templates with the habits of well-known ones, for prompt tests."""

from array import array
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS: Final = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "[INST]")
ADDED: Final = ("<think>", "</think>", "<tool_response>", "</tool_response>", "[/INST]", "[TOOLS]")

CHATML: Final = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING: Final = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{% endfor %}
    {{- '\\nUse them.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(looking=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.looking and message.role == 'user'
        and not (message.content.startswith('<tool_response>')
                 and message.content.endswith('</tool_response>')) %}
        {%- set ns.looking = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set text = message.content %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in text %}
            {%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- text }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' + call.function.name + call.function.arguments | tojson }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""Drops the thoughts of earlier turns; joins the results of several calls into one message."""

HEADERS: Final = (
    "{{ bos_token }}{% set seen = namespace(tools=false) %}{% for m in messages %}"
    "{{ '<|head|>' + m.role + '<|/head|>\n\n' }}"
    "{% if tools and m.role == 'user' and not seen.tools %}{% set seen.tools = true %}"
    "{{ 'You have ' + tools | tojson(indent=4) + '\n\n' }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for p in m.content or [] %}{{ p.text | trim }}{% endfor %}{% endif %}"
    "{{ '</s>' if m.tool_calls else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
"""Shows the tools in the first question; takes content as parts."""

LAST_TOOLS: Final = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}{{ bos_token }}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 is even) and m.role in ('user', 'assistant') %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}"
    "{% if tools and loop.last %}{{ '[TOOLS]' + tools | tojson }}{% endif %}"
    "{{ '[INST]' + ((first + '\n\n') if first and loop.first else '') + m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
"""Shows the tools in the last question, the system prompt in the first; wants roles in turn."""

PLAIN: Final = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
"""Has no special token between messages: nothing can be cut."""

TEMPLATES: Final = {
    "chatml": CHATML,
    "thinking": THINKING,
    "headers": HEADERS,
    "last_tools": LAST_TOOLS,
    "plain": PLAIN,
}
SPECIAL_TOKENS: Final = {"bos_token": "<s>", "eos_token": "</s>"}
CORPUS: Final = [
    "def add(a, b):\n    return a + b\n",
    "the quick brown fox says hello to the world\n",
    "assistant user system tool \n\n Use them.",
] * 50


@cache
def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE with the templates' tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    return tokenizer


def encode(text: str) -> "array[int]":
    """Return a text's ids, nothing added."""
    return array("I", make_tokenizer().encode(text, add_special_tokens=False).ids)


Make = Callable[[str], dict[str, Any]]
