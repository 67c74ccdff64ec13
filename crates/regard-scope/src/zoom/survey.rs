//! A walk over a whole map, strip by strip, and the coarse levels that come of it.

use super::{Place, TILE, max_level};
use crate::error::Error;
use crate::measure::Pool;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};

/// Pairs of a tile that are looked at while somebody waits: 4096 each way, about 20 ms on two cores.
const BUDGET: usize = 1 << 24;

/// The finest level that is kept: 4096 pixels each way.
const FINEST: u32 = 12;

/// The coarse levels of a head, as far as they are known.
#[derive(Debug)]
pub(super) struct Survey {
    size: [usize; 2],
    /// About how many pairs see each other.
    visible: usize,
    busy: AtomicBool,
    done: AtomicUsize,
    /// From the finest on, once all of them are known.
    levels: RwLock<Vec<Pixels>>,
}

/// The largest weight and the sum of the weights of some pixels.
pub(super) struct PixelStats {
    pub(super) max: Vec<f32>,
    pub(super) sum: Vec<f32>,
}

/// All pixels of a level.
#[derive(Debug, Default)]
struct Pixels {
    /// Down and across.
    size: [usize; 2],
    max: Vec<f32>,
    sum: Vec<f32>,
}

impl Survey {
    pub(super) fn new(size: [usize; 2], visible: usize) -> Self {
        let (busy, done) = (AtomicBool::new(false), AtomicUsize::new(0));
        Self { size, visible, busy, done, levels: RwLock::new(Vec::new()) }
    }

    /// Its finest level, and the queries or keys of a pixel there.
    fn finest(&self) -> (u32, usize) {
        let most = max_level(self.size);
        (most.min(FINEST), 1 << (most - most.min(FINEST)))
    }

    fn strips(&self) -> usize {
        self.size[0].div_ceil(self.finest().1 * TILE)
    }

    pub(super) fn is_done(&self) -> bool {
        // Where any tile is exact at once, nothing is left to do.
        self.visible <= BUDGET
            || !self.levels.read().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Of the tiles of a level every so many-th row is looked at. The same for all of them, so that none looks brighter than its
    /// neighbour, and a power of two, so that no pixel has more rows than another.
    pub(super) fn step(&self, scale: usize) -> usize {
        let (q_len, side) = (self.size[0], TILE * scale);
        // Rows near the end of a causal mask see twice as much as others do.
        let each = 2 * self.visible / q_len.max(1);
        let pairs = side.min(q_len).saturating_mul(side.min(each));
        pairs.div_ceil(BUDGET).next_power_of_two().min(scale)
    }

    /// Whether somebody is at it.
    pub(super) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Acquire) && !self.is_done()
    }

    /// From 0 to 1.
    pub(super) fn progress(&self) -> f64 {
        let all = self.strips().max(1) as f64;
        if self.is_done() { 1.0 } else { self.done.load(Ordering::Relaxed) as f64 / all }
    }

    /// Walks over all strips: `look` tells of some rows, in so many pixels down and across.
    pub(super) fn run(
        &self,
        stop: &dyn Fn() -> bool,
        look: impl Fn(Range<usize>, [usize; 2]) -> Result<PixelStats, Error>,
    ) -> Result<(), Error> {
        if self.is_done() || self.busy.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let (_, scale) = self.finest();
        let size = self.size.map(|n| n.div_ceil(scale));
        let mut finest = Pixels { size, ..Pixels::default() };
        for strip in 0..self.strips() {
            let down = TILE.min(size[0] - strip * TILE);
            let first = strip * TILE * scale;
            let found = if stop() {
                Ok(None)
            } else {
                look(first..first + down * scale, [down, size[1]]).map(Some)
            };
            let Some(found) = found.inspect_err(|_| self.give_up())? else {
                self.give_up();
                return Ok(());
            };
            finest.max.extend(found.max);
            finest.sum.extend(found.sum);
            self.done.store(strip + 1, Ordering::Relaxed);
        }
        let mut levels = vec![finest];
        while let Some(last) = levels.last().filter(|last| last.size[0].max(last.size[1]) > 1) {
            let next = last.halved();
            levels.push(next);
        }
        *self.levels.write().unwrap_or_else(PoisonError::into_inner) = levels;
        Ok(())
    }

    /// Lets somebody else begin anew.
    fn give_up(&self) {
        self.done.store(0, Ordering::Relaxed);
        self.busy.store(false, Ordering::Release);
    }

    /// The pixels of a tile, if the survey is done and has them.
    pub(super) fn tile(&self, place: &Place, pool: Pool) -> Option<Vec<f32>> {
        let levels = self.levels.read().unwrap_or_else(PoisonError::into_inner);
        let level = levels.get(usize::try_from(self.finest().0.checked_sub(place.level)?).ok()?)?;
        let from = match pool {
            Pool::Max => &level.max,
            Pool::Mean | Pool::Sum => &level.sum,
        };
        let row = |i: usize| {
            let begin = (place.first[0] + i) * level.size[1] + place.first[1];
            &from[begin..begin + place.pixels[1]]
        };
        let values: Vec<f32> = (0..place.pixels[0]).flat_map(row).copied().collect();
        Some(if pool == Pool::Mean { place.means(&values, 1) } else { values })
    }
}

impl Pixels {
    /// The next coarser level.
    fn halved(&self) -> Self {
        let size = self.size.map(|n| n.div_ceil(2));
        let mut next =
            Self { size, max: vec![0.0; size[0] * size[1]], sum: vec![0.0; size[0] * size[1]] };
        for (i, (max, sum)) in self.max.iter().zip(&self.sum).enumerate() {
            let to = i / self.size[1] / 2 * size[1] + i % self.size[1] / 2;
            next.max[to] = if max.is_nan() { *max } else { next.max[to].max(*max) };
            next.sum[to] += sum;
        }
        next
    }
}
