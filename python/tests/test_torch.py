"""Attention for PyTorch: gradients, operators, compilers, types, strides, and PyTorch's own attention beside it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

import regard
import regard.torch
from regard import masks
from regard._call import describe
from regard.torch import attention

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float64, learns: bool = True) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=learns)


def qkv(dtype: torch.dtype = torch.float64, learns: bool = True, heads: int = 4, kv_heads: int = 2) -> list[torch.Tensor]:
    shapes = ((2, heads, 5, 4), (2, kv_heads, 6, 4), (2, kv_heads, 6, 3))
    return [random(*shape, dtype=dtype, learns=learns) for shape in shapes]


def unfused(q, k, v, bias=None, causal=False):
    """The definition, in the type of its inputs."""
    k, v = [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)]
    score = q @ k.mT * q.shape[-1] ** -0.5
    score = score if bias is None else score + bias
    if causal:
        q_len, k_len = score.shape[-2:]
        score = score.masked_fill(torch.ones(q_len, k_len, dtype=torch.bool).triu(k_len - q_len + 1), -math.inf)
    return torch.softmax(score, -1) @ v


# Calls without gradients, for which the engine reads and makes tensors itself


def version() -> tuple[int, ...]:
    return tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])


LAYOUTS = {
    "as it is": lambda x: x,
    "lengths before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "features apart": lambda x: x.mT.contiguous().mT,
    "part of a larger tensor": lambda x: torch.cat([x, x], -1)[..., x.shape[-1] :],
    "expanded": lambda x: x[:1].expand(x.shape),
    "negated": torch._neg_view,
    "no queries or keys": lambda x: x[:, :, :0],
    "no items": lambda x: x[:0],
    "one feature": lambda x: x[..., :1],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_without_gradients_are_those_of_the_operator(dtype, layout, monkeypatch):
    assert regard.torch._reads_tensors == (version() >= (2, 14))
    tensors = [LAYOUTS[layout](x) for x in qkv(dtype, learns=False)]
    found = attention(*tensors, mask="causal", softcap=3.0)
    expected, _ = attention(*tensors, mask="causal", softcap=3.0, return_aux=True)
    assert torch.equal(found, expected) and found.dtype == dtype
    monkeypatch.setattr(regard.torch, "_reads_tensors", False)
    assert torch.equal(attention(*tensors, mask="causal", softcap=3.0), expected)


@pytest.mark.parametrize("reads", [False, True])
def test_calls_without_gradients_refuse_what_does_not_fit(reads, monkeypatch):
    monkeypatch.setattr(regard.torch, "_reads_tensors", reads and regard.torch._reads_tensors)
    q, k, v = qkv(torch.float32, learns=False)
    with pytest.raises(ValueError, match="features: q has 4, k has 3"):
        attention(q, k[..., :3], v)
    with pytest.raises(ValueError, match="keys: k has 5, v has 6"):
        attention(q, k[:, :, :5], v)
    with pytest.raises(TypeError, match="expected f32, f64, f16 or bf16, found"):
        attention(q.long(), k.long(), v.long())
    with pytest.raises(TypeError, match="k: expected f32"):
        attention(q, k.double(), v)


def test_threads_of_pytorch_change_no_bit():
    """On PyTorch's threads, on those of the engine (64 are more than PyTorch uses), and on that of the caller."""
    tensors = [random(2, 4, 300, 16, dtype=torch.float32, learns=False) for _ in range(3)]
    expected = attention(*tensors, mask="causal", threads=1)
    threads = torch.get_num_threads()
    try:
        for count in (2, 3):
            torch.set_num_threads(count)
            for given in (None, 1, 2, 3, 64):
                assert torch.equal(attention(*tensors, mask="causal", threads=given), expected)
    finally:
        torch.set_num_threads(threads)


# Gradients


def checked(function, *inputs) -> bool:
    return torch.autograd.gradcheck(function, inputs, fast_mode=False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": "causal"},
        {"mask": "window 3", "align": "start"},
        {"mask": "causal & window 2", "align": -2},  # rows that see nothing
        {"scale": 0.3, "temperature": 0.7},
        {"softcap": 1.5},
        {"similarity": "distance"},
        {"normalizer": "sparsemax"},
        {"normalizer": "top-3"},
        {"dropout": 0.4, "seed": (7, 9)},
        {"mask": "causal", "dropout": 0.2, "seed": torch.tensor([3, 4])},
    ],
    ids=str,
)
def test_gradients_are_those_of_differences(options):
    assert checked(lambda q, k, v: attention(q, k, v, **options), *qkv())


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 4), (4, 2), (4, 1)])
def test_heads_that_share_keys_have_the_sum_of_their_gradients(heads, kv_heads):
    assert checked(lambda q, k, v: attention(q, k, v, mask="causal"), *qkv(heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize(
    "shape", [(2, 4, 5, 6), (1, 4, 5, 6), (2, 1, 5, 6), (1, 1, 5, 6), (2, 4, 1, 6), (1, 1, 1, 6), (2, 4, 5, 1)], ids=str
)
def test_a_bias_learns_in_its_own_shape(shape):
    assert checked(lambda q, k, v, bias: attention(q, k, v, bias=bias, softcap=2.0), *qkv(), random(*shape))


def test_an_expanded_bias_learns():
    assert checked(lambda q, k, v, bias: attention(q, k, v, bias=bias.expand(2, 4, 5, 6)), *qkv(), random(1, 4, 1, 6))


@pytest.mark.parametrize(
    "option, shape",
    [
        (lambda x: {"alibi": x}, (4,)),
        (lambda x: {"sinks": x}, (4,)),
        (lambda x: {"relative": ("t5", x, 5, True)}, (8, 4)),
        (lambda x: {"relative": ("t5", x, 5, False), "mask": "causal"}, (8, 4)),
        (lambda x: {"relative": ("clipped", x, 2)}, (5, 4)),
        (lambda x: {"local": (2.5 + 0.4 * x, 2)}, (2, 4, 5)),
        (lambda x: {"similarity": ("general", x)}, (1, 4, 4, 4)),
        (lambda x: {"similarity": ("general", x)}, (1, 1, 4, 4)),
    ],
    ids=["alibi", "sinks", "t5", "t5 causal", "clipped", "local", "general", "general, one for all heads"],
)
def test_options_that_are_tensors_learn(option, shape):
    assert checked(lambda q, k, v, x: attention(q, k, v, **option(x)), *qkv(), random(*shape))


@pytest.mark.parametrize("projected", [False, True], ids=["keys projected inside", "keys projected before"])
def test_an_additive_similarity_learns(projected):
    q, k, v = random(2, 2, 3, 4), random(2, 1, 5, 6), random(2, 1, 5, 3)
    w_q, w_k, w_v = random(1, 2, 4, 6), random(1, 1, 6, 6), random(1, 2, 1, 6)
    if projected:
        assert checked(lambda q, k, v, w_q, w_v: attention(q, k, v, similarity=("additive", w_q, None, w_v)), q, k, v, w_q, w_v)
    else:
        assert checked(lambda q, k, v, *w: attention(q, k, v, similarity=("additive", *w)), q, k, v, w_q, w_k, w_v)


def test_lse_and_entropy_are_differentiable():
    def all_three(q, k, v, sinks):
        out, aux = attention(q, k, v, mask="causal", sinks=sinks, softcap=3.0, entropy=True, return_aux=True)
        return out, aux.lse, aux.entropy

    assert checked(all_three, *qkv(), random(4))


@pytest.mark.parametrize("which", ["lse", "entropy"])
def test_each_of_them_is_alone(which):
    assert checked(lambda q, k, v: getattr(attention(q, k, v, entropy=True, return_aux=True)[1], which), *qkv())


def test_packed_sequences_learn_and_so_do_their_lse():
    q, k, v = random(7, 4, 4), random(9, 2, 4), random(9, 2, 3)

    def packed(q, k, v, alibi):
        out, aux = attention(
            q, k, v, mask="causal", alibi=alibi, q_offsets=[0, 3, 3, 7], k_offsets=torch.tensor([0, 4, 5, 9]), return_aux=True
        )
        return out, aux.lse

    assert checked(packed, q, k, v, random(4))


def test_what_does_not_learn_has_no_gradient_and_changes_no_other():
    whole = qkv()
    bias = random(1, 4, 5, 6)
    attention(*whole, bias=bias).square().sum().backward()
    for i in range(4):
        part = [x.detach().requires_grad_(i == j) for j, x in enumerate((*whole, bias))]
        attention(*part[:3], bias=part[3]).square().sum().backward()
        assert [x.grad is not None for x in part] == [i == j for j in range(4)]
        assert torch.equal(part[i].grad, (*whole, bias)[i].grad)


def test_views_and_hooks_of_leaves_see_their_gradients():
    packed = random(2, 5, 3, 4, 4)
    q, k, v = [x.transpose(1, 2) for x in packed.unbind(2)]
    seen = []
    q.register_hook(seen.append)
    attention(q, k, v, mask="causal").square().sum().backward()
    same = packed.detach().clone().requires_grad_()
    unfused(*[x.transpose(1, 2) for x in same.unbind(2)], causal=True).square().sum().backward()
    assert torch.allclose(packed.grad, same.grad) and torch.equal(seen[0].transpose(1, 2), packed.grad[:, :, 0])


def test_a_second_derivative_is_refused():
    q, k, v = qkv()
    (grad,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        grad.sum().backward()


def test_forward_mode_is_refused():
    q, k, v = qkv(learns=False)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: attention(q, k, v), (q,), (q,))


def test_vmap_is_refused_and_func_grad_works():
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match="vmap is not supported; use the batch axis"):
        torch.func.vmap(lambda q: attention(q[None], k[:1], v[:1]))(q)
    attention(q, k, v, mask="causal").square().sum().backward()
    grad = torch.func.grad(lambda q: attention(q, k.detach(), v.detach(), mask="causal").square().sum())(q.detach())
    assert torch.equal(grad, q.grad)


# Operators


def layouts(dtype: torch.dtype):
    """q, k and v of one shape, in many strides."""
    yield "dense", [random(2, 4, 5, 8, dtype=dtype) for _ in range(3)]
    yield "transposed", [random(2, 5, 4, 8, dtype=dtype).transpose(1, 2) for _ in range(3)]
    yield "mixed", [random(2, 4, 5, 8, dtype=dtype), random(2, 5, 4, 8, dtype=dtype).transpose(1, 2), random(2, 4, 5, 8, dtype=dtype)]
    yield "in one", [x.transpose(1, 2) for x in random(2, 5, 3, 4, 8, dtype=dtype).unbind(2)]
    yield "expanded", [random(*shape, dtype=dtype).expand(2, 4, 5, 8) for shape in ((2, 1, 5, 8), (1, 4, 5, 8), (1, 1, 5, 8))]
    yield "cut", [random(2, 4, 9, 16, dtype=dtype)[:, :, 2:7, 3:11] for _ in range(3)]
    yield "one head", [random(2, 5, 1, 8, dtype=dtype).transpose(1, 2) for _ in range(3)]
    yield "one row", [random(2, 1, 4, 8, dtype=dtype).transpose(1, 2), *[random(2, 5, 4, 8, dtype=dtype).transpose(1, 2) for _ in "kv"]]
    yield "one of each", [random(1, 1, 1, 1, dtype=dtype) for _ in range(3)]


def operands(q, k, v, **options):
    call = describe(q, **options)
    return q, k, v, [torch.as_tensor(x) for x in call.learned], [torch.as_tensor(x) for x in call.held], call.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [name for name, _ in layouts(torch.float32)])
def test_opcheck_passes_in_every_layout(layout, dtype):
    tensors = dict(layouts(dtype))[layout]
    opcheck(torch.ops.regard.attention_fwd.default, operands(*tensors, mask="causal"), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"entropy": True, "softcap": 2.0},
        {"dropout": 0.3, "seed": (1, 2)},
        {"mask": masks.lengths(torch.tensor([3, 6])) & masks.causal()},
        {"mask": torch.ones(5, 6, dtype=torch.bool).tril()},
        {"bias": torch.ones(1, 4, 5, 6, dtype=torch.float64, requires_grad=True), "sinks": torch.ones(4, dtype=torch.float64)},
        {"bias": torch.ones(5, 2, 4, 6, dtype=torch.float64, requires_grad=True).permute(1, 2, 0, 3)},
        {"relative": ("t5", torch.ones(8, 4, dtype=torch.float64, requires_grad=True), 5, True)},
        {"similarity": ("general", torch.ones(1, 1, 4, 4, dtype=torch.float64, requires_grad=True))},
    ],
    ids=["entropy", "dropout", "lengths", "bits", "bias and sinks", "strided bias", "relative", "general"],
)
def test_opcheck_passes_with_options(options):
    opcheck(torch.ops.regard.attention_fwd.default, operands(*qkv(), **options))


def test_opcheck_passes_where_sequences_are_packed():
    tensors = random(7, 4, 4), random(9, 2, 4), random(9, 2, 3)
    opcheck(torch.ops.regard.attention_fwd.default, operands(*tensors, q_offsets=[0, 3, 7], k_offsets=[0, 4, 9]))


@pytest.mark.parametrize("layout", [name for name, _ in layouts(torch.float32)])
def test_opcheck_passes_on_the_way_back(layout):
    tensors = [x.detach() for x in dict(layouts(torch.float32))[layout]]
    call = operands(*tensors, mask="causal")
    out, lse, states, entropy, _ = torch.ops.regard.attention_fwd.default(*call)
    opcheck(torch.ops.regard.attention_bwd.default, (*call, [out, lse, states, entropy], torch.ones_like(out), None, None, False))


@pytest.mark.parametrize("layout", [name for name, _ in layouts(torch.float32)])
def test_results_do_not_depend_on_the_layout_and_are_in_that_of_q(layout):
    tensors = dict(layouts(torch.float32))[layout]
    out = attention(*tensors, mask="causal")
    dense = attention(*[x.detach().contiguous() for x in tensors], mask="causal")
    assert torch.equal(out, dense)
    by_length = tensors[0].stride(1) < tensors[0].stride(2)
    assert (out.transpose(1, 2) if by_length else out).is_contiguous()


@pytest.mark.parametrize("layout", [name for name, _ in layouts(torch.float32)])
def test_gradients_do_not_depend_on_the_layout(layout):
    tensors = [x.detach().requires_grad_() for x in dict(layouts(torch.float32))[layout]]
    dense = [x.detach().contiguous().requires_grad_() for x in tensors]
    for each in (tensors, dense):
        attention(*each, mask="causal").square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(tensors, dense))


def test_features_that_are_apart_are_copied():
    q, k, v = qkv(learns=False)
    apart = [x.mT.contiguous().mT for x in (q, k, v)]
    assert torch.equal(attention(*apart), attention(q, k, v))


def test_packed_rows_that_are_apart_are_copied():
    packed = random(7, 3, 2, 4)
    q, k, v = packed.unbind(1)
    out = attention(q, k, v, q_offsets=[0, 3, 7], k_offsets=[0, 3, 7])
    assert torch.equal(out[3:], attention(*[x[None, 3:].transpose(1, 2) for x in (q, k, v)])[0].transpose(0, 1))
    out.transpose(0, 1).square().sum().backward()
    assert packed.grad.abs().sum() > 0


# Compilers


class Layer(torch.nn.Module):
    """A layer with attention in it, as people write them."""

    def __init__(self, **options):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
        self.sinks = torch.nn.Parameter(torch.zeros(4))
        self.options = options

    def forward(self, x, **more):
        q, k, v = [part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.inner(x).chunk(3, -1)]
        out = attention(q, k, v, sinks=self.sinks, **self.options, **more)
        return self.outer(out.transpose(1, 2).flatten(2))


def steps_of(layer, module, inputs):
    """Outputs and gradients of a few training steps' worth of inputs."""
    found = []
    for x in inputs:
        layer.zero_grad()
        out = module(x)
        out.square().sum().backward()
        found += [out.detach(), *[p.grad.clone() for p in layer.parameters()]]
    return found


@pytest.mark.parametrize(
    "backend, options",
    [
        ("inductor", {"mask": "causal & window 5", "softcap": 5.0}),
        ("aot_eager", {"mask": masks.causal() | masks.prefix(3), "entropy": True}),
        ("aot_eager", {"scale": 0.2, "align": "start"}),
    ],
    ids=["text", "mask", "numbers"],
)
def test_a_compiled_module_trains_as_it_does_eagerly(backend, options):
    torch._dynamo.reset()
    layer = Layer(**options)
    inputs = [torch.randn(2, n, 16) for n in (8, 12, 17)]
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for a, b in zip(steps_of(layer, compiled, inputs), steps_of(layer, layer, inputs)):
        assert torch.allclose(a, b, atol=1e-5, rtol=1e-5)


def test_a_compiled_function_takes_masks_that_hold_tensors():
    torch._dynamo.reset()
    layer = Layer()

    def masked(x, lengths, documents, bias):
        return layer(x, mask=masks.causal() & masks.lengths(lengths) & masks.segments(documents), bias=bias)

    compiled = torch.compile(masked, fullgraph=True, backend="aot_eager")
    for n in (6, 9):
        x, lengths, documents = torch.randn(2, n, 16), torch.tensor([n, 4]), torch.arange(n).repeat(2, 1) // 4
        bias = torch.randn(1, 4, 1, n, requires_grad=True)
        (eager,) = torch.autograd.grad(masked(x, lengths, documents, bias).square().sum(), bias)
        (found,) = torch.autograd.grad(compiled(x, lengths, documents, bias).square().sum(), bias)
        assert torch.allclose(found, eager, atol=1e-5) and found.abs().sum() > 0


def test_a_compiled_function_drops_what_its_seed_says_and_draws_one_without():
    torch._dynamo.reset()
    layer = Layer(mask="causal", dropout=0.5)
    compiled = torch.compile(layer, fullgraph=True)
    x, seed = torch.randn(2, 9, 16), torch.tensor([3, 4])
    assert torch.allclose(compiled(x, seed=seed), layer(x, seed=seed), atol=1e-6)
    assert not torch.allclose(compiled(x), compiled(x), atol=1e-3)
    out = compiled(x)
    out.sum().backward()  # the way back drops the same
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_a_compiled_call_returns_what_it_found_beside():
    torch._dynamo.reset()
    q, k, v = qkv(torch.float32, learns=False)
    compiled = torch.compile(lambda *x: attention(*x, entropy=True, return_aux=True), fullgraph=True, backend="aot_eager")
    (a, found), (b, eager) = compiled(q, k, v), attention(q, k, v, entropy=True, return_aux=True)
    assert torch.equal(a, b) and all(torch.equal(x, y) for x, y in zip(found, eager))


def test_an_exported_module_runs():
    layer, x = Layer(mask="causal"), torch.randn(2, 9, 16)
    exported = torch.export.export(layer, (x,), dynamic_shapes=({1: torch.export.Dim("length", min=2, max=64)},))
    assert any("regard.attention_fwd" in str(node.target) for node in exported.graph.nodes)
    for n in (9, 5):
        x = torch.randn(2, n, 16)
        assert torch.allclose(exported.module()(x), layer(x), atol=1e-6)


def test_meta_tensors_give_shapes_types_and_strides():
    q, k, v = [x.detach().bfloat16() for x in qkv()]
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    real, real_aux = attention(q, k, v, return_aux=True)
    out, aux = attention(*[x.to("meta") for x in (q, k, v)], return_aux=True)
    assert out.is_meta and (out.shape, out.dtype, out.stride()) == (real.shape, real.dtype, real.stride())
    assert (aux.lse.shape, aux.lse.dtype) == (real_aux.lse.shape, torch.float32)


def test_tensors_of_several_devices_are_refused():
    q, k, v = qkv()
    with pytest.raises(TypeError, match="k on meta"):
        attention(q, k.to("meta"), v)


# Modes of PyTorch


def test_without_gradients_nothing_is_kept():
    q, k, v = qkv()
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    with torch.inference_mode():
        out = attention(q, k, v)
    assert out.is_inference() and torch.equal(out, attention(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_autocast_casts_as_pytorchs_attention_does(dtype):
    q, k, v = [x.to(dtype).requires_grad_() for x in qkv(learns=False, kv_heads=4)]
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = F.scaled_dot_product_attention(q, k, v), attention(q, k, v)
        assert ours.dtype == theirs.dtype
        assert torch.allclose(ours.double(), theirs.double(), atol=2e-2)
        biased = attention(q, k, v, bias=torch.zeros(1, 4, 5, 6, dtype=dtype), sinks=torch.full((4,), -1e4))
        assert torch.equal(biased, ours)
    ours.sum().backward()
    assert q.grad.dtype == dtype and q.grad.isfinite().all()


def test_a_linear_layer_and_attention_meet_under_autocast():
    layer, x = Layer(mask="causal"), torch.randn(2, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16 and torch.allclose(out.float(), layer(x), atol=5e-2)
    out.float().square().sum().backward()
    assert layer.sinks.grad.dtype == torch.float32
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), out)


def test_dropout_follows_manual_seed():
    q, k, v = qkv()

    def draw(seed):
        torch.manual_seed(seed)
        return attention(q, k, v, dropout=0.5), attention(q, k, v, dropout=0.5)

    (a, b), (c, d), (e, _) = draw(1), draw(1), draw(2)
    assert torch.equal(a, c) and torch.equal(b, d)
    assert not torch.equal(a, b) and not torch.equal(a, e)


def test_checkpointing_drops_the_same_again():
    q, k, v = qkv()
    loss = lambda q: attention(q, k, v, dropout=0.5).square().sum()  # noqa: E731
    torch.manual_seed(5)
    (kept,) = torch.autograd.grad(loss(q), q)
    torch.manual_seed(5)
    (again,) = torch.autograd.grad(torch.utils.checkpoint.checkpoint(loss, q, use_reentrant=False), q)
    assert torch.equal(kept, again)


def test_bits_do_not_depend_on_the_number_of_threads():
    q, k, v = [random(2, 8, 300, 16, dtype=torch.float32) for _ in range(3)]
    sinks = torch.zeros(8, requires_grad=True)

    def run(threads):
        for x in (q, k, v, sinks):
            x.grad = None
        out, aux = attention(q, k, v, mask="causal", sinks=sinks, threads=threads, dropout=0.1, seed=(1, 2), return_aux=True)
        (out.square().sum() + aux.lse.sum()).backward()
        return [out, aux.lse, *[x.grad for x in (q, k, v, sinks)]]

    assert all(torch.equal(a, b) for a, b in zip(run(1), run(2)))


def test_threads_are_pytorchs():
    q, k, v = [random(1, 4, 2000, 16, dtype=torch.float32, learns=False) for _ in range(3)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = attention(q, k, v)
        torch.set_num_threads(2)
        assert torch.equal(one, attention(q, k, v))
    finally:
        torch.set_num_threads(before)


# Types


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_half_types_are_as_exact_as_the_definition_in_them(dtype, causal, kv_heads):
    """Errors against f64: at most twice those of unfused attention in the same type, thrice for gradients."""
    shapes = ((2, 4, 70, 32), (2, kv_heads, 90, 32), (2, kv_heads, 90, 32))
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    weight = torch.randn(2, 4, 70, 32).to(dtype)

    def run(function, type_):
        inputs = [x.to(type_, copy=True).requires_grad_() for x in tensors]
        out = function(*inputs)
        (out * weight.to(type_)).sum().backward()
        return [out.detach().double(), *[x.grad.double() for x in inputs]]

    exact = run(lambda *x: unfused(*x, causal=causal), torch.float64)
    plain = run(lambda *x: unfused(*x, causal=causal), dtype)
    ours = run(lambda *x: attention(*x, mask="causal" if causal else None), dtype)
    for i, (e, p, o) in enumerate(zip(exact, plain, ours)):
        assert (o - e).abs().max() <= (3 if i else 2) * (p - e).abs().max() + 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
def test_outputs_have_the_type_of_q_and_lse_its_numbers(dtype):
    q, k, v = [x.detach().to(dtype).requires_grad_() for x in qkv()]
    out, aux = attention(q, k, v, entropy=True, return_aux=True)
    number = torch.float64 if dtype == torch.float64 else torch.float32
    assert out.dtype == dtype and {aux.lse.dtype, aux.entropy.dtype, aux.max_score.dtype} == {number}
    out.sum().backward()
    assert q.grad.dtype == k.grad.dtype == v.grad.dtype == dtype


def test_types_that_are_not_numbers_of_attention_are_refused():
    with pytest.raises(TypeError, match="found i64"):
        attention(*[torch.ones(1, 1, 2, 4, dtype=torch.int64)] * 3)
    with pytest.raises(TypeError, match="expected integers"):
        attention(*qkv(), mask=masks.lengths(torch.tensor([2.5, 3.0])))


def test_bits_are_those_of_numpy():
    tensors = qkv(torch.float32, learns=False)
    options = {"mask": "causal", "softcap": 2.0, "dropout": 0.2, "seed": (1, 2)}
    assert torch.equal(attention(*tensors, **options), torch.from_numpy(regard.attention(*[x.numpy() for x in tensors], **options)))


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="unknown option 'dropuot'; did you mean 'dropout'"):
        attention(*qkv(), dropuot=0.5)


# PyTorch's own attention


@pytest.mark.parametrize("shape", ["4", "3", "5"])
@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "float", "rows", "gqa", "scale", "v_dim"])
def test_scaled_dot_product_attention_is_pytorchs(kind, shape):
    lead = {"4": (2,), "3": (), "5": (2, 3)}[shape]
    kv_heads, v_dim = (2 if kind == "gqa" else 4), (5 if kind == "v_dim" else 8)
    shapes = ((*lead, 4, 6, 8), (*lead, kv_heads, 9, 8), (*lead, kv_heads, 9, v_dim))
    options = {
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.rand(6, 9) > 0.3},
        "float": {"attn_mask": torch.randn(4, 6, 9, dtype=torch.float64)},
        "rows": {"attn_mask": torch.tensor([[True], [False]]).repeat(3, 9)},
        "gqa": {"enable_gqa": True, "is_causal": True},
        "scale": {"scale": 0.2},
    }.get(kind, {})
    if len(lead) == 2 and "attn_mask" in options and options["attn_mask"].ndim > 2:
        options["attn_mask"] = options["attn_mask"][None]
    found = []
    for function in (F.scaled_dot_product_attention, regard.scaled_dot_product_attention):
        torch.manual_seed(1)
        tensors = [random(*s) for s in shapes]
        out = function(*tensors, **options)
        out.square().sum().backward()
        found.append([out, *[x.grad for x in tensors]])
    for theirs, ours in zip(*found):
        assert torch.allclose(theirs, ours, atol=1e-10)


def test_scaled_dot_product_attention_drops_about_as_much():
    q = torch.zeros(1, 8, 64, 16)
    v = torch.ones(1, 8, 512, 16)
    out = regard.scaled_dot_product_attention(q, torch.zeros_like(v), v, dropout_p=0.25)
    assert abs(out.mean() - 1) < 0.01 and out.std() > 0.01
