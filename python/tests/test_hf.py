"""The backend itself: how it is switched on, what it takes from a layer, and what it refuses. Real weights of MiniLM."""

from __future__ import annotations

import pytest
import tokenizers
import torch
from hf_table import alike, ids, minilm, model, run
from transformers import (
    AttentionInterface, AttentionMaskInterface, BertModel, BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM,
)  # fmt: skip

import regard.hf
import regard.torch


class Layer(torch.nn.Module):
    is_causal = False
    layer_idx = 0


def tensors(batch=2, heads=4, kv_heads=2, q_len=7, k_len=7, dim=8, v_dim=8, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(batch, q_len, heads, dim), (batch, k_len, kv_heads, dim), (batch, k_len, kv_heads, v_dim)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).transpose(1, 2) for shape in shapes]


def defined(q, k, v, seen=None, bias=None, scale=None, softcap=None, sinks=None):
    """Attention as it is defined, in f64: out [batch, q_len, heads, v_dim] and weights."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2), weights


def test_registering_again_changes_nothing_but_the_precision():
    regard.hf.register()
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    assert before[0]["regard"].keywords == {"precision": "full"} and before[1]["regard"] is regard.hf.mask
    regard.hf.register(precision="strict")
    assert AttentionInterface._global_mapping["regard"].keywords == {"precision": "strict"}
    regard.hf.register()
    assert before[0].keys() == AttentionInterface._global_mapping.keys() and before[1] == AttentionMaskInterface._global_mapping
    with pytest.raises(ValueError, match="precision: 'f32'; use 'strict', 'full' or 'high'"):
        regard.hf.register(precision="f32")
    assert AttentionInterface._global_mapping["regard"].keywords == {"precision": "full"}


@pytest.mark.parametrize("name", ["flash_regard", "sdpa", "someone/regard", "eager"])
def test_a_name_that_means_something_else_is_refused(name):
    with pytest.raises(ValueError, match=name):
        regard.hf.register(name)
    assert AttentionInterface._global_mapping.get(name) is not regard.hf.attention


def test_a_model_may_be_born_with_it():
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    assert LlamaForCausalLM._from_config(config, attn_implementation="regard").config._attn_implementation == "regard"


def test_a_keyword_that_may_change_the_result_is_refused():
    q, k, v = tensors()
    for name in ("head_mask", "indices", "block_indices", "cache"):
        with pytest.raises(TypeError, match=f"{name}.*Layer"):
            regard.hf.attention(Layer(), q, k, v, None, **{name: torch.ones(1)})
        regard.hf.attention(Layer(), q, k, v, None, **{name: None})
    regard.hf.attention(Layer(), q, k, v, None, position_ids=torch.ones(1), use_cache=True, max_length_q=3)


def test_a_keyword_of_a_whole_model_is_refused_too():
    with pytest.raises(TypeError, match="head_mask"):
        run("llama", "regard", lambda m: m(input_ids=ids(1, 4), head_mask=torch.ones(2, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v_dim", [8, 5])
def test_every_option_of_a_layer_is_heard(dtype, v_dim):
    q, k, v = tensors(v_dim=v_dim, dtype=dtype)
    bias, sinks = torch.randn(1, 4, 7, 7).to(dtype), torch.randn(4).to(dtype)
    options = dict(scaling=0.3, softcap=2.0, s_aux=sinks, position_bias=bias, output_attentions=True)
    out, weights = regard.hf.attention(Layer(), q, k, v, None, **options)
    wanted, wanted_weights = defined(q, k, v, bias=bias.double(), scale=0.3, softcap=2.0, sinks=sinks)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert out.shape == (2, 7, 4, v_dim) and out.dtype == weights.dtype == dtype and out.is_contiguous()
    assert (out.double() - wanted).abs().max() < tolerance
    assert (weights.double() - wanted_weights).abs().max() < max(tolerance, 1e-6)


def test_gradients_reach_bias_and_sinks_and_float_masks():
    q, k, v = (t.double().requires_grad_() for t in tensors())
    bias, mask = (torch.randn(1, heads, 7, 7, dtype=torch.float64, requires_grad=True) for heads in (4, 1))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    learned = (q, k, v, bias, mask, sinks)
    out, _ = regard.hf.attention(Layer(), q, k, v, mask, s_aux=sinks, position_bias=bias)
    wanted, _ = defined(q, k, v, bias=bias + mask, sinks=sinks)
    for grad, definition in zip(*(torch.autograd.grad(one.square().sum(), learned) for one in (out, wanted))):
        assert (grad - definition).abs().max() < 1e-10


def test_weights_for_dropout_are_those_before_it():
    q, k, v = tensors()
    _, weights = regard.hf.attention(Layer(), q, k, v, None, dropout=0.5, output_attentions=True)
    alike(weights, defined(q, k, v)[1].float())


def test_dropout_follows_the_seed_of_torch():
    q, k, _ = tensors(q_len=200, k_len=200)
    ones = torch.ones(2, 2, 200, 8)

    def drop(seed):
        torch.manual_seed(seed)
        return regard.hf.attention(Layer(), q, k, ones, None, dropout=0.25)[0]

    assert torch.equal(drop(1), drop(1)) and not torch.equal(drop(1), drop(2))
    assert abs(float(drop(1).mean()) - 1) < 0.02  # what is kept grows by what is dropped


def test_a_bool_mask_of_the_user_says_who_may_be_seen():
    q, k, v = tensors()
    for shape in ((2, 1, 7, 7), (1, 1, 7, 7), (2, 4, 7, 7), (2, 1, 1, 7)):
        seen = torch.rand(shape) < 0.6
        seen[..., 0] = True
        alike(regard.hf.attention(Layer(), q, k, v, seen)[0], defined(q, k, v, seen)[0].float())


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -torch.inf])
def test_a_float_mask_of_the_user_is_added(hidden):
    q, k, v = tensors()
    seen = torch.rand(2, 1, 7, 7) < 0.6
    seen[..., 0] = True
    mask = torch.where(seen, torch.randn(2, 1, 7, 7), torch.tensor(hidden))
    alike(regard.hf.attention(Layer(), q, k, v, mask)[0], defined(q, k, v, bias=mask.double())[0].float())


def test_a_mask_of_the_user_goes_through_a_whole_model():
    seen = torch.ones(2, 1, 9, 9).tril().bool() & (torch.rand(2, 1, 9, 9) < 0.7) | torch.eye(9).bool()
    added = torch.zeros(2, 1, 9, 9).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        eager = run("llama", "eager", lambda m: m(input_ids=ids(2, 9), attention_mask=added).logits)
        for mask in (seen, added):
            alike(run("llama", "regard", lambda m: m(input_ids=ids(2, 9), attention_mask=mask).logits), eager)


def test_without_a_mask_the_module_says_whether_it_is_causal():
    q, k, v = tensors(q_len=5)
    causal = torch.ones(5, 7).tril().bool()  # rows stand at the first keys, as torch and Transformers have it
    layer = Layer()
    for of_module, of_call, seen in ((True, None, causal), (False, None, None), (False, True, causal), (True, False, None)):
        layer.is_causal = of_module
        alike(regard.hf.attention(layer, q, k, v, None, is_causal=of_call)[0], defined(q, k, v, seen)[0].float())
    one = q[:, :, :1]
    alike(regard.hf.attention(layer, one, k, v, None, is_causal=True)[0], defined(one, k, v)[0].float())


def test_without_a_mask_a_window_is_heard():
    q, k, v = tensors()
    apart = torch.arange(7)[:, None] - torch.arange(7)
    for causal, seen in ((True, (apart >= 0) & (apart < 3)), (False, apart.abs() < 3)):
        found = regard.hf.attention(Layer(), q, k, v, None, is_causal=causal, sliding_window=3)[0]
        alike(found, defined(q, k, v, seen)[0].float())
    one = q[:, :, :1]
    found = regard.hf.attention(Layer(), one, k, v, None, is_causal=True, sliding_window=3)[0]
    alike(found, defined(one, k, v, torch.arange(7) > 3)[0].float())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 2])
def test_packed_rows_and_keys_may_differ_in_length(causal, window):
    rows, keys = (3, 1, 4), (5, 2, 4)
    q, k, v = tensors(batch=1, q_len=sum(rows), k_len=sum(keys))
    ends = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (rows, keys)]
    packing = dict(cu_seq_lens_q=ends[0], cu_seq_lens_k=ends[1], max_length_q=4, max_length_k=5)
    found, weights = regard.hf.attention(
        Layer(), q, k, v, None, is_causal=causal, sliding_window=window, output_attentions=True, **packing
    )
    at_q, at_k = 0, 0
    for n, m in zip(rows, keys):
        apart = torch.arange(n)[:, None] + m - n - torch.arange(m)
        seen = torch.ones(n, m).bool() if window is None else apart.abs() < window
        seen = seen & (apart >= 0) if causal else seen
        part = q[:, :, at_q : at_q + n], k[:, :, at_k : at_k + m], v[:, :, at_k : at_k + m]
        wanted, wanted_weights = defined(*part, seen)
        alike(found[:, at_q : at_q + n], wanted.float())
        alike(weights[:, :, at_q : at_q + n, at_k : at_k + m], wanted_weights.float())
        at_q, at_k = at_q + n, at_k + m


def test_packing_that_does_not_fit_is_refused():
    q, k, v = tensors(batch=1)
    ends, short = torch.tensor([0, 3, 7]), torch.tensor([0, 3, 6])
    for given, error, words in (
        (dict(cu_seq_lens_q=ends), TypeError, "cu_seq_lens_k"),
        (dict(cu_seq_lens_q=ends, cu_seq_lens_k=short), ValueError, "cu_seq_lens_k: ends at 6, this layer has 7"),
    ):
        with pytest.raises(error, match=words):
            regard.hf.attention(Layer(), q, k, v, None, **given)
    with pytest.raises(ValueError, match="2 items"):
        regard.hf.attention(Layer(), *tensors(batch=2), None, cu_seq_lens_q=ends, cu_seq_lens_k=ends)


def test_packing_and_a_mask_hide_what_either_hides():
    q, k, v = tensors(batch=1)
    ends = torch.tensor([0, 3, 7])
    packing = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    document = torch.arange(7) >= 3
    alike_documents = document[:, None] == document
    seen = (torch.rand(1, 1, 7, 7) < 0.6) | torch.eye(7).bool()
    added = torch.randn(1, 1, 7, 7)
    alike(regard.hf.attention(Layer(), q, k, v, seen, **packing)[0], defined(q, k, v, seen & alike_documents)[0].float())
    alike(regard.hf.attention(Layer(), q, k, v, added, **packing)[0], defined(q, k, v, alike_documents, bias=added.double())[0].float())
    with pytest.raises(ValueError, match="differ"):
        regard.hf.attention(Layer(), q, k, v, seen, cu_seq_lens_q=ends, cu_seq_lens_k=torch.tensor([0, 2, 7]))


def test_masks_that_do_not_fit_are_refused():
    q, k, v = tensors()
    seen = regard.hf.mask(batch_size=2, q_length=7, kv_length=9)
    with pytest.raises(ValueError, match="created for 9 keys, this layer has 7"):
        regard.hf.attention(Layer(), q, k, v, seen)
    with pytest.raises(TypeError, match="int64"):
        regard.hf.attention(Layer(), q, k, v, torch.ones(2, 1, 7, 7, dtype=torch.int64))
    with pytest.raises(TypeError, match="2 axes"):
        regard.hf.attention(Layer(), q, k, v, torch.ones(2, 7))


def test_a_model_that_has_no_choice_of_backend_does_not_go_on_in_silence():
    config = BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=4)
    assert not BloomForCausalLM._can_set_attn_implementation()
    with pytest.raises(RuntimeError, match="rules, not a tensor"):
        BloomForCausalLM._from_config(config, attn_implementation="regard")(input_ids=ids(1, 4))


def test_computing_with_a_mask_says_what_it_is():
    seen = regard.hf.mask(batch_size=2, q_length=7, kv_length=7)
    for wrong in (lambda: seen[:, :, 1:], lambda: seen.dtype, lambda: torch.ones(1) + seen, lambda: torch.cat([seen, seen])):
        with pytest.raises((AttributeError, RuntimeError, TypeError), match="rules, not a tensor"):
            wrong()


@pytest.mark.parametrize("padded", [False, True])
def test_a_compiled_model_answers_the_same(padded):
    given = dict(input_ids=ids(2, 9), use_cache=False)
    if padded:  # which has to be read, so that the graph is not whole
        given["attention_mask"] = (torch.arange(9) >= torch.tensor([[0], [3]])).long()

    @torch.no_grad()
    def both(m):
        return torch.compile(m, backend="aot_eager", fullgraph=not padded)(**given).logits, m(**given).logits

    found, wanted = run("llama", "regard", both)
    torch.compiler.reset()
    alike(found, wanted)


def test_layers_and_heads_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="-1"), regard.hf.attentions(layers=[-1]):
        pass
    with pytest.raises(ValueError, match="no head 4 in LlamaAttention, which has 4"), regard.hf.attentions(heads=[4]):
        run("llama", "regard", lambda m: m(input_ids=ids(1, 4), output_attentions=True))


def test_weights_that_are_not_asked_for_are_not_computed(monkeypatch):
    asked = []
    view = regard.AttentionView
    monkeypatch.setattr(regard, "AttentionView", lambda *args, **options: asked.append(1) or view(*args, **options))
    with torch.no_grad():
        run("llama", "regard", lambda m: m(input_ids=ids(1, 4)))
        assert not asked
        with regard.hf.attentions(layers=[1]):
            run("llama", "regard", lambda m: m(input_ids=ids(1, 4), output_attentions=True))
    assert len(asked) == 1


@pytest.mark.parametrize("name", ["llama", "bert", "gemma2", "t5"])
def test_lower_precision_goes_through(name):
    given = dict(input_ids=ids(2, 9), attention_mask=torch.ones(2, 9, dtype=torch.int64))
    if name == "t5":
        given["decoder_input_ids"] = ids(2, 5)

    def both(by):
        with torch.no_grad():
            with torch.autocast("cpu", torch.bfloat16):
                mixed = run(name, by, lambda m: m(**given).logits.float())
            exact = run(name, by, lambda m: m(**given).logits)
        return mixed, exact

    (mixed, _), (eager, exact) = both("regard"), both("eager")
    assert (mixed - exact).abs().max() <= 2 * (eager - exact).abs().max()


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "bert"])
def test_a_model_in_bf16_is_as_near_to_the_truth_as_eager(name):
    given = dict(input_ids=ids(2, 40))
    with torch.no_grad():
        exact = run(name, "eager", lambda m: m(**given).logits)
        model(name).bfloat16()
        try:
            found, eager = (run(name, by, lambda m: m(**given).logits).float() for by in ("regard", "eager"))
        finally:
            model.cache_clear()
    assert (found - exact).abs().mean() <= 1.5 * (eager - exact).abs().mean()


def test_minilm_with_its_real_weights():
    """Needs `regard models get minilm`, and fails without it."""
    sentences = ["A man is eating food .", "The sky above the port was the color of television , tuned to a dead channel"]
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(32)
    encoded = tokenizer.encode_batch(sentences)
    given = dict(
        input_ids=torch.tensor([one.ids for one in encoded]), attention_mask=torch.tensor([one.attention_mask for one in encoded])
    )
    answers = {}
    for by in ("regard", "eager"):
        bert = BertModel.from_pretrained(minilm(), attn_implementation=by).eval()
        bert.zero_grad()
        found = bert(**given, output_attentions=True)
        real = given["attention_mask"].bool()
        found.last_hidden_state[real].square().sum().backward()
        grads = {name: weight.grad for name, weight in bert.named_parameters() if weight.grad is not None}
        answers[by] = found.last_hidden_state.detach(), found.attentions, grads
    (out, layers, grads), (eager, eager_layers, eager_grads) = answers["regard"], answers["eager"]
    alike(out, eager)
    assert len(layers) == len(eager_layers) == 6
    for weights, wanted in zip(layers, eager_layers):
        alike(weights, wanted.detach())
    largest = max(float(grad.abs().max()) for grad in eager_grads.values())
    for name, grad in grads.items():
        alike(grad, eager_grads[name], of=name, scale=1e-2 * largest)


def test_a_report_tells_of_each_layer_how_it_ran():
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    llama = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    assert "not computed by regard" in regard.hf.report(llama) and "'sdpa'" in regard.hf.report(llama)
    llama.set_attn_implementation("regard")
    llama(input_ids=torch.arange(9)[None])
    lines = regard.hf.report(llama).splitlines()
    assert [line.split(":")[0] for line in lines] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert all("forward" in line and "f32" in line and line.endswith("mask: rules") for line in lines), lines
    llama(input_ids=torch.arange(9)[None], attention_mask=torch.ones(1, 1, 9, 9, dtype=torch.bool))
    assert "dense mask from the model" in regard.hf.report(llama)
    assert "no attention layer ran" in regard.hf.report(torch.nn.Linear(2, 2))
