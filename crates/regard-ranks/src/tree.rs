//! Sums of parts that are made on different ranks, in an order that follows from the number of parts alone.
//!
//! Parts `0..n` are the leaves of a binary tree: two neighbours of the same size, of which the first begins at a multiple of both,
//! make a node of twice the size; what is left at the end is added from the right. A rank with the leaves `a..b` adds what can
//! be added among them, and the rank that gets the [`nodes`] of all ranks adds the rest: the same additions in any case.

use std::ops::Range;

/// Leaves that were added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// The first of them.
    pub start: usize,
    /// How many; a power of two.
    pub size: usize,
}

/// Adds `&[f32]` lists as a balanced tree. Holds at most log2(leaves) + 1 lists for an aligned run of leaves, and twice that for any.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tree {
    parts: Vec<(Node, Vec<f32>)>,
}

impl Tree {
    /// Adds the sum of a node, which must be the next one.
    pub fn push(&mut self, mut node: Node, mut sum: Vec<f32>) {
        while let Some((left, _)) = self.parts.last()
            && left.size == node.size
            && left.start.is_multiple_of(2 * node.size)
        {
            let (left, mut total) = self.parts.pop().expect("it was the last");
            add(&mut total, &sum);
            sum = total;
            node = Node { start: left.start, size: 2 * node.size };
        }
        self.parts.push((node, sum));
    }

    /// The sums as far as they can be added among those that are here: those of [`nodes`].
    #[must_use]
    pub fn parts(&self) -> &[(Node, Vec<f32>)] {
        &self.parts
    }

    /// The sum of all leaves; none is no list.
    #[must_use]
    pub fn sum(mut self) -> Option<Vec<f32>> {
        let (_, mut sum) = self.parts.pop()?;
        while let Some((_, mut left)) = self.parts.pop() {
            add(&mut left, &sum);
            sum = left;
        }
        Some(sum)
    }
}

/// What is left in a [`Tree`] that got these leaves.
#[must_use]
pub fn nodes(leaves: Range<usize>) -> Vec<Node> {
    let mut found = vec![];
    let mut start = leaves.start;
    while start < leaves.end {
        let aligned = if start == 0 { usize::MAX } else { 1 << start.trailing_zeros() };
        let room = 1 << (leaves.end - start).ilog2();
        let size = aligned.min(room);
        found.push(Node { start, size });
        start += size;
    }
    found
}

fn add(total: &mut [f32], more: &[f32]) {
    for (total, more) in total.iter_mut().zip(more) {
        *total += more;
    }
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "numbers of ranks and parts are small")]
mod tests {
    use super::*;
    use crate::ranks::share;

    /// A number whose sums depend on their order.
    fn leaf(i: usize) -> Vec<f32> {
        vec![(i as f32 + 0.1).sin() * 10f32.powi(i as i32 % 7), 1.0 / (i as f32 + 3.0)]
    }

    fn tree(leaves: Range<usize>) -> Tree {
        let mut tree = Tree::default();
        leaves.for_each(|i| tree.push(Node { start: i, size: 1 }, leaf(i)));
        tree
    }

    #[test]
    fn any_number_of_ranks_adds_to_the_same_bits() {
        let mut differs_from_a_chain = 0;
        for leaves in 1..40 {
            let whole = tree(0..leaves).sum().expect("leaves");
            let chain = (1..leaves).fold(leaf(0)[0], |sum, i| sum + leaf(i)[0]);
            differs_from_a_chain += usize::from(chain.to_bits() != whole[0].to_bits());
            for count in 1..=leaves {
                let mut all = Tree::default();
                for rank in 0..count {
                    let own = share(leaves, rank, count);
                    let parts = tree(own.clone());
                    let found: Vec<Node> = parts.parts().iter().map(|(node, _)| *node).collect();
                    assert_eq!(found, nodes(own), "{leaves} leaves, rank {rank} of {count}");
                    parts.parts.into_iter().for_each(|(node, sum)| all.push(node, sum));
                }
                let bits = |sum: &[f32]| sum.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                let sum = all.sum().expect("leaves");
                assert_eq!(bits(&sum), bits(&whole), "{leaves} leaves, {count} ranks");
            }
        }
        assert!(differs_from_a_chain > 10, "the order must matter for the test to tell anything");
        assert_eq!(Tree::default().sum(), None);
    }
}
