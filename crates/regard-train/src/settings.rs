//! One TOML file says what a run is. It holds what differs from the defaults; a key that is not known is an error.

use crate::data::{Column, VocabularySettings};
use crate::error::Error;
use crate::optim::AdamWSettings;
use crate::schedule::{Decay, Schedule};
use regard_burn::Products;
use regard_models::AttentionScore;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use toml::{Table, Value};

/// What is learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// A text in another language.
    Translate,
    /// Language modeling: the continuation of a text.
    Generate,
    /// Which class a document is of.
    Classify,
}

/// All that a run depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// What is learned.
    pub task: Task,
    /// What every chance in the run follows from: first weights, order of examples, what is dropped.
    pub seed: u64,
    /// What it is learned from.
    pub data: DataSettings,
    /// How texts are divided; of the source, where source and target have vocabularies of their own.
    pub vocabulary: VocabularySettings,
    /// Of the target, where it has a table of its own.
    pub target_vocabulary: VocabularySettings,
    /// What learns.
    pub model: ModelSettings,
    /// How it learns.
    pub training: TrainingSettings,
    /// How weights move.
    pub optimizer: AdamWSettings,
    /// What is asked of attention beside being useful.
    pub attention: AttentionSettings,
    /// How the run is judged while it goes on.
    pub validation: ValidationSettings,
}

/// What is learned from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataSettings {
    /// Where files are looked for.
    pub folder: String,
    /// License of the data, quoted in the model card.
    pub license: String,
    /// Maximum number of pairs read from each file; 0 reads all.
    pub max_examples: usize,
    /// Maximum tokens of each side of a pair; longer pairs are skipped. In documents, maximum words of a sentence; longer ones are
    /// truncated.
    pub max_length: usize,
    /// Probability of removing the final punctuation of a source, drawn anew in each epoch: users often omit it. Not for decoders.
    pub strip_punct_prob: f64,
    /// Files, one after another.
    pub parts: Vec<Part>,
}

/// Files of one kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Part {
    /// To learn from.
    pub train: String,
    /// To judge the run by.
    pub validation: String,
    /// To judge what it leaves behind by.
    pub test: String,
    /// Columns of source and target, or of label and text: numbers from 0 in a TSV file, keys in a JSONL file.
    pub columns: Vec<Column>,
    /// The language of the source.
    pub source: String,
    /// The language of the target.
    pub target: String,
}

/// What kind of model learns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelKind {
    /// An encoder and a decoder.
    Transformer,
    /// A GRU encoder and a GRU decoder, with Bahdanau's or Luong's attention or without attention.
    #[serde(rename = "seq2seq")]
    Seq2Seq,
    /// A transformer decoder.
    Gpt,
    /// A hierarchical attention network.
    Han,
}

/// What learns. A kind of model takes what it knows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSettings {
    /// Which kind.
    pub kind: ModelKind,
    /// Features of a token.
    pub d_model: usize,
    /// Blocks; of the encoder where there is one.
    pub n_layers: usize,
    /// Blocks of the decoder of a transformer.
    pub decoder_layers: usize,
    /// Heads of each attention.
    pub heads: usize,
    /// Features within a feed-forward net.
    pub d_ff: usize,
    /// Positions that a decoder is made for.
    pub context: usize,
    /// Whether the output projection shares the target embedding matrix.
    pub tie_embeddings: bool,
    /// Whether source and target share one vocabulary and one embedding matrix.
    pub shared_vocabulary: bool,
    /// Whether a block norms what it reads; if not, what it has added.
    pub pre_norm: bool,
    /// Features of a recurrent state, each way; a decoder has twice as many.
    pub hidden: usize,
    /// Units of the hidden layer of an additive or concat score; 0 with `additive` for a translator without attention. The scores
    /// `dot` and `general` have no hidden layer and ignore it.
    pub attention: usize,
    /// The attention score of a `seq2seq`: `additive` (Bahdanau), or `dot`, `general` or `concat` (Luong).
    pub attention_score: AttentionScore,
}

/// What products of matrices are made with while learning: see [`regard_burn::Products`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// All digits of f32.
    F32,
    /// Factors are rounded to bf16, sums are f32: much faster on CPUs with AMX. Weights and moments stay f32.
    Bf16,
}

impl From<Precision> for Products {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => Self::F32,
            Precision::Bf16 => Self::Bf16,
        }
    }
}

/// How it learns.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingSettings {
    /// What products are made with.
    pub precision: Precision,
    /// Folder of a model of the same sizes that initializes the weights and vocabularies; empty for random weights.
    pub init_from: String,
    /// How often each example is seen.
    pub epochs: u64,
    /// Steps, if they are to be counted and not epochs; 0 counts epochs.
    pub steps: u64,
    /// Tokens of a batch, padding and both sides counted.
    pub batch_tokens: usize,
    /// Batches of a step.
    pub accumulate: usize,
    /// Peak learning rate.
    pub lr: f64,
    /// Learning rate at the end of the decay.
    pub min_lr: f64,
    /// Steps until the highest.
    pub warmup: u64,
    /// How the rate falls after that.
    pub decay: Decay,
    /// The share of a target that is spread over all tokens.
    pub label_smoothing: f64,
    /// The share of each layer's output that is dropped.
    pub dropout: f64,
    /// The share of attention weights that is dropped.
    pub attention_dropout: f64,
    /// Steps between lines of metrics.
    pub log_every: u64,
    /// Steps between checkpoints.
    pub checkpoint_every: u64,
    /// Steps between validations; 0 validates after each epoch.
    pub validate_every: u64,
    /// Validations without anything better after which the run ends; 0 never ends it.
    pub patience: u64,
    /// Number of best checkpoints to keep.
    pub save_top_k: usize,
    /// Whether the model is saved as f16, half the size; validation decodes with the f16 weights too.
    pub save_fp16: bool,
}

/// What is asked of attention.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionSettings {
    /// So many times the mean entropy of all rows is added to the loss: above 0 heads look at fewer places, below 0 at more.
    pub entropy: f64,
    /// The temperature at first: scores are divided by it.
    pub temperature: f64,
    /// The temperature in the end, if there are steps to it.
    pub last_temperature: f64,
    /// Steps from the one to the other.
    pub temperature_steps: u64,
}

/// Metric that selects the best checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SelectionMetric {
    /// The lower loss.
    Loss,
    /// The higher score: BLEU of translations, accuracy of classes.
    Score,
}

/// How the run is judged while it goes on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ValidationSettings {
    /// Metric that selects the best checkpoint.
    pub metric: SelectionMetric,
    /// Maximum number of validation examples that are translated.
    pub max_examples: usize,
    /// Number of beams of beam search; 1 is greedy decoding.
    pub num_beams: usize,
    /// How much longer translations are favoured by the beam search.
    pub length_penalty: f32,
    /// Tokens of a translation, at most.
    pub max_tokens: usize,
    /// Examples that are shown, and whose attention is measured.
    pub samples: usize,
}

impl Default for Settings {
    fn default() -> Self {
        let vocabulary = VocabularySettings::default();
        Self {
            task: Task::Translate,
            seed: 1,
            data: DataSettings {
                folder: ".".into(),
                license: String::new(),
                max_examples: 0,
                max_length: 128,
                strip_punct_prob: 0.0,
                parts: vec![],
            },
            vocabulary: vocabulary.clone(),
            target_vocabulary: vocabulary,
            model: ModelSettings {
                kind: ModelKind::Transformer,
                d_model: 256,
                n_layers: 3,
                decoder_layers: 3,
                heads: 4,
                d_ff: 1024,
                context: 256,
                tie_embeddings: true,
                shared_vocabulary: false,
                pre_norm: true,
                hidden: 256,
                attention: 256,
                attention_score: AttentionScore::Additive,
            },
            training: TrainingSettings {
                precision: Precision::Bf16,
                init_from: String::new(),
                epochs: 20,
                steps: 0,
                batch_tokens: 4096,
                accumulate: 1,
                lr: 1e-3,
                min_lr: 1e-5,
                warmup: 400,
                decay: Decay::Cosine,
                label_smoothing: 0.1,
                dropout: 0.1,
                attention_dropout: 0.0,
                log_every: 20,
                checkpoint_every: 200,
                validate_every: 0,
                patience: 0,
                save_top_k: 1,
                save_fp16: false,
            },
            optimizer: AdamWSettings::default(),
            attention: AttentionSettings {
                entropy: 0.0,
                temperature: 1.0,
                last_temperature: 1.0,
                temperature_steps: 0,
            },
            validation: ValidationSettings {
                metric: SelectionMetric::Loss,
                max_examples: 200,
                num_beams: 1,
                length_penalty: 1.0,
                max_tokens: 64,
                samples: 4,
            },
        }
    }
}

/// Settings that come with the program: a name and a TOML file.
pub const PRESETS: &[(&str, &str)] = &[
    ("tatoeba-zh-en", include_str!("../presets/tatoeba-zh-en.toml")),
    ("tatoeba-zh-en-gru", include_str!("../presets/tatoeba-zh-en-gru.toml")),
    (
        "tatoeba-zh-en-gru-without-attention",
        include_str!("../presets/tatoeba-zh-en-gru-without-attention.toml"),
    ),
    ("tatoeba-tiny", include_str!("../presets/tatoeba-tiny.toml")),
    ("multi30k-de-en", include_str!("../presets/multi30k-de-en.toml")),
    ("multi30k-de-en-gru", include_str!("../presets/multi30k-de-en-gru.toml")),
    ("multi30k-de-en-luong", include_str!("../presets/multi30k-de-en-luong.toml")),
    ("multi30k-en-de", include_str!("../presets/multi30k-en-de.toml")),
    ("zh-de-en-gpt", include_str!("../presets/zh-de-en-gpt.toml")),
    ("shakespeare", include_str!("../presets/shakespeare.toml")),
    ("tang-poems", include_str!("../presets/tang-poems.toml")),
    ("movie-reviews", include_str!("../presets/movie-reviews.toml")),
    ("poem-genres", include_str!("../presets/poem-genres.toml")),
];

/// What may change in the settings of a run that goes on: where data are, how long it goes on, and what is told of it.
const FREE: &[&str] = &[
    "data.folder",
    "data.license",
    "training.epochs",
    "training.steps",
    "training.patience",
    "training.save_top_k",
    "training.log_every",
    "training.checkpoint_every",
    "validation.samples",
];

/// The TOML of a preset.
pub fn preset(name: &str) -> Result<&'static str, Error> {
    let found = PRESETS.iter().find(|(own, _)| *own == name).map(|(_, text)| *text);
    found.ok_or_else(|| {
        let names = PRESETS.iter().map(|(own, _)| *own);
        Error::setting("preset", format!("there is no `{name}`{}", near(name, names)))
    })
}

/// `; did you mean this one?`, or all that there are.
fn near<'a>(name: &str, all: impl Iterator<Item = &'a str>) -> String {
    let all: Vec<&str> = all.collect();
    let like = |own: &str| strsim::damerau_levenshtein(name, own);
    let nearest = all.iter().min_by_key(|own| like(own)).filter(|own| 2 * like(own) <= own.len());
    // `beams` for `num_beams`.
    let containing = || all.iter().find(|own| name.len() > 2 && own.contains(name));
    match nearest.or_else(containing) {
        Some(own) => format!("; did you mean `{own}`?"),
        None => format!("; there are {}", all.join(", ")),
    }
}

impl Settings {
    /// The defaults, under a file, under changes of the form `training.lr=1e-3`.
    pub fn new(file: &str, changes: &[String]) -> Result<Self, Error> {
        let wrong = |e: &dyn std::fmt::Display| Error::setting("settings", e.to_string());
        let mut table = Table::try_from(Self::default()).map_err(|e| wrong(&e))?;
        let parts = Table::try_from(Part::default()).map_err(|e| wrong(&e))?;
        let file: Table = file.parse().map_err(|e| wrong(&e))?;
        lay(&mut table, file, "", &parts)?;
        for change in changes {
            let (key, value) = change
                .split_once('=')
                .ok_or_else(|| Error::setting(change, "a change has the form key=value"))?;
            set(&mut table, key.trim(), value.trim())?;
        }
        // What toml says ends with a line that names the key.
        let settings: Self = table.try_into().map_err(|e: toml::de::Error| {
            Error::setting("settings", e.to_string().trim_end().replace('\n', " "))
        })?;
        settings.check()?;
        Ok(settings)
    }

    /// All of it, defaults too: what a run directory keeps.
    pub fn to_toml(&self) -> Result<String, Error> {
        toml::to_string(self).map_err(|e| Error::setting("settings", e.to_string()))
    }

    /// The learning rate over a run of so many steps.
    #[must_use]
    pub fn schedule(&self, steps: u64) -> Schedule {
        let TrainingSettings { lr, min_lr, warmup, decay, .. } = self.training;
        Schedule { lr, min_lr, warmup, steps, decay }
    }

    /// Refuses more ranks than a step has parts.
    pub fn refuse_more_ranks(&self, ranks: usize) -> Result<(), Error> {
        let parts = self.training.accumulate;
        if parts >= ranks {
            return Ok(());
        }
        let why = format!(
            "{parts}, and there are {ranks} ranks, each of which computes at least one part of a step; start at most {parts} ranks, or begin \
             a run with more parts"
        );
        Err(Error::setting("training.accumulate", why))
    }

    /// Refuses to go on with a run under other settings than it began with, but those of [`FREE`]. The file is where they stand.
    pub(crate) fn refuse_changes(&self, began: &Self, file: &Path) -> Result<(), Error> {
        let flat = |settings: &Self| {
            let table = Value::try_from(settings);
            let mut all = BTreeMap::new();
            flatten("", table.map_err(|e| Error::file(file, &e))?, &mut all);
            Ok::<_, Error>(all)
        };
        let (now, began) = (flat(self)?, flat(began)?);
        let keys: BTreeSet<&String> = now.keys().chain(began.keys()).collect();
        let free = |key: &str| {
            FREE.contains(&key) || (key.starts_with("data.parts.") && key.ends_with(".test"))
        };
        let told = |all: &BTreeMap<String, Value>, key: &String| {
            all.get(key).map_or_else(|| "nothing".to_owned(), Value::to_string)
        };
        let changed: Vec<String> = keys
            .into_iter()
            .filter(|key| !free(key) && now.get(*key) != began.get(*key))
            .map(|key| format!("{key} = {}, and was {}", told(&now, key), told(&began, key)))
            .collect();
        if changed.is_empty() {
            return Ok(());
        }
        let why = format!(
            "{}; a run goes on as it began: put the settings back, or begin anew (only these may change: {}, data.parts.N.test)",
            changed.join("; "),
            FREE.join(", ")
        );
        Err(Error::file(file, &why))
    }

    fn check(&self) -> Result<(), Error> {
        self.check_numbers()?;
        self.check_counts()?;
        self.check_parts()?;
        self.check_model()
    }

    fn check_numbers(&self) -> Result<(), Error> {
        let (t, o, a) = (&self.training, &self.optimizer, &self.attention);
        let share = |x: f64| (0.0..1.0).contains(&x);
        let above = |x: f64| x.is_finite() && x > 0.0;
        let or_nothing = |x: f64| x.is_finite() && x >= 0.0;
        type Number = (&'static str, f64, fn(f64) -> bool, &'static str);
        let numbers: [Number; 15] = [
            ("data.strip_punct_prob", self.data.strip_punct_prob, share, "from 0 to below 1"),
            ("training.dropout", t.dropout, share, "from 0 to below 1"),
            ("training.attention_dropout", t.attention_dropout, share, "from 0 to below 1"),
            ("training.label_smoothing", t.label_smoothing, share, "from 0 to below 1"),
            ("optimizer.ema_decay", o.ema_decay, share, "from 0 to below 1"),
            ("optimizer.beta1", o.beta1, share, "from 0 to below 1"),
            ("optimizer.beta2", o.beta2, share, "from 0 to below 1"),
            ("training.lr", t.lr, above, "above 0"),
            ("optimizer.epsilon", o.epsilon, above, "above 0"),
            ("attention.temperature", a.temperature, above, "above 0"),
            ("attention.last_temperature", a.last_temperature, above, "above 0"),
            ("optimizer.max_grad_norm", o.max_grad_norm, or_nothing, "0 or more"),
            ("optimizer.weight_decay", o.weight_decay, or_nothing, "0 or more"),
            ("training.min_lr", t.min_lr, or_nothing, "0 or more"),
            ("attention.entropy", a.entropy, f64::is_finite, "a number"),
        ];
        match numbers.iter().find(|(_, number, fits, _)| !fits(*number)) {
            Some((key, number, _, wanted)) => {
                Err(Error::setting(*key, format!("{number}; it must be {wanted}")))
            }
            None => Ok(()),
        }
    }

    fn check_counts(&self) -> Result<(), Error> {
        let (t, v, m) = (&self.training, &self.validation, &self.model);
        let counts = [
            ("training.batch_tokens", t.batch_tokens as u64),
            ("training.accumulate", t.accumulate as u64),
            ("training.save_top_k", t.save_top_k as u64),
            ("training.log_every", t.log_every),
            ("training.checkpoint_every", t.checkpoint_every),
            ("validation.num_beams", v.num_beams as u64),
            ("validation.max_tokens", v.max_tokens as u64),
            ("validation.max_examples", v.max_examples as u64),
            ("data.max_length", self.data.max_length as u64),
            ("model.context", m.context as u64),
            ("model.heads", m.heads as u64),
        ];
        if let Some((key, _)) = counts.iter().find(|(_, count)| *count == 0) {
            return Err(Error::setting(*key, "0; it must be 1 or more"));
        }
        if t.epochs == 0 && t.steps == 0 {
            let why = "0, and training.steps too; nothing would be learned";
            return Err(Error::setting("training.epochs", why));
        }
        Ok(())
    }

    fn check_parts(&self) -> Result<(), Error> {
        let Some(first) = self.data.parts.first() else {
            return Err(Error::setting("data.parts", "there are none; name files to learn from"));
        };
        let other = self.data.parts.iter().position(|part| part.target != first.target);
        match other.filter(|_| self.task == Task::Translate) {
            Some(i) => {
                let (found, target) = (&self.data.parts[i].target, &first.target);
                let why =
                    format!("`{found}`, after `{target}`; all parts of a run have one target");
                Err(Error::setting(format!("data.parts.{i}.target"), why))
            }
            None => Ok(()),
        }
    }

    fn check_model(&self) -> Result<(), Error> {
        let ModelSettings {
            kind,
            d_model,
            heads,
            shared_vocabulary,
            attention,
            attention_score,
            ..
        } = self.model;
        let fits = match self.task {
            Task::Translate => kind != ModelKind::Han,
            Task::Generate => kind == ModelKind::Gpt,
            Task::Classify => kind == ModelKind::Han,
        };
        if !fits {
            let why = format!("{kind:?} cannot {:?}", self.task).to_lowercase();
            let can = "transformer, seq2seq and gpt translate, gpt generates, han classifies";
            return Err(Error::setting("model.kind", format!("{why}; {can}")));
        }
        if matches!(kind, ModelKind::Transformer | ModelKind::Gpt) && !d_model.is_multiple_of(heads)
        {
            let why = format!("{d_model} features do not divide among {heads}");
            return Err(Error::setting("model.heads", why));
        }
        if kind == ModelKind::Seq2Seq && attention_score == AttentionScore::Concat && attention == 0
        {
            let why = "0; the attention_score `concat` has a hidden layer: it must be 1 or more";
            return Err(Error::setting("model.attention", why));
        }
        if kind == ModelKind::Gpt && self.task == Task::Translate && !shared_vocabulary {
            let why = "false; a decoder has one vocabulary for both languages";
            return Err(Error::setting("model.shared_vocabulary", why));
        }
        Ok(())
    }
}

/// Puts what a file says over what is there. A key that is not there is not known.
fn lay(under: &mut Table, over: Table, path: &str, part: &Table) -> Result<(), Error> {
    for (key, value) in over {
        let place = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        let Some(own) = under.get_mut(&key) else {
            let why = format!("no such key{}", near(&key, under.keys().map(String::as_str)));
            return Err(Error::setting(place, why));
        };
        match (own, value) {
            (Value::Table(own), Value::Table(value)) => lay(own, value, &place, part)?,
            (own, Value::Array(items)) if place == "data.parts" => {
                for (i, item) in items.iter().enumerate() {
                    if let Value::Table(item) = item {
                        lay(&mut part.clone(), item.clone(), &format!("{place}.{i}"), part)?;
                    }
                }
                *own = Value::Array(items);
            }
            (own, value) => {
                fits(own, &value, &place)?;
                *own = value;
            }
        }
    }
    Ok(())
}

/// Every value under its whole key.
fn flatten(key: &str, value: Value, all: &mut BTreeMap<String, Value>) {
    let under = |own: &str| if key.is_empty() { own.to_owned() } else { format!("{key}.{own}") };
    match value {
        Value::Table(table) => {
            table.into_iter().for_each(|(own, value)| flatten(&under(&own), value, all));
        }
        Value::Array(items) => {
            let items = items.into_iter().enumerate();
            items.for_each(|(i, value)| flatten(&under(&i.to_string()), value, all));
        }
        value => {
            all.insert(key.to_owned(), value);
        }
    }
}

/// Refuses a value of another kind; a whole number may stand for any number.
fn fits(own: &Value, value: &Value, place: &str) -> Result<(), Error> {
    if own.same_type(value) || (own.is_float() && value.is_integer()) {
        return Ok(());
    }
    let why = format!("`{value}` is {}; it must be {}", value.type_str(), own.type_str());
    Err(Error::setting(place, why))
}

/// One change. A value is TOML, or else a text.
fn set(table: &mut Table, key: &str, text: &str) -> Result<(), Error> {
    let value = format!("x = {text}").parse::<Table>().ok().and_then(|mut t| t.remove("x"));
    let value = value.unwrap_or_else(|| Value::String(text.to_owned()));
    let mut whole = Value::Table(std::mem::take(table));
    let mut place = &mut whole;
    for step in key.split('.') {
        place = match place {
            Value::Array(items) => {
                let found = step.parse::<usize>().ok().filter(|i| *i < items.len());
                let count = items.len();
                let why = format!("there is no `{step}`; there are {count}, counted from 0");
                &mut items[found.ok_or_else(|| Error::setting(key, why))?]
            }
            Value::Table(own) => {
                if !own.contains_key(step) {
                    let why = format!("no such key{}", near(step, own.keys().map(String::as_str)));
                    return Err(Error::setting(key, why));
                }
                &mut own[step]
            }
            _ => return Err(Error::setting(key, format!("`{step}`: nothing is below here"))),
        };
    }
    if place.is_table() {
        return Err(Error::setting(key, "this is a table; name one of its keys"));
    }
    fits(place, &value, key)?;
    *place = value;
    if let Value::Table(whole) = whole {
        *table = whole;
    }
    Ok(())
}

/// The names of all presets.
#[must_use]
pub fn names() -> Vec<&'static str> {
    PRESETS.iter().map(|(name, _)| *name).collect()
}

/// All presets, each with what it is.
#[must_use]
pub fn preset_help() -> String {
    let line = |(name, text): &(&str, &str)| {
        let about = text.lines().next().unwrap_or_default().trim_start_matches("# ");
        let folder = text.lines().find_map(|line| line.strip_prefix("folder = "));
        format!("  {name:36} {about} Data: {}\n", folder.unwrap_or_default().trim_matches('"'))
    };
    format!(
        "Settings that come with the program:\n{}",
        PRESETS.iter().map(line).collect::<String>()
    )
}
