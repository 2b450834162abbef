"""Write a tiny random model as optimum-intel exports it, with what it answers.

The folder has the graph and its weights, the files beside them, and reference.json: token ids of
prompts, the logits behind the last one, and greedy continuations, all from the uncut graph in
float32. Tests cut the graph and compare.

    python export.py llama ../../shards/tests/fixtures/ir/llama
"""
import argparse
import json
import pathlib
import shutil
import tempfile


def options():
    """The command line, parsed before anything heavy is imported."""
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("family", choices=sorted(FAMILIES), help="architecture")
    a.add_argument("out", type=pathlib.Path, help="folder to write; replaced if it is there")
    a.add_argument("--weights", choices=["fp32", "fp16", "int8", "int4"], default="fp16")
    return a.parse_args()


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 320,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}

# The class of each family's configuration, and what it has besides the sizes above.
FAMILIES = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    # The last two layers read the cache of the second; every layer has an embedding of its own.
    # Sliding layers of it cannot be exported as text alone.
    "gemma4": (
        "Gemma4TextConfig",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "layer_types": ["full_attention"] * 4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 320,
            "final_logit_softcapping": 30.0,
        },
    ),
}

N_PROMPTS = 3
N_TOKENS = 24

# Gap between the two best tokens: far more than two ways of computing the same thing differ.
MIN_MARGIN = 0.03


def model(family):
    """A model with random weights, large enough that its logits are far apart."""
    import torch
    import transformers

    name, more = FAMILIES[family]
    torch.manual_seed(7)
    config = getattr(transformers, name)(**{**SIZES, **more})
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for parameter in made.parameters():
        # Norms and biases start as ones and zeros, which would hide that one is left out.
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return made


def tokenizer():
    """A byte-level tokenizer with a few merges and a chat template."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 4], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    return fast


def export(family, weights, out):
    """Writes the folder as `optimum-cli export openvino` does."""
    from optimum.exporters.openvino import main_export, model_configs
    from optimum.intel import OVConfig, OVWeightQuantizationConfig

    # Gemma 4 needs transformers 5.5, and inherits from Gemma the limit 5.0.
    model_configs.Gemma4TextOpenVINOConfig.MAX_TRANSFORMERS_VERSION = "5.5.99"
    config = {
        "fp32": OVConfig(dtype="fp32"),
        "fp16": OVConfig(dtype="fp16"),
        "int8": OVConfig(quantization_config=OVWeightQuantizationConfig(bits=8)),
        "int4": OVConfig(quantization_config=OVWeightQuantizationConfig(bits=4, group_size=32, ratio=1.0)),
    }[weights]
    with tempfile.TemporaryDirectory() as source:
        model(family).save_pretrained(source)
        tokenizer().save_pretrained(source)
        main_export(source, out, task="text-generation-with-past", ov_config=config, convert_tokenizer=False)


class Uncut:
    """The uncut graph in float32, a sequence at a time."""

    def __init__(self, folder):
        import openvino

        properties = {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
            "INFERENCE_NUM_THREADS": "1",
        }
        core = openvino.Core()
        model = core.read_model(folder / "openvino_model.xml")
        self.names = {name for port in model.inputs for name in port.names}
        self.compiled = core.compile_model(model, "CPU", properties)
        self.begin()

    def begin(self):
        """Starts a sequence."""
        self.request, self.n_past = self.compiled.create_infer_request(), 0

    def logits(self, tokens):
        """The logits behind the last of these tokens, which follow those before."""
        import numpy

        end = self.n_past + len(tokens)
        inputs = {
            "input_ids": numpy.array([tokens], dtype=numpy.int64),
            "attention_mask": numpy.ones([1, end], dtype=numpy.int64),
            "position_ids": numpy.arange(self.n_past, end, dtype=numpy.int64)[None],
            "beam_idx": numpy.zeros([1], dtype=numpy.int32),
        }
        self.n_past = end
        output = self.request.infer({name: inputs[name] for name in inputs if name in self.names})
        return next(iter(output.values()))[0, -1].copy()


def answer(uncut, prompt):
    """The case of one prompt."""
    import numpy

    uncut.begin()
    logits = first = uncut.logits(prompt)
    tokens, margin = [], float("inf")
    while len(tokens) < N_TOKENS:
        tokens.append(int(numpy.argmax(logits)))
        low, high = numpy.sort(logits)[-2:]
        margin = min(margin, float(high - low))
        logits = uncut.logits(tokens[-1:])
    logits = [round(float(logit), 5) for logit in first]
    return {"prompt": prompt, "logits": logits, "tokens": tokens, "min_margin": round(margin, 5)}


def reference(folder):
    """What the uncut graph answers, where no two tokens are nearly as likely."""
    import numpy

    random = numpy.random.default_rng(11)
    uncut, cases = Uncut(folder), []
    while len(cases) < N_PROMPTS:
        prompt = [int(token) for token in random.integers(2, 300, 5 + 9 * len(cases))]
        case = answer(uncut, prompt)
        if case["min_margin"] > MIN_MARGIN:
            cases.append(case)
    return cases


def main():
    given = options()
    shutil.rmtree(given.out, ignore_errors=True)
    given.out.mkdir(parents=True)
    export(given.family, given.weights, given.out)
    with open(given.out / "reference.json", "w", encoding="utf8") as file:
        json.dump({"cases": reference(given.out)}, file, indent=None)
        file.write("\n")


if __name__ == "__main__":
    main()
