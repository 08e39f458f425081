"""Renders the templates of chat_forms.py with transformers, for test_chat_forms.py.

    python -m tests.text.chat_goldens

Needs the extra `parity`. transformers hands contents, arguments and nulls on as they are, so it is asked with each
conversation in the form that the template reads (`FORMS`). A golden is a text, or null where transformers refuses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
import transformers

from tests.text.chat_forms import CONVERSATIONS, FORMS, SPECIAL_TOKENS, TEMPLATES

FILE = Path(__file__).with_name("chat_goldens.json")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")


def plain(
    message: dict[str, Any], contents: str, arguments: str, absent: str | None
) -> dict[str, Any]:
    """A message as the template reads it."""
    message = {key: value for key, value in message.items() if value is not None}
    thoughts = [message[name] for name in THOUGHTS if name in message]
    message |= dict.fromkeys(THOUGHTS, thoughts[0]) if thoughts else {}
    content, calls = message.get("content"), message.get("tool_calls")
    if calls and not content:
        message["content"] = content = absent
    if isinstance(content, list) and contents == "text":
        message["content"] = "\n".join(part["text"] for part in content)
    elif isinstance(content, str) and contents == "parts":
        message["content"] = [{"type": "text", "text": content}]
    if calls:
        message["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": told(call["function"], arguments)}}
            for call in calls
        ]
    return message


def told(function: dict[str, Any], arguments: str) -> Any:
    """The arguments of a call, as an object or as text."""
    given = function["arguments"]
    if arguments == "text":
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return json.loads(given) if isinstance(given, str) else given


def rendered(
    tokenizer: Any, template: str, name: str, messages: list[Any], options: dict
) -> str | None:
    form = FORMS.get(name, ("text", "object", ""))
    own = [plain(message, *form) for message in messages]
    if any("content" in message and message["content"] is None for message in own):
        # transformers leaves out what is null, also where a template asks for it.
        variables = {"documents": None, "tools": None} | SPECIAL_TOKENS | options
        compiled = transformers.utils.chat_template_utils._compile_jinja_template(template)
        return compiled.render(messages=own, **{"add_generation_prompt": True} | variables)
    try:
        return tokenizer.apply_chat_template(
            own, chat_template=template, tokenize=False, **{"add_generation_prompt": True} | options
        )
    except (jinja2.TemplateError, TypeError, ValueError):
        return None


def main() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL_TOKENS)
    goldens = {
        name: {
            about: rendered(tokenizer, template, name, messages, options)
            for about, (messages, options) in CONVERSATIONS.items()
        }
        for name, template in TEMPLATES.items()
    }
    made = {
        "transformers": transformers.__version__,
        "jinja2": jinja2.__version__,
        "texts": goldens,
    }
    FILE.write_text(json.dumps(made, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
