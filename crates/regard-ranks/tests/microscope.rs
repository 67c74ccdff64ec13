//! Statistics and maps of a sequence that is spread over ranks, compared with those of one process that has all of it.

use regard::{AttentionView, Machine, Plan, Problem, Score, Shape, View};
use regard_ranks::context::ContextError;
use regard_ranks::microscope::{self, Source};
use regard_ranks::{Alone, Ranks, Threads, gather, share};
use regard_scope::{HeadStats, HeadSums, Inputs, Labels, Layer, LayerData, Site, Trace, stats};
use regard_testkit::Noise;
use std::collections::BTreeMap;
use std::ops::Range;

const HEADS: [usize; 2] = [4, 2];
const LEN: usize = 4_700;
/// Four of them, the last one not whole.
const BLOCK: usize = 1_500;
const DIM: usize = 16;

struct Case {
    q: Vec<f32>,
    k: Vec<f32>,
    mask: &'static str,
}

impl Case {
    fn new(mask: &'static str) -> Self {
        let mut noise = Noise::new(5);
        let mut numbers = |n| noise.normals::<f32>(n).iter().map(|x| 2.0 * x).collect();
        let (q, k) = (numbers(HEADS[0] * LEN * DIM), numbers(HEADS[1] * LEN * DIM));
        Self { q, k, mask }
    }

    fn trace(&self) -> Trace {
        let [q_shape, k_shape] = HEADS.map(|heads| [heads, LEN, DIM]);
        let inputs = Inputs::new((self.q.clone(), q_shape), (self.k.clone(), k_shape), self.mask)
            .expect("inputs");
        let data = LayerData::Inputs(inputs);
        let layer = Layer {
            layer: 0,
            kind: "self".into(),
            rows: "x".into(),
            cols: "x".into(),
            data,
            value_norms: Vec::new(),
        };
        let axes = BTreeMap::from([("x".to_string(), Labels::counted("x", LEN))]);
        Trace { title: String::new(), axes, layers: vec![layer], ..Trace::default() }
    }

    fn plan(&self) -> Plan<'static, f32> {
        let [q, k] = HEADS.map(|heads| Shape { batch: 1, heads, len: LEN, dim: DIM });
        let problem = Problem::of_shapes(q, k, Shape { dim: 0, ..k });
        let mask = regard_scope::parse_mask(self.mask).expect("a mask");
        Plan::new(problem.mask(mask), Machine::detect().threads(1)).expect("a plan")
    }
}

fn site(head: usize) -> Site {
    Site { layer: 0, kind: "self".into(), head }
}

/// Some positions of `[heads, LEN, DIM]`.
fn positions(x: &[f32], range: Range<usize>) -> Vec<f32> {
    x.chunks_exact(LEN * DIM)
        .flat_map(|head| &head[range.start * DIM..range.end * DIM])
        .copied()
        .collect()
}

/// The same of a tensor of which every rank has a run of positions, and no more: the ranks that have some send them to all.
fn distributed(
    ranks: &dyn Ranks,
    own: &(Range<usize>, Vec<f32>),
    range: Range<usize>,
) -> Result<Vec<f32>, ContextError> {
    let of = |run: &Range<usize>| {
        range.start.clamp(run.start, run.end)..range.end.clamp(run.start, run.end)
    };
    let runs = (0..ranks.count()).map(|rank| of(&share(LEN, rank, ranks.count())));
    let counts: Vec<usize> = runs.map(|run| HEADS[1] * run.len() * DIM).collect();
    let (run, each) = (of(&own.0), own.0.len() * DIM);
    let inside = (run.start - own.0.start) * DIM..(run.end - own.0.start) * DIM;
    let mine: Vec<f32> =
        own.1.chunks_exact(each).flat_map(|head| &head[inside.clone()]).copied().collect();
    let all = gather(ranks, &mine, &counts)?;
    // From [ranks, heads, positions, dim] to [heads, positions, dim].
    let mut heads = vec![Vec::new(); HEADS[1]];
    let mut rest = all.as_slice();
    for count in counts {
        let (part, behind) = rest.split_at(count);
        rest = behind;
        let parts = part.chunks((count / HEADS[1]).max(1));
        heads.iter_mut().zip(parts).for_each(|(head, part)| head.extend_from_slice(part));
    }
    Ok(heads.concat())
}

fn on<T: Send>(count: usize, work: impl Fn(Threads) -> T + Sync) -> Vec<T> {
    let work = &work;
    std::thread::scope(|scope| {
        let own = |ranks| scope.spawn(move || work(ranks));
        let all: Vec<_> = Threads::new(count).into_iter().map(own).collect();
        all.into_iter().map(|one| one.join().expect("a rank")).collect()
    })
}

fn numbers(sums: &[HeadSums]) -> Vec<HeadStats> {
    sums.iter().enumerate().map(|(head, sums)| sums.stats(site(head))).collect()
}

#[test]
fn statistics_are_those_of_one_process_and_have_the_same_bits_for_any_number_of_ranks() {
    for mask in ["full", "causal", "causal & window 300"] {
        let case = Case::new(mask);
        let expected = stats(&case.trace(), Machine::detect(), &mut |_, _| ()).expect("stats");
        let alone = |case: &Case| {
            let (mut q, mut k) = (
                |range| Ok::<_, ContextError>(positions(&case.q, range)),
                |range| Ok::<_, ContextError>(positions(&case.k, range)),
            );
            microscope::stats(
                &Alone,
                &case.plan(),
                Source { q: &mut q, k: &mut k, block: BLOCK },
                &mut |_, _| (),
            )
        };
        let alone = alone(&case).expect("stats");
        for (expected, found) in expected.iter().zip(numbers(&alone)) {
            assert_eq!((expected.queries, &expected.site), (found.queries, &found.site));
            for name in HeadStats::NAMES {
                let [a, b] = [expected, &found].map(|stats| stats.get(name).expect("a name"));
                assert!((a - b).abs() <= 1e-6 * a.abs().max(1.0), "{mask}, {name}: {a} and {b}");
            }
            assert!((expected.max_score - found.max_score).abs() <= 1e-5 * expected.max_score);
        }
        for count in [2, 3, 4] {
            for sums in on(count, |ranks| {
                let run = share(LEN, ranks.rank(), count);
                let own = (run.clone(), positions(&case.k, run));
                let mut q = |range| Ok(positions(&case.q, range));
                let mut k = |range| distributed(&ranks, &own, range);
                microscope::stats(
                    &ranks,
                    &case.plan(),
                    Source { q: &mut q, k: &mut k, block: BLOCK },
                    &mut |_, _| (),
                )
            }) {
                let sums: Result<_, ContextError> = sums;
                let bits = |sums: &[HeadSums]| {
                    sums.iter()
                        .flat_map(|sums| sums.to_array())
                        .map(f64::to_bits)
                        .collect::<Vec<_>>()
                };
                assert_eq!(bits(&sums.expect("stats")), bits(&alone), "{mask}, {count} ranks");
            }
        }
    }
}

#[test]
fn maps_are_those_of_one_process() {
    let case = Case::new("causal");
    let trace = case.trace();
    // Cells that stripes and blocks do not coincide with, and one of each row.
    for (rows, cells) in
        [(0..LEN, [100, 77]), (1_001..3_003, [64, 50]), (4_000..4_040, [64, 4_690])]
    {
        for count in [1, 3] {
            let found = on(count, |ranks| {
                let (mut q, mut k) = (
                    |range| Ok::<_, ContextError>(positions(&case.q, range)),
                    |range| Ok::<_, ContextError>(positions(&case.k, range)),
                );
                let of = (rows.clone(), cells);
                microscope::maps(
                    &ranks,
                    &case.plan(),
                    Source { q: &mut q, k: &mut k, block: BLOCK },
                    of,
                    &mut |_, _| (),
                )
                .expect("maps")
            });
            for maps in found {
                let [down, across] = maps.cells();
                for (head, values) in maps.values().chunks_exact(down * across).enumerate() {
                    let map = trace
                        .map(Machine::detect(), &site(head), rows.clone(), cells)
                        .expect("a map");
                    assert_eq!([map.rows.len(), map.cols.len()], [down, across]);
                    // The other side has weights from the lse, which is about 30: rounded by 1e-6, relative to a weight.
                    for (i, (a, b)) in map.values.iter().zip(values).enumerate() {
                        assert!(
                            (a - b).abs() <= 4e-6 * a,
                            "{rows:?}, {count} ranks, cell {i}: {a} and {b}"
                        );
                    }
                }
            }
        }
    }
}

/// A sink is a key that every row has, whatever blocks the keys come in.
#[test]
fn sinks_count_once() {
    let case = Case::new("causal & window 300");
    let sinks = [0.5f32, -1.0, 3.0, 2.0];
    let plan = Plan::new(
        case.plan().problem().clone().score(Score::new().sinks(&sinks)),
        Machine::detect(),
    )
    .expect("a plan");
    let (mut q, mut k) = (
        |range| Ok::<_, ContextError>(positions(&case.q, range)),
        |range| Ok::<_, ContextError>(positions(&case.k, range)),
    );
    let found = microscope::stats(
        &Alone,
        &plan,
        Source { q: &mut q, k: &mut k, block: BLOCK },
        &mut |_, _| (),
    )
    .expect("stats");
    let [q, k] = [(&case.q, HEADS[0]), (&case.k, HEADS[1])]
        .map(|(x, heads)| View::bhsd(x, [1, heads, LEN, DIM]).expect("sizes"));
    let v = View::bhsd(&[], [1, HEADS[1], LEN, 0]).expect("sizes");
    let output = plan.forward(q, k, v).expect("an output");
    let view = AttentionView::new(&plan, q, k, &output).expect("a view");
    let whole = regard_scope::Measure::new().entropy().of(&view).expect("entropies");
    for (head, entropy) in whole.entropy.chunks_exact(LEN).enumerate() {
        let expected = entropy.iter().map(|x| f64::from(*x)).sum::<f64>() / LEN as f64;
        let entropy = found[head].stats(site(head)).entropy;
        assert!((expected - entropy).abs() < 1e-6 * expected, "{expected} and {entropy}");
    }
}
