//! What a user of the crate can do, in one program.

mod data;
mod learn;
mod ranks;
mod resume;
mod score;
mod settings;
mod toy;
