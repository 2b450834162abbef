"""Sample training sequences from the target: one big lock-step batch, fixed-length rows.

Every row starts at position 0 and all rows advance together, so no padding or masks
are needed. Prompt tokens are forced while a row is inside a prompt; when a turn ends
(or hits its cap) the row goes on with a follow-up turn, so no slot is ever idle.
Output: tokens [N, T] (uint16, int32 for large vocabularies) and gen bool [N, T] (True where the target chose the token).
"""
import argparse
import time


def options():
    """The command line, parsed before anything heavy is imported."""
    a = argparse.ArgumentParser(description=__doc__)
    a.add_argument("--target", required=True, help="GGUF file of the target")
    a.add_argument("--out", required=True, help="file for the sequences")
    a.add_argument("--seconds", type=float, default=300, help="time for sampling (default %(default)s)")
    a.add_argument("--batch", type=int, default=6144, help="rows sampled together (default %(default)s)")
    a.add_argument("--length", type=int, default=512, help="tokens of a row (default %(default)s)")
    a.add_argument("--starts", type=int, default=200_000, help="prompts that begin a row (default %(default)s)")
    a.add_argument("--follows", type=int, default=60_000, help="prompts that go on after a turn (default %(default)s)")
    a.add_argument("--seed", type=int, default=0, help="random seed")
    a.add_argument("--device", default="cuda", help="torch device")
    a.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    return a.parse_args()


OPTIONS = options() if __name__ == "__main__" else None

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import prompts as P  # noqa: E402
from model import load_target, load_tokenizer, rope_table  # noqa: E402


def pack_pool(tok, items, max_len=96):
    enc = [e.ids for e in tok.encode_batch([t for t, _ in items])]
    keep = [i for i, e in enumerate(enc) if len(e) <= max_len]
    ids = torch.zeros(len(keep), max_len, dtype=torch.int32)
    for r, i in enumerate(keep):
        ids[r, :len(enc[i])] = torch.tensor(enc[i], dtype=torch.int32)
    return ids, torch.tensor([len(enc[i]) for i in keep]), torch.tensor([items[i][1] for i in keep])


class Sampler:
    def __init__(self, target, tok, B, T, n_start, n_follow, seed=0, compile=True):
        self.m, self.B, self.T, self.dev = target, B, T, target.norm.device
        starts, follows = P.build_pool(n_start, n_follow, seed + 1)
        follows.append((P.ASSISTANT_TURN, 0))
        a, b = pack_pool(tok, starts), pack_pool(tok, follows)
        self.n_start, self.n_all = len(a[0]), len(a[0]) + len(b[0])
        self.ids, self.len, self.kind = (torch.cat(z).to(self.dev) for z in zip(a, b))
        self.assist, self.next_start = self.n_all - 1, 0
        c = target.c
        self.K = torch.zeros(c.layers, B, c.kv_heads, T, c.head_dim, device=self.dev, dtype=target.norm.dtype)
        self.V = torch.zeros_like(self.K)
        self.cos, self.sin = rope_table(c, T, self.dev)

        def pick(h, embed, invtemp, noise):
            z = F.linear(h, embed).float() * invtemp[:, None]
            u = torch.rand_like(z).clamp_min(1e-20)
            return (z - noise[:, None] * torch.log((-torch.log(u)).clamp_min(1e-20))).argmax(-1)
        self.pick = torch.compile(pick, dynamic=False) if compile else pick
        self.backend = [SDPBackend.FLASH_ATTENTION] if self.dev.type == "cuda" else [SDPBackend.MATH]

    def step(self, tokens, t):
        m, c, B = self.m, self.m.c, self.B
        x = F.embedding(tokens, m.embed)
        cos, sin = self.cos[t], self.sin[t]
        for i, b in enumerate(m.blocks):
            q, k, v = b.qkv(x, cos, sin)
            self.K[i, :, :, t], self.V[i, :, :, t] = k, v
            q = q.view(B, c.kv_heads, c.heads // c.kv_heads, c.head_dim)
            a = F.scaled_dot_product_attention(q, self.K[i, :, :, :t + 1], self.V[i, :, :, :t + 1])
            x = b.out(x, a.reshape(B, -1))
        return F.rms_norm(x, (c.dim,), m.norm, c.eps)

    @torch.no_grad()
    def round(self, greedy=0.45, hot=0.2, cap=(96, 288)):
        """One batch of rows -> tokens [B, T], and whether the target chose each."""
        B, T, dev = self.B, self.T, self.dev
        ends = torch.tensor(P.END_TOKENS, device=dev)
        R = lambda lo, hi: torch.randint(lo, hi, (B,), device=dev)
        ent = (torch.arange(B, device=dev) + self.next_start) % self.n_start
        self.next_start += B
        pos, cnt, limit = torch.zeros_like(ent), torch.zeros_like(ent), R(*cap)
        u = torch.rand(B, device=dev)
        # temperature of a row: 0 (greedy), 1.0 (hot) or 0.7
        temp = torch.where(u < greedy, 0.0, torch.where(u < greedy + hot, 1.0, 0.7))
        out = torch.zeros(B, T, dtype=torch.int32, device=dev)
        gen = torch.zeros(B, T, dtype=torch.bool, device=dev)
        nxt, free = self.ids[ent, 0].long(), torch.zeros(B, dtype=torch.bool, device=dev)
        pos += 1
        with sdpa_kernel(self.backend):
            for t in range(T):
                out[:, t], gen[:, t] = nxt.int(), free
                if t == T - 1:
                    break
                h = self.step(nxt, t)
                kind = self.kind[ent]
                tt = torch.where(kind == 1, 0.9, temp)
                s = self.pick(h, self.m.embed, 1 / tt.clamp_min(0.05).where(tt > 0, 1.0), (tt > 0).float())
                free = pos >= self.len[ent]
                cnt = torch.where(free, cnt + 1, 0)
                over = free & (cnt > torch.where(kind == 1, 80, limit))
                s = torch.where(over, P.TURN_END, s)
                nxt = torch.where(free, s, self.ids[ent, pos.clamp_max(self.ids.shape[1] - 1)].long())
                pos = pos + 1
                end = free & torch.isin(nxt, ends)
                free = free & ~over
                follow = torch.where(kind == 1, self.assist, R(self.n_start, self.n_all - 1))
                ent, pos, cnt = torch.where(end, follow, ent), torch.where(end, 0, pos), torch.where(end, 0, cnt)
                limit = torch.where(end, R(*cap), limit)
        return out.to(torch.uint16 if self.m.c.vocab <= 65536 else torch.int32), gen


def main(o):
    t0 = time.time()
    torch.manual_seed(o.seed)
    tok = load_tokenizer(o.target)
    m = load_target(o.target, o.device, torch.bfloat16)
    s = Sampler(m, tok, o.batch, o.length, o.starts, o.follows, o.seed, compile=not o.no_compile)
    print(f"ready after {time.time() - t0:.0f} s; {s.n_start} starts, {s.n_all - s.n_start} follow-ups", flush=True)
    rows, t1, last = [], time.time(), 0
    while time.time() - t1 + last < o.seconds or not rows:
        t2 = time.time()
        x, g = s.round()
        rows.append((x.cpu(), g.cpu()))
        last = time.time() - t2
        n = sum(x.numel() for x, _ in rows)
        print(f"round {len(rows)}: {last:.1f} s, {n / 1e6:.1f} M tokens, "
              f"{x.numel() / last / 1e3:.0f} k tok/s, target-chosen {g.float().mean():.3f}", flush=True)
    torch.save((torch.cat([x for x, _ in rows]), torch.cat([g for _, g in rows])), o.out)
    for i in range(4):
        print(repr(tok.decode(x[i * 7 % len(x)].tolist(), skip_special_tokens=False)[:700]))


if __name__ == "__main__":
    main(OPTIONS)
