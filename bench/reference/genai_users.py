"""Answers lists of prompts with openvino_genai, for `stagebus bench users`.

Usage: genai_users.py MODEL.gguf MODE THREADS
MODE is `default` or a value of the property ATTENTION_BACKEND for LLMPipeline, which answers one
prompt after the other, or `batch` for ContinuousBatchingPipeline, which answers all at once.
Prints one JSON line when ready; reads a JSON line {"prompts": [[id, ...], ...], "n_tokens": N} a
turn; prints {"tokens": [[id, ...], ...], "arrival_ms": [[ms, ...], ...]}, times since the turn began.
"""
import json
import sys
import time


def say(value):
    print(json.dumps(value), flush=True)


def greedy(genai, n_tokens):
    config = genai.GenerationConfig()
    config.max_new_tokens = n_tokens
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    return config


def one_by_one(openvino, genai, numpy, pipeline, prompts, n_tokens):
    tokens, arrivals = [], []
    began = time.perf_counter()
    for prompt in prompts:
        ids = numpy.array([prompt], dtype=numpy.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
        before = (time.perf_counter() - began) * 1e3
        result = pipeline.generate(inputs, greedy(genai, n_tokens))
        # Microseconds, measured in C++: from the start to the first token, and between tokens.
        raw = result.perf_metrics.raw_metrics
        times = [before + raw.m_times_to_first_token[0] / 1e3]
        for duration in raw.m_durations:
            times.append(times[-1] + duration / 1e3)
        tokens.append([int(token) for token in result.tokens[0]])
        arrivals.append(times)
    return tokens, arrivals


def at_once(openvino, genai, numpy, pipeline, prompts, n_tokens):
    tokens, arrivals = [[] for _ in prompts], [[] for _ in prompts]
    inputs = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
    began = time.perf_counter()
    handles = [
        pipeline.add_request(index, ids, greedy(genai, n_tokens))
        for index, ids in enumerate(inputs)
    ]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now = (time.perf_counter() - began) * 1e3
        for index, handle in enumerate(handles):
            while handle.can_read():
                for output in handle.read().values():
                    new = [int(token) for token in output.generated_ids]
                    tokens[index].extend(new)
                    arrivals[index].extend([now] * len(new))
    return tokens, arrivals


def main():
    model, mode, threads = sys.argv[1:4]
    try:
        import numpy
        import openvino
        import openvino_genai as genai
    except ImportError as error:
        say({"ready": False, "error": f"{sys.executable} cannot import it: {error}"})
        return
    properties = {"INFERENCE_NUM_THREADS": int(threads)}
    started = time.perf_counter()
    if mode == "batch":
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1  # GB
        scheduler.enable_prefix_caching = True
        pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        answer = at_once
    else:
        if mode != "default":
            properties["ATTENTION_BACKEND"] = mode
        pipeline = genai.LLMPipeline(model, "CPU", **properties)
        answer = one_by_one
    load_ms = (time.perf_counter() - started) * 1e3
    say({"ready": True, "version": f"openvino_genai {genai.__version__}", "load_ms": load_ms})
    for line in sys.stdin:
        order = json.loads(line)
        tokens, arrivals = answer(openvino, genai, numpy, pipeline, order["prompts"], order["n_tokens"])
        say({"tokens": tokens, "arrival_ms": arrivals})


main()
