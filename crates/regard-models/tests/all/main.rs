//! Modules and models against PyTorch, real models against what they are known to say.

mod files;
mod golden;
mod hostile;
mod layers;
mod models;
mod own;
mod real;
mod recurrent;
mod stacks;
