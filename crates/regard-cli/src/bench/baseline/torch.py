"""PyTorch: scaled_dot_product_attention in all its forms, FlexAttention where a mask or a score makes it a candidate."""


# A form that makes a matrix of all pairs is tried up to this many bytes of it.
MATRIX = 3 << 30


def seen(rule, row, key):
    """Which keys [keys] each row [rows, 1] sees, as regard's mask of the same name."""
    kind, far = rule["rule"], row - key
    if kind == "causal":
        return far >= 0
    if kind == "window":
        return far.abs() < rule["keys"]
    if kind == "lengths":
        return key < torch.tensor(rule["lengths"]).view(-1, 1, 1, 1)
    if kind == "bits":
        return torch.rand(far.shape) < 0.5
    if kind == "blocks":
        return row // rule["size"] == key // rule["size"]
    if kind == "longformer":
        marked = torch.tensor(rule["global"])
        return (far.abs() < rule["window"]) | torch.isin(key, marked) | torch.isin(row, marked)
    if kind == "strided":
        return (far.abs() < rule["stride"]) | (far % rule["stride"] == 0)
    if kind == "fixed":
        block = rule["block"]
        return (row // block == key // block) | (key % block + rule["summary"] >= block)
    if kind == "tree":
        parents, related = rule["parents"], torch.eye(len(rule["parents"]), dtype=torch.bool)
        for token, parent in enumerate(parents):
            if parent >= 0:
                related[token] |= related[parent]
        visible = (far >= 0).clone()
        visible[-len(parents) :, -len(parents) :] = related
        return visible
    if kind == "keys":
        return torch.zeros(far.shape, dtype=torch.bool).scatter(1, scattered(rule["keys"], *far.shape), True)
    raise ValueError(f"no mask rule {kind}")


def scattered(count, rows, keys):
    """So many keys for each row, the same at each call."""
    return torch.randint(keys, (rows, count), generator=torch.Generator().manual_seed(1))


def additive(dim, dtype):
    """Bahdanau's attention as modules are written: [queries, keys, hidden] is made and kept for the way back."""
    size = dim**-0.5
    w_q, w_k, w = (torch.randn(dim, n, dtype=dtype) * size for n in (dim, dim, 1))

    def attend(q, k, v, mask):
        hidden = torch.tanh((q @ w_q).unsqueeze(-2) + (k @ w_k).unsqueeze(-3))
        scores = (hidden @ w).squeeze(-1)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return torch.softmax(scores, -1) @ v

    return attend, [w_q, w_k, w]


def top(k):
    """The softmax over the k highest scores of each row, by hiding the others."""

    def attend(q, key, v, mask):
        scores = (q @ key.mT) * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        best = scores.topk(min(k, scores.shape[-1]), -1)
        kept = torch.full_like(scores, -math.inf).scatter(-1, best.indices, best.values)
        return torch.softmax(kept, -1) @ v

    return attend


class Asked:
    """The tensors of a case, and the forms that compute it."""

    def __init__(self, case):
        torch.manual_seed(1)
        torch.set_num_threads(case["threads"])
        torch._dynamo.reset()
        self.case, self.dtype = case, getattr(torch, {"f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16"}[case["dtype"]])
        self.queries, self.keys, self.heads, self.kv = case["queries"], case["keys"], case["heads"], case["kv_heads"]
        shared = case["cached"] == "shared"
        self.q = self.tensor(case["batch"], self.heads, self.queries, case["dim"]) * case["q_scale"]
        items = 1 if shared else case["batch"]
        self.k = self.tensor(items, self.kv, self.keys, case["dim"]).expand(case["batch"], -1, -1, -1)
        self.v = self.tensor(items, self.kv, self.keys, case["v_dim"]).expand(case["batch"], -1, -1, -1)
        if case["latent"]:
            self.v = self.k[..., : case["v_dim"]]
        self.kinds = [rule["rule"] for rule in case["rules"]]
        self.key, self.row = torch.arange(self.keys), torch.arange(self.keys - self.queries, self.keys).view(-1, 1)
        self.mask = self.all_rules()
        self.bias = self.added()
        self.causal = self.kinds == ["causal"] and self.queries == self.keys and self.bias is None
        self.sinks = torch.randn(self.heads) if case["sinks"] else None
        self.grouped = self.heads != self.kv
        self.matrix = case["batch"] * self.heads * self.queries * self.keys * self.dtype.itemsize

    def tensor(self, batch, heads, length, dim):
        if self.case["layout"] == "bshd":
            return torch.randn(batch, length, heads, dim, dtype=self.dtype).transpose(1, 2)
        return torch.randn(batch, heads, length, dim, dtype=self.dtype)

    def all_rules(self):
        mask = None
        for rule in self.case["rules"]:
            one = seen(rule, self.row, self.key)
            one = one.view((1,) * (4 - one.dim()) + one.shape)
            mask = one if mask is None else mask & one
        return mask

    def added(self):
        if not self.case["bias"]:
            return None
        if self.case["bias"] == "alibi":
            return -torch.tensor(self.case["slopes"], dtype=self.dtype).view(1, -1, 1, 1) * (self.row - self.key).abs()
        heads = self.heads if self.case["bias"] == "heads" else 1
        return torch.randn(1, heads, self.queries, self.keys, dtype=self.dtype)

    def options(self):
        """The arguments of scaled_dot_product_attention."""
        more = {"is_causal": True} if self.causal else {}
        if not self.causal and (self.mask is not None or self.bias is not None):
            both = self.mask is not None and self.bias is not None
            more["attn_mask"] = self.bias.masked_fill(~self.mask, -math.inf) if both else self.mask if self.bias is None else self.bias
        if self.grouped:
            more["enable_gqa"] = True
        if self.case["dropout"]:
            more["dropout_p"] = self.case["dropout"]
        return more

    def scores_by_hand(self):
        """The definition, for scores that scaled_dot_product_attention has not."""
        cap, group = self.case["softcap"], self.heads // self.kv

        def call():
            k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (self.k, self.v))
            scores = (self.q @ k.mT) * self.case["dim"] ** -0.5
            if cap:
                scores = cap * torch.tanh(scores / cap)
            if self.mask is not None:
                scores = scores.masked_fill(~self.mask, -math.inf)
            if self.sinks is not None:
                column = self.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
                return torch.softmax(torch.cat([scores, column], -1), -1, dtype=torch.float32).to(v.dtype)[..., :-1] @ v
            return torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v

        return call

    def flash_and_lse(self):
        """Sinks as a factor of what attention without them returns."""
        sinks, op = self.sinks.view(1, -1, 1), torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        more = {} if self.causal or self.mask is None else {"attn_mask": torch.zeros(self.mask.shape, dtype=self.dtype).masked_fill(~self.mask, -math.inf)}

        def call():
            out, lse = op(self.q, self.k, self.v, 0.0, self.causal, **more)
            lse = lse if lse.shape == out.shape[:3] else lse.transpose(1, 2)
            return (out * torch.sigmoid(lse - sinks).unsqueeze(-1)).to(out.dtype)

        return call

    def flex(self):
        """FlexAttention, compiled by its first call."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        cap, off, bias = self.case["softcap"], self.keys - self.queries, self.bias
        mask = None if self.mask is None else self.mask.expand(-1, -1, self.queries, self.keys)
        visible = lambda b, h, i, j: mask[b if mask.shape[0] > 1 else 0, 0, i, j]
        if self.kinds == ["causal"]:
            visible = lambda b, h, i, j: i + off >= j
        elif self.kinds == ["lengths"]:
            lengths = torch.tensor(self.case["rules"][0]["lengths"])
            visible = lambda b, h, i, j: j < lengths[b]
        elif sorted(self.kinds) == ["causal", "window"]:
            window = next(rule["keys"] for rule in self.case["rules"] if rule["rule"] == "window")
            visible = lambda b, h, i, j: (i + off >= j) & (i + off - j < window)
        blocks = None
        if mask is not None:
            items = self.case["batch"] if mask.shape[0] > 1 else None
            blocks = create_block_mask(visible, items, None, self.queries, self.keys, device="cpu")
        score = None
        if cap:
            score = lambda s, b, h, i, j: cap * torch.tanh(s / cap)
        elif bias is not None:
            score = lambda s, b, h, i, j: s + bias[0, h if bias.shape[1] > 1 else 0, i, j]
        attend = torch.compile(flex_attention, dynamic=False)
        return lambda: attend(self.q, self.k, self.v, score_mod=score, block_mask=blocks, enable_gqa=self.grouped)

    def folded(self):
        """The query heads of a key head, and all items of a shared prefix, as rows of one matrix: keys are read once for them."""
        batch, group, shared = self.case["batch"], self.heads // self.kv, self.case["cached"] == "shared"
        mask = None if self.mask is None else self.mask.repeat(1, 1, group * (batch if shared else 1), 1)

        def call():
            q = self.q.view(batch, self.kv, group * self.queries, -1)
            if not shared:
                return F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask).view(batch, self.heads, self.queries, -1)
            q = q.transpose(0, 1).reshape(1, self.kv, batch * group * self.queries, -1)
            out = F.scaled_dot_product_attention(q, self.k[:1], self.v[:1], attn_mask=mask)
            return out.view(self.kv, batch, group * self.queries, -1).transpose(0, 1).reshape(batch, self.heads, self.queries, -1)

        return call

    def items_alone(self):
        """Each item over its own keys: no padding is computed."""
        lengths = next(rule["lengths"] for rule in self.case["rules"] if rule["rule"] == "lengths")

        def call():
            each = (
                F.scaled_dot_product_attention(self.q[b : b + 1], self.k[b : b + 1, :, :n], self.v[b : b + 1, :, :n], enable_gqa=self.grouped)
                for b, n in enumerate(lengths)
            )
            return torch.cat(list(each))

        return call

    def in_chunks(self):
        """A causal window by chunks of rows, each over the keys that it can see."""
        window = next(rule["keys"] for rule in self.case["rules"] if rule["rule"] == "window")
        size = max(window, 128)
        starts = range(0, self.queries, size)
        spans = [(i, min(i + size, self.queries), max(0, i - window + 1)) for i in starts]
        masks = [self.mask[:, :, i:end, first:end] for i, end, first in spans]

        def call():
            each = (
                F.scaled_dot_product_attention(
                    self.q[:, :, i:end], self.k[:, :, first:end], self.v[:, :, first:end], attn_mask=mask, enable_gqa=self.grouped
                )
                for (i, end, first), mask in zip(spans, masks)
            )
            return torch.cat(list(each), 2)

        return call

    def gathered(self):
        """The listed keys of each row, as a batch of rows with few keys."""
        count = self.case["rules"][0]["keys"]
        at = scattered(count, self.queries, self.keys)
        # A key drawn twice counts once.
        at = at.sort(-1).values
        again = torch.cat([torch.zeros(self.queries, 1, dtype=torch.bool), at[:, 1:] == at[:, :-1]], 1)
        mask = ~again.view(self.queries, 1, 1, count) if again.any() else None

        def call():
            k, v = (x[0][:, at].transpose(0, 1) for x in (self.k, self.v))
            q = self.q[0].transpose(0, 1).reshape(self.queries, self.kv, self.heads // self.kv, -1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return out.reshape(self.queries, self.heads, -1).transpose(0, 1)[None]

        return call

    def forms(self):
        case = self.case
        if case["unknown"]:
            raise ValueError(f"it has no {case['unknown']}")
        if case["additive"] or case["top"]:
            return self.other_functions()
        forward, forms = case["pass"] == "forward", {}
        more = self.options()
        if not case["softcap"] and not case["sinks"]:
            forms["default"] = lambda: F.scaled_dot_product_attention(self.q, self.k, self.v, **more)
            if self.matrix <= MATRIX:

                def math_only():
                    with sdpa_kernel(SDPBackend.MATH):
                        return F.scaled_dot_product_attention(self.q, self.k, self.v, **more)

                forms["math"] = math_only
            plain = not case["bias"] and not case["dropout"]
            if plain and (self.grouped or case["cached"] == "shared") and self.queries <= 16 and case["layout"] == "bhsd":
                forms["folded"] = self.folded()
            if plain and self.kinds == ["keys"] and case["batch"] == 1:
                forms["gathered"] = self.gathered()
            if plain and self.kinds == ["lengths"]:
                forms["items alone"] = self.items_alone()
            if plain and sorted(self.kinds) == ["causal", "window"] and self.queries == self.keys:
                forms["chunks"] = self.in_chunks()
        elif self.matrix <= MATRIX:
            forms["eager"] = self.scores_by_hand()
        if case["sinks"] and not case["softcap"]:
            forms["flash + lse"] = self.flash_and_lse()
        special = case["softcap"] or case["bias"] or (self.kinds and not self.causal)
        if forward and special and not case["sinks"] and not case["dropout"] and (self.queries > 16 or "tree" in self.kinds):
            forms["flex"] = self.flex()
        return forms if forward else self.with_gradients(forms, [])

    def other_functions(self):
        case = self.case
        if set(self.options()) - {"attn_mask", "is_causal"} or case["bias"] or case["softcap"]:
            raise ValueError("not written for these options")
        attend, weights = (top(case["top"]), []) if case["top"] else additive(case["dim"], self.dtype)
        forms = {"module": lambda: attend(self.q, self.k, self.v, self.mask)}
        return forms if case["pass"] == "forward" else self.with_gradients(forms, weights)

    def with_gradients(self, forms, weights):
        learned = [self.q, self.k, self.v, *weights]
        if self.case["bias"] in ("shared", "heads"):
            learned.append(self.bias)
        for one in learned:
            one.requires_grad_()
        shape = (*self.q.shape[:3], self.v.shape[-1])
        d_out = torch.randn(shape, dtype=self.dtype)

        def both(forward):
            def call():
                with torch.enable_grad():
                    out = forward()
                    return (out, *torch.autograd.grad(out, learned, d_out))

            return call

        def back(forward):
            with torch.enable_grad():
                out = forward()
            return lambda: torch.autograd.grad(out, learned, d_out, retain_graph=True)

        wrap = both if self.case["pass"] == "both" else back
        return {name: wrap(forward) for name, forward in forms.items()}


def start():
    global torch, F, SDPBackend, sdpa_kernel
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.set_flush_denormal(True)  # as ours
    torch.set_grad_enabled(False)
    return f"torch {torch.__version__.split('+')[0]}", lambda case: Asked(case).forms(), lambda out: out.detach().float().numpy()


serve(start)
