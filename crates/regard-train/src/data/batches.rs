//! Batches: which examples are learned from together, and in which order. All of it follows from the seed and the epoch.

use crate::error::Error;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// So many batches are sorted at a time: enough for neighbours to be alike, and few enough for epochs to differ.
const POOL: usize = 100;

/// Examples of similar length side by side, as many as a limit of tokens allows.
///
/// ```
/// # use regard_train::data::Batches;
/// let batches = Batches::new(&[[3, 4], [9, 9], [3, 5]], 18, 1)?;
/// let mut epoch = batches.epoch(0);
/// epoch.iter_mut().for_each(|batch| batch.sort());
/// epoch.sort();
/// assert_eq!(epoch, [vec![0, 2], vec![1]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Batches {
    lengths: Vec<[usize; 2]>,
    tokens: usize,
    seed: u64,
}

impl Batches {
    /// For examples whose sources and targets have these `lengths`; one-sided ones have a source of 0. A batch, filled up to its
    /// longest source and its longest target, has `tokens` tokens or fewer; an example that has more stands alone.
    pub fn new(lengths: &[[usize; 2]], tokens: usize, seed: u64) -> Result<Self, Error> {
        if tokens == 0 {
            return Err(Error::setting("tokens", "0; a batch must have room for 1 or more"));
        }
        Ok(Self { lengths: lengths.into(), tokens, seed })
    }

    /// The batches of an epoch, each a list of examples. Every example is in exactly one.
    #[must_use]
    pub fn epoch(&self, epoch: u64) -> Vec<Vec<usize>> {
        let mut chance = chance(self.seed, epoch);
        let mut order: Vec<usize> = (0..self.lengths.len()).collect();
        shuffle(&mut order, &mut chance);
        let mut batches = Vec::new();
        let mut rest = order.as_mut_slice();
        while !rest.is_empty() {
            let (pool, after) = rest.split_at_mut(self.pool(rest));
            self.cut(pool, &mut batches);
            rest = after;
        }
        shuffle(&mut batches, &mut chance);
        batches
    }

    /// How many batches an epoch has. They are cut for it.
    #[must_use]
    pub fn len(&self, epoch: u64) -> usize {
        self.epoch(epoch).len()
    }

    /// How many of the examples fill a pool.
    fn pool(&self, examples: &[usize]) -> usize {
        let mut room = self.tokens.saturating_mul(POOL);
        let fits = |example: &&usize| {
            let [source, target] = self.lengths[**example];
            let left = room.checked_sub(source.saturating_add(target).max(1));
            room = left.unwrap_or(0);
            left.is_some()
        };
        examples.iter().take_while(fits).count().max(1)
    }

    fn cut(&self, pool: &mut [usize], batches: &mut Vec<Vec<usize>>) {
        // Targets go up for one length of the source and down for the next, so that there is no leap between the two. The sort is
        // stable: equals stay shuffled.
        pool.sort_by_key(|example| {
            let [source, target] = self.lengths[*example];
            (source, if source % 2 == 0 { target } else { usize::MAX - target })
        });
        let mut batch = Vec::new();
        let mut longest = [0, 0];
        for example in pool {
            let own = self.lengths[*example];
            let both = [longest[0].max(own[0]), longest[1].max(own[1])];
            let width = both[0].saturating_add(both[1]).max(1);
            if !batch.is_empty() && width.saturating_mul(batch.len() + 1) > self.tokens {
                batches.push(std::mem::take(&mut batch));
                longest = own;
            } else {
                longest = both;
            }
            batch.push(*example);
        }
        batches.push(batch);
    }
}

/// Where windows of `context + 1` tokens begin in a text of `len` tokens, `rows` of them a batch, the last batch with what is
/// left. Windows share one token: the last of one is foretold, the first of the next foretells. Where the first begins is another
/// place in each epoch; before it and after the last, less than a window is left out. A text shorter than a window has none.
#[must_use]
pub fn windows(len: usize, context: usize, seed: u64, epoch: u64, rows: usize) -> Vec<Vec<usize>> {
    let Some(places) = len.checked_sub(context).filter(|places| *places > 0 && context > 0) else {
        return Vec::new();
    };
    let mut chance = chance(seed, epoch);
    let first = below(places.min(context), &mut chance);
    let mut starts: Vec<usize> = (first..places).step_by(context).collect();
    shuffle(&mut starts, &mut chance);
    starts.chunks(rows.max(1)).map(<[usize]>::to_vec).collect()
}

fn chance(seed: u64, epoch: u64) -> ChaCha8Rng {
    let mut chance = ChaCha8Rng::seed_from_u64(seed);
    chance.set_stream(epoch);
    chance
}

/// A number below `limit`.
fn below(limit: usize, chance: &mut ChaCha8Rng) -> usize {
    let scaled = (u128::from(chance.next_u64()) * limit as u128) >> 64;
    usize::try_from(scaled).expect("it is below `limit`")
}

fn shuffle<T>(items: &mut [T], chance: &mut ChaCha8Rng) {
    for last in (1..items.len()).rev() {
        items.swap(last, below(last + 1, chance));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn sorted(batches: &[Vec<usize>]) -> Vec<usize> {
        let mut all = batches.concat();
        all.sort_unstable();
        all
    }

    fn examples() -> impl Strategy<Value = Vec<[usize; 2]>> {
        vec([0..40_usize, 0..40_usize], 0..600)
    }

    proptest! {
        #[test]
        fn every_example_is_there_once(lengths in examples(), tokens in 1..300_usize, seed: u64, epoch: u64) {
            let batches = Batches::new(&lengths, tokens, seed).unwrap();
            let found = batches.epoch(epoch);
            prop_assert_eq!(sorted(&found), (0..lengths.len()).collect::<Vec<_>>());
            prop_assert_eq!(found.len(), batches.len(epoch));
            prop_assert!(found.iter().all(|batch| !batch.is_empty()));
        }

        #[test]
        fn no_batch_has_more_than_it_may(lengths in examples(), tokens in 1..300_usize, seed: u64) {
            for batch in Batches::new(&lengths, tokens, seed).unwrap().epoch(0) {
                let longest = |side: usize| batch.iter().map(|i| lengths[*i][side]).max().unwrap();
                prop_assert!(batch.len() == 1 || batch.len() * (longest(0) + longest(1)) <= tokens);
            }
        }

        #[test]
        fn the_order_follows_from_seed_and_epoch(seed: u64, epoch: u64) {
            let lengths: Vec<_> = (0..300).map(|i| [i % 7, 1 + i % 11]).collect();
            let batches = |seed| Batches::new(&lengths, 100, seed).unwrap();
            prop_assert_eq!(batches(seed).epoch(epoch), batches(seed).epoch(epoch));
            prop_assert_ne!(batches(seed).epoch(epoch), batches(seed).epoch(epoch ^ 1));
            prop_assert_ne!(batches(seed).epoch(epoch), batches(seed ^ 1).epoch(epoch));
        }

        #[test]
        fn windows_cover_a_text_without_meeting(
            len in 0..500_usize, context in 0..40_usize, seed: u64, epoch: u64, rows in 0..9_usize,
        ) {
            let found = windows(len, context, seed, epoch, rows);
            prop_assert_eq!(&found, &windows(len, context, seed, epoch, rows));
            prop_assert!(found.iter().all(|batch| (1..=rows.max(1)).contains(&batch.len())));
            let short = found.iter().filter(|batch| batch.len() < rows).count();
            prop_assert!(short <= 1);
            let starts = sorted(&found);
            prop_assert_eq!(starts.is_empty(), context == 0 || len <= context);
            if let (Some(first), Some(last)) = (starts.first(), starts.last()) {
                prop_assert!(*first < context && last + context < len);
                prop_assert!(len - (last + context + 1) < context);
                prop_assert!(starts.windows(2).all(|two| two[1] - two[0] == context));
            }
        }
    }

    #[test]
    fn windows_begin_elsewhere_in_each_epoch() {
        let firsts = (0..64).map(|epoch| sorted(&windows(1000, 16, 1, epoch, 4))[0]);
        assert_eq!(firsts.collect::<BTreeSet<_>>().len(), 16);
    }

    #[test]
    fn orders_are_drawn_evenly() {
        let mut seen = std::collections::BTreeMap::new();
        for epoch in 0..6000 {
            let mut items = [0, 1, 2];
            shuffle(&mut items, &mut chance(7, epoch));
            *seen.entry(items).or_insert(0) += 1;
        }
        assert_eq!(seen.len(), 6);
        assert!(seen.values().all(|count| (850..1150).contains(count)), "{seen:?}");
    }

    #[test]
    fn a_run_goes_on_as_it_began() {
        // The order of a run that is taken up again must not hang on the version: these numbers stay.
        let lengths: Vec<_> = (0..12).map(|i| [1 + i % 3, 2 + i % 2]).collect();
        let epoch = Batches::new(&lengths, 16, 1).unwrap().epoch(3);
        assert_eq!(epoch, [vec![5, 2], vec![4, 10, 1], vec![8], vec![9, 3, 0, 6], vec![7, 11]]);
    }

    #[test]
    fn a_batch_without_room_is_refused() {
        let message = Batches::new(&[[1, 1]], 0, 1).unwrap_err().to_string();
        assert!(message.contains("tokens: 0"), "{message}");
        assert!(Batches::new(&[], 1, 1).unwrap().epoch(0).is_empty());
    }
}
