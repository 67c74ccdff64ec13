//! Many texts in batches of like length.

use crate::error::Error;

/// How much is worked on at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch {
    /// Rows at most.
    pub(crate) rows: usize,
    /// Rows times the longest of them at most, unless one alone is longer.
    pub(crate) positions: usize,
}

/// Positions of a batch: at a thousand numbers for each, 128 MB.
pub(crate) const POSITIONS: usize = 1 << 15;

/// Works through all in batches of like length; results are in the order of what was given.
pub(crate) fn in_batches<T>(
    lengths: &[usize],
    Batch { rows, positions }: Batch,
    mut work: impl FnMut(&[usize]) -> Result<Vec<T>, Error>,
) -> Result<Vec<T>, Error> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    let longest = lengths.iter().copied().max().unwrap_or(0);
    if lengths.len() > rows || lengths.len().saturating_mul(longest) > positions {
        order.sort_by_key(|i| lengths[*i]);
    }
    let (mut all, mut rest) = (Vec::with_capacity(order.len()), order.as_slice());
    while !rest.is_empty() {
        let fits = |n: &usize| (n + 1).saturating_mul(lengths[rest[*n]]) <= positions;
        let n = (0..rest.len().min(rows)).take_while(fits).count().max(1);
        let (some, after) = rest.split_at(n);
        all.extend(some.iter().copied().zip(work(some)?));
        rest = after;
    }
    all.sort_by_key(|(i, _)| *i);
    Ok(all.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_their_order_whatever_shares_a_batch() {
        let lengths = [5, 1, 4, 1, 3, 9, 2];
        let mut batches: Vec<Vec<usize>> = Vec::new();
        let found = in_batches(&lengths, Batch { rows: 3, positions: 100 }, |some| {
            batches.push(some.to_vec());
            Ok(some.iter().map(|i| 10 * i).collect())
        });
        assert_eq!(found, Ok(vec![0, 10, 20, 30, 40, 50, 60]));
        assert_eq!(batches, [vec![1, 3, 6], vec![4, 2, 0], vec![5]]);
        batches.clear();
        let found = in_batches(&lengths, Batch { rows: 9, positions: 8 }, |some| {
            batches.push(some.to_vec());
            Ok(some.to_vec())
        });
        assert_eq!(found, Ok((0..7).collect()));
        assert_eq!(batches, [vec![1, 3, 6], vec![4, 2], vec![0], vec![5]]);
    }
}
