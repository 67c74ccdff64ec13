//! What inputs are given to. A target returns whether it took the input for what it seems to be; to be refused is fine, to panic is not.

use burn::module::Param;
use burn::tensor::{Device, Tensor};
use regard_models::files::{
    Config, Gguf, ModelFiles, Tokens, TransformerConfig, TransformerFiles, Weights,
};
use regard_models::generate::DecodingStrategy;
use regard_models::nn::Linear;
use regard_models::{Error, Model};
use regard_scope::{parse_mask, read_npy};
use regard_train::{AdamW, AdamWSettings, BestCheckpoint, Progress, Run, Settings};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Something that reads files of others.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// What it is called, and its folder in `fuzz/seeds`.
    pub name: &'static str,
    /// Words of its format, put into inputs.
    pub dictionary: &'static [&'static str],
    /// Whether an input is accepted.
    pub call: fn(&[u8]) -> bool,
    /// Seeds that are made, beside those that are files: where our own program writes the format, it writes them.
    pub made: fn() -> Vec<Vec<u8>>,
}

/// All of them.
pub const TARGETS: [Target; 10] = [
    Target { name: "gguf", dictionary: GGUF, call: gguf, made: Vec::new },
    Target { name: "npy", dictionary: NPY, call: npy, made: Vec::new },
    Target { name: "config", dictionary: CONFIG, call: config, made: Vec::new },
    Target { name: "huggingface", dictionary: HUGGINGFACE, call: huggingface, made: Vec::new },
    Target { name: "safetensors", dictionary: SAFETENSORS, call: safetensors, made: tensors },
    Target { name: "tokenizer", dictionary: TOKENIZER, call: tokenizer, made: Vec::new },
    Target {
        name: "sentencepiece",
        dictionary: &["<unk>", "</s>"],
        call: sentencepiece,
        made: Vec::new,
    },
    Target { name: "settings", dictionary: SETTINGS, call: settings, made: Vec::new },
    Target { name: "checkpoint", dictionary: CHECKPOINT, call: checkpoint, made: checkpoints },
    Target { name: "mask", dictionary: MASK, call: mask, made: Vec::new },
];

const GGUF: &[&str] = &[
    "GGUF",
    "general.alignment",
    "llama.block_count",
    "llama.vocab_size",
    "tokenizer.ggml.merges",
    "blk.1.",
    "token_embd.weight",
];
const HUGGINGFACE: &[&str] = &[
    "null",
    "true",
    "[",
    "{",
    "-1",
    "1e308",
    "\"model_type\": \"gemma3_text\"",
    "\"num_hidden_layers\": ",
    "\"layer_types\": ",
    "\"rope_scaling\": {",
    "\"rope_type\": \"yarn\"",
    "\"short_factor\": [",
];
const SAFETENSORS: &[&str] = &[
    "\"dtype\"",
    "\"F32\"",
    "\"BF16\"",
    "\"shape\"",
    "\"data_offsets\"",
    "__metadata__",
    "[",
    "{",
    "\0\0",
];
const NPY: &[&str] =
    &["'descr'", "'<f4'", "'fortran_order'", "True", "False", "'shape'", "(", "[", ", ", "{", "}"];
const CONFIG: &[&str] = &[
    "null",
    "true",
    "[",
    "{",
    "\"",
    "-1",
    "\"seq2seq\": {}",
    "\"n_layers\": ",
    "\"d_model\": 0",
    "\"shared_vocabulary\": true",
    "{source}",
    "\"positions\": \"learned\"",
    "\"head_dim\": 3",
    "\"eos\": [9]",
    "\"kv\": 7",
];
const TOKENIZER: &[&str] = &[
    "null",
    "[",
    "{",
    "{\"type\": \"Sequence\", \"normalizers\": [",
    "\"NFKC\"",
    "\"Lowercase\"",
    "\"ByteLevel\"",
    "\"Metaspace\"",
    "\"FixedLength\"",
    "\"length\": 0",
    "\"stop\": 1",
    "\"Unigram\"",
    "\"WordLevel\"",
    "\"Regex\": \"\"",
    "\"(a+)+b\"",
    "\"content\": \"\"",
    "\"byte_fallback\": true",
    "\"unk_id\": 9",
    "\"continuing_subword_prefix\": \"##\"",
    "\"dropout\": 1.0",
    "\u{fdfa}",
    "\\u0000",
    "\"end_of_word_suffix\": \"</w>\"",
    "\"prepend_scheme\": \"always\"",
    "\"lstrip\": true",
    "\"single_word\": true",
    "\"normalized\": true",
];
const SETTINGS: &[&str] = &[
    "[model]",
    "[training]",
    "[[data.parts]]",
    "=",
    "\n",
    "'",
    "\"\"\"",
    "training.lr=",
    "model.heads=",
    "nan",
    "inf",
    "true",
    "[",
    "{",
    "\n%%\n",
    "0x10",
    "1979-05-27",
];
const CHECKPOINT: &[&str] = &[
    "\"F32\"",
    "\"BF16\"",
    "\"I64\"",
    "data_offsets",
    "__metadata__",
    "[0,0]",
    "value.weight",
    "\\\"step\\\":",
    "null",
];
const MASK: &[&str] = &[
    "full",
    "causal",
    "band",
    "window",
    "lengths",
    "spans",
    "prefix",
    "segments",
    "global",
    "blocks",
    "dilated",
    "columns",
    "strided",
    "fixed",
    "longformer",
    "keys",
    "tree",
    "root",
    "&",
    "|",
    "(",
    ")",
    "$0",
    ",",
    "..",
    "-",
];

/// Texts that tokenizers are given: nothing, words, scripts without spaces, marks, spaces, and letters beyond the first plane.
const TEXTS: [&str; 5] = [
    "",
    "ab ba  c\n",
    "\u{65e5}\u{672c} \u{e9}e\u{301}",
    "<s>a</s> \u{1f600}\u{200d}",
    "            1234 it's.",
];

/// A whole model of a few numbers: it is opened, and writes a token.
fn gguf(bytes: &[u8]) -> bool {
    let opened = || -> Result<Model, Error> {
        Model::of_transformer(TransformerFiles::of_gguf(Gguf::read(bytes.to_vec())?, "gguf")?)
    };
    let Ok(model) = opened() else { return false };
    let mut hear = |_: usize, _: &str| ControlFlow::Continue(());
    // Weights are what they are: that scores are no numbers is an error of its own.
    drop(
        model
            .causal_lm()
            .map(|model| model.generate(&["ab"], &DecodingStrategy::Greedy, 2, &mut hear)),
    );
    true
}

/// A configuration, beside weights that fit one of the seeds.
fn config(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    let Ok(config) = Config::from_json(text) else { return false };
    if let Ok(again) = config.to_json() {
        assert!(Config::from_json(&again).is_ok(), "{again}");
    }
    static WEIGHTS: OnceLock<Option<Weights>> = OnceLock::new();
    let Some(weights) = WEIGHTS.get_or_init(|| weights().ok()) else { return false };
    let weights = weights.clone();
    let files =
        ModelFiles { config, weights, tokens: None, target_tokens: None, title: "config".into() };
    // Without tokens nothing is opened for text, but only after all weights have been taken.
    matches!(Model::new(files), Err(Error::Tokens { .. }))
}

/// The tensors of a decoder with one block, 2 features and 6 tokens.
fn weights() -> Result<Weights, Error> {
    let square = ["attention.q", "attention.k", "attention.v", "attention.out"];
    let wide = ["feed_forward.gate", "feed_forward.up", "feed_forward.down"];
    let norms = ["blocks.0.attention_norm", "blocks.0.feed_forward_norm", "norm"];
    let matrices =
        square.iter().chain(&wide).map(|name| (format!("blocks.0.{name}.weight"), vec![2, 2]));
    let norms = norms.iter().map(|name| (format!("{name}.weight"), vec![2]));
    let all = matrices.chain(norms).chain([("embedding.weight".to_owned(), vec![6, 2])]);
    Weights::new(all.map(|(name, shape)| {
        let n = shape.iter().product();
        (name, shape, vec![0.5; n])
    }))
}

/// A configuration of Hugging Face.
fn huggingface(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_ok_and(|text| TransformerConfig::from_json(text).is_ok())
}

/// Tensors: each is taken as numbers and as a matrix for products.
fn safetensors(bytes: &[u8]) -> bool {
    let Ok(mut weights) = Weights::safetensors(bytes.to_vec()) else { return false };
    let shapes: Vec<(String, Vec<usize>)> = (weights.names())
        .map(|name| (name.to_owned(), weights.shape(name).unwrap_or_default().to_vec()))
        .collect();
    for (name, shape) in shapes {
        if let [outputs, inputs] = *shape {
            drop(weights.matrix(&name, [outputs, inputs]));
        }
        drop(weights.take(&name, &shape));
    }
    true
}

/// A file of two tensors of each type that is read.
fn tensors() -> Vec<Vec<u8>> {
    let file = |dtype: &str, size: usize| {
        let (first, all) = (6 * size, 9 * size);
        let header = format!(
            r#"{{"a":{{"dtype":"{dtype}","shape":[2,3],"data_offsets":[0,{first}]}},"b":{{"dtype":"{dtype}","shape":[3],"data_offsets":[{first},{all}]}}}}"#
        );
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0x3F; all]].concat()
    };
    [("F32", 4), ("F64", 8), ("F16", 2), ("BF16", 2)].map(|(dtype, size)| file(dtype, size)).into()
}

/// A model of SentencePiece.
fn sentencepiece(bytes: &[u8]) -> bool {
    Tokens::sentencepiece(bytes).is_ok_and(|tokens| divides(&tokens))
}

/// A vocabulary of any kind.
fn tokenizer(bytes: &[u8]) -> bool {
    Tokens::from_json(bytes).is_ok_and(|tokens| divides(&tokens))
}

/// Texts become tokens, and tokens texts.
fn divides(tokens: &Tokens) -> bool {
    let end = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
    for text in TEXTS {
        if let Ok(ids) = tokens.encode(text) {
            assert!(ids.iter().all(|id| *id < end), "{ids:?} of {end}");
            tokens.decode(&ids);
        }
    }
    let mut stream = tokens.stream();
    for id in [0, 1, 2, end.saturating_sub(1), end, u32::MAX, 3] {
        stream.push(id);
        tokens.token(id);
    }
    stream.finish();
    true
}

/// Settings of a training run, and after a line `%%` changes to them, one on each.
fn settings(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    let (file, changes) = text.split_once("\n%%\n").unwrap_or((text, ""));
    let changes: Vec<String> = changes.lines().map(str::to_owned).collect();
    let Ok(settings) = Settings::new(file, &changes) else { return false };
    // What a run keeps of its settings is read when it is resumed.
    let kept = settings.to_toml().map(|kept| Settings::new(&kept, &[]));
    assert!(matches!(&kept, Ok(Ok(again)) if *again == settings), "{kept:?}");
    true
}

/// The checkpoint of a run of a model with one layer.
fn checkpoint(bytes: &[u8]) -> bool {
    let folder = folder();
    if std::fs::write(folder.join(LAST), bytes).is_err() {
        return false;
    }
    let restored = Run::open(&folder).and_then(|mut run| {
        let saved = run.load_checkpoint()?;
        saved.check(4, 1)?;
        run.restore(saved, optimizer())
    });
    restored.is_ok()
}

/// One at the beginning and one of a run that was validated.
fn checkpoints() -> Vec<Vec<u8>> {
    let best = [(3, 0.5), (1, -2.25)].map(|(step, value)| BestCheckpoint { step, value });
    let later = Progress { step: 7, epoch: 1, batch: 2, best: best.into(), ..Progress::default() };
    let written = |mut progress: Progress| -> Option<Vec<u8>> {
        let folder = folder();
        let settings = Settings::new(SETTINGS_OF_A_RUN, &[]).ok()?;
        Run::open(&folder).ok()?.save_checkpoint(&settings, optimizer(), &mut progress).ok()?;
        std::fs::read(folder.join(LAST)).ok()
    };
    [Progress::default(), later].into_iter().filter_map(written).collect()
}

/// What the runs were asked for.
const SETTINGS_OF_A_RUN: &str = include_str!("../../../fuzz/seeds/settings/write.toml");

/// What a run keeps its checkpoint in.
const LAST: &str = "last.safetensors";

/// The weights of that layer: the same in every process.
fn optimizer() -> &'static AdamW {
    static OPTIMIZER: OnceLock<AdamW> = OnceLock::new();
    OPTIMIZER.get_or_init(|| {
        let weight = Tensor::full([2, 2], 0.5, &Device::flex().autodiff());
        let mut layer = Linear::new([2, 2], false, &Device::flex());
        layer.weight = Param::from_tensor(weight);
        AdamW::new(&layer, AdamWSettings::default())
    })
}

/// Removes what targets have written on this thread. What others have written stays, and the folder around it.
pub fn clean() {
    drop(std::fs::remove_dir_all(folder()));
    drop(std::fs::remove_dir(scratch()));
}

/// Where targets write, in memory where there is such a thing.
fn scratch() -> PathBuf {
    let memory = Path::new("/dev/shm");
    let base = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    base.join(format!("regard-hostile-{}", std::process::id()))
}

/// A folder of this thread: several tests may run in one process.
fn folder() -> PathBuf {
    let folder = scratch().join(format!("{:?}", std::thread::current().id()));
    // That it cannot be made is seen when a file is written.
    drop(std::fs::create_dir_all(&folder));
    folder
}

/// A mask as it is typed.
/// An array, with its size known before and not.
fn npy(input: &[u8]) -> bool {
    let known = read_npy(input, Some(input.len() as u64));
    let unknown = read_npy(input, None);
    known.is_ok() && unknown.is_ok()
}

fn mask(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_ok_and(|text| parse_mask(text).is_ok())
}
