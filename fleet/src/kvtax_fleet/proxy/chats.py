# SPDX-License-Identifier: Apache-2.0
"""A chat of any API, as vLLM hands it to the model's template.

Each function names the function of vLLM 0.18.1 that it follows; tests compare the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from .apis import CHAT, MESSAGES, RESPONSES
from .body import BILLING

Message = dict[str, Any]
_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}


class Unknown(Exception):
    """vLLM's prompt cannot be computed here; the message is a short reason."""


class Chat(NamedTuple):
    """Arguments of a chat template; `special_tokens`: the tokenizer adds its own."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    options: dict[str, Any]
    special_tokens: bool


def chat_of(path: str, fields: dict[str, Any]) -> Chat:
    """Read the chat from the fields of a request to `path`. Raises Unknown."""
    if fields.get("truncate_prompt_tokens") or fields.get("chat_template"):
        raise Unknown("truncation or template of the request")
    return {CHAT: _from_chat, MESSAGES: _from_messages, RESPONSES: _from_responses}[
        path
    ](fields)


def conversation(messages: list[Message], as_parts: bool) -> list[Message]:
    """Follow entrypoints/chat_utils.py, parse_chat_messages.

    `as_parts`: the template takes the parts of a message's content, not one text.
    """
    return [_turn(message, as_parts) for message in messages]


def _from_chat(fields: dict[str, Any]) -> Chat:
    """Follow ChatCompletionRequest.build_chat_params, and render_chat for the tools."""
    tools = fields.get("tools")
    if tools is not None:
        tools = [_tool(tool["function"], tool) for tool in tools]
    if tools == [] and fields.get("tool_choice") == "required":
        tools = None
    options = {
        **(fields.get("chat_template_kwargs") or {}),
        "add_generation_prompt": fields.get("add_generation_prompt", True),
        "continue_final_message": fields.get("continue_final_message", False),
    }
    for name in ("documents", "reasoning_effort"):
        if fields.get(name) is not None:
            options[name] = fields[name]
    special = fields.get("add_special_tokens", False)
    return Chat([*map(_validated, fields["messages"])], tools, options, special)


def _validated(message: Message) -> Message:
    """Order the keys of tool calls as pydantic does, by its types."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_validated_call(call) for call in calls]}


def _validated_call(call: dict[str, Any]) -> dict[str, Any]:
    function = {name: call["function"][name] for name in ("arguments", "name")}
    return {"id": call["id"], "function": function, "type": "function"}


def _tool(function: dict[str, Any], tool: dict[str, Any]) -> dict[str, Any]:
    """Follow ChatCompletionToolsParam: known fields first, missing ones as null."""
    known = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    return {"type": "function", **tool, "function": {**known, **function}}


def _from_messages(fields: dict[str, Any]) -> Chat:
    """Follow entrypoints/anthropic/serving.py, _convert_anthropic_to_openai_request."""
    messages: list[Message] = []
    if system := fields.get("system"):
        if isinstance(system, list):
            texts = [
                block.get("text") or "" for block in system if block["type"] == "text"
            ]
            system = "".join(text for text in texts if not text.startswith(BILLING))
        messages.append({"role": "system", "content": system})
    for message in fields["messages"]:
        messages += _anthropic_turn(message)
    tools = fields.get("tools")
    if tools is not None:
        tools = [_anthropic_tool(tool) for tool in tools]
    options = {"add_generation_prompt": True, "continue_final_message": False}
    return Chat(messages, tools, options, False)


def _anthropic_tool(tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool["input_schema"]
    parameters = schema if "type" in schema else {**schema, "type": "object"}
    named = {"name": tool["name"], "description": tool.get("description")}
    return {"type": "function", "function": {**named, "parameters": parameters}}


def _anthropic_turn(message: Message) -> Iterator[Message]:
    """Yield the messages of a turn: a tool's result comes before its own message."""
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
        turn["content"] = [{"type": "text", "text": text} for text in parts]
    yield turn


def _anthropic_call(block: dict[str, Any]) -> dict[str, Any]:
    function = {"arguments": block.get("input") or {}, "name": block.get("name") or ""}
    return {"id": block["id"], "function": function, "type": "function"}


def _result_text(content: Any) -> str:
    if not isinstance(content, list):
        return content or ""
    if any(part.get("type") != "text" for part in content):
        raise Unknown("multi-modal")
    return "\n".join(part.get("text", "") for part in content)


def _from_responses(fields: dict[str, Any]) -> Chat:
    """Follow entrypoints/openai/responses/utils.py, and ResponsesRequest."""
    if fields.get("previous_response_id") or fields.get("previous_input_messages"):
        raise Unknown("previous response")
    if fields.get("truncation", "disabled") != "disabled":
        raise Unknown("truncation or template of the request")
    messages: list[Message] = []
    if instructions := fields.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    items = fields["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    messages += map(_item, items)
    unfinished = items[-1].get("status") in ("in_progress", "incomplete")
    options: dict[str, Any] = {
        "add_generation_prompt": not unfinished,
        "continue_final_message": unfinished,
    }
    if effort := (fields.get("reasoning") or {}).get("effort"):
        options["reasoning_effort"] = effort
    tools = None
    if fields.get("tool_choice") != "none":
        tools = [_flat_tool(tool) for tool in fields.get("tools") or []]
    # TokenizeParams' default; other than a chat's.
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
    """Follow openai.types.responses.FunctionTool."""
    if tool["type"] != "function":
        raise Unknown("tool of a kind of its own")
    names = ("name", "parameters", "strict", "type", "description")
    known = {name: tool.get(name) for name in names}
    return {"type": "function", "function": {**known, **tool}}


def _turn(message: Message, as_parts: bool) -> Message:
    """Follow _parse_chat_message_content, and _postprocess_messages."""
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
            turn["tool_calls"] = [_call(call) for call in calls]
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
    """Parse a call's arguments, as templates get them."""
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
    text: str | None = part.get(field)
    return text
