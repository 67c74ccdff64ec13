//! What is computed: one call with all its options, as data, checked before anything runs.

pub(crate) mod dropout;
pub(crate) mod local;
pub(crate) mod mask;
pub(crate) mod normalizer;
pub(crate) mod options;
pub(crate) mod problem;
pub(crate) mod score;
pub(crate) mod similarity;
