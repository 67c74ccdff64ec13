//! Descriptions made of bytes, for all targets.

use arbitrary::{Arbitrary, Result, Unstructured};
use regard::reference::Inputs;
use regard::mask::{Bits, KeyLists, MaskRule};
use regard::problem::{Additive, Align, Dropout, Local, Normalizer, Scope, Similarity};
use regard::score::RelativeBias;
use regard::{Isa, Machine, Mask, Problem, Score, View};
use std::ops::Range;

/// A size: mostly small, sometimes at the edge of the type.
pub fn size(u: &mut Unstructured<'_>, wild: bool) -> Result<usize> {
    match u.int_in_range(0..=9u8)? {
        0 if wild => Ok(usize::MAX - usize::from(u8::arbitrary(u)?)),
        1 if wild => usize::arbitrary(u),
        _ => Ok(usize::from(u8::arbitrary(u)?)),
    }
}

/// The sizes that a mask is asked about.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub batch: usize,
    pub heads: usize,
    pub q_len: usize,
    pub k_len: usize,
}

/// A mask rule that gives each row its own ranges, which may overlap or be empty.
#[derive(Debug)]
struct Ranges(Vec<(u8, u8)>);

impl MaskRule for Ranges {
    fn visible(&self, _: &Scope, row: usize, ranges: &mut Vec<Range<usize>>) {
        let mut mine: Vec<_> = self
            .0
            .iter()
            .map(|(start, len)| {
                let start = usize::from(*start) + row % 5;
                start..start + usize::from(*len) / 4
            })
            .collect();
        mine.sort_by_key(|r| r.start);
        ranges.extend(mine);
    }
}

/// Any mask. Unless `wild`, one that fits the sizes.
pub fn mask(u: &mut Unstructured<'_>, at: Sizes, wild: bool, depth: usize) -> Result<Mask> {
    let Sizes { batch, heads, q_len, k_len } = at;
    // Lists hold one entry for each of these; a wild call has lists of any length.
    let count = |u: &mut Unstructured<'_>, n: usize| {
        if wild && u.ratio(1, 4)? { Ok(usize::from(u8::arbitrary(u)?)) } else { Ok(n.min(512)) }
    };
    let positive = |u: &mut Unstructured<'_>| {
        let n = size(u, wild)?;
        Ok::<_, arbitrary::Error>(if wild { n } else { n % 40 + 1 })
    };
    let last = if depth == 0 { 15 } else { 17 };
    Ok(match u.int_in_range(0..=last)? {
        0 => Mask::full(),
        1 => Mask::causal(),
        2 => {
            let mut bound = || -> Result<_> {
                Ok(if bool::arbitrary(u)? { Some(size(u, wild)?) } else { None })
            };
            Mask::band(bound()?, bound()?)
        }
        3 => Mask::full().window(size(u, wild)?),
        4 => {
            let n = count(u, batch)?;
            let lengths = (0..n).map(|_| bounded(u, k_len, wild)).collect::<Result<Vec<_>>>()?;
            Mask::lengths(&lengths)
        }
        5 => {
            let n = count(u, batch)?;
            let span =
                |u: &mut Unstructured<'_>| Ok(bounded(u, k_len, wild)?..bounded(u, k_len, wild)?);
            let spans = (0..n).map(|_| span(u)).collect::<Result<Vec<_>>>()?;
            Mask::spans(&spans)
        }
        6 => {
            let items = if bool::arbitrary(u)? { 1 } else { batch };
            let n = count(u, k_len.saturating_mul(items))?;
            let documents = documents(u, n)?;
            if bool::arbitrary(u)? {
                let n = count(u, q_len)?;
                Mask::segments_between(&self::documents(u, n)?, &documents)
            } else {
                Mask::segments(&documents)
            }
        }
        7 => {
            let n = usize::from(u8::arbitrary(u)?) % 8;
            let places = (0..n)
                .map(|_| bounded(u, k_len.saturating_sub(1), wild))
                .collect::<Result<Vec<_>>>()?;
            if k_len == 0 && !wild { Mask::full() } else { Mask::global(&places) }
        }
        8 => Mask::blocks(positive(u)?),
        9 => Mask::dilated(positive(u)?),
        10 => Mask::columns(positive(u)?, size(u, wild)?),
        11 => {
            let (b, h) = (
                if bool::arbitrary(u)? { 1 } else { batch.min(4) },
                if bool::arbitrary(u)? { 1 } else { heads.min(8) },
            );
            let shape = [b, h, q_len.min(256), k_len.min(256)];
            let mut state = u32::arbitrary(u)? | 1;
            let rare = u8::arbitrary(u)?;
            let bools: Vec<bool> = (0..shape.iter().product())
                .map(|_| {
                    state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
                    (state >> 24) as u8 >= rare
                })
                .collect();
            Bits::from_bools(&bools, shape).map_or(Mask::full(), Mask::bits)
        }
        12 => Mask::custom(Ranges(Vec::arbitrary(u)?)),
        13 => Mask::strided(positive(u)?),
        14 => {
            let items = count(u, batch)?;
            let trees = (0..items).map(|_| tree(u, q_len.min(k_len), wild));
            Mask::trees(&trees.collect::<Result<Vec<_>>>()?)
        }
        15 => lists(u, at, wild)?,
        16 => mask(u, at, wild, depth - 1)?.and(mask(u, at, wild, depth - 1)?),
        _ => mask(u, at, wild, depth - 1)?.or(mask(u, at, wild, depth - 1)?),
    })
}

/// Parents of draft tokens; if `wild`, also ones that come after their children.
fn tree(u: &mut Unstructured<'_>, most: usize, wild: bool) -> Result<Vec<Option<usize>>> {
    let n = bounded(u, most.min(256), wild)?.min(1 << 10);
    let parent = |i: usize| -> Result<Option<usize>> {
        let parent = if wild { size(u, wild)? } else { usize::from(u8::arbitrary(u)?) };
        Ok(if wild { Some(parent) } else { Some(parent).filter(|parent| *parent < i) })
    };
    (0..n).map(parent).collect()
}

/// Key lists for rows, blocks of rows and heads.
fn lists(u: &mut Unstructured<'_>, at: Sizes, wild: bool) -> Result<Mask> {
    let Sizes { batch, heads, q_len, k_len } = at;
    let row_block = 1 + usize::from(u8::arbitrary(u)? % 80);
    let per_head = bool::arbitrary(u)? && heads <= 8;
    let shape = [
        if bool::arbitrary(u)? { 1 } else { batch.min(4) },
        if per_head { heads } else { 1 },
        q_len.div_ceil(row_block).min(256),
    ];
    let list = |_| {
        let n = usize::from(u8::arbitrary(u)?) % 12;
        let n = if k_len == 0 && !wild { 0 } else { n };
        (0..n).map(|_| bounded(u, k_len.saturating_sub(1), wild)).collect::<Result<Vec<_>>>()
    };
    let lists: Vec<_> = (0..shape.iter().product::<usize>()).map(list).collect::<Result<_>>()?;
    let lists = KeyLists::new(&lists, shape);
    Ok(lists.map_or(Mask::full(), |lists| Mask::keys(lists.row_block(row_block))))
}

fn bounded(u: &mut Unstructured<'_>, most: usize, wild: bool) -> Result<usize> {
    if wild { size(u, wild) } else { u.int_in_range(0..=most) }
}

/// Runs of equal documents, as packed sequences have them, and now and then the same one again.
fn documents(u: &mut Unstructured<'_>, n: usize) -> Result<Vec<u32>> {
    let mut documents = Vec::with_capacity(n);
    while documents.len() < n {
        let (id, run) = (u8::arbitrary(u)? % 6, usize::from(u8::arbitrary(u)? % 32) + 1);
        documents.extend(std::iter::repeat_n(u32::from(id), run.min(n - documents.len())));
    }
    Ok(documents)
}

/// Where row 0 stands.
pub fn align(u: &mut Unstructured<'_>, wild: bool) -> Result<Align> {
    Ok(match u.int_in_range(0..=3u8)? {
        0 | 1 => Align::End,
        2 => Align::Start,
        _ if wild => Align::Offset(i64::arbitrary(u)?),
        _ => Align::Offset(i64::from(i16::arbitrary(u)? % 300)),
    })
}

/// Numbers in `-amplitude..amplitude`, repeatable.
pub fn numbers(seed: u32, n: usize, amplitude: f32) -> Vec<f32> {
    let mut state = u64::from(seed).wrapping_mul(2_654_435_769) + 1;
    let next = move |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1u32 << 23) as f32 - 1.0) * amplitude
    };
    (0..n).map(next).collect()
}

/// A small problem with its tensors: every mask, score and similarity.
#[derive(Debug)]
pub struct Case {
    pub sizes: Sizes,
    pub kv_heads: usize,
    pub q_dim: usize,
    pub dim: usize,
    pub v_dim: usize,
    pub seed: u32,
    mask: Mask,
    align: Align,
    w: Option<Vec<f32>>,
    /// `w_k` and `v`, where `w` is `w_q`.
    hidden: Option<[Vec<f32>; 2]>,
    distance: bool,
    pub normalizer: Normalizer,
    centers: Option<(Vec<f32>, usize)>,
    scale: Option<f64>,
    temperature: Option<f64>,
    softcap: Option<f64>,
    bias: Option<(Vec<f32>, [usize; 4])>,
    slopes: Option<Vec<f32>>,
    table: Option<(Vec<f32>, usize)>,
    sinks: Option<Vec<f32>>,
    dropout: Option<Dropout>,
    pub entropy: bool,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

/// How many times the bound of the case table an error may be. The bound is made of the plain evaluation's own error,
/// which a fuzzer soon finds to be 0 by luck, while the kernel's adds up over hundreds of rows; a mistake is larger by
/// orders of magnitude.
pub const ROOM: f64 = 32.0;

impl<'a> Arbitrary<'a> for Case {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        // Mostly a few rows and keys, sometimes more than two groups of rows and three cells of keys.
        let long = u.ratio(1, 8)?;
        let mut up_to = |n: usize| u.int_in_range(0..=n);
        let (q_len, k_len) =
            if long { (up_to(140)?, up_to(200)?) } else { (up_to(20)?, up_to(70)?) };
        let (batch, kv_heads, group) = (1 + up_to(1)?, 1 + up_to(1)?, 1 + up_to(1)?);
        let (dim, v_dim) = (1 + up_to(19)?, up_to(20)?);
        let heads = kv_heads * group;
        let sizes = Sizes { batch, heads, q_len, k_len };
        let (mask, align) = (mask(u, sizes, false, 2)?, align(u, false)?);
        let amplitude = *u.choose(&[1.0, 1e-3, 30.0])?;
        let seed = u32::arbitrary(u)?;
        let projects = u.ratio(1, 6)?;
        let q_dim = if projects { 1 + u.int_in_range(0..=9usize)? } else { dim };
        let units =
            if projects && u.ratio(1, 2)? { Some(1 + u.int_in_range(0..=9usize)?) } else { None };
        let distance = !projects && u.ratio(1, 4)?;
        let normalizer = if u.ratio(1, 3)? { normalizer(u)? } else { Normalizer::Softmax };
        let alone = !matches!(normalizer, Normalizer::Softmax | Normalizer::TopK(_));
        let one = |u: &mut Unstructured<'_>, n: usize| Ok(if bool::arbitrary(u)? { n } else { 1 });
        let bias = some(u, 3, |u| {
            let shape = [one(u, batch)?, one(u, heads)?, one(u, q_len)?, one(u, k_len)?];
            let mut bias = numbers(seed ^ 2, shape.iter().product(), 3.0);
            if u.ratio(1, 3)? {
                bias.iter_mut().filter(|x| **x < -2.0).for_each(|x| *x = f32::NEG_INFINITY);
            }
            Ok((bias, shape))
        })?;
        let table = some(u, 4, |u| {
            let reach = u.int_in_range(0..=20usize)?;
            Ok((numbers(seed ^ 4, (2 * reach + 1) * heads, 3.0), reach))
        })?;
        let mut case = Self {
            sizes,
            kv_heads,
            q_dim,
            dim,
            v_dim,
            seed,
            mask,
            align,
            w: projects.then(|| numbers(seed ^ 1, q_dim * units.unwrap_or(dim), 1.0)),
            hidden: units.map(|n| [numbers(seed ^ 12, dim * n, 1.0), numbers(seed ^ 13, n, 1.0)]),
            distance,
            normalizer,
            centers: some(u, 6, |u| {
                let centers = numbers(seed ^ 14, batch * heads * q_len, k_len as f32 + 3.0);
                Ok((centers, 1 + u.int_in_range(0..=30usize)?))
            })?,
            scale: some(u, 4, |u| Ok(*u.choose(&[0.0, 1.0, -0.5, 0.01])?))?,
            temperature: some(u, 4, |u| Ok(*u.choose(&[0.5, 2.0, 10.0])?))?,
            softcap: some(u, 4, |u| Ok(*u.choose(&[1.0, 30.0])?))?,
            bias,
            slopes: some(u, 4, |_| Ok(numbers(seed ^ 3, heads, 1.0)))?,
            table,
            sinks: some(u, 4, |_| Ok(numbers(seed ^ 5, heads, 5.0)))?.filter(|_| !alone),
            dropout: some(u, 4, |u| {
                let rate = *u.choose(&[0.0, 0.1, 0.5, 0.9])?;
                Ok(Dropout::new(rate, u64::arbitrary(u)?, u64::arbitrary(u)?))
            })?,
            entropy: u.ratio(1, 3)? && normalizer != Normalizer::Sparsemax,
            q: numbers(seed ^ 6, batch * heads * q_len * q_dim, amplitude),
            k: numbers(seed ^ 7, batch * kv_heads * k_len * dim, amplitude),
            v: numbers(seed ^ 8, batch * kv_heads * k_len * v_dim, 1.0),
        };
        if bool::arbitrary(u)? {
            case.poison_what_nobody_sees();
        }
        Ok(case)
    }
}

/// Any way from scores to weights but the softmax.
pub fn normalizer(u: &mut Unstructured<'_>) -> Result<Normalizer> {
    Ok(match u.int_in_range(0..=3u8)? {
        0 => Normalizer::TopK(1 + usize::from(u8::arbitrary(u)?)),
        1 => Normalizer::Hard,
        2 => Normalizer::Sampled { seed: u64::arbitrary(u)? },
        _ => Normalizer::Sparsemax,
    })
}

/// Something once in `n` times.
fn some<'a, T>(
    u: &mut Unstructured<'a>,
    n: u8,
    make: impl FnOnce(&mut Unstructured<'a>) -> Result<T>,
) -> Result<Option<T>> {
    if u.ratio(1, n)? { make(u).map(Some) } else { Ok(None) }
}

impl Case {
    /// q, k and v.
    pub fn inputs(&self) -> Inputs<'_, f32> {
        let Sizes { batch, heads, q_len, k_len } = self.sizes;
        (
            View::bhsd(&self.q, [batch, heads, q_len, self.q_dim]).unwrap(),
            View::bhsd(&self.k, [batch, self.kv_heads, k_len, self.dim]).unwrap(),
            View::bhsd(&self.v, [batch, self.kv_heads, k_len, self.v_dim]).unwrap(),
        )
    }

    /// The call.
    pub fn problem(&self) -> Problem<'_, f32> {
        let mut score = Score::new();
        score = self.scale.into_iter().fold(score, Score::scale);
        score = self.temperature.into_iter().fold(score, Score::temperature);
        score = self.softcap.into_iter().fold(score, Score::softcap);
        if let Some((bias, shape)) = &self.bias {
            score = score.bias(View::bhsd(bias, *shape).unwrap());
        }
        if let Some(slopes) = &self.slopes {
            score = score.alibi(slopes);
        }
        if let Some((table, reach)) = &self.table {
            score = score.relative(RelativeBias::clipped(table, *reach));
        }
        if let Some(sinks) = &self.sinks {
            score = score.sinks(sinks);
        }
        let matrix = |data, rows: usize, columns| View::matrix(data, [rows, columns]).unwrap();
        let similarity = match (&self.w, &self.hidden) {
            (Some(w), Some([w_k, v])) => Similarity::Additive(Additive {
                w_q: matrix(w, self.q_dim, v.len()),
                w_k: Some(matrix(w_k, self.dim, v.len())),
                v: matrix(v, 1, v.len()),
            }),
            (Some(w), None) => {
                Similarity::General(View::matrix(w, [self.q_dim, self.dim]).unwrap())
            }
            (None, _) if self.distance => Similarity::Distance,
            (None, _) => Similarity::Dot,
        };
        let (q, k, v) = self.inputs();
        let problem = Problem::new(&q, &k, &v).mask(self.mask.clone()).score(score);
        let problem = problem.similarity(similarity).align(self.align).normalizer(self.normalizer);
        let local = self.centers.as_ref().map(|(centers, reach)| Local::new(centers, *reach));
        let problem = local.into_iter().fold(problem, Problem::local);
        let problem = self.dropout.into_iter().fold(problem, Problem::dropout);
        if self.entropy { problem.entropy() } else { problem }
    }

    /// NaN and infinities where no row of any head looks.
    fn poison_what_nobody_sees(&mut self) {
        let Sizes { batch, heads, q_len, k_len } = self.sizes;
        let problem = self.problem();
        let hidden = |(b, key): &(usize, usize)| {
            !(0..heads).any(|h| {
                let scope = problem.scope(*b, h);
                (0..q_len).any(|row| self.mask.is_visible(&scope, row, *key))
            })
        };
        let all = (0..batch).flat_map(|b| (0..k_len).map(move |key| (b, key)));
        let hidden: Vec<(usize, usize)> = all.filter(hidden).collect();
        for (b, key) in hidden {
            for head in 0..self.kv_heads {
                let at = (b * self.kv_heads + head) * k_len + key;
                self.k[at * self.dim..][..self.dim].fill(f32::NAN);
                self.v[at * self.v_dim..][..self.v_dim].fill(f32::INFINITY);
            }
        }
    }
}

/// Two machines that must agree to the bit; `portable` has no fused multiply-add and agrees with itself only.
pub fn machines(u: &mut Unstructured<'_>) -> Result<[Machine; 2]> {
    let isas = Isa::available();
    let isa = *u.choose(&isas)?;
    let other = isas.iter().copied().find(|i| *i != isa && i.is_fused());
    let other = if !isa.is_fused() { isa } else { other.unwrap_or(isa) };
    let threads = u.int_in_range(1..=3)?;
    let again = if threads == 1 { 2 } else { 1 };
    Ok([Machine::detect().isa(isa).threads(threads), Machine::detect().isa(other).threads(again)])
}
