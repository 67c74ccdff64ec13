//! What does a KV cache save?
//!
//! `cargo run --release --example decode_with_a_cache`
//!
//! A model of one attention and random weights writes 60 tokens behind a prompt of 200, over a cache. At every step the whole text is
//! also computed again from nothing. Look at the counts of both ways, at what is equal to the bit and what only to rounding, and at the
//! pages that two texts share which begin alike.
//!
//! Try next: another `page` in the shape of the cache; `Mask::causal().window(64)` and `KvCache::evict`, which forgets what no query can
//! see any more; `Plan::forward_shared`, which reads common pages once for all texts; `Rope`, which turns keys before they go in.

#![expect(clippy::print_stdout, reason = "a program")]

use regard::cache::{CacheShape, PAGE};
use regard::{Error, KvCache, Machine, Mask, Plan, Problem, Sequence, View};
use regard_testkit::Noise;

const VOCAB: usize = 50;
/// 4 query heads share 2 key heads.
const HEADS: usize = 4;
const KEY_HEADS: usize = 2;
const DIM: usize = 32;
const PROMPT: usize = 200;
const STEPS: usize = 60;

/// The query, key and value of each token, and what an output looks like that calls for it: a model of tables.
struct Tiny {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    calls: Vec<f32>,
}

impl Tiny {
    // ANCHOR: heart
    /// Appends keys and values of `tokens` to a text. They are made once, and never again.
    fn read(
        &self,
        cache: &mut KvCache<f32>,
        text: Sequence,
        tokens: &[usize],
    ) -> Result<(), Error> {
        let (k, v) = (rows(&self.k, tokens), rows(&self.v, tokens));
        let shape = [1, tokens.len(), KEY_HEADS, DIM];
        cache.append(text, View::bshd(&k, shape)?, View::bshd(&v, shape)?)
    }

    /// What the last token of each text sees over the cache, `[texts, 1, heads, dim]`, and how many pairs that took.
    fn decode(
        &self,
        cache: &KvCache<f32>,
        texts: &[Sequence],
        last: &[usize],
    ) -> Result<(Vec<f32>, u128), Error> {
        let q = rows(&self.q, last);
        let q = View::bshd(&q, [texts.len(), 1, HEADS, DIM])?;
        let problem = Problem::cached(&q, cache, texts)?.mask(Mask::causal());
        let plan = Plan::new(problem, Machine::detect())?;
        let output = plan.forward_cached(q, cache, texts)?;
        Ok((output.out.data().to_vec(), plan.work().pairs))
    }

    /// The last row of the same without a cache: all keys and values, and the queries from `from` on.
    fn again(&self, tokens: &[usize], from: usize) -> Result<(Vec<f32>, u128), Error> {
        let q = rows(&self.q, &tokens[from..]);
        let (k, v) = (rows(&self.k, tokens), rows(&self.v, tokens));
        let q = View::bshd(&q, [1, tokens.len() - from, HEADS, DIM])?;
        let shape = [1, tokens.len(), KEY_HEADS, DIM];
        let (k, v) = (View::bshd(&k, shape)?, View::bshd(&v, shape)?);
        let plan = Plan::new(Problem::new(&q, &k, &v).mask(Mask::causal()), Machine::detect())?;
        let out = plan.forward(q, k, v)?.out;
        Ok((out.data()[out.data().len() - HEADS * DIM..].to_vec(), plan.work().pairs))
    }
    // ANCHOR_END: heart

    /// The token that an output calls for most.
    fn next(&self, out: &[f32]) -> usize {
        let loud = |token: &usize| -> f32 {
            out.iter().zip(&self.calls[token * out.len()..]).map(|(x, y)| x * y).sum()
        };
        (0..VOCAB).max_by(|a, b| loud(a).total_cmp(&loud(b))).unwrap_or(0)
    }
}

/// What a table has of some tokens, one after another.
fn rows(table: &[f32], tokens: &[usize]) -> Vec<f32> {
    let size = table.len() / VOCAB;
    tokens.iter().flat_map(|token| &table[token * size..][..size]).copied().collect()
}

fn main() -> Result<(), Error> {
    let mut noise = Noise::new(7);
    let mut table = |heads| noise.normals(VOCAB * heads * DIM);
    let model =
        Tiny { q: table(HEADS), k: table(KEY_HEADS), v: table(KEY_HEADS), calls: table(HEADS) };
    let mut tokens: Vec<usize> = (0..PROMPT).map(|_| noise.below(VOCAB)).collect();
    let shape = CacheShape { heads: KEY_HEADS, qk_dim: DIM, v_dim: DIM, page: PAGE };
    let mut cache = KvCache::<f32>::new(shape, 1 << 20)?;
    let text = cache.start()?;

    model.read(&mut cache, text, &tokens)?;
    let (mut cached, mut repeated, mut made_again, mut apart) = (0, 0, 0, 0f32);
    for _ in 0..STEPS {
        let last = tokens.len() - 1;
        let (out, pairs) = model.decode(&cache, &[text], &tokens[last..])?;
        let (whole, all_pairs) = model.again(&tokens, 0)?;
        (cached, repeated, made_again) =
            (cached + pairs, repeated + all_pairs, made_again + last + 1);
        assert_eq!(out, model.again(&tokens, last)?.0, "pages are one piece, to the bit");
        apart = out.iter().zip(&whole).fold(apart, |most, (x, y)| most.max((x - y).abs()));
        assert_eq!(model.next(&out), model.next(&whole), "both ways choose the same token");
        tokens.push(model.next(&out));
        model.read(&mut cache, text, &tokens[last + 1..])?;
    }
    println!("{STEPS} tokens behind a prompt of {PROMPT}     with a cache   without");
    println!("keys and values made              {:>13} {made_again:>9}", tokens.len());
    println!("pairs of query and key, {HEADS} heads   {cached:>13} {repeated:>9}");
    println!("At every step the same bits as one query over all keys in one piece,");
    println!("and the last row of a whole causal call to {apart:.0e}.\n");
    assert!(apart < 1e-5 && repeated > 100 * cached);

    // The same past, another last token.
    let mut both = [tokens.clone(), tokens];
    let last = both[1].len() - 1;
    both[1][last] = (both[1][last] + 1) % VOCAB;
    let other = cache.fork(text)?;
    cache.truncate(other, last)?;
    model.read(&mut cache, other, &both[1][last..])?;
    for _ in 0..STEPS {
        let last = both.each_ref().map(|tokens| tokens[tokens.len() - 1]);
        let (out, _) = model.decode(&cache, &[text, other], &last)?;
        for ((tokens, text), out) in both.iter_mut().zip([text, other]).zip(out.chunks(HEADS * DIM))
        {
            assert_eq!(out, model.again(tokens, tokens.len() - 1)?.0, "each as if it were alone");
            tokens.push(model.next(out));
            model.read(&mut cache, text, &tokens[tokens.len() - 1..])?;
        }
    }
    let held = cache.pages_held(text)? + cache.pages_held(other)?;
    let page = PAGE * KEY_HEADS * 2 * DIM * size_of::<f32>();
    let there = cache.bytes_in_use() / page;
    let shared = cache.shared_prefix(&[text, other])?;
    println!("A fork of it goes on with another token: {} tokens each.", both[0].len());
    println!("The two hold {held} pages of {PAGE} positions, of which there are {there}:");
    println!("positions {shared:?} are the same memory.");
    assert!(there < held && !shared.is_empty());
    Ok(())
}
