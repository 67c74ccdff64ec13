//! `look` and `stats` with `--mpi`: queries and keys of files that are longer than the memory of one machine.
//!
//! Each rank reads its rows of q.npy, and k.npy block after block, twice; files are not sent, every rank reads them.

use crate::args::SourceArgs;
use crate::show::progress;
use crate::source::{has_ending, labels, trace_of_arrays};
use anyhow::{Context, Result, anyhow, bail};
use regard::{Machine, Plan, Problem, Score, Shape};
use regard_ranks::microscope::{self, Source};
use regard_ranks::{Ranks, agree};
use regard_scope::{
    CellMaps, HeadStats, Labels, LayerData, NpyReader, Site, Trace, Weights, parse_mask,
};
use std::fs::File;
use std::io::BufReader;
use std::ops::Range;
use std::path::PathBuf;

/// Numbers of a block of keys: 64 MiB.
const BLOCK_NUMBERS: usize = 1 << 24;
/// Keys of a block are a multiple of this.
const BLOCK_STEP: usize = 4096;

/// Queries and keys, read in parts.
pub(crate) struct LongArrays<'a> {
    args: &'a SourceArgs,
    q: NpyReader<BufReader<File>>,
    k: NpyReader<BufReader<File>>,
}

impl<'a> LongArrays<'a> {
    pub(crate) fn open(args: &'a SourceArgs) -> Result<Self> {
        let [q, k] = args.files.as_slice() else {
            bail!("--mpi: give queries and keys, as in q.npy k.npy")
        };
        if !has_ending(q, "npy") || !has_ending(k, "npy") {
            bail!("--mpi: only for queries and keys in .npy files; leave it out");
        }
        if args.value_weighted {
            bail!("--value-weighted: .npy files have no norms of values; leave it out");
        }
        let open = |path: &PathBuf| {
            let file = File::open(path).map_err(anyhow::Error::from);
            let reader = file.and_then(|file| Ok(NpyReader::new(BufReader::new(file))?));
            reader.with_context(|| path.display().to_string())
        };
        Ok(Self { args, q: open(q)?, k: open(k)? })
    }

    pub(crate) fn heads(&self) -> usize {
        self.q.shape()[0]
    }

    /// The numbers of all heads, on every rank.
    pub(crate) fn stats(&mut self, ranks: &dyn Ranks) -> Result<Vec<HeadStats>> {
        let heads = 0..self.heads();
        let sums = self.run(ranks, heads, |plan, source, progress| {
            microscope::stats(ranks, plan, source, progress)
        })?;
        let site = |head| Site { layer: 0, kind: "attention".into(), head };
        Ok(sums.iter().enumerate().map(|(head, sums)| sums.stats(site(head))).collect())
    }

    /// A trace of maps of one head or all of them, with the largest weight in each of at most `cells x cells` cells.
    pub(crate) fn trace(
        &mut self,
        ranks: &dyn Ranks,
        (head, rows): (Option<usize>, Option<Range<usize>>),
        cells: usize,
    ) -> Result<Trace> {
        let ([heads, q_len, _], [_, k_len, _]) = (self.q.shape(), self.k.shape());
        if let Some(head) = head.filter(|head| *head >= heads) {
            bail!("--head {head}: heads 0 to {} are there", heads - 1);
        }
        let rows = rows.unwrap_or(0..q_len);
        if rows.start > rows.end || rows.end > q_len {
            bail!("--rows {}..{}: rows 0..{q_len} are there", rows.start, rows.end);
        }
        let [q_labels, k_labels] = labels(self.args, [q_len, k_len])?;
        let own = head.map_or(0..heads, |head| head..head + 1);
        let maps: CellMaps = self.run(ranks, own.clone(), |plan, source, progress| {
            microscope::maps(ranks, plan, source, (rows.clone(), [cells; 2]), progress)
        })?;
        let [down, across] = maps.cells();
        // Heads that were not asked for are empty, so that the others keep their numbers.
        let mut values = vec![0.0; heads * down * across];
        values[own.start * down * across..][..maps.values().len()].copy_from_slice(maps.values());
        let labels =
            [(q_labels, rows, down), (k_labels, 0..k_len, across)].map(|(all, range, cells)| {
                Labels::new(all.title.clone(), all.cells(range, cells).labels)
            });
        let data = LayerData::Weights(Weights { values, shape: [heads, down, across] });
        Ok(trace_of_arrays(self.args, labels, data))
    }

    /// Runs a computation over some heads.
    fn run<T>(
        &mut self,
        ranks: &dyn Ranks,
        heads: Range<usize>,
        work: impl FnOnce(
            &Plan<'static, f32>,
            Source<'_, anyhow::Error>,
            &mut dyn FnMut(usize, usize),
        ) -> Result<T>,
    ) -> Result<T> {
        let ([q_heads, q_len, dim], [k_heads, k_len, k_dim]) = (self.q.shape(), self.k.shape());
        agree(
            ranks,
            "the shape of the arrays",
            &format!("{:?}", [self.q.shape(), self.k.shape()]),
        )?;
        if k_heads == 0 || q_heads % k_heads != 0 {
            bail!(
                "heads: q has {q_heads}, k has {k_heads}; the first must be a multiple of the second"
            );
        }
        let group = q_heads / k_heads;
        let kv_heads = heads.start / group..(heads.end - 1) / group + 1;
        let q = Shape { batch: 1, heads: heads.len(), len: q_len, dim };
        let k = Shape { heads: kv_heads.len(), len: k_len, dim: k_dim, ..q };
        let mask = self.args.mask.as_deref().unwrap_or("full");
        let mask = parse_mask(mask).map_err(|e| anyhow!("--mask: {e}"))?;
        let score = self.args.scale.into_iter().fold(Score::new(), Score::scale);
        let problem = Problem::of_shapes(q, k, Shape { dim: 0, ..k }).mask(mask).score(score);
        let plan = Plan::new(problem, Machine::detect())?;
        let block = BLOCK_NUMBERS / (k.heads * k.dim) / BLOCK_STEP * BLOCK_STEP;
        let (q_file, k_file) = (&mut self.q, &mut self.k);
        let source = Source {
            q: &mut |rows| Ok(q_file.positions(heads.clone(), rows)?),
            k: &mut |keys| Ok(k_file.positions(kv_heads.clone(), keys)?),
            block: block.max(BLOCK_STEP),
        };
        if ranks.rank() == 0 {
            work(&plan, source, &mut progress("blocks of keys")?)
        } else {
            work(&plan, source, &mut |_, _| ())
        }
    }
}
