"""vLLM 0.32's whole (non-streamed) answers, field for field and in its order.

Values in, bytes out. What each looks like was recorded from a real server; the tests compare.
"""

from typing import Any

import orjson

from gateway.sim.answer import Answer, Choice
from gateway.sim.asked import CHAT, COMPLETIONS, MESSAGES, RESPONSES

FINGERPRINT = "vllm-0.32.0-55765066"
STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


def whole(answer: Answer) -> bytes:
    """Return the JSON body of a finished, non-streamed answer."""
    shapes = {
        CHAT: chat,
        COMPLETIONS: completion,
        MESSAGES: message,
        RESPONSES: finished_response,
    }
    return orjson.dumps(shapes[answer.asked.api](answer))


def usage(answer: Answer) -> dict[str, Any]:
    """Return the usage object of chat and completions answers."""
    chat_like = answer.asked.api == CHAT
    return {
        "prompt_tokens": answer.prompt_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "completion_tokens": answer.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": answer.cached_tokens,
            "created_cache_tokens": answer.created_cache_tokens if chat_like else None,
            "multimodal_tokens": None,
        },
        "completion_tokens_details": None,
    }


def chat(answer: Answer) -> dict[str, Any]:
    """Return a chat completion."""
    return {
        "id": answer.id,
        "object": "chat.completion",
        "created": answer.created,
        "model": answer.asked.model,
        "choices": [_chat_choice(choice) for choice in answer.choices],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage(answer),
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _chat_choice(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "message": {
            "role": "assistant",
            "content": choice.full_text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        },
        "logprobs": None,
        "finish_reason": choice.finish,
        "stop_reason": choice.stop_reason,
        "token_ids": None,
        "routed_experts": None,
    }


def completion(answer: Answer) -> dict[str, Any]:
    """Return a text completion, one choice per prompt and copy."""
    return {
        "id": answer.id,
        "object": "text_completion",
        "created": answer.created,
        "model": answer.asked.model,
        "choices": [
            {
                "index": choice.index,
                "text": answer.echo(choice) + choice.full_text,
                "logprobs": None,
                "finish_reason": choice.finish,
                "stop_reason": choice.stop_reason,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "routed_experts": None,
            }
            for choice in answer.choices
        ],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage(answer),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def message(answer: Answer) -> dict[str, Any]:
    """Return an Anthropic message."""
    choice = answer.choices[0]
    return {
        "id": answer.id,
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": choice.full_text}],
        "model": answer.asked.model,
        "stop_reason": message_stop_reason(choice),
        "usage": message_usage(answer),
    }


def message_stop_reason(choice: Choice) -> str:
    """Return why an Anthropic message ended."""
    return "stop_sequence" if choice.stop_reason else STOP_REASONS[choice.finish]


def message_usage(answer: Answer) -> dict[str, Any]:
    """Return the final usage of an Anthropic message: cached tokens are no input tokens."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "output_tokens": answer.completion_tokens,
        "cache_creation_input_tokens": answer.created_cache_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
    }


def item_id(answer: Answer) -> str:
    """Return the id of a response's one output message."""
    return "msg_" + answer.id.removeprefix("resp_")


def output_part(text: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
    """Return a response's text part."""
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def output_item(answer: Answer, parts: list[Any], status: str) -> dict[str, Any]:
    """Return a response's output message."""
    return {
        "id": item_id(answer),
        "content": parts,
        "role": "assistant",
        "status": status,
        "type": "message",
        "phase": None,
    }


def finished_response(answer: Answer) -> dict[str, Any]:
    """Return a finished OpenAI response."""
    choice = answer.choices[0]
    output = [output_item(answer, [output_part(choice.full_text)], "completed")]
    cut = choice.finish == "length"
    return response(answer, output, "incomplete" if cut else "completed", response_usage(answer))


def response(
    answer: Answer, output: list[Any], status: str, used: dict[str, Any] | None
) -> dict[str, Any]:
    """Return an OpenAI response in any state."""
    data = answer.asked.data
    return {
        "id": answer.id,
        "created_at": answer.created,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": data.get("instructions"),
        "metadata": data.get("metadata"),
        "model": answer.asked.model,
        "object": "response",
        "output": output,
        "parallel_tool_calls": data.get("parallel_tool_calls", True),
        "temperature": data.get("temperature", 1.0),
        "tool_choice": data.get("tool_choice") or ("auto" if data.get("tools") else "none"),
        "tools": data.get("tools") or [],
        "top_p": data.get("top_p", 1.0),
        "background": False,
        "max_output_tokens": answer.asked.max_tokens,
        "max_tool_calls": None,
        "previous_response_id": data.get("previous_response_id"),
        "prompt": None,
        "reasoning": data.get("reasoning"),
        "service_tier": "auto",
        "status": status,
        "text": data.get("text"),
        "top_logprobs": None,
        "truncation": "disabled",
        "usage": used,
        "user": data.get("user"),
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "input_messages": None,
        "output_messages": None,
    }


def response_usage(answer: Answer) -> dict[str, Any]:
    """Return the usage of an OpenAI response."""
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": answer.cached_tokens,
            "cache_write_tokens": answer.created_cache_tokens,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
