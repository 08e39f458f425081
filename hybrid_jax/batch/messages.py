"""What a chat line asks for, as arguments of `LLM.render_chat`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_jax.batch.errors import LineError, shown, unsupported
from hybrid_jax.text.messages import check_tools

SAME_NAMES = ("add_generation_prompt", "cache_breakpoints", "chat_template_kwargs", "tools")


def chat_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """`messages` and what else the body brings; null is the same as leaving a field out.

    Raises:
        LineError: there are no messages, or tool_choice or parallel_tool_calls asks for what is not supported.
        ConversationError: tools are no list of JSON schemas.
    """
    if body.get("messages") is None:
        raise LineError(
            "the body has no messages", code="missing_required_parameter", param="messages"
        )
    given = {name: body[name] for name in SAME_NAMES if body.get(name) is not None}
    tools = given.get("tools", [])
    check_tools(tools)  # also those that tool_choice leaves out
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", choice, 'use "auto" or "none"')
    parallel = body.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise LineError(
            f"parallel_tool_calls must be true or false, got {shown(parallel)}",
            param="parallel_tool_calls",
        )
    if choice == "none":
        given.pop("tools", None)
    elif tools and parallel is False:
        raise unsupported("parallel_tool_calls", False, "leave it out")
    return {"messages": body["messages"], **given}
