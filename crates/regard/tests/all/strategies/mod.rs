//! Masks and options for property tests, small ones first when a failure shrinks.

use proptest::prelude::*;
use regard::Mask;
use regard::problem::Dims;
use regard_testkit::Noise;
use regard_testkit::masks::MASKS;

/// A mask without its sizes: rules of the table, joined.
#[derive(Clone, Debug)]
pub(crate) enum Tree {
    /// A line of the table.
    Rule(usize),
    /// Both.
    And(Box<(Self, Self)>),
    /// Either.
    Or(Box<(Self, Self)>),
}

impl Tree {
    /// The mask for these sizes.
    pub(crate) fn build(&self, dims: &Dims, noise: &mut Noise) -> Mask {
        match self {
            Self::Rule(i) => (MASKS[*i].build)(dims, noise),
            Self::And(pair) => pair.0.build(dims, noise).and(pair.1.build(dims, noise)),
            Self::Or(pair) => pair.0.build(dims, noise).or(pair.1.build(dims, noise)),
        }
    }
}

/// Masks inside masks, up to three deep.
pub(crate) fn masks() -> impl Strategy<Value = Tree> {
    (0..MASKS.len()).prop_map(Tree::Rule).prop_recursive(3, 8, 2, |inner| {
        let pair = (inner.clone(), inner).prop_map(Box::new);
        prop_oneof![pair.clone().prop_map(Tree::And), pair.prop_map(Tree::Or)]
    })
}
