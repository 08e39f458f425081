"""Chat templates of models that think first, and a tokenizer with their marks."""

from __future__ import annotations

from tests.llms import byte_tokenizer


def marked_tokenizer():
    """Bytes, and a token for each mark: 256 opens, 257 closes."""
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_tokens(["<think>", "</think>"])
    return tokenizer


# How the templates of the families end: what follows the last message, and what they drop of earlier answers.
DROPS = "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
TURNS = "{% for m in messages %}<|{{ m.role }}|>" + DROPS + "{% endfor %}"
ASSISTANT = "{% if add_generation_prompt %}<|assistant|>"
SWITCH = "{% if enable_thinking is defined and enable_thinking is false %}"
QWEN3_5 = (
    TURNS + ASSISTANT + SWITCH + "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)

# Qwen3-Next-Thinking, Falcon-H1R, Jamba-Reasoning
ALWAYS = TURNS + ASSISTANT + "<think>\n{% endif %}"

LFM2 = TURNS + ASSISTANT + "{% endif %}"  # it opens them itself
