//! The experiments, one file each. They are written to be read: begin with `scaling.rs`.

mod additive;
mod cost;
mod distance;
mod geometry;
mod heads;
mod learning;
mod order;
mod scaling;
mod sparse;
mod symmetry;
mod tiled;

use crate::Experiment;

/// All of them, in the order of their ids.
pub const EXPERIMENTS: [Experiment; 11] = [
    scaling::SCALING,
    order::ORDER,
    cost::COST,
    geometry::GEOMETRY,
    additive::ADDITIVE,
    symmetry::SYMMETRY,
    heads::HEADS,
    distance::DISTANCE,
    tiled::TILED,
    sparse::SPARSE,
    learning::LEARNING,
];
