//! What may be typed after `regard train` and `regard eval`.

use clap::Subcommand;
use regard_train::data::Field;
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Learns from files, into a directory that can be gone on with: `regard train --preset tatoeba-zh-en --out RUN`
    Train(TrainArgs),
    /// How good a model is on a test: BLEU and chrF of translations, the share of classes that are right
    Eval(EvalArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct TrainArgs {
    /// A TOML file of settings, which holds what differs from the defaults
    #[arg(value_name = "FILE")]
    pub(crate) settings: Option<PathBuf>,
    /// Settings that come with the program
    #[arg(long, value_name = "NAME", value_parser = regard_train::names(), hide_possible_values = true,
        long_help = regard_train::preset_help())]
    pub(crate) preset: Option<String>,
    /// Where the files of the settings are [default: of a preset, a folder of Regard's repository]
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// The directory of the run; it must be new or empty
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Changes a setting: training.epochs=5
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// Goes on with a run from its last checkpoint, to the same bits as if it had never stopped
    #[arg(long, value_name = "DIR", conflicts_with_all = ["out", "data", "dry_run"])]
    pub(crate) resume: Option<PathBuf>,
    /// Writes event files for TensorBoard too
    #[arg(long)]
    pub(crate) tensorboard: bool,
    /// Says how large the run is, and how long it would take here
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct EvalArgs {
    /// A model that translates or classifies: a name, a folder, a file, or a run, which has its own test
    #[arg(value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    /// Pairs or labelled documents to judge by, as TSV or JSONL, maybe gzipped
    #[arg(long, value_name = "FILE")]
    pub(crate) test: Option<PathBuf>,
    /// Where source and target are, or label and text: columns of a TSV from 0, or keys of a JSONL [default: as the run says, else 0,1]
    #[arg(long, value_name = "A,B", value_delimiter = ',', value_parser = field)]
    pub(crate) fields: Option<Vec<Field>>,
    /// Translations that are there already, one a line, in the place of a model
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model", "write"])]
    pub(crate) hypotheses: Option<PathBuf>,
    /// Writes the translations, one a line
    #[arg(long, value_name = "FILE")]
    pub(crate) write: Option<PathBuf>,
    /// So many pairs at most
    #[arg(long, value_name = "N")]
    pub(crate) examples: Option<usize>,
    /// Hypotheses of a beam search; 1 is greedy
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(crate) beams: usize,
    /// How much longer translations are favoured
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub(crate) length_penalty: f32,
    /// Tokens of a translation at most
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) max_tokens: usize,
    /// How BLEU divides a text: 13a, zh, char or none, as in sacrebleu
    #[arg(long, value_name = "NAME", default_value = "13a")]
    pub(crate) tokenize: String,
    /// Compares small letters only
    #[arg(long)]
    pub(crate) lowercase: bool,
}

/// A number is a column, anything else a key.
fn field(text: &str) -> Result<Field, std::convert::Infallible> {
    Ok(text.parse().map_or_else(|_| Field::Name(text.into()), Field::Column))
}
