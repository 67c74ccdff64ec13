//! Attention statistics compared with the reference, for every row of the table.

use crate::cases::{AttentionKind, Case, Dtype};
use crate::close::{Ratio, Rounding, epsilon, largest, narrowing, share, stored, wide};
use crate::data::Data;
use crate::run::{CheckedCase, Failure, Report, Runs, everywhere, same_bits};
use regard::problem::Normalizer;
use regard::reference::{self, RowWeights};
use regard::{
    AttentionView, Element, Error, Isa, Machine, Mask, Number, Output, Plan, Problem, bf16, f16,
};
use regard_scope::{Measure, Pool, PooledMap};
use std::ops::Range;

/// Runs the rows of `cases` with exact attention, and compares the statistics of their weights.
#[must_use]
pub fn check_statistics(cases: &[Case]) -> Report {
    let isas = Isa::available();
    let exact: Vec<&Case> =
        cases.iter().filter(|case| case.attention == AttentionKind::Exact).collect();
    let names = isas.iter().map(|isa| isa.name()).collect();
    let mut report = Report { rows: exact.len(), isas: names, ..Report::default() };
    for case in exact {
        let failures = &mut report.failures;
        match case.dtype {
            Dtype::F32 => run::<f32>(case, &isas, failures),
            Dtype::F64 => run::<f64>(case, &isas, failures),
            Dtype::F16 => run::<f16>(case, &isas, failures),
            Dtype::Bf16 => run::<bf16>(case, &isas, failures),
        };
    }
    report
}

fn run<E: Element>(case: &Case, isas: &[Isa], failures: &mut Vec<Failure>) -> Ratio {
    let data = Data::new(case);
    everywhere(&Statistics::<E>::new(case, &data), isas, failures)
}

/// Cells of a pooled map, and `k` of the top-k keys: fewer and more than most rows have.
const CELLS: [usize; 2] = [5, 7];
const TOP: usize = 4;

/// Masks whose mass is measured.
fn masks() -> [Mask; 2] {
    [Mask::full().window(3), Mask::blocks(16).or(Mask::dilated(5))]
}

/// Spans whose mass is measured: one inside of a tile, one that begins in another tile and reaches beyond the last key.
const SPANS: [Range<usize>; 2] = [1..5, 3..200];

/// Queries and keys with the same label: every third.
fn label(position: usize) -> u32 {
    [7, 8, 9][position % 3]
}

/// Names of statistics and their values.
type NamedValues = Vec<(&'static str, Vec<f64>)>;

struct Statistics<'d, E: Element> {
    case: &'d Case,
    data: &'d Data<E>,
    problem: Problem<'d, E>,
}

impl<'d, E: Element> Statistics<'d, E> {
    fn new(case: &'d Case, data: &'d Data<E>) -> Self {
        Self { case, data, problem: data.problem(case) }
    }

    /// The statistics by definition, from the weights of each row.
    fn defined<N: Number>(&self, problem: &Problem<'_, E>, round: fn(N) -> N) -> NamedValues {
        let (dims, masks) = (self.problem.dims(), masks());
        let rows = reference::weights::<N, E>(problem, self.data.inputs(), &masks, round);
        let each = |of: &dyn Fn(&RowWeights<N>) -> N| rows.iter().map(|r| of(r).to_f64()).collect();
        let [mut weights, mut tops, mut col_sum] = [const { Vec::new() }; 3];
        let mut pools = [const { Vec::new() }; 3];
        for head in 0..dims.batch * dims.heads.q {
            let head = &rows[head * dims.q_len..][..dims.q_len];
            let mut map = vec![N::zero(); dims.q_len * dims.k_len];
            for row in head {
                for (key, a, _) in &row.keys {
                    map[row.at[2] * dims.k_len + key] = *a;
                }
                let mut top: Vec<f64> = row.keys.iter().map(|(_, a, _)| wide(*a)).collect();
                top.sort_by(|a, b| b.total_cmp(a));
                tops.extend((0..TOP.min(dims.k_len)).map(|i| top.get(i).copied().unwrap_or(0.0)));
            }
            let by_key = |key| (0..dims.q_len).map(|i| map[i * dims.k_len + key]).sum::<N>();
            col_sum.extend((0..dims.k_len).map(|key| by_key(key).to_f64()));
            for (pool, to) in [Pool::Mean, Pool::Max, Pool::Sum].into_iter().zip(&mut pools) {
                to.extend(pooled(&map, [dims.q_len, dims.k_len], pool));
            }
            weights.extend(map.iter().map(|a| wide(*a)));
        }
        let [mean, max, sum] = pools;
        let mass_of = |row: &RowWeights<N>, is_in: &dyn Fn(usize) -> bool| {
            row.keys.iter().filter(|(key, ..)| is_in(*key)).map(|(_, a, _)| *a).sum::<N>()
        };
        let mass_of_span = |i: usize| each(&|row| mass_of(row, &|key| SPANS[i].contains(&key)));
        let same = |row: &RowWeights<N>| mass_of(row, &|key| label(key) == label(row.at[2]));
        vec![
            ("weights", weights),
            ("top", tops),
            ("entropy", each(&RowWeights::entropy)),
            ("mean distance", each(&RowWeights::mean_distance)),
            ("column sums", col_sum),
            ("pooled mean", mean),
            ("pooled max", max),
            ("pooled sum", sum),
            ("mass of a window", each(&|row| row.mass(0))),
            ("mass of blocks", each(&|row| row.mass(1))),
            ("mass of the sink", each(&|row| row.sink.map_or(N::zero(), |(a, _)| a))),
            ("mass of a span", mass_of_span(0)),
            ("mass of a later span", mass_of_span(1)),
            ("mass of matches", each(&same)),
        ]
    }
}

/// Pools a map: index `i` falls into cell `i cells / n`.
fn pooled<N: Number>(map: &[N], [rows, keys]: [usize; 2], pool: Pool) -> Vec<f64> {
    let [down, across] = [CELLS[0].min(rows), CELLS[1].min(keys)];
    let mut cells = vec![(N::zero(), N::zero(), 0); down * across];
    for (i, a) in map.iter().enumerate() {
        let cell = (i / keys * down / rows) * across + i % keys * across / keys;
        let (sum, most, n) = cells[cell];
        cells[cell] = (sum + *a, most.max(*a), n + 1);
    }
    let of_cell = |(sum, most, n): (N, N, usize)| match pool {
        Pool::Mean => sum / N::of_len(n),
        Pool::Max => most,
        Pool::Sum => sum,
    };
    cells.into_iter().map(|cell| of_cell(cell).to_f64()).collect()
}

impl<E: Element> CheckedCase for Statistics<'_, E> {
    type Output = (Output<E>, NamedValues);

    fn name(&self) -> String {
        format!("look at {}", self.case)
    }

    fn runs(&self, isa: Isa) -> Runs {
        Runs::of(self.case, &self.problem, isa)
    }

    fn call(&self, machine: Machine) -> Result<Self::Output, Error> {
        let (q, k, v) = self.data.inputs();
        let plan = Plan::new(self.problem.clone(), machine)?;
        let output = plan.forward(q, k, v)?;
        let view = AttentionView::new(&plan, q, k, &output)?;
        let all = Measure::new().entropy().mean_distance().col_sum().top_k(TOP).sink_mass();
        let all = masks().into_iter().fold(all, Measure::mass);
        let dims = self.problem.dims();
        let [rows, keys] =
            [dims.q_len, dims.k_len].map(|n| (0..n).map(label).collect::<Vec<u32>>());
        let all = all.span_mass(SPANS).match_mass(&rows, &keys);
        let found = all.pooled(CELLS[0], CELLS[1], Pool::Max).of(&view)?;
        let map =
            |pooled: Vec<PooledMap<E::Num>>| pooled.into_iter().flat_map(|p| p.values).collect();
        let pooled = |pool| {
            let found = Measure::new().pooled(CELLS[0], CELLS[1], pool).of(&view)?;
            Ok::<_, Error>(map(found.pooled))
        };
        let top = found.top;
        let wide = |xs: Vec<E::Num>| xs.into_iter().map(wide).collect::<Vec<f64>>();
        let tops = (0..top.rows()).flat_map(|row| {
            let missing = TOP.min(dims.k_len) - top.keys(row).len();
            top.weights(row).iter().copied().chain(vec![E::Num::default(); missing])
        });
        let [window, blocks] = <[_; 2]>::try_from(found.masses).unwrap_or_default();
        let [span, later] = <[_; 2]>::try_from(found.spans).unwrap_or_default();
        let seen = vec![
            ("weights", wide(view.tile(0..dims.q_len, 0..dims.k_len)?)),
            ("top", wide(tops.collect())),
            ("entropy", wide(found.entropy)),
            ("mean distance", wide(found.mean_distance)),
            ("column sums", wide(found.col_sum)),
            ("pooled mean", wide(pooled(Pool::Mean)?)),
            ("pooled max", wide(map(found.pooled))),
            ("pooled sum", wide(pooled(Pool::Sum)?)),
            ("mass of a window", wide(window)),
            ("mass of blocks", wide(blocks)),
            ("mass of the sink", wide(found.sink_mass)),
            ("mass of a span", wide(span)),
            ("mass of a later span", wide(later)),
            ("mass of matches", wide(found.matches.into_iter().flatten().collect())),
        ];
        Ok((output, seen))
    }

    fn judge(&self, (output, seen): &Self::Output) -> Result<(Ratio, &'static str), String> {
        let chosen = output.selection.as_ref().map(|choice| self.problem.with_selection(choice));
        let problem = chosen.as_ref().unwrap_or(&self.problem);
        let exact = self.defined::<f64>(problem, |x| x);
        let plain = self.defined::<E::Num>(problem, stored::<E>);
        let Rounding { weight, log, .. } = Rounding::new(problem, self.data.inputs());
        // Scores are computed twice, not always in the order of the forward pass, which adds the rounding error of a dot
        // product. For half-precision dtypes the forward pass may keep fewer bits of a weight than separate operations do.
        let twice = 2.0 + (problem.dims().qk_dim as f64).sqrt() / 4.0;
        let weight = weight * twice + narrowing::<E>();
        // Sparsemax weights are differences of scores, so small weights have the same absolute error as large ones.
        let least = if self.case.normalizer == Normalizer::Sparsemax { 1.0 } else { 0.0 };
        let mut worst = (0.0, "weights");
        let sink = exact.iter().find(|(name, _)| *name == "mass of the sink");
        let sink = sink.map_or(Vec::new(), |(_, mass)| mass.clone());
        for (((name, exact), (_, plain)), (_, ours)) in exact.iter().zip(&plain).zip(seen) {
            if exact.len() != ours.len() {
                return Err(format!("{} of {name} instead of {}", ours.len(), exact.len()));
            }
            let size = largest(exact.iter().copied()).max(least);
            // Sums over weights have the relative error of the weights. The entropy also has that of their logarithms, a
            // mean has it twice.
            let steps = match *name {
                "entropy" => 2.0 * weight * (1.0 + size) + log,
                "mean distance" => 2.0 * weight * size,
                _ => weight * size,
            };
            let plain = largest(exact.iter().zip(plain).map(|(a, b)| a - b));
            // Weights below 2^-64 of the largest of their row are 0 (ADR 0016): what is left of the sums of far keys.
            let nothing = (self.problem.dims().k_len as f64) * 2f64.powi(-64);
            let bound = 2.0 * plain + steps + epsilon::<E::Num>() * size + nothing;
            // If a sink takes almost all of the mass, the weights of the keys are negligible, and so is their mean
            // distance.
            let nothing_left = |row: usize| {
                *name == "mean distance" && sink.get(row).is_some_and(|mass| *mass > 1.0 - 1e-9)
            };
            let rows = exact.iter().zip(ours).enumerate().filter(|(row, _)| !nothing_left(*row));
            for (_, (exact, ours)) in rows {
                let ratio = share(*ours, *exact, bound);
                if ratio > worst.0 {
                    worst = (ratio, name);
                }
            }
        }
        Ok((Ratio { out: worst.0, ..Ratio::default() }, worst.1))
    }

    fn same((a, seen): &Self::Output, (b, other): &Self::Output) -> bool {
        let bits = |seen: &NamedValues| -> Vec<u64> {
            seen.iter().flat_map(|(_, xs)| xs.iter().map(|x| x.to_bits())).collect()
        };
        same_bits(a, b) && bits(seen) == bits(other)
    }
}
