"""Makes the references of tests/fixtures/families: what huggingface/transformers computes with tiny
models whose weights follow from their names.

    pip install -r tools/references/requirements.txt
    python tools/references/generate.py tests/fixtures/families [FAMILY ...]

A file has the model's config.json, the names and shapes of its tensors, the metadata and tensors of
the GGUF file that llama.cpp's converter would make of it, a prompt, the greedy continuation, and
some rows of logits. Weights are not stored: `weights` below makes them, and the tests do the same.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

VOCAB = 128
N_PROMPT = 40
N_TOKENS = 12
# Rows whose logits are kept: within the first window, behind it, the last of the prompt, the last.
ROWS = [9, 27, N_PROMPT - 1, N_PROMPT + N_TOKENS - 2]
# A greedy choice closer than this could turn with the last bits.
LEAST_MARGIN = 0.005

BASE = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
GEMMA3 = dict(
    head_dim=32,
    num_hidden_layers=4,
    num_key_value_heads=1,
    sliding_window=16,
    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    final_logit_softcapping=5.0,
)
EXPERTS = dict(num_experts_per_tok=2, num_hidden_layers=2)

# Family: (model_type, changes, architecture of its GGUF file or none).
MODELS = {
    "llama": (
        "llama",
        dict(
            rope_theta=500.0,
            rope_scaling=dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        ),
        "llama",
    ),
    # llama.cpp has no windows for these, so their GGUF files would be other models.
    "mistral": ("mistral", dict(sliding_window=16), None),
    "qwen2-windows": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=16, max_window_layers=1),
        None,
    ),
    "gemma3-scaled": ("gemma3_text", dict(GEMMA3, query_pre_attn_scalar=20), None),
    "mixtral": ("mixtral", dict(EXPERTS, num_local_experts=4), "llama"),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True), "qwen2"),
    "qwen3": ("qwen3", dict(head_dim=32, tie_word_embeddings=True), "qwen3"),
    "qwen3moe": (
        "qwen3_moe",
        dict(
            EXPERTS, head_dim=32, num_experts=8, moe_intermediate_size=32, norm_topk_prob=True
        ),
        "qwen3moe",
    ),
    "gemma3": (
        "gemma3_text",
        dict(
            GEMMA3,
            sliding_window_pattern=3,
            layer_types=None,
            query_pre_attn_scalar=32,
            rope_scaling=dict(rope_type="linear", factor=8.0),
        ),
        "gemma3",
    ),
    "phi3": (
        "phi3",
        dict(
            partial_rotary_factor=0.5,
            original_max_position_embeddings=64,
            rope_scaling=dict(
                type="longrope",
                short_factor=[1.0, 1.25, 1.5, 2.0],
                long_factor=[2.0, 4.0, 8.0, 16.0],
            ),
        ),
        "phi3",
    ),
}


def mixed(name, n):
    """Numbers of 64 bits that follow from a name: FNV-1a of it, then splitmix64 of each place."""
    state = 0xCBF29CE484222325
    for byte in name.encode():
        state = ((state ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    with np.errstate(over="ignore"):
        z = np.uint64(state) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def weights(name, shape, norm_base):
    """A tensor's values: whole numbers below 128 over a power of two, exact in every float type."""
    codes = (mixed(name, int(np.prod(shape))) >> np.uint64(56)).astype(np.float32) - 128
    if len(shape) == 1:
        base = norm_base if name.endswith("norm.weight") else 0.0
        return (base + codes / 512).reshape(shape).astype(np.float32)
    return (codes / 1024).reshape(shape).astype(np.float32)


def make_model(family):
    model_type, changes, _ = MODELS[family]
    changes = {key: value for key, value in dict(BASE, **changes).items() if value is not None}
    config = transformers.AutoConfig.for_model(model_type, **changes)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    norm_base = 0.0 if model_type == "gemma3_text" else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = weights(name, tuple(parameter.shape), norm_base)
            parameter.copy_(torch.from_numpy(values))
    return model


def run(model):
    """A prompt, its greedy continuation and the logits of all rows, without a cache. The prompt is
    the first that leaves no choice to the last bits."""
    for seed in range(100):
        prompt = [(seed + 29 * i * i + 13 * i) % VOCAB for i in range(N_PROMPT)]
        ids, margin = list(prompt), 1.0
        while len(ids) < N_PROMPT + N_TOKENS and margin > LEAST_MARGIN:
            with torch.no_grad():
                logits = model(torch.tensor([ids]), use_cache=False).logits[0]
            best = torch.topk(logits[-1], 2)
            margin = float(best.values[0] - best.values[1])
            ids.append(int(best.indices[0]))
        if margin > LEAST_MARGIN:
            return prompt, ids[N_PROMPT:], logits
    raise SystemExit("no prompt has clear choices")


def llama3_divisors(config):
    """As llama.cpp's converter computes the tensor rope_freqs.weight."""
    scaling, dim = config.rope_scaling, config.hidden_size // config.num_attention_heads
    freqs = 1.0 / (config.rope_theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim))
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for freq in freqs:
        wavelen = 2 * np.pi / freq
        if wavelen < original / high:
            divisors.append(1.0)
        elif wavelen > original / low:
            divisors.append(scaling["factor"])
        else:
            smooth = (original / wavelen - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return [float(np.float32(d)) for d in divisors]


def gguf_metadata(family, config, architecture):
    """Keys of the architecture, as llama.cpp's converter writes them."""
    get = lambda key: getattr(config, key, None)
    head_dim = get("head_dim") or config.hidden_size // config.num_attention_heads
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_theta),
    }
    if get("head_dim"):
        keys["attention.key_length"] = keys["attention.value_length"] = head_dim
    n_experts = get("num_local_experts") or get("num_experts")
    if n_experts:
        keys["expert_count"] = n_experts
        keys["expert_used_count"] = config.num_experts_per_tok
    if get("moe_intermediate_size"):
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
    if family == "llama":
        keys["rope.dimension_count"] = head_dim
    if family == "gemma3":
        keys["attention.sliding_window"] = config.sliding_window
        keys["attention.sliding_window_pattern"] = 3
        keys["final_logit_softcapping"] = config.final_logit_softcapping
        keys["rope.scaling.type"] = "linear"
        keys["rope.scaling.factor"] = config.rope_scaling["factor"]
    if family == "phi3":
        keys["rope.dimension_count"] = int(head_dim * config.partial_rotary_factor)
        keys["rope.scaling.original_context_length"] = config.original_max_position_embeddings
        times = config.max_position_embeddings / config.original_max_position_embeddings
        magnitude = np.sqrt(1 + np.log(times) / np.log(config.original_max_position_embeddings))
        keys["rope.scaling.attn_factor"] = float(magnitude)
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def gguf_tensors(family, model, architecture):
    """Name, sources and what is done to them, for every tensor of the GGUF file."""
    config = model.config
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers
    )
    tensors, stacks = [], {}
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            before, after = name.split(".experts.")
            part = after.split(".")[1]
            # The converter merges experts under a name without an index.
            before = before.replace("model.layers", "layers") if "block_sparse" in name else before
            before = before.replace("block_sparse_moe", "feed_forward")
            stacks.setdefault(f"{before}.experts.{part}.weight", []).append(name)
            continue
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        how = "same"
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            query = name.endswith("q_proj.weight")
            how = f"pair {config.num_attention_heads if query else config.num_key_value_heads}"
        elif architecture == "gemma3" and name.endswith("norm.weight"):
            how = "add 1"
        tensors.append([mapped, how, [name]])
    for merged, sources in stacks.items():
        mapped = names.get_name(merged, try_suffixes=(".weight",))
        tensors.append([mapped, "stack", sources])
    values = {}
    if family == "llama":
        values["rope_freqs.weight"] = llama3_divisors(config)
    if family == "phi3":
        values["rope_factors_short.weight"] = config.rope_scaling["short_factor"]
        values["rope_factors_long.weight"] = config.rope_scaling["long_factor"]
    assert all(name for name, _, _ in tensors), tensors
    return tensors, values


def reference(family):
    model = make_model(family)
    architecture = MODELS[family][2]
    prompt, tokens, logits = run(model)
    config = json.loads(model.config.to_json_string(use_diff=False))
    drop = [key for key, value in config.items() if value is None or key.startswith("_")]
    for key in drop:
        del config[key]
    made = dict(
        versions=dict(transformers=transformers.__version__, torch=torch.__version__),
        config=config,
        norm_base=0.0 if MODELS[family][0] == "gemma3_text" else 1.0,
        tensors=[[name, list(p.shape)] for name, p in model.named_parameters()],
        gguf=None,
        prompt=prompt,
        tokens=tokens,
        logits=[[row, [float(f"{x:.6g}") for x in logits[row].tolist()]] for row in ROWS],
    )
    if architecture:
        tensors, values = gguf_tensors(family, model, architecture)
        made["gguf"] = dict(
            architecture=architecture,
            metadata=gguf_metadata(family, model.config, architecture),
            tensors=tensors,
            values=values,
        )
    return made


def main():
    out = Path(sys.argv[1])
    for family in sys.argv[2:] or MODELS:
        made = reference(family)
        text = ",\n".join(
            f" {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}"
            for key, value in made.items()
        )
        (out / f"{family}.json").write_text("{\n" + text + "\n}\n")
        print(family, made["tokens"])


if __name__ == "__main__":
    main()
