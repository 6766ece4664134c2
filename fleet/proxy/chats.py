# SPDX-License-Identifier: Apache-2.0
"""A chat in any of the APIs, as vLLM hands it to the model's template.

Each function says which of vLLM 0.18.1's it follows; tests compare the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from .apis import CHAT, MESSAGES, RESPONSES
from .steady import BILLING

Message = dict[str, Any]
_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}


class Unknown(Exception):
    """What vLLM makes of the prompt cannot be told; the message is a short reason."""


class Chat(NamedTuple):
    """`options` are the template's. `special_tokens`: the tokenizer adds its own."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    options: dict[str, Any]
    special_tokens: bool


def chat_of(path: str, asked: dict[str, Any]) -> Chat:
    """The chat in the fields of a request to `path`. Raises Unknown."""
    if asked.get("truncate_prompt_tokens") or asked.get("chat_template"):
        raise Unknown("truncation or template of the request")
    return {CHAT: _from_chat, MESSAGES: _from_messages, RESPONSES: _from_responses}[
        path
    ](asked)


def conversation(messages: list[Message], as_parts: bool) -> list[Message]:
    """entrypoints/chat_utils.py, parse_chat_messages.

    `as_parts`: the template wants the parts of a message's content, not one text.
    """
    return [_turn(message, as_parts) for message in messages]


def _from_chat(asked: dict[str, Any]) -> Chat:
    """ChatCompletionRequest.build_chat_params, and render_chat for the tools."""
    tools = asked.get("tools")
    if tools is not None:
        tools = [_tool(one["function"], one) for one in tools]
    if tools == [] and asked.get("tool_choice") == "required":
        tools = None
    options = {
        **(asked.get("chat_template_kwargs") or {}),
        "add_generation_prompt": asked.get("add_generation_prompt", True),
        "continue_final_message": asked.get("continue_final_message", False),
    }
    for name in ("documents", "reasoning_effort"):
        if asked.get(name) is not None:
            options[name] = asked[name]
    special = asked.get("add_special_tokens", False)
    return Chat([*map(_validated, asked["messages"])], tools, options, special)


def _validated(message: Message) -> Message:
    """As pydantic leaves it, with the keys of a tool call in the order of its types."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_validated_call(one) for one in calls]}


def _validated_call(call: dict[str, Any]) -> dict[str, Any]:
    function = {name: call["function"][name] for name in ("arguments", "name")}
    return {"id": call["id"], "function": function, "type": "function"}


def _tool(function: dict[str, Any], tool: dict[str, Any]) -> dict[str, Any]:
    """ChatCompletionToolsParam, dumped: known fields first, missing ones as null."""
    known = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    return {"type": "function", **tool, "function": {**known, **function}}


def _from_messages(asked: dict[str, Any]) -> Chat:
    """entrypoints/anthropic/serving.py, _convert_anthropic_to_openai_request."""
    messages: list[Message] = []
    if system := asked.get("system"):
        if isinstance(system, list):
            texts = [one.get("text") or "" for one in system if one["type"] == "text"]
            system = "".join(one for one in texts if not one.startswith(BILLING))
        messages.append({"role": "system", "content": system})
    for message in asked["messages"]:
        messages += _anthropic_turn(message)
    tools = asked.get("tools")
    if tools is not None:
        tools = [_anthropic_tool(one) for one in tools]
    options = {"add_generation_prompt": True, "continue_final_message": False}
    return Chat(messages, tools, options, False)


def _anthropic_tool(tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool["input_schema"]
    parameters = schema if "type" in schema else {**schema, "type": "object"}
    named = {"name": tool["name"], "description": tool.get("description")}
    return {"type": "function", "function": {**named, "parameters": parameters}}


def _anthropic_turn(message: Message) -> Iterator[Message]:
    """A tool's result is a message before the one that it is in."""
    role, blocks = message["role"], message["content"]
    if isinstance(blocks, str):
        yield {"role": role, "content": blocks}
        return
    parts, calls, thoughts = [], [], []
    for block in blocks:
        kind = block["type"]
        if kind == "text":
            parts += [block["text"]] if block.get("text") else []
        elif kind == "thinking":
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            calls.append(_anthropic_call(block))
        elif kind == "tool_result" and role == "user":
            content = _result_text(block.get("content"))
            id_ = block.get("tool_use_id") or ""
            yield {"role": "tool", "tool_call_id": id_, "content": content}
        elif kind == "tool_result":
            content = block.get("content")
            parts.append(f"Tool result: {content or ''!s}")
        elif kind != "redacted_thinking":
            raise Unknown("multi-modal")
    turn: Message = {"role": role}
    if thoughts:
        turn["reasoning"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    if parts:
        turn["content"] = [{"type": "text", "text": one} for one in parts]
    yield turn


def _anthropic_call(block: dict[str, Any]) -> dict[str, Any]:
    function = {"arguments": block.get("input") or {}, "name": block.get("name") or ""}
    return {"id": block["id"], "function": function, "type": "function"}


def _result_text(content: Any) -> str:
    if not isinstance(content, list):
        return content or ""
    if any(one.get("type") != "text" for one in content):
        raise Unknown("multi-modal")
    return "\n".join(one.get("text", "") for one in content)


def _from_responses(asked: dict[str, Any]) -> Chat:
    """entrypoints/openai/responses/utils.py, and ResponsesRequest."""
    if asked.get("previous_response_id") or asked.get("previous_input_messages"):
        raise Unknown("previous response")
    if asked.get("truncation", "disabled") != "disabled":
        raise Unknown("truncation or template of the request")
    messages: list[Message] = []
    if instructions := asked.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    items = asked["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    messages += map(_item, items)
    unfinished = items[-1].get("status") in ("in_progress", "incomplete")
    options: dict[str, Any] = {
        "add_generation_prompt": not unfinished,
        "continue_final_message": unfinished,
    }
    if effort := (asked.get("reasoning") or {}).get("effort"):
        options["reasoning_effort"] = effort
    tools = None
    if asked.get("tool_choice") != "none":
        tools = [_flat_tool(one) for one in asked.get("tools") or []]
    # TokenizeParams' default; a chat's is not to.
    return Chat(messages, tools, options, special_tokens=True)


def _item(item: dict[str, Any]) -> Message:
    kind = item.get("type", "message")
    if kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "function": function, "type": "function"}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        id_, content = item["call_id"], item["output"]
        return {"role": "tool", "tool_call_id": id_, "content": content}
    if kind == "reasoning" and not item.get("encrypted_content"):
        (thought,) = (item.get("content") or item.get("summary") or [None])[:1]
        return {"role": "assistant", "reasoning": thought["text"] if thought else ""}
    if kind != "message":
        raise Unknown("item of a kind of its own")
    content = item["content"]
    if item["role"] == "assistant" and isinstance(content, list) and len(content) > 1:
        # vLLM takes the first part or all, by how the item was parsed.
        raise Unknown("several parts of an answer")
    return item


def _flat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """openai.types.responses.FunctionTool, dumped."""
    if tool["type"] != "function":
        raise Unknown("tool of a kind of its own")
    names = ("name", "parameters", "strict", "type", "description")
    known = {name: tool.get(name) for name in names}
    return {"type": "function", "function": {**known, **tool}}


def _turn(message: Message, as_parts: bool) -> Message:
    """_parse_chat_message_content, and _postprocess_messages."""
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        texts = [content]
    else:
        texts = [text for text in map(_text, content or []) if text is not None]
    turn: Message = {"role": role, "content": "\n".join(filter(None, texts))}
    if as_parts:
        turn["content"] = [{"type": "text", "text": text} for text in texts]
    if role == "assistant":
        if calls := message.get("tool_calls"):
            turn["tool_calls"] = [_call(one) for one in calls]
        if (reasoning := message.get("reasoning")) is not None:
            turn["reasoning"] = turn["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        turn["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        turn["name"] = message["name"]
    if role == "developer":
        turn["tools"] = message.get("tools")
    return turn


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Templates get a call's arguments parsed."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    field = _TEXTS.get(part.get("type"))
    if field is None or "uuid" in part:
        raise Unknown("multi-modal")
    return part.get(field)
