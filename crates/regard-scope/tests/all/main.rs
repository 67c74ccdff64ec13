//! What the microscope is tried on: two real pretrained models, small enough to be run by a few plain equations, held against the
//! outputs of the programs they come from.

mod aren;
mod dense;
mod heads;
mod measure;
mod models;
mod page;
mod record;
mod stories;
mod trace;
mod zoom;
