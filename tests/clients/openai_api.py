"""The official client of OpenAI's API, against a gateway.

Takes the base URL and the model's name; prints one JSON object with what each case gave.
"""

import json
import sys
from typing import Literal

import openai
import pydantic

BASE_URL, MODEL = sys.argv[1], sys.argv[2]
QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]
COUNT = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,"

client = openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0, timeout=120)
chat = client.chat.completions.create
complete = client.completions.create


def text_of(chunks):
    """The text of a stream of chat chunks, and its last reason."""
    text, reason = "", None
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason


def refused(call):
    """The class, status, code and parameter of the error that a call raises."""
    try:
        call()
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.code, error.param]
    return None


def listed():
    return [[model.id, model.owned_by] for model in client.models.list()]


def whole():
    answer = chat(model=MODEL, messages=QUESTION, temperature=0)
    choice, usage = answer.choices[0], answer.usage
    return {
        "text": choice.message.content,
        "role": choice.message.role,
        "reason": choice.finish_reason,
        "usage": [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens],
        "id_is_the_header": answer._request_id == answer.id,
    }


def streamed():
    chunks = list(
        chat(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text, reason = text_of(chunks)
    usage = chunks[-1].usage
    used = [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens]
    return {"text": text, "reason": reason, "usage": used, "several": len(chunks) > 4}


def drawn():
    """Two answers of one request, and each of them asked for by its seed."""
    sampling = {"model": MODEL, "messages": QUESTION, "temperature": 0.9, "max_tokens": 24}
    both = [choice.message.content for choice in chat(**sampling, seed=11, n=2).choices]
    each = [chat(**sampling, seed=seed).choices[0].message.content for seed in (11, 12)]
    return {"both": both, "each": each}


def completed():
    answer = complete(model=MODEL, prompt=COUNT, max_tokens=12, temperature=0)
    stream = complete(model=MODEL, prompt=COUNT, max_tokens=12, temperature=0, stream=True)
    stopped = complete(model=MODEL, prompt=COUNT, max_tokens=60, temperature=0, stop=[" 13"])
    return {
        "whole": answer.choices[0].text,
        "streamed": "".join(chunk.choices[0].text for chunk in stream),
        "stopped": [stopped.choices[0].text, stopped.choices[0].finish_reason],
    }


def logprobs():
    request = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 5}
    answer = chat(**request, logprobs=True, top_logprobs=3).choices[0]
    entries = answer.logprobs.content
    legacy = complete(model=MODEL, prompt=COUNT, max_tokens=4, temperature=0, logprobs=2)
    legacy = legacy.choices[0]
    return {
        "text": answer.message.content,
        "bytes": [entry.bytes for entry in entries],
        "greedy": all(entry.top_logprobs[0].token == entry.token for entry in entries),
        "tops": [len(entry.top_logprobs) for entry in entries],
        "negative": all(entry.logprob <= 0 for entry in entries),
        "legacy_joined": "".join(legacy.logprobs.tokens) == legacy.text,
        "legacy_tops": [len(top) for top in legacy.logprobs.top_logprobs],
        "legacy_offsets": legacy.logprobs.text_offset,
    }


class Place(pydantic.BaseModel):
    """A city, and how many days to stay."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Kyoto", "Osaka", "Nara"]
    days: int = pydantic.Field(ge=1, le=99)


def structured():
    """An answer that fits a schema: as an object of the client's own, as text, and streamed."""
    request = {"model": MODEL, "messages": QUESTION, "temperature": 1, "seed": 4}
    parsed = client.chat.completions.parse(**request, response_format=Place).choices[0].message
    schema = {"name": "place", "strict": True, "schema": Place.model_json_schema()}
    form = {"type": "json_schema", "json_schema": schema}
    whole = chat(**request, response_format=form).choices[0]
    text, reason = text_of(chat(**request, response_format=form, stream=True))
    any_object = {"type": "json_object"}
    cut = chat(**request, response_format=any_object, max_tokens=8).choices[0].message.content
    return {
        "object": json.loads(whole.message.content),
        "fits": isinstance(Place.model_validate_json(whole.message.content), Place),
        "parsed": parsed.parsed is not None and parsed.parsed.model_dump(),
        "streamed": [text == whole.message.content, reason],
        "any_object": cut[:1],
    }


def tool(name, parameters):
    function = {"name": name, "description": f"Tells the {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


def calls_of(chunks):
    """Name and arguments of the calls in a stream of chunks, its text, and its last reason."""
    calls, text, reason = {}, "", None
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, ["", ""])
                call[0] += part.function.name or ""
                call[1] += part.function.arguments
    return list(calls.values()), text, reason


def called():
    """A function that must be called, whole and streamed, and what follows its result."""
    tools = [tool("weather", Place.model_json_schema()), tool("time", {"type": "object"})]
    choice = {"type": "function", "function": {"name": "weather"}}
    request = {"model": MODEL, "messages": QUESTION, "tools": tools, "temperature": 1, "seed": 4}
    forced = {**request, "tool_choice": choice, "parallel_tool_calls": False}
    answer = chat(**forced).choices[0]
    (call,) = answer.message.tool_calls
    function = [call.function.name, call.function.arguments]
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    request["messages"] = [*QUESTION, answer.message, result]
    free = chat(**request, tool_choice="none", max_tokens=8).choices[0]
    auto = chat(**request, tool_choice="auto", max_tokens=40).choices[0]
    required = chat(**{**request, "tools": tools[:1]}, tool_choice="required", max_tokens=80)
    return {
        "name": function[0],
        "fits": isinstance(Place.model_validate_json(function[1]), Place),
        "reason": answer.finish_reason,
        "content": answer.message.content,
        "streamed": calls_of(chat(**forced, stream=True)) == ([function], "", "tool_calls"),
        "free": [free.message.tool_calls, bool(free.message.content)],
        "auto": bool(auto.message.content or auto.message.tool_calls),
        "required": required.choices[0].message.tool_calls[0].function.name,
    }


def errors():
    unique = {"type": "array", "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": unique}}
    functions = [{"name": "f"}]
    nameless = [{"type": "function", "function": {"name": "f g"}}]
    return {
        "model": refused(lambda: chat(model="none", messages=QUESTION)),
        "temperature": refused(lambda: chat(model=MODEL, messages=QUESTION, temperature=-1)),
        "stop": refused(lambda: chat(model=MODEL, messages=QUESTION, stop=["x"] * 10_000)),
        "functions": refused(lambda: chat(model=MODEL, messages=QUESTION, functions=functions)),
        "tools": refused(lambda: chat(model=MODEL, messages=QUESTION, tools=nameless)),
        "schema": refused(lambda: chat(model=MODEL, messages=QUESTION, response_format=form)),
        "context": refused(lambda: complete(model=MODEL, prompt="word " * 20_000)),
        "large": refused(lambda: complete(model=MODEL, prompt="x" * 2_000_000)),
        "embeddings": refused(lambda: client.embeddings.create(model=MODEL, input="x")),
    }


def cancelled():
    """Closes a stream after three chunks with text."""
    stream = complete(model=MODEL, prompt=COUNT, max_tokens=4000, temperature=0, stream=True)
    n_chunks = 0
    for chunk in stream:
        n_chunks += bool(chunk.choices[0].text)
        if n_chunks == 3:
            break
    stream.close()
    return n_chunks


CASES = [
    listed,
    whole,
    streamed,
    drawn,
    completed,
    logprobs,
    structured,
    called,
    errors,
    cancelled,
]
print(json.dumps({case.__name__: case() for case in CASES}))
