//! What may be typed after the verbs of models.

use crate::args::count;
use clap::Subcommand;
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Goes on with a text, as a language model does: `regard generate smollm2 --prompt 'Once upon a time'`
    Generate(GenerateArgs),
    /// Writes a text in another language or script: `regard translate MODEL TEXT`
    Translate(TranslateArgs),
    /// Which class a document is of, and which of its sentences said so: `regard classify RUN/model TEXT`
    Classify(ClassifyArgs),
    /// Vectors of texts, and how alike the texts are: `regard embed minilm TEXT TEXT`
    Embed(EmbedArgs),
    /// Models that are known by name: what they are, whether they are here, how to get them
    Models(ListArgs),
}

/// A model that works with text.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ModelArg {
    /// A name that `regard models` lists, a folder (config.json, model.safetensors, tokenizer.json), a .gguf or a .safetensors
    #[arg(value_name = "MODEL")]
    pub(crate) model: PathBuf,
}

/// How the next token is chosen.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SearchArgs {
    /// The most probable token each time; the default unless --temperature, --top-k, --top-p or --beams is given
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p", "seed", "beams"])]
    pub(crate) greedy: bool,
    /// Draws tokens; above 1 more freely, below 1 more narrowly
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) temperature: Option<f32>,
    /// Draws among so many most probable tokens
    #[arg(long, value_name = "N")]
    pub(crate) top_k: Option<usize>,
    /// Draws among the most probable tokens that have this share together
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Of what is drawn [default: 0]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// Goes on with so many of the best texts at once, and takes the best at the end
    #[arg(long, value_name = "N", conflicts_with_all = ["temperature", "top_k", "top_p", "seed"])]
    pub(crate) beams: Option<usize>,
    /// Of --beams: a text's log-probability is divided by its length to this power [default: 1]
    #[arg(long, value_name = "X", requires = "beams", allow_negative_numbers = true)]
    pub(crate) length_penalty: Option<f32>,
    /// Tokens to write, at most
    #[arg(long, value_name = "N", default_value = "128", value_parser = count)]
    pub(crate) max_tokens: usize,
}

#[derive(Debug, clap::Args)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// The text to go on with, at most 1 MiB; may be given several times [default: nothing]
    #[arg(long, value_name = "TEXT")]
    pub(crate) prompt: Vec<String>,
    #[command(flatten)]
    pub(crate) search: SearchArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct TranslateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// The texts, at most 1 MiB each [default: each line of the input, answered as it comes]
    #[arg(value_name = "TEXT")]
    pub(crate) texts: Vec<String>,
    /// Says which word of the source each word of the translation looked at most
    #[arg(long)]
    pub(crate) alignment: bool,
    #[command(flatten)]
    pub(crate) search: SearchArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ClassifyArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// The documents, at most 1 MiB each: a text, or @FILE
    #[arg(required = true, value_name = "TEXT")]
    pub(crate) texts: Vec<String>,
    /// Sentences to show, those with the most weight
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) sentences: usize,
}

#[derive(Debug, clap::Args)]
pub(crate) struct EmbedArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// The texts, at most 1 MiB each
    #[arg(required = true, value_name = "TEXT")]
    pub(crate) texts: Vec<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    /// Downloads this one, by the pip of --python, and checks what came
    #[arg(long, value_name = "NAME")]
    pub(crate) get: Option<String>,
    /// A Python with pip; it is started with -I, so it sees neither the working directory nor PYTHONPATH
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    pub(crate) python: String,
}
