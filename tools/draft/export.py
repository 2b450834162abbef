"""Write a trained candidate as a model folder that `stagebus` takes as a draft model.

Every matrix is stored as int8 with one float32 scale per row (NAME and NAME_scale); norms are
float16. token_rank.u16 (.u32 for more than 65,536 tokens) lists the token ids by falling frequency
in the training data, so that the head can be cut to the first N of them. config.json carries the
fingerprint of the tokenizer, by which a target finds its draft: it is computed from the
tokenizer.json of the target's shard set.
"""
import argparse
import hashlib
import json
import os
import struct


def options():
    """The command line, parsed before anything heavy is imported."""
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--checkpoint", required=True, help="ckpt.pt from train.py")
    a.add_argument("--rank", required=True, help="rank.pt from train.py")
    a.add_argument("--candidate", required=True, help="own:DIMxLAYERSfFFN, as given to train.py")
    a.add_argument("--tokenizer", required=True, help="tokenizer.json of the target's shard set")
    a.add_argument("--out", required=True, help="folder to write")
    return a.parse_args()


OPTIONS = options() if __name__ == "__main__" else None


def tokenizer_sha256(path):
    """The fingerprint that `stagebus_shards::text::tokenizer_fingerprint` computes."""
    with open(path, encoding="utf8") as file:
        document = json.load(file)
    vocab = document["model"]["vocab"]
    if isinstance(vocab, dict):
        tokens = {(token_id, token.encode()) for token, token_id in vocab.items()}
    else:
        tokens = {(token_id, entry[0].encode()) for token_id, entry in enumerate(vocab)}
    tokens |= {(t["id"], t["content"].encode()) for t in document.get("added_tokens", [])}
    sha = hashlib.sha256()
    for token_id, token in sorted(tokens):
        sha.update(struct.pack("<II", token_id, len(token)) + token)
    for merge in document["model"].get("merges", []):
        for part in merge.split(" ", 1) if isinstance(merge, str) else merge:
            part = part.encode()
            sha.update(struct.pack("<I", len(part)) + part)
    return sha.hexdigest()


def export(state, config, rank, tokenizer, out):
    """Write config.json, model.safetensors and the token rank."""
    import torch
    from safetensors.torch import save_file

    from model import Llama

    os.makedirs(out, exist_ok=True)
    model = Llama(config)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    weights = {}
    for name, tensor in model.hf_state().items():
        tensor = tensor.float()
        if tensor.ndim == 1:
            weights[name] = tensor.half()
            continue
        scale = (tensor.abs().amax(1) / 127).clamp_min(1e-12)
        weights[name] = (tensor / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        weights[name + "_scale"] = scale
    save_file(weights, os.path.join(out, "model.safetensors"), metadata={"format": "pt"})
    stored = {"matrices": "int8, value = weight * weight_scale[row]"}
    with open(os.path.join(out, "config.json"), "w", encoding="utf8") as file:
        json.dump(config.hf(stored_as=stored, tokenizer_sha256=tokenizer_sha256(tokenizer)), file, indent=2)
        file.write("\n")
    is_small = config.vocab <= 65536
    rank_file = os.path.join(out, "token_rank.u16" if is_small else "token_rank.u32")
    rank.to(torch.int64).numpy().astype("<u2" if is_small else "<u4").tofile(rank_file)


def main(o):
    import torch

    from model import Config

    if not o.candidate.startswith("own:"):
        raise SystemExit("only candidates with their own embedding (own:...) can be exported")
    checkpoint = torch.load(o.checkpoint, map_location="cpu")[o.candidate]
    export(checkpoint["model"], Config(**checkpoint["config"]), torch.load(o.rank)[0], o.tokenizer, o.out)


if __name__ == "__main__":
    main(OPTIONS)
