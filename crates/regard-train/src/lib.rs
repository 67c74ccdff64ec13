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
//   trainable_model  models with a loss
//   validation       loss, BLEU and chrF, statistics of heads
//   card             the model card
//   run              the run directory
//   summary_writer   event files of TensorBoard
//   train            the training loop

mod card;
mod corpus;
pub mod data;
mod error;
mod optim;
mod run;
mod schedule;
pub mod score;
mod settings;
mod summary_writer;
mod train;
mod trainable_model;
mod validation;

pub use corpus::{Corpus, Examples, Vocabularies};
pub use error::Error;
pub use optim::{AdamW, AdamWSettings, Snapshot};
pub use regard_ranks::{Alone, Ranks, RanksError, Threads};
pub use run::{BestCheckpoint, Checkpoint, IntervalSums, Progress, Run, Times};
pub use schedule::{Decay, Schedule, ramp};
pub use settings::{
    AttentionSettings, DataSettings, ModelKind, ModelSettings, PRESETS, Part, Precision,
    SelectionMetric, Settings, Task, TrainingSettings, ValidationSettings, names, preset,
    preset_help,
};
pub use summary_writer::SummaryWriter;
pub use train::{Callback, RunOutcome, Size, StepMetrics, Trainer};
pub use trainable_model::{Batch, Learner, Loss, TrainableModel};
pub use validation::{Sample, ValidationMetrics, decoding_strategy, translations};
