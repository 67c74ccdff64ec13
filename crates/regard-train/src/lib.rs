//! Training on Regard: from files to a model that can be opened, with a run that survives being killed.
//!
//! A line: [`Settings`] (one TOML file) ─► [`Corpus`] (texts become numbers, numbers batches) ─► [`Trainer`] (loss, gradients,
//! [`AdamW`]) ─► [`Run`] (checkpoints, metrics, the model). Everything that looks like chance is a pure function of the seed and of
//! where the run stands, so a run that was killed and resumed ends with the same bits as one that was not.

#![forbid(unsafe_code)]

// The map.
//
// Ground
//   error      every way that training can fail
//   data       files, vocabularies, batches
//   score      BLEU and chrF
//   schedule   the learning rate, and other numbers that change with the step
//   optim      the weights, and how they move
//   settings   what a run is, as TOML
//
// The line
//   corpus     examples as numbers
//   net        models that learn, and how wrong they are
//   judge      how good they are
//   card       what is said of a model
//   run        the directory
//   board      event files of TensorBoard
//   train      the loop

mod board;
mod card;
mod corpus;
pub mod data;
mod error;
mod judge;
mod net;
mod optim;
mod run;
mod schedule;
pub mod score;
mod settings;
mod train;

pub use board::Board;
pub use corpus::{Corpus, Examples, Tables};
pub use error::Error;
pub use judge::{Sample, Validated, search, translations};
pub use net::{Loss, Net};
pub use optim::{AdamW, AdamWSettings};
pub use run::{Best, Progress, Run, Saved, Since};
pub use schedule::{Decay, Schedule, ramp};
pub use settings::{
    AttentionSettings, DataSettings, ModelKind, ModelSettings, PRESETS, Part, Precision,
    SelectionMetric, Settings, Task, TrainingSettings, ValidationSettings, names, preset,
    preset_help,
};
pub use train::{Ended, Size, Stepped, Trainer, Watch};
