//! What rows choose before there are weights, where the normalizer is not the softmax.

use super::{Core, Grid, lane_rows};
use crate::description::normalizer::{NONE, Normalizer, Selection};
use crate::description::problem::Dims;
use crate::error::Error;
use crate::kernel::block_loop::{Call, Tiling};
use crate::kernel::select::{Scratch, Select, Target};
use crate::machine::memory::filled;
use crate::machine::run::run;
use crate::machine::simd::Number;
use crate::tensor::view::TileHeads;

impl<N: Number> Core<'_, N> {
    /// What each row chooses.
    pub(crate) fn select(&self, call: Call<'_, N>) -> Result<Selection<N>, Error> {
        let problem = self.problem();
        let (rows, most) = (problem.rows(), problem.normalizer.most(problem.dims().k_len));
        let sparse = problem.normalizer == Normalizer::Sparsemax;
        let numbers = |n| filled(N::zero(), &[n]);
        let (mut keys, mut thresholds) = (filled(NONE, &[rows, most])?, numbers(rows)?);
        let mut supports = numbers(if sparse { rows } else { 0 })?;
        if rows > 0 {
            self.select_into(call, &mut keys, &mut thresholds, &mut supports)?;
        }
        Ok(Selection { most, keys, thresholds, supports })
    }

    fn select_into(
        &self,
        call: Call<'_, N>,
        keys: &mut [usize],
        thresholds: &mut [N],
        supports: &mut [N],
    ) -> Result<(), Error> {
        let problem = self.problem();
        let Dims { batch, heads, .. } = problem.dims();
        let (rows, sparse) = (problem.rows(), !supports.is_empty());
        let (keys, thresholds) =
            (self.by_row(keys, keys.len() / rows)?, self.by_row(thresholds, 1)?);
        let supports = self.by_row(supports, usize::from(sparse))?;
        // As forward has them: what a row chooses must not depend on other items.
        let tiling = |item| {
            let q_len = problem.q_len(item);
            Tiling { q_len, rows: lane_rows(problem, q_len), stride: 1 }
        };
        let grid = Grid::new(batch, heads.q, problem.q_offsets().is_none(), tiling);
        run(
            self.machine().threads,
            grid.count(),
            || Scratch::new(problem, self.rows),
            |scratch, i| {
                let (item, head, rows) = grid.at(i);
                let scope = problem.scope(item, head);
                let one = || TileHeads::one(head);
                // SAFETY: `Tiling::tile` gives each row of a head to one tile and `Grid::at` each tile to one task, so nobody else
                // holds these rows; all of them have values from the start (`choose`).
                let to = unsafe {
                    let supports = sparse.then(|| supports.tile(item, one(), rows));
                    Target {
                        keys: keys.tile(item, one(), rows),
                        thresholds: thresholds.tile(item, one(), rows),
                        supports,
                    }
                };
                Select { call, scope, rows, to, scratch }.run(self.machine().isa);
            },
        );
        Ok(())
    }
}
