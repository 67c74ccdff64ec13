//! What may be typed, before it is known to make sense.

use clap::{Parser, Subcommand, ValueEnum};
use regard::Normaliser;
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
    /// How fast calls are here, beside the machine's own limit and, if wanted, PyTorch
    Bench(BenchArgs),
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
    /// Who may see whom: rules joined by & and |, for example 'causal & (window 128 | every 128)'
    #[arg(long, value_name = "RULES", default_value = "full", long_help = crate::mask::HELP)]
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
    #[arg(long, value_name = "N", value_parser = count)]
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
    #[arg(long, value_name = "NAME", default_value = "softmax", value_parser = normaliser)]
    pub(crate) normaliser: Normaliser,
    /// Of the numbers, and of what is sampled
    #[arg(long, value_name = "N", default_value = "0")]
    pub(crate) seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RivalArg {
    /// PyTorch's scaled_dot_product_attention
    Torch,
}

#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    /// A case, or a pattern of * and ? over the listed ones [default: all but the slow]
    ///
    /// {prefill|short|decode|backward|linear|lsh}-{f32|f64|f16|bf16}-n{keys}-d{dim}, then any of
    /// -h{heads} -kv{heads} -b{batch} -v{v_dim} -q{queries}
    /// -causal -window{keys} -padding -bool -blocks{size} -longformer{window} -strided -fixed
    /// -bias -headbias -alibi -softcap -dropout -spread -bshd -alone
    /// -additive -top{keys} -hard -sampled -sparsemax -local{reach}
    /// and a precision: -strict -f32 -high; of linear, -relu -random{features} -both; of lsh, -both
    #[arg(long, value_name = "GLOB", verbatim_doc_comment)]
    pub(crate) case: Option<String>,
    /// Print the listed cases and stop
    #[arg(long)]
    pub(crate) list: bool,
    /// Threads to use; several counts, as in 1,2, run each case with each [default: all]
    #[arg(long, value_name = "N", value_parser = count, value_delimiter = ',')]
    pub(crate) threads: Vec<usize>,
    /// Also measure a rival, in turns with us
    #[arg(long, value_enum, value_name = "RIVAL")]
    pub(crate) against: Option<RivalArg>,
    /// A Python that has torch [default: python3]
    #[arg(long, value_name = "PATH", requires = "against")]
    pub(crate) python: Option<PathBuf>,
    /// Seconds to measure each case for
    #[arg(long, value_name = "S", default_value_t = 2.0, allow_negative_numbers = true)]
    pub(crate) seconds: f64,
    /// Instruction set, as `regard info` lists them [default: the best]
    #[arg(long, value_name = "NAME")]
    pub(crate) isa: Option<String>,
}

/// A normaliser by its name; what is sampled gets its seed later.
fn normaliser(text: &str) -> Result<Normaliser, String> {
    let accepted = "give softmax, top{K} as in top3, hard, sampled or sparsemax";
    match text {
        "softmax" => Ok(Normaliser::Softmax),
        "hard" => Ok(Normaliser::Hard),
        "sampled" => Ok(Normaliser::Sampled { seed: 0 }),
        "sparsemax" => Ok(Normaliser::Sparsemax),
        _ => {
            let k = text.strip_prefix("top").and_then(|k| k.parse().ok()).filter(|k| *k > 0);
            k.map(Normaliser::TopK).ok_or_else(|| accepted.into())
        }
    }
}

/// The largest number a flag takes: beyond any memory, and small enough that sums of a few cannot overflow.
pub(crate) const MOST: usize = 1 << 40;

pub(crate) fn count(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|n| (1..=MOST).contains(n));
    number.ok_or_else(|| format!("give a whole number from 1 to {MOST}"))
}
