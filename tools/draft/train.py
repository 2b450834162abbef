"""Distil draft models for speculative decoding from the sequences that generate.py wrote.

Several candidates can train at once: they share each batch's teacher logits. The loss of
a candidate is the cross-entropy against  q = hard * onehot(argmax p) + (1 - hard) * p,
where p is the target's distribution, so that both greedy and sampled acceptance improve.
AdamW, bf16 compute with fp32 master weights, learning rate cosine in wall time, so that a
run ends when its time is up. `--resume` goes on from a checkpoint, also with fewer candidates.

Candidates are named by their shape:
  share:0,29        the target's width and (frozen) embedding, layers copied from the target
  own:384x4f1024    own tied embedding (from an SVD of the target's), dim 384, 4 layers, ffn 1024
"""
import argparse
import copy
import math
import os
import time


def options():
    """The command line, parsed before anything heavy is imported."""
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--target", required=True, help="GGUF file of the target")
    a.add_argument("--data", required=True, help="sequences from generate.py")
    a.add_argument("--out", required=True, help="folder for checkpoints")
    a.add_argument("--candidates", nargs="+", required=True, help="shapes to train, see above")
    a.add_argument("--lr", nargs="+", type=float, default=[1e-3], help="peak learning rate, one or one per candidate")
    a.add_argument("--seconds", type=float, default=500, help="time for this run")
    a.add_argument("--start", type=float, default=0, help="seconds already trained, for the schedule")
    a.add_argument("--total", type=float, default=500, help="seconds of the whole schedule")
    a.add_argument("--resume", default="", help="checkpoint to go on from")
    a.add_argument("--rows", type=int, default=128, help="rows of a step")
    a.add_argument("--join", nargs="+", type=int, default=[1], help="rows per draft context, taken in turn by step")
    a.add_argument("--chunk", type=int, default=16384, help="tokens whose logits are computed together")
    a.add_argument("--hard", type=float, default=0.5, help="share of the loss on the target's top token")
    a.add_argument("--prompt-weight", type=float, default=0.1, help="weight of tokens that the target did not choose")
    a.add_argument("--wd", type=float, default=0.05, help="weight decay of the layers")
    a.add_argument("--device", default="cuda", help="torch device")
    a.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    a.add_argument("--no-eval", action="store_true", help="skip the acceptance table at the end")
    return a.parse_args()


OPTIONS = options() if __name__ == "__main__" else None

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import evaluate as E  # noqa: E402
from model import Config, Llama, load_target, load_tokenizer  # noqa: E402


def make_candidate(spec, target):
    kind, s = spec.split(":")
    tc = target.c
    emb = target.embed.float()
    if kind == "share":
        ix = [int(i) for i in s.split(",")]
        m = Llama(Config(**{**tc.__dict__, "layers": len(ix)}), emb)
        for b, i in zip(m.blocks, ix):
            b.load_state_dict({k: v.float() for k, v in target.blocks[i].state_dict().items()})
        m.norm.data.copy_(target.norm)
        return m
    d, rest = s.split("x")
    layers, ffn = rest.split("f")
    d = int(d)
    m = Llama(Config(vocab=tc.vocab, dim=d, layers=int(layers), heads=d // 64, kv_heads=2, ffn=int(ffn),
                     theta=tc.theta, eps=tc.eps))
    # principal directions of the target's embedding
    _, V = torch.linalg.eigh(emb.T @ emb)
    e = emb @ V[:, -d:]
    m.embed.data.copy_(e * (emb.norm() / math.sqrt(emb.numel()) / (e.norm() / math.sqrt(e.numel()))))
    return m


def teacher_core(z, hard):
    """teacher logits [n, V] -> soft targets [n, V] in bf16"""
    z = z.float()
    p = (1 - hard) * torch.softmax(z, -1)
    top = z.argmax(-1)
    return torch.where(torch.arange(z.shape[1], device=z.device)[None] == top[:, None], p + hard, p).to(torch.bfloat16), top


def student_core(z, q, w, top):
    """-> per-token weighted loss, gradient of its sum with respect to z, top-1 hits"""
    z = z.float()
    lse = torch.logsumexp(z, -1, keepdim=True)
    lp = z - lse
    loss = -(q.float() * lp).sum(-1)
    return loss * w, ((lp.exp() - q.float()) * w[:, None]).to(torch.bfloat16), (z.argmax(-1) == top)


def main(o):
    dev, t00 = o.device, time.time()
    torch.manual_seed(int(o.start) + 7)
    torch.set_float32_matmul_precision("high")
    os.makedirs(o.out, exist_ok=True)
    comp = (lambda f: f) if o.no_compile else (lambda f: torch.compile(f, dynamic=False))

    def by_block(m):  # compile one block at a time: blocks of one shape share the code
        if not o.no_compile:
            for b in m.blocks:
                b.compile(dynamic=False)
        return m

    target32 = load_target(o.target, dev)
    target = by_block(copy.deepcopy(target32).to(torch.bfloat16))
    X, G = torch.load(o.data)
    held = min(256, len(X) // 10)
    X, G, HX, HG = X[:-held], G[:-held], X[-held:], G[-held:]
    count = torch.bincount(X[G].int(), minlength=target.c.vocab)
    rank = count.argsort(descending=True, stable=True)
    torch.save((rank, count), os.path.join(o.out, "rank.pt"))
    cover = count[rank].cumsum(0) / count.sum()
    print(f"{X.numel() / 1e6:.1f} M tokens, {G.sum().item() / 1e6:.1f} M chosen by the target; the most frequent "
          + ", ".join(f"{n}: {cover[n - 1]:.4f}" for n in (4096, 8192, 16384, 24576)), flush=True)

    lrs = o.lr * len(o.candidates) if len(o.lr) == 1 else o.lr
    ck = torch.load(o.resume, map_location=dev) if o.resume else {}
    C = []
    for spec, lr in zip(o.candidates, lrs):
        m = make_candidate(spec, target32).to(dev)
        mat = [p for p in m.parameters() if p.ndim > 1 and p is not m.embed]
        rest = [p for p in m.parameters() if p.ndim == 1 or p is m.embed]
        opt = torch.optim.AdamW([dict(params=mat, weight_decay=o.wd), dict(params=rest, weight_decay=0.0)],
                                lr=lr, betas=(0.9, 0.98), fused=dev == "cuda")
        if spec in ck:
            m.load_state_dict(ck[spec]["model"])
            if "opt" in ck[spec]:
                opt.load_state_dict(ck[spec]["opt"])
        emb16 = m.embed.detach().to(torch.bfloat16)
        C.append(dict(spec=spec, m=by_block(m), opt=opt, lr=lr, loss=0.0, hit=0.0, emb=emb16))
        n = sum(p.numel() for p in m.parameters())
        print(f"{spec}: {n / 1e6:.2f} M own parameters", flush=True)
    del ck
    tcore, score = comp(teacher_core), comp(student_core)

    N, T = X.shape
    step, seen, order, at = 0, 0, torch.randperm(N), 0
    deadline, logged = t00 + o.seconds, time.time()
    stat_n = 0.0
    sched0 = time.time()
    while time.time() < deadline:
        if at + o.rows > N:
            order, at = torch.randperm(N), 0
        ix = order[at:at + o.rows]
        at += o.rows
        x = X[ix].to(dev, non_blocking=True).long()
        g = G[ix].to(dev, non_blocking=True)
        w = torch.where(g, 1.0, o.prompt_weight)[:, 1:]
        w = (w / w.sum()).flatten()
        now = time.time()
        frac = min(1.0, (o.start + now - sched0) / o.total)
        warm = min(1.0, (step + 1) / 150)
        with torch.no_grad():
            ht = target(x)[:, :-1].reshape(-1, target.c.dim)
        # the draft may see several unrelated rows as one long context, so that it learns
        # to cope with distances beyond one row; the target still sees each row alone
        xs = x.view(-1, T * o.join[step % len(o.join)])
        hs = [c["m"](xs, torch.bfloat16).view(len(x), T, -1)[:, :-1].reshape(-1, c["m"].c.dim) for c in C]
        dh = [torch.empty_like(h) for h in hs]
        dW = [None if c["m"].shared else torch.zeros_like(c["m"].embed) for c in C]
        with torch.no_grad():
            for c in C:
                if not c["m"].shared:
                    c["emb"] = c["m"].embed.to(torch.bfloat16)
            n = ht.shape[0] // (T - 1) * (T - 1)
            per = max(1, o.chunk // (T - 1)) * (T - 1)
            for s in range(0, n, per):
                e = min(n, s + per)
                q, top = tcore(F.linear(ht[s:e], target.embed), o.hard)
                for j, c in enumerate(C):
                    z = F.linear(hs[j][s:e], c["emb"])
                    l, gz, hit = score(z, q, w[s:e], top)
                    c["loss"] += l.sum()
                    c["hit"] += (hit * w[s:e]).sum()
                    dh[j][s:e] = gz @ c["emb"]
                    if dW[j] is not None:
                        dW[j] += (gz.T @ hs[j][s:e]).float()
        for j, c in enumerate(C):
            hs[j].backward(dh[j])
            if dW[j] is not None:
                c["m"].embed.grad += dW[j]
            torch.nn.utils.clip_grad_norm_(c["m"].parameters(), 1.0)
            for p in c["opt"].param_groups:
                p["lr"] = c["lr"] * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * frac)))
            c["opt"].step()
            c["opt"].zero_grad(set_to_none=True)
        step, seen, stat_n = step + 1, seen + x.numel(), stat_n + 1
        if step in (1, 2, 10) or time.time() - logged > 20:
            torch.cuda.synchronize() if dev == "cuda" else None
            logged = time.time()
            if step == 10:
                mark = (logged, seen)
            rate = (seen - mark[1]) / (logged - mark[0]) / 1e3 if step > 10 else 0
            print(f"step {step} {logged - t00:.0f}s frac {frac:.3f} {seen / 1e6:.1f}M tok {rate:.0f}k/s | " + " | ".join(
                f"{c['spec']} loss {float(c['loss']) / stat_n:.3f} top1 {float(c['hit']) / stat_n:.3f}" for c in C), flush=True)
            stat_n = 0
            for c in C:
                c["loss"] = c["hit"] = 0.0
    print(f"trained {step} steps, {seen / 1e6:.1f} M tokens in {time.time() - sched0:.0f} s", flush=True)
    torch.save({c["spec"]: dict(model=c["m"].state_dict(), opt=c["opt"].state_dict(), config=c["m"].c.__dict__) for c in C},
               os.path.join(o.out, "ckpt.pt"))

    # held-out agreement, with the draft's head cut to the most frequent tokens
    with torch.no_grad():
        sizes, tot = [target.c.vocab, 24576, 16384, 8192, 4096], 0
        hits = {(c["spec"], v): 0 for c in C for v in sizes}
        for s in range(0, len(HX), 16):
            x, g = HX[s:s + 16].to(dev).long(), HG[s:s + 16].to(dev)[:, 1:].flatten()
            top = F.linear(target(x)[:, :-1].reshape(-1, target.c.dim)[g], target.embed).argmax(-1)
            tot += len(top)
            for c in C:
                h = c["m"](x, torch.bfloat16)[:, :-1].reshape(-1, c["m"].c.dim)[g]
                z = F.linear(h, c["m"].embed.to(h.dtype))[:, rank.to(dev)]
                for v in sizes:
                    hits[c["spec"], v] += (rank.to(dev)[z[:, :v].argmax(-1)] == top).sum().item()
        for c in C:
            print("held-out top-1", c["spec"], " ".join(f"{v}:{hits[c['spec'], v] / max(1, tot):.4f}" for v in sizes), flush=True)
    if not o.no_eval:
        torch.set_float32_matmul_precision("highest")
        tok = load_tokenizer(o.target)
        tp = os.path.join(o.out, "traj.pt")
        tr = torch.load(tp) if os.path.exists(tp) else E.trajectories(target32, tok)
        torch.save(tr, tp)
        ms = {c["spec"]: c["m"] for c in C}
        E.show(E.evaluate(tr, ms, lookup=False))
        for v in (16384, 8192):
            print(f"head cut to {v}:")
            E.show(E.evaluate(tr, ms, head_ids=rank[:v].to(dev), lookup=False), True)


if __name__ == "__main__":
    main(OPTIONS)
