"""A small Llama in plain PyTorch, the loader for a GGUF target, and its tokenizer."""
import json
import math
import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    vocab: int = 49152
    dim: int = 576
    layers: int = 30
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    ffn: int = 1536
    theta: float = 100000.0
    eps: float = 1e-5

    def hf(self, **extra):
        """The fields of config.json."""
        return dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=self.vocab,
                    hidden_size=self.dim, num_hidden_layers=self.layers, num_attention_heads=self.heads,
                    num_key_value_heads=self.kv_heads, head_dim=self.head_dim, intermediate_size=self.ffn,
                    rope_theta=self.theta, rms_norm_eps=self.eps, hidden_act="silu", attention_bias=False,
                    mlp_bias=False, tie_word_embeddings=True, max_position_embeddings=8192,
                    bos_token_id=1, eos_token_id=2, pad_token_id=2, **extra)


def rope_table(c, n, device):
    inv = 1.0 / c.theta ** (torch.arange(0, c.head_dim, 2, device=device).float() / c.head_dim)
    ang = torch.outer(torch.arange(n, device=device).float(), inv)
    return ang.cos(), ang.sin()


def rope(x, cos, sin):
    """x [..., head_dim]; cos/sin broadcastable to [..., head_dim/2] (rotate-half layout)."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        q, k = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.norm1 = nn.Parameter(torch.ones(c.dim))
        self.norm2 = nn.Parameter(torch.ones(c.dim))
        self.wqkv = nn.Parameter(torch.randn(q + 2 * k, c.dim) / math.sqrt(c.dim))
        self.wo = nn.Parameter(torch.randn(c.dim, q) / math.sqrt(q) * 0.5)
        self.wgu = nn.Parameter(torch.randn(2 * c.ffn, c.dim) / math.sqrt(c.dim))
        self.wd = nn.Parameter(torch.randn(c.dim, c.ffn) / math.sqrt(c.ffn) * 0.5)

    def qkv(self, x, cos, sin):
        """x [..., dim] -> q [..., H, hd], k and v [..., Hkv, hd]; q and k already rotated."""
        c = self.c
        y = F.linear(F.rms_norm(x, (c.dim,), self.norm1.to(x.dtype), c.eps), self.wqkv.to(x.dtype))
        y = y.unflatten(-1, (c.heads + 2 * c.kv_heads, c.head_dim))
        qk, v = y.split([c.heads + c.kv_heads, c.kv_heads], -2)
        q, k = rope(qk, cos, sin).split([c.heads, c.kv_heads], -2)
        return q, k, v

    def out(self, x, attn):
        c = self.c
        x = x + F.linear(attn, self.wo.to(x.dtype))
        g, u = F.linear(F.rms_norm(x, (c.dim,), self.norm2.to(x.dtype), c.eps), self.wgu.to(x.dtype)).chunk(2, -1)
        return x + F.linear(F.silu(g) * u, self.wd.to(x.dtype))

    def forward(self, x, cos, sin):
        c = self.c
        q, k, v = self.qkv(x, cos[:, None], sin[:, None])
        rep = c.heads // c.kv_heads
        q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(rep, 2), v.repeat_interleave(rep, 2)))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x, a.transpose(1, 2).flatten(2))


class Llama(nn.Module):
    """embed=None gives the model its own tied embedding; a tensor is used as a frozen, shared one."""

    def __init__(self, c, embed=None):
        super().__init__()
        self.c = c
        self.shared = embed is not None
        if self.shared:
            self.register_buffer("embed", embed, persistent=False)
        else:
            self.embed = nn.Parameter(torch.randn(c.vocab, c.dim) * 0.02)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.Parameter(torch.ones(c.dim))

    def forward(self, tokens, dtype=None):
        """tokens [B, T] -> final normed hidden states [B, T, dim]"""
        x = F.embedding(tokens, self.embed).to(dtype or self.norm.dtype)
        cos, sin = rope_table(self.c, tokens.shape[1], tokens.device)
        for b in self.blocks:
            x = b(x, cos, sin)
        return F.rms_norm(x, (self.c.dim,), self.norm.to(x.dtype), self.c.eps)

    def hf_state(self):
        c, out = self.c, {}
        q, k = c.heads * c.head_dim, c.kv_heads * c.head_dim
        for i, b in enumerate(self.blocks):
            p = f"model.layers.{i}."
            wq, wk, wv = b.wqkv.split([q, k, k])
            wg, wu = b.wgu.chunk(2)
            out |= {p + "input_layernorm.weight": b.norm1, p + "post_attention_layernorm.weight": b.norm2,
                    p + "self_attn.q_proj.weight": wq, p + "self_attn.k_proj.weight": wk,
                    p + "self_attn.v_proj.weight": wv, p + "self_attn.o_proj.weight": b.wo,
                    p + "mlp.gate_proj.weight": wg, p + "mlp.up_proj.weight": wu, p + "mlp.down_proj.weight": b.wd}
        out["model.norm.weight"] = self.norm
        if not self.shared:
            out["model.embed_tokens.weight"] = self.embed
        return {n: t.detach().contiguous() for n, t in out.items()}


def load_target(path, device="cpu", dtype=torch.float32):
    """Dequantise a Llama GGUF exactly and return it as a Llama module."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    r = GGUFReader(path)
    g = lambda k: r.fields["llama." + k].contents()
    w = {t.name: torch.tensor(dequantize(t.data, t.tensor_type)).float() for t in r.tensors}
    c = Config(vocab=w["token_embd.weight"].shape[0], dim=g("embedding_length"), layers=g("block_count"),
               heads=g("attention.head_count"), kv_heads=g("attention.head_count_kv"),
               head_dim=g("rope.dimension_count"), ffn=g("feed_forward_length"), theta=g("rope.freq_base"))

    def unpermute(x, h):  # GGUF pairs neighbouring rows for RoPE; go back to rotate-half
        return x.view(h, c.head_dim // 2, 2, -1).transpose(1, 2).reshape(h * c.head_dim, -1)

    with torch.device("meta"):
        m = Llama(c)
    m = m.to_empty(device="cpu")
    with torch.no_grad():
        m.embed.copy_(w["token_embd.weight"])
        m.norm.copy_(w["output_norm.weight"])
        for i, b in enumerate(m.blocks):
            p = lambda n: w[f"blk.{i}.{n}.weight"]
            b.norm1.copy_(p("attn_norm"))
            b.norm2.copy_(p("ffn_norm"))
            b.wqkv.copy_(torch.cat([unpermute(p("attn_q"), c.heads), unpermute(p("attn_k"), c.kv_heads), p("attn_v")]))
            b.wo.copy_(p("attn_output"))
            b.wgu.copy_(torch.cat([p("ffn_gate"), p("ffn_up")]))
            b.wd.copy_(p("ffn_down"))
    return m.to(device, dtype).requires_grad_(False)


def load_draft(folder):
    """Load an exported draft (see export.py) -> Llama in float32, token ids by falling frequency."""
    from safetensors.torch import load_file
    with open(os.path.join(folder, "config.json"), encoding="utf8") as file:
        j = json.load(file)
    c = Config(j["vocab_size"], j["hidden_size"], j["num_hidden_layers"], j["num_attention_heads"],
               j["num_key_value_heads"], j["head_dim"], j["intermediate_size"], j["rope_theta"], j["rms_norm_eps"])
    w = load_file(os.path.join(folder, "model.safetensors"))
    w = {n: t.float() * w[n + "_scale"][:, None].float() if n + "_scale" in w else t.float() for n, t in w.items()}
    m = Llama(c).requires_grad_(False)
    m.embed.copy_(w["model.embed_tokens.weight"])
    m.norm.copy_(w["model.norm.weight"])
    for i, b in enumerate(m.blocks):
        p = lambda n: w[f"model.layers.{i}.{n}.weight"]
        b.norm1.copy_(p("input_layernorm"))
        b.norm2.copy_(p("post_attention_layernorm"))
        b.wqkv.copy_(torch.cat([p(f"self_attn.{n}_proj") for n in "qkv"]))
        b.wo.copy_(p("self_attn.o_proj"))
        b.wgu.copy_(torch.cat([p("mlp.gate_proj"), p("mlp.up_proj")]))
        b.wd.copy_(p("mlp.down_proj"))
    small = os.path.join(folder, "token_rank.u16")
    rank = np.fromfile(small, "<u2") if os.path.exists(small) else np.fromfile(small[:-3] + "u32", "<u4")
    rank = rank.astype(np.int64)
    return m, torch.from_numpy(rank)


def load_tokenizer(path):
    """Byte-level BPE with single digits, from the GGUF's own vocabulary."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    r = GGUFReader(path)
    toks = r.fields["tokenizer.ggml.tokens"].contents()
    types = r.fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(m.split(" ")) for m in r.fields["tokenizer.ggml.merges"].contents()]
    t = Tokenizer(models.BPE({s: i for i, s in enumerate(toks)}, merges))
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False)])
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken(s, special=True, normalized=False) for s, y in zip(toks, types) if y == 3])
    return t
