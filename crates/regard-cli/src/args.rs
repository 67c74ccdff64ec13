//! What may be typed, before it is known to make sense.

use crate::bench::Engine;
use crate::status::{HELP, LONG_HELP, VERSION};
use crate::text::a_text;
use clap::error::ContextKind;
use clap::{Parser, Subcommand, ValueEnum};
use regard::problem::Normalizer;
use serde::Serialize;
use std::path::PathBuf;

/// Exact fused attention for CPUs: inspect, verify and benchmark it, and run models on it
#[derive(Debug, Parser)]
#[command(name = "regard", version, long_version = VERSION.as_str(), propagate_version = true, after_help = HELP, after_long_help = LONG_HELP)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) verb: Verb,
    /// Output format: text, or JSON with one object per line
    #[arg(long, global = true, value_enum, default_value_t = Format::Text, display_order = 100)]
    pub(crate) format: Format,
    /// Print nothing but results and errors: no progress, no notes
    #[arg(short, long, global = true, conflicts_with = "verbose", display_order = 101)]
    pub(crate) quiet: bool,
    /// Also print the version, instruction set and threads, and what is opened
    #[arg(short, long, global = true, display_order = 102)]
    pub(crate) verbose: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Show CPU, instruction sets, threads, caches, and the plan of a typical call
    #[command(
        after_long_help = "Examples:\n  regard info\n  RAYON_NUM_THREADS=2 regard info --format json"
    )]
    Info,
    /// Show the execution plan of an attention call, its cost, and the reasons
    #[command(
        after_long_help = "Examples:\n  regard plan --queries 4096 --mask 'causal & window 512'\n  regard plan --batch 16 --queries 1 --keys 8192 --dtype bf16 --threads 1"
    )]
    Plan(Box<PlanArgs>),
    /// Print attention on small random inputs step by step, with all values and shapes
    #[command(
        after_long_help = "Examples:\n  regard steps --mask causal\n  regard steps --similarity additive --normalizer sparsemax --seed 7"
    )]
    Steps(Box<StepsArgs>),
    /// Verify results on this machine: every test case against the reference implementation, with the largest error of each option
    #[command(
        after_long_help = "Examples:\n  regard check\n  regard check --format json > check.jsonl\n  regard check --serve http://127.0.0.1:8080 http://10.0.0.7:8080 --key-file keys"
    )]
    Check(CheckArgs),
    /// Draw attention maps: terminal, SVG, PNG, HTML, or a zoomable map in a browser
    #[command(
        after_long_help = "Examples:\n  regard look zh-en 好久不见 --view alignment --kind cross\n  regard look minilm @letter.txt --out letter.html\n  regard look q.npy k.npy --mask causal --serve"
    )]
    Look(Box<LookArgs>),
    /// Statistics of each head: entropy, mean attention distance, weight of the first token
    #[command(
        after_long_help = "Examples:\n  regard stats zh-en 好久不见\n  regard stats run.safetensors --view entropy --out entropy.svg\n  regard stats smollm2 @letter.txt --spans parts.txt"
    )]
    Stats(StatsArgs),
    /// What each head does: scores of induction heads, previous-token heads, retrieval heads, sinks and others
    #[command(
        long_about = "What each head does: scores of induction heads, previous-token heads, retrieval heads, sinks and others\n\n\
            Each score is from 0 to 1, over the rows (tokens) of the text that can tell:\n  \
            previous    mean weight of the token before (Olsson et al. 2022)\n  \
            duplicate   mean mass on earlier occurrences of the same token (Wang et al. 2023)\n  \
            induction   mean mass on the tokens that followed earlier occurrences (Olsson et al. 2022)\n  \
            positional  part of the rows whose largest weight is at one distance, and that distance (Voita et al. 2019)\n  \
            delimiter   mean mass on punctuation and special tokens (Clark et al. 2019)\n  \
            sink        mean weight of the first token (Xiao et al. 2024)\n  \
            copy        part of the rows whose largest weight is on the token that comes next\n  \
            retrieval   part of the needle that is copied when it is written once more (Wu et al. 2024); with --needle",
        after_long_help = "Examples:\n  regard heads smollm2\n  regard heads smollm2 @letter.txt --out heads.html\n  regard heads smollm2 @haystack.txt --needle 'The best thing to do is to eat a sandwich'"
    )]
    Heads(HeadsArgs),
    /// Attention mass that sparse patterns retain, for each head: windows, top-k, masks, LSH
    #[command(
        after_long_help = "Examples:\n  regard audit minilm @letter.txt --windows 8,32\n  regard audit q.npy k.npy --pattern 'strided 64' --lsh"
    )]
    Audit(AuditArgs),
    /// Compare the attention weights of two traces, or of two types of KV cache: KL and JS divergence of each head
    #[command(
        after_long_help = "Examples:\n  regard diff before.safetensors after.safetensors\n  regard diff smollm2 @letter.txt --kv-dtype int8"
    )]
    Diff(DiffArgs),
    /// Benchmark attention calls against the machine's roofline and, optionally, other engines
    #[command(
        subcommand,
        after_long_help = "Examples:\n  regard bench list\n  regard bench run --case 'prefill-*' --threads 1,2\n  regard bench suite --out suite.jsonl"
    )]
    Bench(BenchVerb),
    /// Print a shell completion script
    #[command(
        after_long_help = "Examples:\n  regard completions bash > ~/.local/share/bash-completion/completions/regard"
    )]
    Completions {
        /// Shell
        shell: clap_complete::Shell,
    },
    /// Write man pages into a folder
    #[command(after_long_help = "Examples:\n  regard man ~/.local/share/man/man1")]
    Man {
        /// Folder; made if it does not exist
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
    #[cfg(feature = "models")]
    #[command(flatten)]
    Models(crate::models::Verb),
    #[cfg(feature = "train")]
    #[command(flatten)]
    Train(crate::train::Verb),
    /// Experiments on attention: a prediction, a measurement and a verdict for each claim
    #[cfg(feature = "lab")]
    #[command(
        after_long_help = "Examples:\n  regard lab list\n  regard lab run scaling --quick\n  regard lab all --quick --out pictures"
    )]
    Lab(crate::lab::LabArgs),
}

impl Verb {
    /// The value of `--threads`.
    pub(crate) fn threads(&self) -> Option<usize> {
        match self {
            Self::Plan(args) => args.threads.count,
            Self::Check(args) => args.threads.count,
            Self::Look(args) => args.source.threads.count,
            Self::Stats(args) => args.source.threads.count,
            Self::Audit(args) => args.source.threads.count,
            Self::Heads(args) => args.source.threads.count,
            Self::Diff(args) => args.threads.count,
            Self::Bench(BenchVerb::Run(args)) => args.threads.iter().copied().max(),
            Self::Bench(BenchVerb::Suite(args)) => args.threads.count,
            Self::Bench(BenchVerb::Ranks(args)) => args.threads.count,
            #[cfg(feature = "models")]
            Self::Models(verb) => verb.threads().count,
            #[cfg(feature = "train")]
            Self::Train(verb) => verb.threads().count,
            #[cfg(feature = "lab")]
            Self::Lab(args) => args.threads().count,
            Self::Info
            | Self::Steps(_)
            | Self::Bench(BenchVerb::List(_))
            | Self::Completions { .. }
            | Self::Man { .. } => None,
        }
    }
}

/// Verbs that only a build with a feature has, and the feature.
const FEATURES: &[(&str, &str)] = &[
    ("generate", "models"),
    ("translate", "models"),
    ("align", "models"),
    ("classify", "models"),
    ("embed", "models"),
    ("models", "models"),
    ("serve", "serve"),
    ("train", "train"),
    ("eval", "train"),
    ("data", "train"),
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

/// Threads of a command that computes.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(crate) struct ThreadsArg {
    /// Threads to use [default: RAYON_NUM_THREADS, else one for each available CPU]
    #[arg(short = 't', long = "threads", value_name = "N", value_parser = threads)]
    pub(crate) count: Option<usize>,
}

/// Options of `check`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) threads: ThreadsArg,
    /// Verify running servers instead: 64 requests one by one, then at once, must get the same tokens and log-probabilities to the last bit
    #[arg(long, value_name = "URL", num_args = 1..)]
    pub(crate) serve: Vec<String>,
    /// Model to ask, if a server has several
    #[arg(short, long, value_name = "NAME", requires = "serve")]
    pub(crate) model: Option<String>,
    /// File with an API key of the servers
    #[arg(long, value_name = "FILE", requires = "serve")]
    pub(crate) key_file: Option<std::path::PathBuf>,
}

/// From a query and a key to their score.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ScoreArgs {
    /// Attention mask: rules joined by & and |, for example 'causal & (window 128 | dilated 128)'
    #[arg(long, value_name = "RULES", default_value = "full", long_help = regard_scope::MASK_HELP)]
    pub(crate) mask: String,
    /// Similarity function of a query and a key
    #[arg(long, value_enum, default_value_t = SimilarityArg::Dot)]
    pub(crate) similarity: SimilarityArg,
    /// Scale of the scores [default: 1 / sqrt(dim); 1 for additive]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) scale: Option<f64>,
    /// Softmax temperature: divides the scores
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) temperature: Option<f64>,
    /// Softcap: cap * tanh(score / cap)
    #[arg(long, value_name = "CAP", allow_negative_numbers = true)]
    pub(crate) softcap: Option<f64>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct PlanArgs {
    /// Batch size
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
    /// Keys [default: as many as queries]
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) keys: Option<usize>,
    /// Head dimension of queries and keys
    #[arg(long, value_name = "N", default_value = "64", value_parser = count)]
    pub(crate) dim: usize,
    /// Head dimension of values [default: as --dim]
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) v_dim: Option<usize>,
    /// Element type
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    pub(crate) dtype: Dtype,
    /// Memory layout
    #[arg(long, value_enum, default_value_t = LayoutArg::Bhsd)]
    pub(crate) layout: LayoutArg,
    #[command(flatten)]
    pub(crate) score: ScoreArgs,
    /// ALiBi with the default slopes
    #[arg(long)]
    pub(crate) alibi: bool,
    /// One attention sink per head
    #[arg(long)]
    pub(crate) sinks: bool,
    /// A dense bias
    #[arg(long)]
    pub(crate) bias: bool,
    #[command(flatten)]
    pub(crate) threads: ThreadsArg,
    /// Instruction set, one of those that `regard info` lists [default: the best]
    #[arg(long, value_name = "NAME")]
    pub(crate) isa: Option<String>,
    /// Also estimate the call spread over up to N machines
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) ranks: Option<usize>,
    /// Network of a machine in bits per second and direction, for example 1G or 100G
    #[arg(long, value_name = "RATE", default_value = "10G", value_parser = bits, requires = "ranks")]
    pub(crate) network: f64,
    /// Attention GFLOP/s of a machine [default: measured on this one]
    #[arg(long, value_name = "X", requires = "ranks")]
    pub(crate) gflops: Option<f64>,
}

/// Bits per second with a unit.
fn bits(text: &str) -> Result<f64, String> {
    let units = [("M", 1e6), ("G", 1e9)];
    let found = units.into_iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit)));
    match found.map(|(number, unit)| (number.parse::<f64>(), unit)) {
        Some((Ok(number), unit)) if number > 0.0 && number.is_finite() => Ok(number * unit),
        _ => Err("give a number above 0 with M or G, for example 10G".into()),
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct StepsArgs {
    /// Heads
    #[arg(long, value_name = "N", default_value = "1", value_parser = count)]
    pub(crate) heads: usize,
    /// Queries
    #[arg(long, value_name = "N", default_value = "3", value_parser = count)]
    pub(crate) queries: usize,
    /// Keys, at most 12 unless --format json [default: as many as queries]
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) keys: Option<usize>,
    /// Head dimension of queries and keys
    #[arg(long, value_name = "N", default_value = "4", value_parser = count)]
    pub(crate) dim: usize,
    /// Head dimension of values [default: as --dim]
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) v_dim: Option<usize>,
    #[command(flatten)]
    pub(crate) score: ScoreArgs,
    /// Normalizer: softmax, top{K}, hard, sampled or sparsemax
    #[arg(long, value_name = "NAME", default_value = "softmax", value_parser = normalizer)]
    pub(crate) normalizer: Normalizer,
    /// Random seed
    #[arg(long, value_name = "N", default_value = "0")]
    pub(crate) seed: u64,
}

/// What is looked at.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SourceArgs {
    #[arg(required = true, num_args = 1..=2, value_name = "FILE",
        help = a_text!("A trace (.safetensors); queries and keys (q.npy k.npy), [heads, len, dim] or [len, dim]; or a model and what it reads"))]
    pub(crate) files: Vec<PathBuf>,
    /// For q.npy and k.npy: attention mask, for example 'causal & window 128' [default: full]
    #[arg(long, value_name = "RULES", long_help = format!("For q.npy and k.npy. {}", regard_scope::MASK_HELP))]
    pub(crate) mask: Option<String>,
    /// For q.npy and k.npy: scale of the scores [default: 1 / sqrt(dim)]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) scale: Option<f64>,
    /// For q.npy and k.npy: file with one label per query, one per line
    #[arg(long, value_name = "FILE")]
    pub(crate) q_labels: Option<PathBuf>,
    /// For q.npy and k.npy: file with one label per key [default: as --q-labels, if there are as many]
    #[arg(long, value_name = "FILE")]
    pub(crate) k_labels: Option<PathBuf>,
    #[arg(long, value_name = "TEXT", help = a_text!("For translation models, the target to align with", " [default: the model's own translation]"))]
    pub(crate) target: Option<String>,
    /// For a vision transformer, the image that it reads, PNG or JPEG
    #[arg(long, value_name = "FILE", conflicts_with = "target")]
    pub(crate) image: Option<PathBuf>,
    /// Value-weighted attention in place of the weights: how much of what is added to a row comes from each key
    #[arg(long)]
    pub(crate) value_weighted: bool,
    #[command(flatten)]
    pub(crate) threads: ThreadsArg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ViewArg {
    /// Heat map of one head, tokens on both axes
    Heat,
    /// All heads as thumbnails
    Grid,
    /// Lines between queries and keys of one head
    Flow,
    /// Heat map with the largest weight of each row outlined
    Alignment,
    /// Zoomable map of one head (.html)
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
    /// Output file; the extension selects the format: .svg, .png or .html [default: the terminal]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Dark or light [default: dark in a terminal, light in a file]
    #[arg(long, value_enum)]
    pub(crate) theme: Option<ThemeArg>,
    /// Width in terminal columns, or in pixels [default: as the terminal; 1000]
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) width: Option<usize>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct LookArgs {
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    /// Layer, from 0 [default: all in a grid, else the first]
    #[arg(long, value_name = "N")]
    pub(crate) layer: Option<usize>,
    /// Attention kind, as the trace names it [default: all in a grid, else the first]
    #[arg(long, value_name = "NAME")]
    pub(crate) kind: Option<String>,
    /// Head, from 0 [default: all in a grid, else the first]
    #[arg(long, value_name = "N")]
    pub(crate) head: Option<usize>,
    /// Query rows, for example 100..200 [default: all]
    #[arg(long, value_name = "A..B", value_parser = range)]
    pub(crate) rows: Option<std::ops::Range<usize>>,
    /// Kind of view [default: grid if there are several heads, else heat]
    #[arg(long, value_enum)]
    pub(crate) view: Option<ViewArg>,
    /// Maximum number of lines in a flow view
    #[arg(long, value_name = "N", default_value = "60", value_parser = count)]
    pub(crate) lines: usize,
    /// Logarithmic color scale
    #[arg(long)]
    pub(crate) log: bool,
    /// Name parts of the text on a page: a file with a line for each part, as in `context 40..900`
    #[arg(long, value_name = "FILE", conflicts_with = "mpi")]
    pub(crate) spans: Option<PathBuf>,
    /// Page of the difference from another trace of the same text, such as one after an intervention
    #[arg(long, value_name = "TRACE", conflicts_with = "mpi")]
    pub(crate) against: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) show: ShowArgs,
    #[command(flatten)]
    pub(crate) mpi: MpiArgs,
    /// Serve a zoomable map on localhost until Ctrl-C
    #[arg(long, conflicts_with_all = ["out", "view", "rows", "log", "against", "theme", "width", "mpi"])]
    pub(crate) serve: bool,
    /// Port [default: any free one]
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
    /// Draw one statistic over layers and heads: entropy, keys, distance, first, largest
    #[arg(long, value_name = "NAME", value_parser = regard_scope::HeadStats::NAMES)]
    pub(crate) view: Option<String>,
    /// Attention mass on parts of the text instead: a file with a line for each part, a name and positions, as in `context 40..900`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["view", "out", "mpi"])]
    pub(crate) spans: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) show: ShowArgs,
    #[command(flatten)]
    pub(crate) mpi: MpiArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct HeadsArgs {
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    /// For retrieval heads: a sentence that the text contains twice, hidden, and at its end as the answer to a question
    #[arg(long, value_name = "SENTENCE")]
    pub(crate) needle: Option<String>,
    /// Heads that are named for each score
    #[arg(long, value_name = "N", default_value = "5", value_parser = count)]
    pub(crate) top: usize,
    /// Write a page (.html) with a table for each score
    #[arg(short, long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct AuditArgs {
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    /// Window sizes
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "16,64,256", value_parser = count)]
    pub(crate) windows: Vec<usize>,
    /// Values of k for top-k
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,8", value_parser = count)]
    pub(crate) top: Vec<usize>,
    /// A mask as sparsity pattern, in the syntax of `regard look --mask`; repeatable
    #[arg(long, value_name = "RULES")]
    pub(crate) pattern: Vec<String>,
    /// LSH attention (Reformer), for full and causal masks
    #[arg(long)]
    pub(crate) lsh: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct DiffArgs {
    /// A trace (.safetensors); with --kv-dtype, a language model
    pub(crate) first: PathBuf,
    #[arg(help = a_text!("Another trace of the same model and text; with --kv-dtype, what the model reads"))]
    pub(crate) second: PathBuf,
    /// Compare a KV cache of f32 with one of this type
    #[cfg(feature = "models")]
    #[arg(long, value_name = "TYPE", value_parser = crate::models::kv_dtypes())]
    pub(crate) kv_dtype: Option<regard_models::infer::KvDtype>,
    #[command(flatten)]
    pub(crate) threads: ThreadsArg,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchVerb {
    /// List the cases
    #[command(
        after_long_help = "Examples:\n  regard bench list --case 'decode-*'\n  regard bench list --suite"
    )]
    List(BenchListArgs),
    /// Measure cases
    #[command(
        after_long_help = "Examples:\n  regard bench run --case 'prefill-f32-n2048*'\n  regard bench run --case decode-bf16-n8192-d128 --against torch --python ENV/bin/python"
    )]
    Run(Box<BenchArgs>),
    /// Measure the cases of the suite against all baselines; resumes an interrupted run
    #[command(
        after_long_help = "Examples:\n  regard bench suite --out suite.jsonl --threads 2 --python ENV/bin/python"
    )]
    Suite(SuiteArgs),
    /// Measure attention over one sequence that is spread over the ranks of an MPI job
    #[command(
        after_long_help = "Examples:\n  mpirun -n 4 --bind-to none regard bench ranks --mpi --queries 131072 --scheme ring"
    )]
    Ranks(RanksArgs),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scheme {
    /// Keys and values are gathered; the same bits for any number of ranks
    Gather,
    /// Keys and values go round in a ring, with less memory
    Ring,
}

impl Scheme {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gather => "gather",
            Self::Ring => "ring",
        }
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct RanksArgs {
    /// Length of the sequence
    #[arg(long, value_name = "N", default_value = "16384", value_parser = count)]
    pub(crate) queries: usize,
    /// Query heads
    #[arg(long, value_name = "N", default_value = "8", value_parser = count)]
    pub(crate) heads: usize,
    /// Key and value heads, a divisor of --heads [default: as --heads]
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) kv_heads: Option<usize>,
    /// Head dimension
    #[arg(long, value_name = "N", default_value = "64", value_parser = count)]
    pub(crate) dim: usize,
    /// Element type
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    pub(crate) dtype: Dtype,
    /// Attention mask
    #[arg(long, value_name = "RULES", default_value = "causal", long_help = regard_scope::MASK_HELP)]
    pub(crate) mask: String,
    /// How keys and values reach the ranks
    #[arg(long, value_enum, default_value_t = Scheme::Gather)]
    pub(crate) scheme: Scheme,
    /// Calls, of which the fastest counts
    #[arg(long, value_name = "N", default_value = "3", value_parser = count)]
    pub(crate) repeat: usize,
    /// Network of a rank in bits per second and direction, for the prediction
    #[arg(long, value_name = "RATE", default_value = "10G", value_parser = bits)]
    pub(crate) network: f64,
    /// Attention GFLOP/s of a rank, for the prediction [default: measured on all ranks at once]
    #[arg(long, value_name = "X")]
    pub(crate) gflops: Option<f64>,
    #[command(flatten)]
    pub(crate) mpi: MpiArgs,
    #[command(flatten)]
    pub(crate) threads: ThreadsArg,
}

/// Ranks of a job that this process is one of.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct MpiArgs {
    /// Use all ranks of an MPI job; needs a program built with the feature mpi
    #[arg(long)]
    pub(crate) mpi: bool,
    /// Time that a rank waits for the others before it ends the job
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0, requires = "mpi")]
    pub(crate) mpi_timeout: f64,
}

#[derive(Debug, clap::Args)]
pub(crate) struct BenchListArgs {
    /// The cases of the suite
    #[arg(long)]
    pub(crate) suite: bool,
    /// Glob pattern over the cases [default: all]
    #[arg(long, value_name = "GLOB")]
    pub(crate) case: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    /// Case name, or a glob pattern over the listed cases [default: all but the slow]
    ///
    /// {prefill|short|decode|backward|look|linear|lsh}-{f32|f64|f16|bf16}-n{keys}-d{dim}, then any of
    /// -h{heads} -kv{heads} -b{batch} -v{v_dim} -q{queries}
    /// -causal -window{keys} -padding -bool -blocks{size} -longformer{window} -strided -fixed -tree -keys{keys}
    /// -bias -headbias -alibi -softcap -sinks -dropout -spread -bshd -latent -alone
    /// -additive -top{keys} -hard -sampled -sparsemax -local{reach}
    /// and a precision: -strict -full -high; of linear, -relu -random{features} -both; of lsh, -both
    #[arg(long, value_name = "GLOB", verbatim_doc_comment)]
    pub(crate) case: Option<String>,
    /// Threads to use; several counts, as in 1,2, run each case with each [default: RAYON_NUM_THREADS, else one for each available CPU]
    #[arg(short, long, value_name = "N", value_parser = threads, value_delimiter = ',')]
    pub(crate) threads: Vec<usize>,
    /// Baseline engines, comma-separated, for example torch,vllm
    #[arg(long, value_enum, value_name = "ENGINE", value_delimiter = ',')]
    pub(crate) against: Vec<Engine>,
    /// Python interpreter that has the baseline engines (`bench/environment` makes one), started with -I [default: python3]
    #[arg(long, value_name = "PATH", requires = "against")]
    pub(crate) python: Option<PathBuf>,
    /// Seconds to measure each case for
    #[arg(long, value_name = "S", default_value_t = 2.0, allow_negative_numbers = true)]
    pub(crate) seconds: f64,
    /// Instruction set, one of those that `regard info` lists [default: the best]
    #[arg(long, value_name = "NAME")]
    pub(crate) isa: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct SuiteArgs {
    /// Record file (JSONL); cases already in it are skipped
    #[arg(short, long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Glob pattern over the cases of the suite [default: all]
    #[arg(long, value_name = "GLOB")]
    pub(crate) case: Option<String>,
    /// Baseline engines [default: all]
    #[arg(long, value_enum, value_name = "ENGINE", value_delimiter = ',')]
    pub(crate) against: Vec<Engine>,
    /// Python interpreter that has the baseline engines (`bench/environment` makes one), started with -I [default: python3]
    #[arg(long, value_name = "PATH")]
    pub(crate) python: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) threads: ThreadsArg,
    /// Seconds to measure each case for, at least
    #[arg(long, value_name = "S", default_value_t = 5.0, allow_negative_numbers = true)]
    pub(crate) seconds: f64,
}

/// A normalizer by its name; what is sampled gets its seed later.
fn normalizer(text: &str) -> Result<Normalizer, String> {
    let accepted = "give softmax, top-{K} as in top-3, hard, sampled or sparsemax";
    match text {
        "softmax" => Ok(Normalizer::Softmax),
        "hard" => Ok(Normalizer::Hard),
        "sampled" => Ok(Normalizer::Sampled { seed: 0 }),
        "sparsemax" => Ok(Normalizer::Sparsemax),
        _ => {
            let k = text.strip_prefix("top-").and_then(|k| k.parse().ok()).filter(|k| *k > 0);
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

pub(crate) fn threads(text: &str) -> Result<usize, String> {
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

    #[cfg(feature = "models")]
    #[test]
    fn texts_or_images_are_classified_and_not_both() {
        let parse = |words: &[&str]| {
            Args::try_parse_from(["regard", "classify", "model"].iter().chain(words)).is_ok()
        };
        assert!(parse(&["a text"]) && parse(&["--image", "a.png", "b.jpg"]));
        assert!(!parse(&[]) && !parse(&["--image"]) && !parse(&["a text", "--image", "a.png"]));
        assert!(!parse(&["--image", "a.png", "--sentences", "2"]));
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
