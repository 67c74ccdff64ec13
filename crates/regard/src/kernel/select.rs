//! The pass that finds what a normalizer must know of each row before there are weights: a [`Selection`](crate::problem::Selection).
//!
//! Cost: the scores once more (for sparsemax, once for each step of Newton's method), and of values nothing. Memory: what is
//! chosen.

use crate::description::dropout::uniform;
use crate::description::normalizer::{NONE, Normalizer};
use crate::description::problem::Problem;
use crate::description::score::LOG2_E;
use crate::kernel::best::{BestKeys, take_best};
use crate::kernel::block_loop::{BlockLoop, Call, KeyRange, ScoreTile, Visit};
use crate::kernel::queries::Queries;
use crate::kernel::softmax::{States, TileSums, exp_and_sum, update_max};
use crate::machine::simd::{GROUP, Isa, Lanes, Number};
use crate::tensor::index::{At, BLOCK_KEYS, HeadRows, Keys, Pair, RowTile, Scope, Span};
use crate::tensor::view::TileMut;

/// Where the choice of some rows goes.
#[derive(Debug)]
pub(crate) struct Target<'t, N> {
    pub(crate) keys: TileMut<'t, usize>,
    pub(crate) thresholds: TileMut<'t, N>,
    /// Of a sparsemax.
    pub(crate) supports: Option<TileMut<'t, N>>,
}

/// Memory of one thread, reused from task to task.
#[derive(Debug)]
pub(crate) struct Scratch<N> {
    groups: Vec<Group<N>>,
    tile: Vec<Lanes<N>>,
    block_loop: BlockLoop<N>,
}

/// A group of rows, and what it has found out so far.
#[derive(Debug)]
struct Group<N> {
    q: Queries<N>,
    found: Found<N>,
}

/// What rows have found out.
#[derive(Debug)]
enum Found<N> {
    /// The best of each.
    TopK(BestKeys<N>),
    /// The softmax so far, and one key of each that was drawn from it.
    Sampled(u64, Box<States<N>>, Box<[usize; GROUP]>),
    /// The highest scores.
    Max(Box<Lanes<N>>),
    /// The highest scores, and who is within reach of them.
    Support(Box<Lanes<N>>, Box<Support>),
}

/// What rows know of the scores within reach of their highest: in `f64`, for there may be many that are alike.
#[derive(Debug)]
struct Support {
    support: [f64; GROUP],
    /// How far they are from being out of reach, in all, and how many they are.
    left: [f64; GROUP],
    count: [f64; GROUP],
}

impl<N: Number> Scratch<N> {
    pub(crate) fn new(problem: &Problem<'_, N>, rows: usize) -> Self {
        let dims = problem.dims();
        let zeros = |n| vec![Lanes([N::zero(); GROUP]); n];
        let group = || Group { q: Queries::new(problem), found: Found::new(problem) };
        Self {
            groups: (0..rows.min(dims.q_len).div_ceil(GROUP)).map(|_| group()).collect(),
            tile: zeros(BLOCK_KEYS),
            block_loop: BlockLoop::new(),
        }
    }
}

/// One tile of rows of one head.
#[derive(Debug)]
pub(crate) struct Select<'t, 'c, N: Number> {
    pub(crate) call: Call<'c, N>,
    pub(crate) scope: Scope,
    pub(crate) rows: RowTile,
    pub(crate) to: Target<'t, N>,
    pub(crate) scratch: &'t mut Scratch<N>,
}

/// Steps of Newton's method, at most: it ends by itself, after fewer steps than there are keys, and hardly ever takes ten.
const STEPS: usize = 100;

impl<N: Number> Select<'_, '_, N> {
    pub(crate) fn run(mut self, isa: Isa) {
        let Self { call, scope, rows, .. } = self;
        let problem = call.problem;
        let Scratch { groups, tile, block_loop } = &mut *self.scratch;
        let groups = &mut groups[..rows.groups()];
        for (g, group) in groups.iter_mut().enumerate() {
            let q = call.queries(scope.batch, scope.head);
            group.q.take(isa, problem, scope.head, (q, rows.group(g)));
            group.found = Found::new(problem);
        }
        let key_range = KeyRange { mask: &problem.mask, without: None, keys: 0..scope.k_len };
        for _ in 0..STEPS {
            let mut visitor = SelectVisitor { problem, groups: &mut *groups, tile: &mut *tile };
            block_loop.for_each_block(
                isa,
                &call,
                HeadRows { scope, rows },
                &key_range,
                &mut visitor,
            );
            // Each group goes on until it has nothing more to find out.
            if groups.iter_mut().map(Group::goes_on).filter(|more| *more).count() == 0 {
                break;
            }
        }
        for (g, group) in groups.iter().enumerate() {
            for lane in 0..group.q.rows.count {
                let row = g * GROUP + lane;
                let to = &mut self.to;
                to.thresholds.update(0, row)[0] = group.write(lane, to.keys.update(0, row));
                if let (Some(to), Some(support)) = (&mut to.supports, group.support(lane)) {
                    to.update(0, row)[0] = support;
                }
            }
        }
    }
}

struct SelectVisitor<'t, 'c, N: Number> {
    problem: &'c Problem<'c, N>,
    groups: &'t mut [Group<N>],
    tile: &'t mut [Lanes<N>],
}

impl<N: Number> Visit<N> for SelectVisitor<'_, '_, N> {
    const VALUES: bool = false;

    fn visit(&mut self, isa: Isa, mut score_tile: ScoreTile<'_, N>) {
        let group = &mut self.groups[score_tile.group];
        let tile = &mut self.tile[..score_tile.k.len];
        score_tile.scores(isa, self.problem, &mut group.q, tile, None);
        group.found.take(isa, score_tile.at, tile);
    }
}

impl<N: Number> Found<N> {
    /// Nothing yet.
    fn new(problem: &Problem<'_, N>) -> Self {
        match problem.normalizer {
            Normalizer::Sampled { seed } => {
                Self::Sampled(seed, Box::new(States::empty()), Box::new([NONE; GROUP]))
            }
            Normalizer::Sparsemax => Self::Max(Box::new(Lanes([N::neg_infinity(); GROUP]))),
            other => Self::TopK(BestKeys::new(other.most(problem.dims().k_len))),
        }
    }

    /// Takes the scores of some keys in.
    fn take(&mut self, isa: Isa, at: At<'_>, tile: &mut [Lanes<N>]) {
        let lanes = at.span.start..at.span.end;
        match self {
            Self::TopK(best) => take_best(isa, best, at, tile),
            Self::Sampled(seed, states, keys) => draw(isa, *seed, states, keys, (at, tile)),
            Self::Max(max) => {
                for scores in tile {
                    for lane in lanes.clone() {
                        max.0[lane] = max.0[lane].max(scores.0[lane]);
                    }
                }
            }
            Self::Support(max, support_of) => {
                for (scores, lane) in tile.iter().flat_map(|x| lanes.clone().map(move |l| (x, l))) {
                    let left = (scores.0[lane] - max.0[lane]).to_f64() + support_of.support[lane];
                    if left > 0.0 {
                        support_of.left[lane] += left;
                        support_of.count[lane] += 1.0;
                    }
                }
            }
        }
    }
}

/// Tells the places of gathered keys from those on the grid.
const GATHERED: usize = 1 << (usize::BITS - 1);

/// Lets the keys of a tile compete with the one drawn before: they win with the share of the weight that is theirs, and
/// among them each with its own. One number decides both; it depends on the row and the block alone.
fn draw<N: Number>(
    isa: Isa,
    seed: u64,
    states: &mut States<N>,
    keys: &mut [usize; GROUP],
    (at, tile): (At<'_>, &mut [Lanes<N>]),
) {
    // Sums that never suffice: `max` becomes the largest score so far.
    let (never, mut rescale) = (Lanes([N::infinity(); GROUP]), Lanes([N::one(); GROUP]));
    let before = states.sum;
    update_max(isa, states, tile, &never, at.span, &mut rescale);
    let mut sums = TileSums::new(false);
    exp_and_sum(isa, states, tile, at.span, &mut sums, true);
    let Scope { batch, head, .. } = at.scope;
    for (lane, key) in keys.iter_mut().enumerate().take(at.span.end).skip(at.span.start) {
        // By the place of the tile on the grid, whatever else is in its tile; gathered keys by the first of them, which no other
        // tile has.
        let place = match at.keys {
            Keys::From(first) => first / BLOCK_KEYS,
            Keys::Gathered(keys) => GATHERED | keys[0],
        };
        let pair = Pair { batch, head, row: at.rows.row(lane), key: place };
        let mut left = uniform(seed, pair) * states.sum.0[lane].to_f64();
        // What has met a NaN keeps it: a result that depends on it must not look like a number.
        if left >= sums.sum.0[lane].to_f64() || before.0[lane].is_nan() {
            continue;
        }
        for (i, weights) in tile.iter().enumerate() {
            let weight = weights.0[lane];
            left -= weight.to_f64();
            if weight > N::zero() || weight.is_nan() {
                *key = at.keys.get(i);
            }
            if left < 0.0 || weight.is_nan() {
                break;
            }
        }
    }
}

impl<N: Number> Group<N> {
    /// After a pass: whether there must be another, and what it looks for.
    fn goes_on(&mut self) -> bool {
        let span = Span::first(self.q.rows.count);
        match &mut self.found {
            Found::TopK(..) | Found::Sampled(..) => false,
            Found::Max(max) => {
                // No weight is above 1, so nothing farther below the highest has one.
                let (support, zero) = ([LOG2_E; GROUP], [0.0; GROUP]);
                let support_of = Box::new(Support { support, left: zero, count: zero });
                self.found = Found::Support(max.clone(), support_of);
                true
            }
            Found::Support(_, support_of) => {
                let Support { support, left, count } = &mut **support_of;
                let mut moved = false;
                for lane in span.start..span.end {
                    // left = sum of (score - highest + reach): the weights sum to 1 if this is `log2 e`. At the highest score
                    // `reach` itself is left, so it never falls to 0.
                    let next = support[lane] - (left[lane] - LOG2_E) / count[lane];
                    moved |= count[lane] > 0.0 && N::from_f64(next) < N::from_f64(support[lane]);
                    if count[lane] > 0.0 && next < support[lane] && next > 0.0 {
                        support[lane] = next;
                    }
                    (left[lane], count[lane]) = (0.0, 0.0);
                }
                moved
            }
        }
    }

    /// How far below its highest score the weights of a row begin, if that is what it looks for.
    fn support(&self, lane: usize) -> Option<N> {
        match &self.found {
            Found::Support(_, support_of) => Some(N::from_f64(support_of.support[lane])),
            _ => None,
        }
    }

    /// Writes what a row has chosen, the best first, and tells its bound.
    fn write(&self, lane: usize, keys: &mut [usize]) -> N {
        match &self.found {
            Found::TopK(best) => {
                let found = best.of_row(lane);
                keys.iter_mut().zip(&found).for_each(|(to, best)| *to = best.key);
                let last = found.last().filter(|_| found.len() == best.most());
                last.map_or(N::neg_infinity(), |x| x.score)
            }
            Found::Sampled(_, _, drawn) => {
                keys[0] = drawn[lane];
                N::neg_infinity()
            }
            Found::Max(max) | Found::Support(max, _) => max.0[lane],
        }
    }
}
