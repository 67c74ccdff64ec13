//! What may be typed after `regard train` and `regard eval`.

use crate::args::{MpiArgs, ThreadsArg};
use clap::Subcommand;
use regard_train::data::Column;
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Train a model into a run directory, from which an interrupted run resumes
    #[command(
        after_long_help = "Examples:\n  regard train --preset tatoeba-zh-en --out RUN\n  regard train --preset shakespeare --set training.steps=1000 --dry-run\n  regard train --resume RUN\n  mpirun -n 4 --bind-to none regard train --mpi --resume RUN"
    )]
    Train(TrainArgs),
    /// Evaluate a model: BLEU and chrF of translations, or accuracy
    #[command(
        after_long_help = "Examples:\n  regard eval RUN\n  regard eval zh-en --test data/tatoeba-zh-en/test.zh-en.tsv.gz -o translations.txt\n  regard eval --hypotheses translations.txt --test test.tsv --lowercase"
    )]
    Eval(EvalArgs),
    /// Data sets of the presets: list them, or find out how to get one
    #[command(after_long_help = "Examples:\n  regard data list\n  regard data get multi30k-ende")]
    Data(DataArgs),
}

impl Verb {
    pub(crate) fn threads(&self) -> ThreadsArg {
        match self {
            Self::Train(args) => args.threads,
            Self::Eval(args) => args.threads,
            Self::Data(_) => ThreadsArg::default(),
        }
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct TrainArgs {
    /// TOML settings file; unset keys have defaults
    #[arg(value_name = "FILE")]
    pub(crate) settings: Option<PathBuf>,
    /// Built-in settings
    #[arg(long, value_name = "NAME", value_parser = regard_train::names(), hide_possible_values = true,
        long_help = regard_train::preset_help())]
    pub(crate) preset: Option<String>,
    /// Data folder [default: of a preset, a folder of Regard's repository]
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Directory of the run; it must be new or empty
    #[arg(short, long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Override a setting, for example training.epochs=5
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// Resume from the last checkpoint; the result is bitwise that of an uninterrupted run
    #[arg(long, value_name = "DIR", conflicts_with_all = ["out", "data", "dry_run"])]
    pub(crate) resume: Option<PathBuf>,
    /// Also write TensorBoard event files
    #[arg(long)]
    pub(crate) tensorboard: bool,
    /// Print parameters, memory and estimated time, then exit
    #[arg(long, conflicts_with = "mpi")]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) mpi: MpiArgs,
    #[command(flatten)]
    pub(crate) threads: ThreadsArg,
}

#[derive(Debug, clap::Args)]
pub(crate) struct EvalArgs {
    /// A model that translates or classifies: a name that `regard models` lists, a folder, a file, or a run directory, which has test sets of its own
    #[arg(value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    /// Test set: TSV or JSONL, optionally gzipped
    #[arg(long, value_name = "FILE")]
    pub(crate) test: Option<PathBuf>,
    /// Source and target, or label and text: columns of a TSV file from 0, or keys of a JSONL file [default: those of the run, else 0,1]
    #[arg(long = "columns", value_name = "A,B", value_delimiter = ',', value_parser = field)]
    pub(crate) fields: Option<Vec<Column>>,
    /// Score existing translations, one per line, instead of a model
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model", "write"])]
    pub(crate) hypotheses: Option<PathBuf>,
    /// Write the translations to a file, one per line
    #[arg(short = 'o', long, value_name = "FILE")]
    pub(crate) write: Option<PathBuf>,
    /// Maximum number of examples
    #[arg(long = "limit", value_name = "N")]
    pub(crate) examples: Option<usize>,
    /// Number of beams; 1 is greedy decoding
    #[arg(long = "num-beams", value_name = "N", default_value_t = 5)]
    pub(crate) beams: usize,
    /// Length penalty of beam search
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub(crate) length_penalty: f32,
    /// Maximum number of tokens of a translation
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128)]
    pub(crate) max_tokens: usize,
    /// BLEU tokenizer, as in sacrebleu: 13a, zh, char or none
    #[arg(long, value_name = "NAME", default_value = "13a")]
    pub(crate) tokenize: String,
    /// Case-insensitive scores
    #[arg(long)]
    pub(crate) lowercase: bool,
    #[command(flatten)]
    pub(crate) threads: ThreadsArg,
}

#[derive(Debug, clap::Args)]
pub(crate) struct DataArgs {
    #[command(subcommand)]
    pub(crate) what: Option<DataVerb>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DataVerb {
    /// List the data sets: presets, license, whether they are in ./data (the default)
    #[command(after_long_help = "Examples:\n  regard data list --format json")]
    List,
    /// Print the path of a data set in ./data; without one, fail with the command that makes it
    #[command(after_long_help = "Examples:\n  regard data get multi30k-ende")]
    Get {
        /// A name that `regard data list` prints
        #[arg(value_name = "NAME")]
        name: String,
    },
}

/// A number is a column, anything else a key.
fn field(text: &str) -> Result<Column, std::convert::Infallible> {
    Ok(text.parse().map_or_else(|_| Column::Name(text.into()), Column::Index))
}
