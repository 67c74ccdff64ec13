"""Every rule of `regard.masks` against who may see whom by its definition, pair by pair, in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import regard
from regard import masks

BATCH, HEADS = 3, 2
SHAPES = [(9, 9), (5, 12), (13, 7), (1, 20), (40, 33)]
ALIGNS = ["end", "start", 3, -4]


def seen(mask, q_len, k_len, align="end"):
    """Who sees whom, `[batch, heads, q_len, k_len]`: by the definition, and by the kernels, which must agree."""
    q, k = np.zeros((BATCH, HEADS, q_len, 2), np.float32), np.zeros((BATCH, HEADS, k_len, 2), np.float32)
    by_definition = np.isfinite(regard.steps(q, k, k, mask=mask, align=align).scores)
    values = np.broadcast_to(np.eye(k_len, dtype=np.float32), (BATCH, HEADS, k_len, k_len))
    by_kernel = regard.attention(q, k, values, mask=mask, align=align) > 0
    assert np.array_equal(by_definition, by_kernel)
    return by_kernel


def pairs(q_len, k_len, align="end"):
    """Positions of rows among the keys, `[q_len, 1]`, and keys, `[1, k_len]`."""
    offset = {"end": k_len - q_len, "start": 0}.get(align, align)
    return np.arange(q_len)[:, None] + offset, np.arange(k_len)[None]


def near(at, key, n):
    return abs(at - key) < n


def in_blocks(at, key, n):
    return at // n == key // n


def in_columns(at, key, block, width):
    return (key % block >= block - width) | (at < -(10**9))


POSITIONS = np.array([0, 4, 6])


def is_global(at, key):
    return np.isin(at, POSITIONS) | np.isin(key, POSITIONS)


RULES = {
    "full": (masks.full(), lambda at, key: (at == at) & (key == key)),
    "causal": (masks.causal(), lambda at, key: key <= at),
    "window": (masks.window(4), lambda at, key: near(at, key, 4)),
    "window 1": (masks.window(1), lambda at, key: at == key),
    "window 0": (masks.window(0), lambda at, key: (at == key) & False),
    "band": (masks.band(3, 1), lambda at, key: (key >= at - 3) & (key <= at + 1)),
    "band back": (masks.band(3, None), lambda at, key: key >= at - 3),
    "band ahead": (masks.band(None, 2), lambda at, key: key <= at + 2),
    "prefix": (masks.prefix(5), lambda at, key: (key < 5) & (at == at)),
    "blocks": (masks.blocks(4), lambda at, key: in_blocks(at, key, 4)),
    "dilated": (masks.dilated(3), lambda at, key: (at - key) % 3 == 0),
    "columns": (masks.columns(5, 2), lambda at, key: in_columns(at, key, 5, 2)),
    "strided": (masks.strided(4), lambda at, key: near(at, key, 4) | ((at - key) % 4 == 0)),
    "fixed": (masks.fixed(6, 2), lambda at, key: in_blocks(at, key, 6) | in_columns(at, key, 6, 2)),
    "global": (masks.global_(POSITIONS), is_global),
    "longformer": (masks.longformer(3, POSITIONS), lambda at, key: near(at, key, 3) | is_global(at, key)),
    "both": (masks.causal() & masks.window(4), lambda at, key: (key <= at) & near(at, key, 4)),
    "either": (masks.causal() | masks.prefix(5), lambda at, key: (key <= at) | (key < 5)),
    "both of either": (
        (masks.blocks(3) | masks.prefix(2)) & masks.causal(),
        lambda at, key: (in_blocks(at, key, 3) | (key < 2)) & (key <= at),
    ),
    "either of both": (
        masks.blocks(3) | masks.prefix(4) & masks.causal(),
        lambda at, key: in_blocks(at, key, 3) | ((key < 4) & (key <= at)),
    ),
    "arrays in both": (
        (masks.global_([1]) | masks.dilated(5)) & masks.global_([2, 3]),
        lambda at, key: (np.isin(at, 1) | np.isin(key, 1) | ((at - key) % 5 == 0)) & (np.isin(at, [2, 3]) | np.isin(key, [2, 3])),
    ),
    "text": ("causal & (window 3 | dilated 4)", lambda at, key: (key <= at) & (near(at, key, 3) | ((at - key) % 4 == 0))),
}


@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize("name", RULES)
def test_a_rule_says_who_sees_whom(name, align):
    mask, rule = RULES[name]
    for q_len, k_len in SHAPES:
        expected = rule(*pairs(q_len, k_len, align))
        assert np.array_equal(seen(mask, q_len, k_len, align), np.broadcast_to(expected, (BATCH, HEADS, q_len, k_len))), (q_len, k_len)


def of_items(expected):
    """`[batch, q_len, k_len]` for all heads."""
    return np.broadcast_to(expected[:, None], (BATCH, HEADS, *expected.shape[1:]))


@pytest.mark.parametrize("q_len, k_len", SHAPES)
def test_items_have_lengths_and_spans_of_their_own(q_len, k_len):
    chance = np.random.default_rng(q_len)
    lengths, keys = chance.integers(0, k_len + 1, BATCH), np.arange(k_len)
    rows = np.ones((1, q_len, 1), bool)
    assert np.array_equal(seen(masks.lengths(lengths), q_len, k_len), of_items((keys < lengths[:, None, None]) & rows))
    assert np.array_equal(seen(masks.lengths(lengths[:1]), q_len, k_len)[2, 1], (keys < lengths[0]) & rows[0])
    starts = chance.integers(0, k_len + 1, BATCH)
    spans = np.stack([starts, np.minimum(starts + 4, k_len)], axis=1)
    within = (keys >= spans[:, :1, None]) & (keys < spans[:, 1:, None]) & rows
    assert np.array_equal(seen(masks.spans(spans), q_len, k_len), of_items(within))
    at, key = pairs(q_len, k_len)
    joined = seen(masks.causal() & masks.spans(spans) | masks.lengths(lengths), q_len, k_len)
    assert np.array_equal(joined, of_items((key <= at) & within | (keys < lengths[:, None, None])))


@pytest.mark.parametrize("q_len, k_len", [(9, 9), (5, 12), (40, 41)])
def test_draft_tokens_see_their_ancestors(q_len, k_len):
    chance = np.random.default_rng(k_len)
    tokens = q_len - 2
    parents = np.array([[chance.integers(-1, i) if i else -1 for i in range(tokens)] for _ in range(BATCH)])
    at, key = pairs(q_len, k_len)
    expected = np.broadcast_to(key <= at, (BATCH, q_len, k_len)).copy()
    for item in range(BATCH):
        related = np.eye(tokens, dtype=bool)
        for i, parent in enumerate(parents[item]):
            related[i] |= related[parent] if parent >= 0 else False
        expected[item, 2:, k_len - tokens :] = related
    assert np.array_equal(seen(masks.tree(parents), q_len, k_len), of_items(expected))
    assert np.array_equal(seen(masks.tree(parents[0]), q_len, k_len)[1], np.broadcast_to(expected[0], (HEADS, q_len, k_len)))
    chain = np.arange(tokens) - 1
    assert np.array_equal(seen(masks.tree(chain), q_len, k_len), seen(masks.causal(), q_len, k_len))


@pytest.mark.parametrize("q_len, k_len", [(9, 9), (5, 12), (40, 33)])
def test_rows_see_the_keys_of_their_lists(q_len, k_len):
    chance = np.random.default_rng(q_len)
    for heads, row_block in [(1, 1), (HEADS, 1), (1, 4), (HEADS, 4)]:
        blocks = -(-q_len // row_block)
        lists = chance.integers(-1, k_len, (BATCH, heads, blocks, 5))
        expected = (lists[..., None] == np.arange(k_len)).any(3).repeat(row_block, 2)[:, :, :q_len]
        expected = expected.repeat(HEADS // heads, 1)
        assert np.array_equal(seen(masks.keys(lists, row_block), q_len, k_len), expected)


@pytest.mark.parametrize("q_len, k_len", [(9, 9), (5, 12), (40, 33)])
def test_rows_see_the_keys_of_their_own_document(q_len, k_len):
    chance = np.random.default_rng(k_len)
    for items in (1, BATCH):
        of_keys, of_rows = chance.integers(0, 4, (items, k_len)), chance.integers(0, 4, (items, q_len))
        expected = np.broadcast_to(of_rows[:, :, None] == of_keys[:, None], (BATCH, q_len, k_len))
        assert np.array_equal(seen(masks.segments_between(of_rows, of_keys), q_len, k_len), of_items(expected))
        if q_len <= k_len:
            by_position = of_keys[:, k_len - q_len :, None] == of_keys[:, None]
            expected = np.broadcast_to(by_position, (BATCH, q_len, k_len))
            assert np.array_equal(seen(masks.segments(of_keys), q_len, k_len), of_items(expected))
    assert np.array_equal(
        seen(masks.segments(of_keys) & masks.segments_between(of_rows, of_keys) & masks.prefix(7), q_len, k_len)[..., 7:].any(), False
    )


@pytest.mark.parametrize(
    "shape", [(BATCH, HEADS, 11, 14), (1, HEADS, 11, 14), (BATCH, 1, 11, 14), (1, 1, 11, 14), (11, 14), (BATCH, 1, 1, 14), (14,)]
)
def test_booleans_say_who_sees_whom(shape):
    visible = np.random.default_rng(1).random(shape) < 0.4
    whole = np.broadcast_to(visible, (BATCH, HEADS, 11, 14))
    assert np.array_equal(seen(visible, 11, 14), whole)
    assert np.array_equal(seen(masks.bits(visible) & masks.causal(), 11, 14), whole & (pairs(11, 14)[1] <= pairs(11, 14)[0]))
    assert np.array_equal(seen(visible.tolist(), 11, 14), whole)
    assert np.array_equal(seen(np.asfortranarray(visible), 11, 14), whole)
    bytes_of_two = (visible.astype(np.uint8) * 2).view(bool)
    assert np.array_equal(seen(bytes_of_two, 11, 14), whole)


@pytest.mark.parametrize("batch, heads, rows", [(BATCH, HEADS, 11), (1, 1, 11), (BATCH, 1, 1), (1, HEADS, 1)])
def test_ranges_are_what_each_row_sees(batch, heads, rows):
    ends = np.sort(np.random.default_rng(2).integers(0, 15, (batch, heads, rows, 3, 2)), axis=-1)
    keys = np.arange(14)
    visible = ((keys >= ends[..., :1]) & (keys < ends[..., 1:])).any(axis=-2)
    whole = np.broadcast_to(visible, (BATCH, HEADS, 11, 14))
    assert np.array_equal(seen(masks.ranges(ends), 11, 14), whole)
    assert np.array_equal(seen(masks.ranges(ends) | masks.window(2), 11, 14), whole | near(*pairs(11, 14), 2))
    assert not seen(masks.ranges(np.zeros((1, 1, 1, 0, 2), int)), 11, 14).any()


def test_arrays_of_torch_are_taken_as_they_are():
    torch = pytest.importorskip("torch")
    for made in (
        lambda array: masks.lengths(array([4, 9, 2])),
        lambda array: masks.segments(array([0] * 6 + [1] * 8)),
        lambda array: masks.segments_between(array([0] * 5 + [1] * 6), array([1] * 7 + [0] * 7)),
        lambda array: masks.ranges(array([[[[[2, 5]]]]])) | masks.global_(array([1])),
        lambda array: masks.bits(array([[True, False] * 7] * 11)),
    ):
        assert np.array_equal(seen(made(torch.tensor), 11, 14), seen(made(np.array), 11, 14))


def test_text_and_values_are_one_language():
    pairs_of = {
        "causal & window 4": masks.causal() & masks.window(4),
        "(blocks 3 | prefix 2) & causal": (masks.blocks(3) | masks.prefix(2)) & masks.causal(),
        "band 3 all": masks.band(3, None),
        "fixed 6 2": masks.fixed(6, 2),
        "global 0,4,6": masks.global_(POSITIONS),
        "lengths 3,9,5": masks.lengths([3, 9, 5]),
        "longformer 3 0,4,6": masks.longformer(3, POSITIONS),
        "keys 4,0,11": masks.keys([[[[0, 4, 11]]]], row_block=9),
        "causal & tree root,0,0,2": masks.causal() & masks.tree([-1, 0, 0, 2]),
        "causal\n  & window 4": masks.causal() & "window 4",
    }
    for text, mask in pairs_of.items():
        assert np.array_equal(seen(text, 9, 12), seen(mask, 9, 12)), text
    assert repr(masks.causal() & masks.window(4)) == "causal & window 4"
    assert repr(masks.lengths([1]) | masks.ranges(np.zeros((1, 1, 1, 1, 2), int))) == "$0 | $1"


def test_a_mask_is_a_value_that_can_be_used_again():
    one = masks.lengths([3, 9, 5])
    other = masks.causal() & one
    before = seen(one, 9, 12)
    assert np.array_equal(seen(other | one, 9, 12), before)
    assert np.array_equal(seen(one, 9, 12), before)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: masks.window(2.5), "window: expected an integer, found 2.5"),
        (lambda: masks.lengths([1.5, 2, 3]), "lengths: expected integers, found float64"),
        (lambda: masks.bits(np.ones((2, 2, 2, 2, 2), bool)), "expected a mask with at most 4 axes, found 5"),
        (lambda: masks.causal() & np.ones((3, 3), bool), "use regard.masks.bits for a boolean array"),
        (lambda: seen(masks.window(-1), 5, 5), "window"),
        (lambda: seen(masks.blocks(0), 5, 5), "blocks: 0"),
        (lambda: seen(masks.dilated(0), 5, 5), "dilated.*0"),
        (lambda: seen(masks.tree([-1, 1]), 5, 5), "token 1 has parent 1"),
        (lambda: seen(masks.tree([-1, -2]), 5, 5), "parent -2"),
        (lambda: seen(masks.tree([[[-1]]]), 5, 5), r"expected \[tokens\]"),
        (lambda: seen(masks.keys([[0]]), 5, 5), r"expected \[batch or 1, heads or 1, rows, n\]"),
        (lambda: seen(masks.keys([[[[5]] * 5]]), 5, 5), "keys: 5 is out of range"),
        (lambda: seen(masks.keys([[[[0]] * 4]]), 5, 5), "rows: the key lists has 4"),
        (lambda: seen(masks.segments([0, 1]), 5, 5), "segments: 2 entries; give 5"),
        (lambda: seen(masks.segments([-1] * 5), 5, 5), "segments: -1"),
        (lambda: seen(masks.segments([2**40] * 5), 5, 5), "segments.*2\\^32"),
        (lambda: seen(masks.spans([[1, 2, 3]]), 5, 5), r"spans: expected \[.., 2\]"),
        (lambda: seen("causal & sideways 3", 5, 5), "sideways"),
        (lambda: seen("$0", 5, 5), r"\$0|0"),
        (lambda: seen(masks.ranges(np.zeros((2, 1, 5, 1, 2), int)), 5, 5), "batch: ranges has 2, the scores have 3"),
    ],
)
def test_errors_say_what_is_wrong(wrong, message):
    with pytest.raises((ValueError, TypeError), match=message):
        wrong()
