"""The functions of FlashAttention-2: their signatures, and what its documentation says of them."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys

import pytest
import torch

import regard.flash_attn as fa


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def random(*shape: int, learns: bool = False, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=learns)


def qkv(batch=2, q_len=5, k_len=7, heads=4, kv_heads=2, dim=8, learns=False, dtype=torch.float64):
    shapes = ((batch, q_len, heads, dim), *[(batch, k_len, kv_heads, dim)] * 2)
    return [random(*shape, learns=learns, dtype=dtype) for shape in shapes]


def definition(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None):
    """What the documentation of `flash_attn_func` says, with matrices: out and lse."""
    q_len, heads, k_len = q.shape[1], q.shape[2], k.shape[1]
    k, v = [x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v)]
    score = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    i, j = torch.arange(q_len)[:, None] + k_len - q_len, torch.arange(k_len)
    if alibi_slopes is not None:
        score = score - alibi_slopes.reshape(-1, heads, 1, 1) * (i - j).abs()
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = (j < i - left if left >= 0 else False) | (j > i + right if right >= 0 else torch.zeros(q_len, k_len, dtype=torch.bool))
    score = score.masked_fill(hidden, -math.inf)
    weights = torch.softmax(score, -1).nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v), torch.logsumexp(score, -1)


def close(a, b) -> bool:
    return torch.allclose(a, b, atol=1e-10)


COMMON = dict(
    dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False,
)  # fmt: skip
NONE = inspect.Parameter.empty
PACKED = dict(cu_seqlens_q=NONE, cu_seqlens_k=NONE, max_seqlen_q=NONE, max_seqlen_k=NONE)
SIGNATURES = {
    "flash_attn_func": dict(q=NONE, k=NONE, v=NONE, **COMMON),
    "flash_attn_kvpacked_func": dict(q=NONE, kv=NONE, **COMMON),
    "flash_attn_qkvpacked_func": dict(qkv=NONE, **COMMON),
    "flash_attn_varlen_func": dict(q=NONE, k=NONE, v=NONE, **PACKED, **COMMON, block_table=None),
    "flash_attn_varlen_kvpacked_func": dict(q=NONE, kv=NONE, **PACKED, **COMMON),
    "flash_attn_varlen_qkvpacked_func": dict(qkv=NONE, cu_seqlens=NONE, max_seqlen=NONE, **COMMON),
    "flash_attn_with_kvcache": dict(
        q=NONE, k_cache=NONE, v_cache=NONE, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
        cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
    ),
}  # fmt: skip
"""Of flash_attn 2.8.3: names in their order, with what they are unless given."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_version_2_8(name):
    found = inspect.signature(getattr(fa, name)).parameters
    assert [(parameter.name, parameter.default) for parameter in found.values()] == list(SIGNATURES[name].items())


OPTIONS = [
    {},
    {"causal": True},
    {"softmax_scale": 0.3, "softcap": 1.5},
    {"window_size": (2, 1)},
    {"window_size": (0, -1)},
    {"window_size": (-1, 0)},
    {"window_size": (-1, 2)},
    {"causal": True, "window_size": (3, 5)},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)},
    {"alibi_slopes": torch.arange(8, dtype=torch.float64).reshape(2, 4) / 4, "causal": True, "softcap": 2.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("q_len, k_len", [(5, 7), (7, 3), (1, 6), (6, 6)])
def test_flash_attn_func_is_its_definition(options, q_len, k_len):
    q, k, v = qkv(q_len=q_len, k_len=k_len)
    out, lse, nothing = fa.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    wanted, wanted_lse = definition(q, k, v, **options)
    assert close(out, wanted) and close(lse, wanted_lse)
    assert out.is_contiguous() and nothing.numel() == 0
    assert torch.equal(out, fa.flash_attn_func(q, k, v, **options))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_are_those_of_the_definition(options):
    q, k, v = qkv(learns=True)
    found = torch.autograd.grad(fa.flash_attn_func(q, k, v, **options).square().sum(), (q, k, v))
    wanted = torch.autograd.grad(definition(q, k, v, **options)[0].square().sum(), (q, k, v))
    assert all(close(a, b) for a, b in zip(found, wanted))


def test_lse_and_slopes_have_gradients():
    q, k, v = qkv(learns=True)
    slopes = torch.rand(2, 4, dtype=torch.float64, requires_grad=True)
    inputs = (q, k, v, slopes)
    assert torch.autograd.gradcheck(
        lambda q, k, v, slopes: fa.flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=True)[:2], inputs, fast_mode=True
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types_are_kept_and_lse_is_f32(dtype):
    q, k, v = qkv(dtype=dtype)
    out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    wanted, _ = definition(*[x.double() for x in (q, k, v)], causal=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert torch.allclose(out.double(), wanted, atol=2e-2)


def test_v_may_have_other_features():
    q, k, v = qkv()
    assert close(fa.flash_attn_func(q, k, v[..., :3]), fa.flash_attn_func(q, k, v)[..., :3])


def test_packed_tensors_are_their_parts():
    qkv_ = random(2, 6, 3, 4, 8, learns=True)
    q, k, v = qkv_.unbind(2)
    whole = fa.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(fa.flash_attn_qkvpacked_func(qkv_, causal=True), whole)
    assert torch.equal(fa.flash_attn_kvpacked_func(q, qkv_[:, :, 1:], causal=True), whole)
    (a,) = torch.autograd.grad(fa.flash_attn_qkvpacked_func(qkv_, causal=True).square().sum(), qkv_)
    (b,) = torch.autograd.grad(whole.square().sum(), qkv_)
    assert torch.equal(a, b)
    with pytest.raises(ValueError, match="3 at axis 2"):
        fa.flash_attn_qkvpacked_func(qkv_[:, :, :2])


# Packed sequences

Q_AT, K_AT = torch.tensor([0, 3, 3, 8], dtype=torch.int32), torch.tensor([0, 5, 7, 9], dtype=torch.int32)


def items(q, k, v):
    for b in range(3):
        yield [q[None, Q_AT[b] : Q_AT[b + 1]], *[x[None, K_AT[b] : K_AT[b + 1]] for x in (k, v)]]


@pytest.mark.parametrize("options", OPTIONS[:-1], ids=str)
def test_varlen_is_each_item_by_itself(options):
    q, k, v = random(8, 4, 8), random(9, 2, 8), random(9, 2, 8)
    out, lse, _ = fa.flash_attn_varlen_func(q, k, v, Q_AT, K_AT, 5, 5, **options, return_attn_probs=True)
    wanted = [definition(*item, **options) for item in items(q, k, v)]
    assert close(out, torch.cat([out[0] for out, _ in wanted]))
    assert lse.shape == (4, 8) and close(lse, torch.cat([lse[0] for _, lse in wanted], 1))


def test_items_of_varlen_may_have_slopes_of_their_own():
    q, k, v = random(8, 4, 8, learns=True), random(9, 2, 8, learns=True), random(9, 2, 8, learns=True)
    slopes = torch.rand(3, 4, dtype=torch.float64)
    out, lse, _ = fa.flash_attn_varlen_func(q, k, v, Q_AT, K_AT, 5, 5, causal=True, alibi_slopes=slopes, return_attn_probs=True)
    wanted = [definition(*item, causal=True, alibi_slopes=slope) for item, slope in zip(items(q, k, v), slopes)]
    assert close(out, torch.cat([out[0] for out, _ in wanted])) and close(lse, torch.cat([lse[0] for _, lse in wanted], 1))
    with pytest.raises(ValueError, match=r"alibi_slopes: expected \[heads\] or \[3, heads\]"):
        fa.flash_attn_varlen_func(q, k, v, Q_AT, K_AT, 5, 5, alibi_slopes=slopes[:2])


def test_varlen_learns():
    inputs = (random(8, 4, 4, learns=True), random(9, 2, 4, learns=True), random(9, 2, 4, learns=True))
    assert torch.autograd.gradcheck(
        lambda *x: fa.flash_attn_varlen_func(*x, Q_AT, K_AT, 5, 5, softcap=2.0, return_attn_probs=True)[:2], inputs, fast_mode=True
    )


def test_packed_tensors_of_varlen_are_their_parts():
    packed = random(9, 3, 4, 8, learns=True)
    whole = fa.flash_attn_varlen_func(*packed.unbind(1), K_AT, K_AT, 5, 5, causal=True)
    assert torch.equal(fa.flash_attn_varlen_qkvpacked_func(packed, K_AT, 5, causal=True), whole)
    assert torch.equal(fa.flash_attn_varlen_kvpacked_func(packed[:, 0], packed[:, 1:], K_AT, K_AT, 5, 5, causal=True), whole)
    (grad,) = torch.autograd.grad(whole.square().sum(), packed)
    assert grad.shape == packed.shape and grad.isfinite().all()


def test_varlen_reads_pages():
    q, k, v = random(8, 4, 8), random(9, 2, 8), random(9, 2, 8)
    table = torch.tensor([[4, 1, 0], [2, 0, 0], [3, 0, 0]], dtype=torch.int32)  # 2 keys a page
    pages = torch.full((2, 5, 2, 2, 8), math.nan, dtype=torch.float64)
    for b in range(3):
        for t in range(K_AT[b + 1] - K_AT[b]):
            for paged, x in zip(pages, (k, v)):
                paged[table[b, t // 2], t % 2] = x[K_AT[b] + t]
    found = fa.flash_attn_varlen_func(q, *pages, Q_AT, K_AT, 5, 5, causal=True, block_table=table)
    assert torch.equal(found, fa.flash_attn_varlen_func(q, k, v, Q_AT, K_AT, 5, 5, causal=True))
    with pytest.raises(ValueError, match="cu_seqlens_k: 5 keys .* for 4"):
        fa.flash_attn_varlen_func(q, *pages, Q_AT, K_AT, 5, 5, block_table=table[:, :2])


# The cache

ROOM = 12
LENGTHS, PADS, PLACES = [torch.tensor(x, dtype=torch.int32) for x in ([4, 9, 2], [1, 5, 0], [4, 0, 2])]


def rotated(x, cos, sin, positions, interleaved):
    """By complex numbers."""
    half = cos.shape[1]
    turn = torch.complex(cos[positions], sin[positions])[:, :, None]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = turned.unflatten(-1, (half, 2)) if interleaved else turned.unflatten(-1, (2, half)).transpose(-1, -2)
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat([turned, rest], -1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (2, 1), "softcap": 2.0},
        {"causal": True, "window_size": (3, -1)},
        {"causal": True, "alibi_slopes": torch.rand(4, dtype=torch.float64)},
        {"alibi_slopes": torch.rand(3, 4, dtype=torch.float64)},
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", ["one", "own"])
@pytest.mark.parametrize("placed", [False, True], ids=["in order", "placed"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("new", [0, 3])
def test_a_cache_is_the_keys_that_are_in_it(options, lengths, placed, padded, new):
    q = random(3, 2, 4, 8)
    caches = random(2, 5, ROOM, 2, 8)
    fresh = random(2, 3, new, 2, 8)
    before = [int(n) for n in LENGTHS] if lengths == "own" else [6] * 3
    starts = [int(n) for n in PADS] if padded else [0] * 3
    places = [int(n) for n in PLACES] if placed else [0, 1, 2]
    k_cache, v_cache = caches.clone()
    out, lse = fa.flash_attn_with_kvcache(
        q, k_cache, v_cache, *(fresh if new else (None, None)),
        cache_seqlens=LENGTHS if lengths == "own" else 6,
        cache_batch_idx=PLACES if placed else None,
        cache_leftpad=PADS if padded else None,
        return_softmax_lse=True, **options,
    )  # fmt: skip
    written = caches.clone()
    for b in range(3):
        written[:, places[b], before[b] : before[b] + new] = fresh[:, b]
        keys = written[:, places[b] : places[b] + 1, starts[b] : before[b] + new]
        own = dict(options)
        if own.get("alibi_slopes", torch.ones(1)).ndim == 2:
            own["alibi_slopes"] = own["alibi_slopes"][b]
        wanted, wanted_lse = definition(q[b : b + 1], *keys, **own)
        assert close(out[b], wanted[0]) and close(lse[b], wanted_lse[0])
    assert torch.equal(k_cache, written[0]) and torch.equal(v_cache, written[1])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"alibi_slopes": torch.rand(3, 4)}], ids=str)
def test_a_paged_cache_is_one_that_is_not(options):
    q, fresh = random(3, 2, 4, 8), random(2, 3, 3, 2, 8)
    plain = random(2, 3, ROOM, 2, 8)
    table = torch.randperm(12, dtype=torch.int32).reshape(3, 4)  # 3 keys a page
    paged = torch.empty(2, 12, 3, 2, 8, dtype=torch.float64)
    paged[:, table.long()] = plain.unflatten(2, (4, 3))
    options = dict(options, cache_seqlens=LENGTHS, return_softmax_lse=True)
    found = fa.flash_attn_with_kvcache(q, *paged, *fresh, block_table=table, **options)
    wanted = fa.flash_attn_with_kvcache(q, *plain, *fresh, **options)
    assert all(close(a, b) for a, b in zip(found, wanted))
    assert torch.equal(paged[:, table.long()].flatten(2, 3), plain)


@pytest.mark.parametrize("interleaved", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize("half", [4, 2], ids=["all features", "some features"])
@pytest.mark.parametrize("causal", [True, False])
def test_new_keys_and_queries_are_rotated(interleaved, half, causal):
    q, fresh = random(3, 3, 4, 8), random(2, 3, 3, 2, 8)
    angle = torch.arange(ROOM)[:, None] * torch.rand(half, dtype=torch.float64)
    cos, sin = angle.cos().float().double(), angle.sin().float().double()
    caches = random(2, 3, ROOM, 2, 8)
    one, other = caches.clone(), caches.clone()
    options = dict(cache_seqlens=LENGTHS, causal=causal, return_softmax_lse=True)
    out = fa.flash_attn_with_kvcache(q, *one, *fresh, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved, **options)
    at = LENGTHS.long()[:, None] + torch.arange(3)
    q_at = at if causal else at[:, :1].expand(3, 3)
    turned = rotated(q, cos, sin, q_at, interleaved), rotated(fresh[0], cos, sin, at, interleaved)
    wanted = fa.flash_attn_with_kvcache(turned[0], *other, turned[1], fresh[1], **options)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip((*out, one), (*wanted, other)))
    assert not torch.equal(one[0], caches[0])


def test_a_sequence_step_by_step_is_the_sequence():
    q, k, v = qkv(q_len=9, k_len=9, dtype=torch.float32)
    caches = torch.zeros(2, 2, 16, 2, 8)
    whole = fa.flash_attn_func(q, k, v, causal=True)
    for t in range(9):
        step = slice(t, t + 1)
        out = fa.flash_attn_with_kvcache(q[:, step], *caches, k[:, step], v[:, step], cache_seqlens=t, causal=True)
        assert torch.allclose(out, whole[:, step], atol=1e-6)


def test_a_whole_cache_is_seen_without_lengths():
    q, k, v = qkv(learns=True)
    out = fa.flash_attn_with_kvcache(q, k, v, num_splits=3)
    assert torch.equal(out, fa.flash_attn_func(q, k, v)) and not out.requires_grad


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"k": 1}, ValueError, "k and v: give both"),
        ({"k": 1, "v": 1}, ValueError, "cache_seqlens: required with new k and v"),
        ({"k": 1, "v": 1, "cache_seqlens": 6}, ValueError, "cache_seqlens: 8 keys including 2 new ones exceed .* 7"),
        ({"rotary_cos": 1, "rotary_sin": 1}, ValueError, "rotary_cos: .* give k and v"),
        ({"cache_seqlens": torch.tensor([1, 2, 3])}, ValueError, r"cache_seqlens: expected a number or \[2\], found \[3\]"),
        ({"block_table": torch.zeros(2, 1), "cache_batch_idx": torch.arange(2)}, NotImplementedError, "cache_batch_idx with block_table"),
        ({"block_table": torch.zeros(2, 1), "cache_leftpad": torch.arange(2)}, NotImplementedError, "cache_leftpad with block_table"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_does_not_go_together_is_refused(options, error, text):
    q, k, v = qkv()
    options = {name: random(2, 2, 2, 8) if isinstance(x, int) and name != "cache_seqlens" else x for name, x in options.items()}
    with pytest.raises(error, match=text):
        fa.flash_attn_with_kvcache(q, k, v, **options)


# The rest


def test_dropout_follows_manual_seed_and_has_no_matrix():
    q, k, v = qkv()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(fa.flash_attn_func(q, k, v, 0.5))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    with pytest.raises(NotImplementedError, match="return_attn_probs with dropout_p"):
        fa.flash_attn_func(q, k, v, 0.5, return_attn_probs=True)


def test_deterministic_changes_nothing():
    q, k, v = qkv()
    assert torch.equal(fa.flash_attn_func(q, k, v, deterministic=True), fa.flash_attn_func(q, k, v))


def test_it_compiles_whole():
    q, k, v = qkv(learns=True, dtype=torch.float32)
    torch._dynamo.reset()
    options = dict(causal=True, window_size=(3, 0))
    compiled = torch.compile(lambda *x: fa.flash_attn_func(*x, **options), fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v)
    assert torch.allclose(out, fa.flash_attn_func(q, k, v, **options))
    out.sum().backward()
    assert q.grad is not None


def test_padding_comes_off_and_on_again():
    x = random(3, 5, 4, 8, learns=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 1, 0]])
    unused = torch.tensor([[0, 0, 0, 1, 0], [0] * 5, [0] * 5])
    tokens, indices, offsets, longest, used = fa.unpad_input(x, mask)
    assert tokens.shape == (10, 4, 8) and offsets.tolist() == [0, 3, 8, 10] and offsets.dtype == torch.int32
    assert longest == 5 and used.tolist() == [3, 5, 2]
    assert torch.equal(fa.pad_input(tokens, indices, 3, 5), x * mask[..., None, None])
    tokens, _, offsets, _, used = fa.unpad_input(x, mask, unused)
    assert len(tokens) == 11 and offsets.tolist() == [0, 4, 9, 11] and used.tolist() == [3, 5, 2]
    (grad,) = torch.autograd.grad(fa.pad_input(*fa.unpad_input(x, mask)[:2], 3, 5).sum(), x)
    assert torch.equal(grad, mask[..., None, None].expand(grad.shape).double())


def run(code: str, **more) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, **more).stdout


def test_installed_it_is_what_others_import():
    assert "ok 2.8.3" in run(
        "import regard.flash_attn as fa; package = fa.install(); assert fa.install() is package\n"
        "import flash_attn, importlib.util\n"
        "from flash_attn import flash_attn_func, flash_attn_with_kvcache\n"
        "from flash_attn.flash_attn_interface import flash_attn_varlen_func\n"
        "from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input\n"
        "assert flash_attn_func is fa.flash_attn_func and importlib.util.find_spec('flash_attn') is not None\n"
        "try: import flash_attn.layers.rotary\n"
        "except ModuleNotFoundError: print('ok', flash_attn.__version__)"
    )


def test_a_real_one_is_left_alone_unless_forced(tmp_path):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("real = True")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import regard.flash_attn as fa\n"
        "try: fa.install()\n"
        "except ImportError as error: print(error)\n"
        "import flash_attn; print(flash_attn.real)\n"
        "fa.install(force=True)\n"
        "import flash_attn; print(hasattr(flash_attn, 'real'), flash_attn.flash_attn_func.__module__)"
    )
    refused, real, forced = run(code).splitlines()
    assert "force=True" in refused and real == "True" and forced == "False regard.flash_attn"
