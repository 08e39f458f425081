"""Chat templates of the forms in which models are published, and conversations as clients write them.

The templates are short, and each has the features of Jinja that its form lives on. `chat_goldens.py` renders them with
transformers, test_chat_forms.py with this package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

# What transformers is asked with, because it hands a conversation on as it is: how a template reads contents, how it
# reads arguments, and what it takes for no content. Templates that are not named here read ("text", "object", "").
FORMS: dict[str, tuple[str, str, str | None]] = {
    **dict.fromkeys(
        ("qwen3_5", "llama4", "mistral_small", "kimi", "glm", "cohere", "minimax"),
        ("both", "object", ""),
    ),
    "gemma3": ("both", "object", ""),
    "parts_only": ("parts", "object", ""),
    "deepseek_r1": ("text", "text", None),
    "deepseek_v3": ("text", "text", ""),
}

FOLDER = Path(__file__).with_name("chat_templates")
TEMPLATES = {file.stem: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.jinja"))}

AREA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "area",
        "description": "Größe, in m² <b>",
        "parameters": {
            "type": "object",
            "properties": {
                "width": {"type": "number"},
                "unit": {"type": "string", "enum": ["m", "ft"]},
            },
            "required": ["width"],
        },
    },
}
ARGUMENTS = {"width": 2.5, "unit": 'ft "é"', "more": [1, None, True]}


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def call(number: int = 1, arguments: Any = ARGUMENTS) -> dict[str, Any]:
    function = {"name": "area", "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def result(number: int = 1, content: Any = "6") -> dict[str, Any]:
    return says("tool", content, tool_call_id=f"call0000{number}")


USER, ANSWER, SYSTEM = says("user", "hi"), says("assistant", "Hello!"), says("system", "Be brief.")
MORE, TOOLS = says("user", "  and\nmore? "), {"tools": [AREA]}
OPEN: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
NULLS = dict.fromkeys(("name", "refusal", "audio", "function_call", "annotations"))

# As clients write them, with options.
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one turn": ([USER], {}),
    "a system": ([SYSTEM, USER], {}),
    "several turns": ([SYSTEM, USER, ANSWER, MORE], {}),
    "no opening of a turn": ([USER, ANSWER], {"add_generation_prompt": False}),
    "unicode": ([says("user", "né 你好 🙂 <b>&amp;</b> {{ x }} {% y %}")], {}),
    "an empty text": ([says("system", ""), says("user", "")], {}),
    "parts": ([says("user", parts("one ", "two"))], {}),
    "parts everywhere": (
        [says("system", parts("Be brief.")), says("user", parts("hi")), says("assistant", parts("a", " b")), MORE],
        {},
    ),
    "thoughts": ([USER, says("assistant", "4", reasoning_content="2 + 2"), MORE], {}),
    "thoughts of the last turn": (
        [USER, says("assistant", "4", reasoning="2 + 2")],
        {"add_generation_prompt": False},
    ),
    "thoughts by another name": ([USER, says("assistant", "4", thinking="2 + 2"), MORE], {}),
    "thoughts in the text": (
        [USER, says("assistant", "<think>\n2 + 2\n</think>\n\n4"), MORE],
        {},
    ),
    "no thinking": ([USER], {"enable_thinking": False, "thinking": False}),
    "tools": ([SYSTEM, USER], TOOLS),
    "a call": ([USER, says("assistant", "", tool_calls=[call()]), result()], TOOLS),
    "a call with nulls": (
        [
            says("user", "hi", **NULLS),
            says("assistant", None, tool_calls=[call()], reasoning_content=None, **NULLS),
            says("tool", "6", tool_call_id="call00001", name=None),
        ],
        TOOLS,
    ),
    "a call as text": (
        [USER, says("assistant", None, tool_calls=[call(1, '{"width": 2.5}')]), result()],
        TOOLS,
    ),
    "parallel calls": (
        [USER, says("assistant", None, tool_calls=[call(), call(2, {"width": 1})]), result(), result(2, "7")],
        TOOLS,
    ),
    "a call with a text": (
        [USER, says("assistant", "Let me see.", tool_calls=[call()]), result(), says("assistant", "6."), MORE],
        TOOLS,
    ),
    "a call with thoughts": (
        [USER, says("assistant", None, tool_calls=[call()], reasoning="a tool"), result()],
        TOOLS,
    ),
    "a result of parts": (
        [USER, says("assistant", None, tool_calls=[call()]), result(1, parts("6", "7"))],
        TOOLS,
    ),
    "documents": ([USER], {"documents": [{"title": "t", "text": "It rains."}]}),
    "a name": ([says("user", "hi", name="ann")], {}),
    "an open answer": ([USER, says("assistant", "The answer is")], OPEN),
    "an open answer with a space": ([USER, says("assistant", "The answer is ")], OPEN),
    "an open answer with thoughts": ([USER, says("assistant", "4 =", reasoning_content="2")], OPEN),
    "an open answer of parts": ([USER, says("assistant", parts("The", " answer"))], OPEN),
}  # fmt: skip
SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
    "image_token": "<image>",
}
