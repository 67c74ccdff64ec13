//! The visible keys of a tile of rows: ranges of keys, each with the set of rows for which it is visible.

use crate::tensor::index::{LaneSet, RowTile, lane_range};
use std::ops::Range;

/// A range of keys visible to the same set of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) keys: Range<usize>,
    pub(crate) lanes: LaneSet,
}

/// Appends a range. Drops it if it is empty; extends the last run if the range continues it with the same rows.
#[inline(always)]
pub(super) fn push(out: &mut Vec<Run>, keys: Range<usize>, lanes: LaneSet) {
    if keys.start >= keys.end || lanes == 0 {
        return;
    }
    match out.last_mut() {
        Some(last) if last.keys.end == keys.start && last.lanes == lanes => {
            last.keys.end = keys.end;
        }
        _ => out.push(Run { keys, lanes }),
    }
}

/// Runs of one range per row. Invariant: starts and ends do not decrease from one row to the next.
#[inline(always)]
pub(super) fn monotone(rows: RowTile, out: &mut Vec<Run>, range: impl Fn(usize) -> Range<usize>) {
    // Entries past the last row are sentinels.
    let (mut starts, mut ends) = ([usize::MAX; 129], [usize::MAX; 129]);
    for lane in 0..rows.count {
        Range { start: starts[lane], end: ends[lane] } = range(rows.row(lane));
    }
    let (mut entered, mut left) = (0, 0); // rows whose start, or end, lies at or before `at`
    let mut at = starts[0];
    while left < rows.count {
        while entered < rows.count && starts[entered] <= at {
            entered += 1;
        }
        while left < entered && ends[left] <= at {
            left += 1;
        }
        let next = if left < entered { starts[entered].min(ends[left]) } else { starts[entered] };
        if left < rows.count {
            push(out, at..next, lane_range(left, entered));
        }
        at = next;
    }
}

/// Runs of arbitrary (range, lane) entries, which may overlap.
pub(super) fn from_ranges(ranges: &mut [(Range<usize>, usize)], out: &mut Vec<Run>) {
    // Ranges of one row may overlap: count the open ranges of each row.
    let mut events: Vec<(usize, i32, usize)> = ranges
        .iter()
        .filter(|(r, _)| r.start < r.end)
        .flat_map(|(r, lane)| [(r.start, 1, *lane), (r.end, -1, *lane)])
        .collect();
    events.sort_unstable();
    let mut inside = [0i32; 128];
    let (mut lanes, mut at) = (0 as LaneSet, 0);
    for (key, change, lane) in events {
        push(out, at..key, lanes);
        at = key;
        inside[lane] += change;
        let bit = lane_range(lane, lane + 1);
        lanes = if inside[lane] > 0 { lanes | bit } else { lanes & !bit };
    }
}

/// Appends keys in ascending order, each for the union of the rows that `lanes` makes of its entries.
pub(super) fn push_keys(
    keys: &mut [(usize, usize)],
    lanes: impl Fn(usize) -> LaneSet,
    out: &mut Vec<Run>,
) {
    keys.sort_unstable();
    for same in keys.chunk_by(|a, b| a.0 == b.0) {
        let rows = same.iter().fold(0, |rows, (_, i)| rows | lanes(*i));
        push(out, same[0].0..same[0].0 + 1, rows);
    }
}

/// Merges two lists; `join` combines the row sets of each key.
pub(super) fn combine(
    a: &[Run],
    b: &[Run],
    out: &mut Vec<Run>,
    join: fn(LaneSet, LaneSet) -> LaneSet,
) {
    let (mut i, mut j, mut at) = (0, 0, 0);
    while i < a.len() || j < b.len() {
        // The row set of each list at key `at`, and the key where it changes.
        let look = |list: &[Run], n: usize| match list.get(n) {
            None => (0, usize::MAX),
            Some(s) if at < s.keys.start => (0, s.keys.start),
            Some(s) => (s.lanes, s.keys.end),
        };
        let ((x, x_end), (y, y_end)) = (look(a, i), look(b, j));
        let end = x_end.min(y_end);
        push(out, at..end, join(x, y));
        at = end;
        i += usize::from(i < a.len() && a[i].keys.end <= at);
        j += usize::from(j < b.len() && b[j].keys.end <= at);
    }
}
