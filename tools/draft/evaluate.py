"""Greedy speculative-decoding acceptance of a draft, an n-gram drafter and a hybrid.

Because greedy speculation is lossless, the target's greedy trajectory is computed
once; for each position the draft's own K-token continuation is tabulated, and the
draft-verify loop is then simulated by look-ups.
"""
import argparse
import os


def options():
    """The command line, parsed before anything heavy is imported."""
    a = argparse.ArgumentParser(description=__doc__)
    a.add_argument("--target", required=True, help="GGUF file of the target")
    a.add_argument("--draft", required=True, help="exported draft folder")
    a.add_argument("--tokens", type=int, default=128, help="tokens of each answer (default %(default)s)")
    a.add_argument("--trajectories", default="", help="cache file for the target's greedy outputs")
    a.add_argument("--heads", type=int, nargs="*", default=[16384, 8192], help="also with the head cut to the N most frequent tokens")
    return a.parse_args()


OPTIONS = options() if __name__ == "__main__" else None

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import prompts as P  # noqa: E402
from model import load_draft, load_target, load_tokenizer, rope_table  # noqa: E402


@torch.no_grad()
def greedy(target, prompt, n, eos=P.END_TOKENS):
    """Greedy continuation of one prompt with a simple KV cache -> list of ids."""
    c, dev = target.c, target.norm.device
    cos, sin = rope_table(c, len(prompt) + n, dev)
    kc = [None] * c.layers
    out, ids, pos = [], torch.tensor(prompt, device=dev), 0
    rep = c.heads // c.kv_heads
    while len(out) < n:
        x = F.embedding(ids, target.embed)
        t = len(ids)
        cs, sn = cos[pos:pos + t, None], sin[pos:pos + t, None]
        for i, b in enumerate(target.blocks):
            q, k, v = b.qkv(x, cs, sn)
            if kc[i] is not None:
                k, v = torch.cat([kc[i][0], k]), torch.cat([kc[i][1], v])
            kc[i] = (k, v)
            a = F.scaled_dot_product_attention(q.transpose(0, 1), k.repeat_interleave(rep, 1).transpose(0, 1),
                                               v.repeat_interleave(rep, 1).transpose(0, 1), is_causal=t > 1)
            x = b.out(x, a.transpose(0, 1).flatten(1))
        pos += t
        h = F.rms_norm(x[-1], (c.dim,), target.norm, c.eps)
        nxt = int((target.embed @ h).argmax())
        out.append(nxt)
        if nxt in eos:
            break
        ids = torch.tensor([nxt], device=dev)
    return out


@torch.no_grad()
def draft_table(m, seq, start, K, head_ids=None):
    """D[j, k]: the draft's k-th token when drafting from the true prefix seq[:start+j]."""
    c, dev = m.c, m.norm.device
    W = m.embed if head_ids is None else m.embed[head_ids]
    pick = lambda h: (h @ W.T).argmax(-1) if head_ids is None else head_ids[(h @ W.T).argmax(-1)]
    ids = torch.tensor(seq, device=dev)
    T, rep = len(seq), c.heads // c.kv_heads
    cos, sin = rope_table(c, T + K, dev)
    x, pre = F.embedding(ids, m.embed), []
    for b in m.blocks:
        q, k, v = b.qkv(x, cos[:T, None], sin[:T, None])
        pre.append((k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)))
        a = F.scaled_dot_product_attention(q.transpose(0, 1), pre[-1][0].transpose(0, 1),
                                           pre[-1][1].transpose(0, 1), is_causal=True)
        x = b.out(x, a.transpose(0, 1).flatten(1))
    h = F.rms_norm(x, (c.dim,), m.norm, c.eps)
    cur = pick(h[start - 1:T - 1])
    D, own = [cur], [[] for _ in m.blocks]
    ctx = torch.arange(start, T, device=dev)
    visible = torch.arange(T, device=dev)[None] < ctx[:, None]
    for s in range(1, K):
        p = ctx + s - 1
        x = F.embedding(cur, m.embed)
        for i, b in enumerate(m.blocks):
            q, k, v = b.qkv(x, cos[p][:, None], sin[p][:, None])
            own[i].append((k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)))
            ks, vs = (torch.stack(z, 1) for z in zip(*own[i]))
            s1 = torch.einsum("nhd,thd->nht", q, pre[i][0]).masked_fill(~visible[:, None], -1e30)
            s2 = torch.einsum("nhd,nthd->nht", q, ks)
            w = (torch.cat([s1, s2], -1) / c.head_dim ** 0.5).softmax(-1)
            a = torch.einsum("nht,thd->nhd", w[..., :T], pre[i][1]) + torch.einsum("nht,nthd->nhd", w[..., T:], vs)
            x = b.out(x, a.flatten(1))
        cur = pick(F.rms_norm(x, (c.dim,), m.norm, c.eps))
        D.append(cur)
    return torch.stack(D, 1).tolist()


def ngram(seq, end, K, longest=4, shortest=1):
    """Prompt look-up: continuation of the latest earlier match of the longest suffix."""
    for n in range(longest, shortest - 1, -1):
        if end < n + 1:
            continue
        suf = seq[end - n:end]
        for j in range(end - n - 1, -1, -1):
            if seq[j:j + n] == suf:
                return seq[j + n:min(j + n + K, end)]
    return []


def simulate(seq, start, draft, K):
    """-> drafted, accepted, verify passes, tokens emitted"""
    i, d_n, a_n, v_n = start, 0, 0, 0
    while i < len(seq):
        d = draft(i, K)[:K]
        a = 0
        while a < len(d) and i + a < len(seq) and d[a] == seq[i + a]:
            a += 1
        d_n, a_n, v_n = d_n + min(len(d), len(seq) - i), a_n + a, v_n + 1
        i += a + 1
    return d_n, a_n, v_n, len(seq) - start


def evaluate(trajs, models, Ks=(3, 5, 10), head_ids=None, min_match=(3,), lookup=True):
    """trajs: {category: [(seq, start)]}; models: {name: Llama} -> {drafter: {category: row}}

    The hybrid takes the n-gram draft where a suffix of at least min_match tokens
    recurs, and the model's draft elsewhere."""
    res = {}
    for cat, items in trajs.items():
        acc = {}
        for seq, start in items:
            tabs = {}
            for name, m in models.items():
                D = tabs[name] = draft_table(m, seq, start, max(Ks), head_ids)
                r = acc.setdefault(name, {}).setdefault("agree", [0, 0])
                r[0] += sum(D[j][0] == seq[start + j] for j in range(len(D)))
                r[1] += len(D)
            for K in Ks:
                dr = {"ngram": lambda i, K: ngram(seq, i, K)} if lookup else {}
                for name, D in tabs.items():
                    dr[name] = lambda i, K, D=D: D[i - start]
                    for mm in min_match if lookup else ():
                        dr[f"hybrid{mm}+" + name] = lambda i, K, D=D, mm=mm: ngram(seq, i, K, 4, mm) or D[i - start]
                for name, f in dr.items():
                    r = acc.setdefault(name, {}).setdefault(K, [0, 0, 0, 0])
                    for z, y in enumerate(simulate(seq, start, f, K)):
                        r[z] += y
        for name, a in acc.items():
            row = {f"acc{K}": a[K][1] / max(1, a[K][0]) for K in Ks} | {f"tok{K}": a[K][3] / a[K][2] for K in Ks}
            if "agree" in a:
                row["agree"] = a["agree"][0] / a["agree"][1]
            res.setdefault(name, {})[cat] = row
    for name, rows in res.items():
        keys = list(next(iter(rows.values())))
        rows["mean"] = {k: sum(r[k] for r in rows.values()) / len(rows) for k in keys}
    return res


def show(res, only_mean=False):
    """The acceptance table: top-1 agreement, then accepted share / tokens per verify for each K."""
    for name, rows in res.items():
        ks = [key[3:] for key in next(iter(rows.values())) if key.startswith("tok")]
        print(f"{name:24s}{'top-1':>8s}" + "".join(f"{'K=' + k:>16s}" for k in ks))
        for cat, r in rows.items():
            if only_mean and cat != "mean":
                continue
            agree = f"{r['agree']:8.3f}" if "agree" in r else f"{'-':>8s}"
            cells = (f"{r['acc' + k]:.2f} / {r['tok' + k]:.2f}" for k in ks)
            print(f"  {cat:22s}{agree}" + "".join(f"{cell:>16s}" for cell in cells), flush=True)


def trajectories(target, tok, n=128, system=None):
    return {cat: [((p := tok.encode(P.chat(q, system)).ids) + greedy(target, p, n), len(p)) for q in qs]
            for cat, qs in P.EVAL.items()}


def main(o):
    torch.set_grad_enabled(False)
    tok = load_tokenizer(o.target)
    if o.trajectories and os.path.exists(o.trajectories):
        trajs = torch.load(o.trajectories)
    else:
        trajs = trajectories(load_target(o.target), tok, o.tokens)
        if o.trajectories:
            torch.save(trajs, o.trajectories)
    draft, rank = load_draft(o.draft)
    show(evaluate(trajs, {"model": draft}, min_match=(2, 3, 4)))
    for v in o.heads:
        print(f"head cut to the {v} most frequent tokens:")
        show(evaluate(trajs, {"model": draft}, head_ids=rank[:v], lookup=False), True)


if __name__ == "__main__":
    main(OPTIONS)
