"""Generates turn by turn with openvino_genai.LLMPipeline, for `stagebus bench`.

Usage: genai.py MODEL.gguf BACKEND THREADS ID,ID,...
Prints one JSON line when ready; reads a number of tokens a line; prints one JSON line a turn.
BACKEND is `default`, or a value of the property ATTENTION_BACKEND.
"""
import json
import sys
import time


def say(value):
    print(json.dumps(value), flush=True)


def main():
    model, backend, threads, prompt = sys.argv[1:5]
    try:
        import numpy
        import openvino
        import openvino_genai
    except ImportError as error:
        say({"ready": False, "error": f"{sys.executable} cannot import it: {error}"})
        return
    properties = {"INFERENCE_NUM_THREADS": int(threads)}
    if backend != "default":
        properties["ATTENTION_BACKEND"] = backend
    started = time.perf_counter()
    pipeline = openvino_genai.LLMPipeline(model, "CPU", **properties)
    load_ms = (time.perf_counter() - started) * 1e3
    ids = numpy.array([[int(token) for token in prompt.split(",")]], dtype=numpy.int64)
    mask = numpy.ones_like(ids)
    say({"ready": True, "version": f"openvino_genai {openvino_genai.__version__}", "load_ms": load_ms})
    for line in sys.stdin:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = int(line)
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask))
        result = pipeline.generate(inputs, config)
        # Microseconds, measured in C++: from the start to the first token, and between tokens.
        raw = result.perf_metrics.raw_metrics
        say({
            "tokens": [int(token) for token in result.tokens[0]],
            "first_token_ms": raw.m_times_to_first_token[0] / 1e3,
            "token_ms": [duration / 1e3 for duration in raw.m_durations],
        })


main()
