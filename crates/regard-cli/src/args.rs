//! What may be typed, before it is known to make sense.

use crate::bench::Engine;
use clap::error::ContextKind;
use clap::{Parser, Subcommand, ValueEnum};
use regard::problem::Normalizer;
use serde::Serialize;
use std::path::PathBuf;

/// Exact fused attention for CPUs: what would run here, and how fast
#[derive(Debug, Parser)]
#[command(version, propagate_version = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) verb: Verb,
    /// How to print: for people, or one JSON object a line for programs
    #[arg(long, global = true, value_enum, default_value_t = Format::Text, display_order = 100)]
    pub(crate) format: Format,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// This machine: CPU, instruction sets, threads, caches, and what a typical call would run
    Info,
    /// What would run for a problem described by flags, how much work it is, and why
    Plan(Box<PlanArgs>),
    /// Attention on a few small random inputs, step by step: every number, every shape
    Steps(Box<StepsArgs>),
    /// Whether results are right here: the case table against the definition, and the worst error of each option
    Check,
    /// What heads look at: in the terminal, as SVG, PNG or HTML, or served as a map to zoom into
    Look(Box<LookArgs>),
    /// Numbers of each head: how concentrated it is, how far it looks, what goes to the first token
    Stats(StatsArgs),
    /// Which head tolerates which sparsity: the weight that windows, the largest, masks or hashing would keep
    Audit(AuditArgs),
    /// How far apart the weights of two runs are: Kullback-Leibler and Jensen-Shannon, head by head
    Diff(DiffArgs),
    /// How fast calls are here, beside the machine's own limit and, if wanted, PyTorch
    Bench(BenchArgs),
    #[cfg(feature = "models")]
    #[command(flatten)]
    Models(crate::models::Verb),
    #[cfg(feature = "train")]
    #[command(flatten)]
    Train(crate::train::Verb),
    /// Claims about attention, each predicted by theory, measured here and judged: `regard lab` lists them, `regard lab scaling` runs one
    #[cfg(feature = "lab")]
    Lab(crate::lab::LabArgs),
}

/// Verbs that only a build with a feature has, and the feature.
const FEATURES: &[(&str, &str)] = &[
    ("generate", "models"),
    ("translate", "models"),
    ("classify", "models"),
    ("embed", "models"),
    ("models", "models"),
    ("train", "train"),
    ("eval", "train"),
    ("lab", "lab"),
];

/// The feature that this program would need to know the verb that it did not.
pub(crate) fn feature_of(error: &clap::Error) -> Option<(&'static str, &'static str)> {
    let verb = error.get(ContextKind::InvalidSubcommand)?.to_string();
    FEATURES.iter().copied().find(|(own, _)| *own == verb)
}

/// How to get a program with a feature.
pub(crate) fn remedy(feature: &str) -> String {
    format!("build it by: cargo build --release -p regard-cli --features {feature}")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Text,
    Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Dtype {
    F32,
    F64,
    F16,
    Bf16,
}

impl Dtype {
    /// Bytes of an element.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LayoutArg {
    /// [batch, heads, len, dim]
    Bhsd,
    /// [batch, len, heads, dim]
    Bshd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SimilarityArg {
    /// q . k
    Dot,
    /// q W k, with a matrix W
    General,
    /// -|q - k|^2
    Distance,
    /// v tanh(W q + U k), with a hidden layer
    Additive,
}

/// From a query and a key to their score.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ScoreArgs {
    /// Who may see whom: rules joined by & and |, for example 'causal & (window 128 | dilated 128)'
    #[arg(long, value_name = "RULES", default_value = "full", long_help = regard_scope::MASK_HELP)]
    pub(crate) mask: String,
    /// How a query and a key make a number
    #[arg(long, value_enum, default_value_t = SimilarityArg::Dot)]
    pub(crate) similarity: SimilarityArg,
    /// Multiplies the similarity [default: 1 / sqrt(dim); 1 for additive]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) scale: Option<f64>,
    /// Divides the scale
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) temperature: Option<f64>,
    /// Bounds scores smoothly: cap tanh(score / cap)
    #[arg(long, value_name = "CAP", allow_negative_numbers = true)]
    pub(crate) softcap: Option<f64>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct PlanArgs {
    /// Independent items
    #[arg(long, value_name = "N", default_value = "1", value_parser = count)]
    pub(crate) batch: usize,
    /// Query heads
    #[arg(long, value_name = "N", default_value = "8", value_parser = count)]
    pub(crate) heads: usize,
    /// Key and value heads, a divisor of --heads [default: as --heads]
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) kv_heads: Option<usize>,
    /// Queries
    #[arg(long, value_name = "N", default_value = "2048", value_parser = count)]
    pub(crate) queries: usize,
    /// Keys [default: as --queries]
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) keys: Option<usize>,
    /// Features of a query and a key
    #[arg(long, value_name = "N", default_value = "64", value_parser = count)]
    pub(crate) dim: usize,
    /// Features of a value [default: as --dim]
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) v_dim: Option<usize>,
    /// What the tensors hold
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    pub(crate) dtype: Dtype,
    /// How the tensors lie in memory
    #[arg(long, value_enum, default_value_t = LayoutArg::Bhsd)]
    pub(crate) layout: LayoutArg,
    #[command(flatten)]
    pub(crate) score: ScoreArgs,
    /// Adds ALiBi with the usual slopes
    #[arg(long)]
    pub(crate) alibi: bool,
    /// Adds a sink to each head
    #[arg(long)]
    pub(crate) sinks: bool,
    /// Adds a dense bias
    #[arg(long)]
    pub(crate) bias: bool,
    /// Threads to use [default: all]
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// Instruction set, as `regard info` lists them [default: the best]
    #[arg(long, value_name = "NAME")]
    pub(crate) isa: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct StepsArgs {
    /// Heads
    #[arg(long, value_name = "N", default_value = "1", value_parser = count)]
    pub(crate) heads: usize,
    /// Queries
    #[arg(long, value_name = "N", default_value = "3", value_parser = count)]
    pub(crate) queries: usize,
    /// Keys, at most 12 unless --format json [default: as --queries]
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) keys: Option<usize>,
    /// Features of a query and a key
    #[arg(long, value_name = "N", default_value = "4", value_parser = count)]
    pub(crate) dim: usize,
    /// Features of a value [default: as --dim]
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) v_dim: Option<usize>,
    #[command(flatten)]
    pub(crate) score: ScoreArgs,
    /// How scores become weights: softmax, top{K}, hard, sampled, sparsemax
    #[arg(long, value_name = "NAME", default_value = "softmax", value_parser = normalizer)]
    pub(crate) normalizer: Normalizer,
    /// Of the numbers, and of what is sampled
    #[arg(long, value_name = "N", default_value = "0")]
    pub(crate) seed: u64,
}

/// What is looked at.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SourceArgs {
    /// A trace (.safetensors); a model and a text (minilm 'A sentence', or @FILE for the text in a file, at most 1 MiB); or queries and keys
    /// (q.npy k.npy), [heads, len, dim] or [len, dim]
    #[arg(required = true, num_args = 1..=2, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// Of q.npy and k.npy: who may see whom, for example 'causal & window 128' [default: full]
    #[arg(long, value_name = "RULES", long_help = format!("Of q.npy and k.npy. {}", regard_scope::MASK_HELP))]
    pub(crate) mask: Option<String>,
    /// Of q.npy and k.npy: multiplies the similarity [default: 1 / sqrt(dim)]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) scale: Option<f64>,
    /// Of q.npy and k.npy: a file with a word for each query, one a line
    #[arg(long, value_name = "FILE")]
    pub(crate) q_words: Option<PathBuf>,
    /// Of q.npy and k.npy: a file with a word for each key [default: as --q-words, if there are as many]
    #[arg(long, value_name = "FILE")]
    pub(crate) k_words: Option<PathBuf>,
    /// Of a model that translates: the translation to look at [default: its own]
    #[arg(long, value_name = "TEXT")]
    pub(crate) target: Option<String>,
    /// Threads to use [default: all]
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ViewArg {
    /// One head, words on both axes
    Heat,
    /// All heads, small
    Grid,
    /// One head as lines between two columns of words
    Flow,
    /// One head, the strongest key of each query outlined
    Alignment,
    /// One head as a map to zoom into (.html)
    Zoom,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ThemeArg {
    Dark,
    Light,
}

/// How it is shown.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ShowArgs {
    /// A file to write, by its ending .svg, .png or .html [default: the terminal]
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Dark or light [default: dark in a terminal, light in a file]
    #[arg(long, value_enum)]
    pub(crate) theme: Option<ThemeArg>,
    /// Columns of the terminal, or pixels of a picture [default: as the terminal; 1000]
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) width: Option<usize>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct LookArgs {
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    /// Which layer [default: all in a grid, else the first]
    #[arg(long, value_name = "N")]
    pub(crate) layer: Option<usize>,
    /// Which kind of attention, as the trace names it [default: all in a grid, else the first]
    #[arg(long, value_name = "NAME")]
    pub(crate) kind: Option<String>,
    /// Which head [default: all in a grid, else the first]
    #[arg(long, value_name = "N")]
    pub(crate) head: Option<usize>,
    /// Which queries, as in 100..200 [default: all]
    #[arg(long, value_name = "A..B", value_parser = range)]
    pub(crate) rows: Option<std::ops::Range<usize>>,
    /// What to draw [default: grid if there are several heads, else heat]
    #[arg(long, value_enum)]
    pub(crate) view: Option<ViewArg>,
    /// Lines of a flow, at most
    #[arg(long, value_name = "N", default_value = "60", value_parser = count)]
    pub(crate) lines: usize,
    /// Colours by powers of ten, not evenly
    #[arg(long)]
    pub(crate) log: bool,
    #[command(flatten)]
    pub(crate) show: ShowArgs,
    /// Serve a map to zoom into, for a browser on this machine alone, until Ctrl-C
    #[arg(long, conflicts_with_all = ["out", "view", "rows", "log", "theme", "width"])]
    pub(crate) serve: bool,
    /// Where to serve it [default: any free one]
    #[arg(
        long,
        value_name = "N",
        default_value = "0",
        hide_default_value = true,
        requires = "serve"
    )]
    pub(crate) port: u16,
}

#[derive(Debug, clap::Args)]
pub(crate) struct StatsArgs {
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    /// Draw one of the numbers over layers and heads: entropy, keys, distance, first, largest
    #[arg(long, value_name = "NAME", value_parser = regard_scope::HeadStats::NAMES)]
    pub(crate) view: Option<String>,
    #[command(flatten)]
    pub(crate) show: ShowArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct AuditArgs {
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    /// Keys less than so many away
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "16,64,256", value_parser = count)]
    pub(crate) windows: Vec<usize>,
    /// The keys with the largest weights
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,8", value_parser = count)]
    pub(crate) top: Vec<usize>,
    /// Keys that a mask lets through, as `regard look --help` names them under --mask; may be given several times
    #[arg(long, value_name = "RULES")]
    pub(crate) pattern: Vec<String>,
    /// Keys that hashing finds: for full and causal masks
    #[arg(long)]
    pub(crate) lsh: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct DiffArgs {
    /// A trace (.safetensors)
    pub(crate) first: PathBuf,
    /// Another trace of the same model and text
    pub(crate) second: PathBuf,
    /// Threads to use [default: all]
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
}

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) what: Option<BenchVerb>,
    /// A case, or a pattern of * and ? over the listed ones [default: all but the slow]
    ///
    /// {prefill|short|decode|backward|look|linear|lsh}-{f32|f64|f16|bf16}-n{keys}-d{dim}, then any of
    /// -h{heads} -kv{heads} -b{batch} -v{v_dim} -q{queries}
    /// -causal -window{keys} -padding -bool -blocks{size} -longformer{window} -strided -fixed
    /// -bias -headbias -alibi -softcap -sinks -dropout -spread -bshd -alone
    /// -additive -top{keys} -hard -sampled -sparsemax -local{reach}
    /// and a precision: -strict -f32 -high; of linear, -relu -random{features} -both; of lsh, -both
    #[arg(long, value_name = "GLOB", verbatim_doc_comment)]
    pub(crate) case: Option<String>,
    /// Print the listed cases and stop
    #[arg(long)]
    pub(crate) list: bool,
    /// Threads to use; several counts, as in 1,2, run each case with each [default: all]
    #[arg(long, value_name = "N", value_parser = threads, value_delimiter = ',')]
    pub(crate) threads: Vec<usize>,
    /// Also measure other engines, in turns with us; several, as in torch,vllm
    #[arg(long, value_enum, value_name = "ENGINE", value_delimiter = ',')]
    pub(crate) against: Vec<Engine>,
    /// A Python that has them, as `bench/environment` makes one; it is started with -I [default: python3]
    #[arg(long, value_name = "PATH", requires = "against")]
    pub(crate) python: Option<PathBuf>,
    /// Seconds to measure each case for
    #[arg(long, value_name = "S", default_value_t = 2.0, allow_negative_numbers = true)]
    pub(crate) seconds: f64,
    /// Instruction set, as `regard info` lists them [default: the best]
    #[arg(long, value_name = "NAME")]
    pub(crate) isa: Option<String>,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum BenchVerb {
    /// The cases that stand for real use, beside every engine, as a record that an interrupted run goes on with
    Suite(SuiteArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct SuiteArgs {
    /// The record: one row a line; what it has already is not measured again
    #[arg(long, value_name = "FILE", required_unless_present = "list")]
    pub(crate) out: Option<PathBuf>,
    /// A pattern of * and ? over the cases of the suite [default: all]
    #[arg(long, value_name = "GLOB")]
    pub(crate) case: Option<String>,
    /// Print the cases of the suite and stop
    #[arg(long)]
    pub(crate) list: bool,
    /// Engines to measure beside us [default: all]
    #[arg(long, value_enum, value_name = "ENGINE", value_delimiter = ',')]
    pub(crate) against: Vec<Engine>,
    /// A Python that has them, as `bench/environment` makes one; it is started with -I [default: python3]
    #[arg(long, value_name = "PATH")]
    pub(crate) python: Option<PathBuf>,
    /// Threads to use, on each side [default: all]
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// Seconds to measure each case for, at least
    #[arg(long, value_name = "S", default_value_t = 5.0, allow_negative_numbers = true)]
    pub(crate) seconds: f64,
}

/// A normalizer by its name; what is sampled gets its seed later.
fn normalizer(text: &str) -> Result<Normalizer, String> {
    let accepted = "give softmax, top{K} as in top3, hard, sampled or sparsemax";
    match text {
        "softmax" => Ok(Normalizer::Softmax),
        "hard" => Ok(Normalizer::Hard),
        "sampled" => Ok(Normalizer::Sampled { seed: 0 }),
        "sparsemax" => Ok(Normalizer::Sparsemax),
        _ => {
            let k = text.strip_prefix("top").and_then(|k| k.parse().ok()).filter(|k| *k > 0);
            k.map(Normalizer::TopK).ok_or_else(|| accepted.into())
        }
    }
}

/// The largest number a flag takes: beyond any memory, and small enough that sums of a few cannot overflow.
pub(crate) const MOST: usize = 1 << 40;

/// `A..B`
fn range(text: &str) -> Result<std::ops::Range<usize>, String> {
    let ends = text.split_once("..").and_then(|(a, b)| Some(a.parse().ok()?..b.parse().ok()?));
    ends.filter(|r| r.start < r.end)
        .ok_or_else(|| "give two numbers, the first smaller, as in 100..200".into())
}

pub(crate) fn count(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|n| (1..=MOST).contains(n));
    number.ok_or_else(|| format!("give a whole number from 1 to {MOST}"))
}

/// Threads at most, more than the largest machines have: each takes a stack, and systems refuse to make many thousands.
pub(crate) const THREADS: usize = 1024;

fn threads(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|n| (1..=THREADS).contains(n));
    number.ok_or_else(|| format!("give a whole number from 1 to {THREADS}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn a_verb_that_is_not_built_in_is_known_by_its_feature() {
        let command = Args::command();
        for (verb, feature) in FEATURES {
            if command.find_subcommand(verb).is_none() {
                let error = Args::try_parse_from(["regard", verb]).expect_err(verb);
                assert_eq!(feature_of(&error), Some((*verb, *feature)));
            }
        }
        let error = Args::try_parse_from(["regard", "lok"]).expect_err("no such verb");
        assert_eq!(feature_of(&error), None);
        assert!(error.to_string().contains("'look'"), "{error}");
    }

    #[cfg(feature = "full")]
    #[test]
    fn every_verb_of_a_feature_is_there_with_it() {
        let command = Args::command();
        for (verb, _) in FEATURES {
            assert!(command.find_subcommand(verb).is_some(), "{verb}");
        }
    }
}
