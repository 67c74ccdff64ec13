//! What heads do, by published definitions: scores of each head over one text, in one pass over its weights and in memory linear in
//! the length of the text.
//!
//! Rows are queries `i`, columns keys `j`, tokens `t`. Only self-attention has scores, since rows and keys are the same text there.
//!
//! | score | definition | from |
//! |---|---|---|
//! | previous | mean over `i >= 1` of the weight of `i - 1` | [Olsson et al. 2022](https://arxiv.org/abs/2209.11895) |
//! | duplicate | mean over the rows whose token occurred before of the mass on its earlier occurrences | [Wang et al. 2023](https://arxiv.org/abs/2211.00593) |
//! | induction | mean over these rows of the mass on the tokens that followed earlier occurrences (prefix matching) | [Olsson et al. 2022](https://arxiv.org/abs/2209.11895) |
//! | positional | part of the rows `i >= 1` whose largest weight is at one distance, the most frequent one | [Voita et al. 2019](https://arxiv.org/abs/1905.09418) |
//! | delimiter | mean over `i >= 1` of the mass on delimiters, the first token left out | [Clark et al. 2019](https://arxiv.org/abs/1906.04341) |
//! | sink | mean over `i >= 1` of the weight of the first token | [Xiao et al. 2024](https://arxiv.org/abs/2309.17453) |
//! | copy | part of the rows whose next token occurred before, at which the largest weight is on an occurrence of it | the rule of the next line, anywhere |
//! | retrieval | part of the tokens of a needle that are copied: when they are written once more, the largest weight is on them | [Wu et al. 2024](https://arxiv.org/abs/2404.15574) |

use crate::color::Theme;
use crate::error::Error;
use crate::map::Map;
use crate::measure::Measure;
use crate::page::escaped;
use crate::palette::Scale;
use crate::render::svg;
use crate::scene::Metrics;
use crate::trace::{Inputs, Labels, Layer, LayerData, Site, Trace, Weights};
use crate::view::{Style, table};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use regard::{Machine, Mask};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

/// The scores of one head, each from 0 to 1; NaN where no row of the text could tell.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HeadScores {
    /// Which head.
    #[serde(flatten)]
    pub site: Site,
    /// Previous-token head.
    pub previous: f64,
    /// Duplicate-token head.
    pub duplicate: f64,
    /// Induction head.
    pub induction: f64,
    /// Positional head.
    pub positional: f64,
    /// The distance `key - query` of [`positional`](Self::positional).
    pub distance: i64,
    /// Head that attends to delimiters.
    pub delimiter: f64,
    /// Head whose mass is on the first token.
    pub sink: f64,
    /// Head that attends to what is written next.
    pub copy: f64,
    /// Retrieval head.
    pub retrieval: f64,
}

/// A sentence that a text contains twice: hidden somewhere, and written once more at the end, as the answer to a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Needle {
    /// Positions of the sentence.
    pub hidden: Range<usize>,
    /// Positions of its repetition; as long as the sentence, or shorter.
    pub answer: Range<usize>,
}

/// The smallest score that names a head on a page: half of the mass, or of the rows.
const MIN_LABEL_SCORE: f64 = 0.5;
/// The smallest number of rows whose mean names a head: in a short text few rows can tell.
const MIN_LABEL_ROWS: usize = 4;

/// What a head is called on a page.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct HeadLabel {
    /// `induction`, `previous token`, `distance −3`.
    name: String,
    score: f64,
    /// That of the score, in words.
    definition: &'static str,
}

/// The names of a head by its scores, highest first; none of what has no scores. Two passes over its weights, three if the mask is not
/// causal.
pub(crate) fn head_labels(
    trace: &Trace,
    layer: &Layer,
    head: usize,
    machine: Machine,
) -> Result<Vec<HeadLabel>, Error> {
    let Some(text) = Text::of(trace, layer) else { return Ok(Vec::new()) };
    Ok(HeadScores::of_head((layer, head), machine, &text, None)?.labels(&text))
}

/// What the tokens of a text are: equal numbers for equal tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Text {
    tokens: Vec<u32>,
    /// 1 for a delimiter.
    delimiters: Vec<u32>,
}

/// No token has this number, and no other number is for keys without one.
const NO_TOKEN: u32 = u32::MAX;

impl Text {
    /// Of a layer of self-attention whose tokens have labels.
    fn of(trace: &Trace, layer: &Layer) -> Option<Self> {
        let labels = trace.labels(&layer.rows);
        let is_same = layer.rows == layer.cols && layer.data.size() == [labels.labels.len(); 2];
        is_same.then(|| Self::new(labels))
    }

    fn new(labels: &Labels) -> Self {
        let mut numbers = HashMap::new();
        let mut tokens = Vec::with_capacity(labels.labels.len());
        for label in &labels.labels {
            let next = u32::try_from(numbers.len()).unwrap_or(NO_TOKEN - 1);
            tokens.push(*numbers.entry(label.as_str()).or_insert(next));
        }
        let delimiter = |(i, label): (usize, &String)| u32::from(i > 0 && is_delimiter(label));
        let delimiters = labels.labels.iter().enumerate().map(delimiter).collect();
        Self { tokens, delimiters }
    }

    /// Which rows have a token that occurred before.
    fn repeated(&self) -> Vec<bool> {
        let mut seen = HashSet::new();
        self.tokens.iter().map(|token| !seen.insert(*token)).collect()
    }

    /// Which rows have a next token that occurred before, that row included.
    fn next_is_known(&self) -> Vec<bool> {
        let mut seen = HashSet::new();
        let mut known = Vec::with_capacity(self.tokens.len());
        for (i, token) in self.tokens.iter().enumerate() {
            seen.insert(*token);
            known.push(self.tokens.get(i + 1).is_some_and(|next| seen.contains(next)));
        }
        known
    }

    /// The token before each position.
    fn shifted(&self) -> Vec<u32> {
        let before = self.tokens.iter().copied().take(self.tokens.len().saturating_sub(1));
        std::iter::once(NO_TOKEN).chain(before).take(self.tokens.len()).collect()
    }
}

/// Punctuation, line ends, and special tokens such as `[SEP]` and `</s>`.
fn is_delimiter(label: &str) -> bool {
    let bare = label.trim_matches([' ', '\u{2581}', '\u{120}', '\u{b7}']);
    let special = |open, close| bare.len() > 2 && bare.starts_with(open) && bare.ends_with(close);
    let is_mark = |c: char| ".,;:!?\n\u{10a}\u{21b5}。，、；：！？".contains(c);
    (!bare.is_empty() && bare.chars().all(is_mark)) || special('[', ']') || special('<', '>')
}

/// What each row of a head says, from which its scores are made.
#[derive(Clone, Debug, Default)]
struct Rows {
    /// Weight of the key before.
    previous: Vec<f64>,
    /// Masses on earlier occurrences, and on what followed them.
    duplicate: Vec<f64>,
    induction: Vec<f64>,
    delimiter: Vec<f64>,
    sink: Vec<f64>,
    /// Key of the largest weight.
    top: Vec<Option<usize>>,
}

impl Needle {
    /// Where a sentence stands in a text: its first occurrence, and its last one. Space is not compared.
    pub fn find(labels: &Labels, sentence: &str) -> Result<Self, Error> {
        let bare = |text: &str| -> String {
            let marks = ['\u{2581}', '\u{120}', '\u{10a}', '\u{b7}'];
            text.chars().filter(|c| !c.is_whitespace() && !marks.contains(c)).collect()
        };
        let (mut whole, mut starts) = (String::new(), Vec::new());
        for label in &labels.labels {
            starts.push(whole.len());
            whole.push_str(&bare(label));
        }
        starts.push(whole.len());
        let sentence = bare(sentence);
        let positions = |at: usize| {
            let first = starts.partition_point(|start| *start <= at) - 1;
            first..starts.partition_point(|start| *start < at + sentence.len())
        };
        let found = whole.find(&sentence).zip(whole.rfind(&sentence));
        match found.filter(|(first, last)| !sentence.is_empty() && first < last) {
            Some((first, last)) => Ok(Self { hidden: positions(first), answer: positions(last) }),
            None => Err(Error::NotThere {
                what: "needle, twice in the text".into(),
                there: "a text that contains the sentence, and ends with it as the answer".into(),
            }),
        }
    }

    fn check(&self, len: usize) -> Result<(), Error> {
        for (name, range) in [("needle", &self.hidden), ("answer", &self.answer)] {
            if range.is_empty() || range.end > len || (name == "answer" && range.start == 0) {
                let Range { start, end } = range;
                let why = format!(
                    "positions {start}..{end} of a text of {len} tokens; give a range within it, an answer after the first token"
                );
                return Err(Error::format(name, why));
            }
        }
        Ok(())
    }
}

impl HeadScores {
    /// The names of the scores, as they are printed.
    pub const NAMES: [&'static str; 8] = [
        "previous",
        "duplicate",
        "induction",
        "positional",
        "delimiter",
        "sink",
        "copy",
        "retrieval",
    ];

    /// The scores of every head of self-attention of a trace, whose labels are its tokens. `progress` hears of layers done and layers
    /// in all.
    pub fn of(
        trace: &Trace,
        machine: Machine,
        needle: Option<&Needle>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Vec<Self>, Error> {
        let mut all = Vec::new();
        for (i, layer) in trace.layers.iter().enumerate() {
            if let Some(text) = Text::of(trace, layer) {
                needle.map_or(Ok(()), |needle| needle.check(text.tokens.len()))?;
                for head in 0..layer.data.heads() {
                    all.push(Self::of_head((layer, head), machine, &text, needle)?);
                }
            }
            progress(i + 1, trace.layers.len());
        }
        if all.is_empty() {
            let what = "self-attention with tokens as labels".into();
            return Err(Error::NotThere { what, there: trace.kinds().join(", ") });
        }
        Ok(all)
    }

    fn of_head(
        (layer, head): (&Layer, usize),
        machine: Machine,
        text: &Text,
        needle: Option<&Needle>,
    ) -> Result<Self, Error> {
        let rows = match &layer.data {
            LayerData::Inputs(inputs) => Rows::streamed(inputs, machine, head, text)?,
            LayerData::Weights(weights) => Rows::dense(weights, head, text),
        };
        let site = Site { layer: layer.layer, kind: layer.kind.clone(), head };
        Ok(Self::new(site, &rows, text, needle))
    }

    fn new(site: Site, rows: &Rows, text: &Text, needle: Option<&Needle>) -> Self {
        let (repeated, known) = (text.repeated(), text.next_is_known());
        let n = text.tokens.len();
        let after_first: Vec<bool> = (0..n).map(|i| i > 0).collect();
        let is_copied = |i: usize| {
            let next = text.tokens.get(i + 1);
            let top = rows.top[i].filter(|key| *key <= i);
            top.is_some_and(|key| next == text.tokens.get(key))
        };
        let copied: Vec<f64> = (0..n).map(|i| f64::from(u8::from(is_copied(i)))).collect();
        let (positional, distance) = rows.positional();
        let retrieval = needle.map_or(f64::NAN, |needle| {
            let keys = needle.answer.clone().filter(|i| is_copied(i - 1));
            let keys =
                keys.filter_map(|i| rows.top[i - 1]).filter(|key| needle.hidden.contains(key));
            let mut keys: Vec<usize> = keys.collect();
            keys.sort_unstable();
            keys.dedup();
            keys.len() as f64 / needle.hidden.len() as f64
        });
        Self {
            site,
            previous: mean(&rows.previous, &after_first),
            duplicate: mean(&rows.duplicate, &repeated),
            induction: mean(&rows.induction, &repeated),
            positional,
            distance,
            delimiter: mean(&rows.delimiter, &after_first),
            sink: mean(&rows.sink, &after_first),
            copy: mean(&copied, &known),
            retrieval,
        }
    }

    /// A score by its name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<f64> {
        Some(match name {
            "previous" => self.previous,
            "duplicate" => self.duplicate,
            "induction" => self.induction,
            "positional" => self.positional,
            "delimiter" => self.delimiter,
            "sink" => self.sink,
            "copy" => self.copy,
            "retrieval" => self.retrieval,
            _ => return None,
        })
    }

    /// The scores that name the head, highest first.
    fn labels(&self, text: &Text) -> Vec<HeadLabel> {
        let count = |rows: Vec<bool>| rows.into_iter().filter(|counts| *counts).count();
        let (repeated, known) = (count(text.repeated()), count(text.next_is_known()));
        let rows = |name: &str| match name {
            "duplicate" | "induction" => repeated,
            "copy" => known,
            _ => text.tokens.len().saturating_sub(1),
        };
        // Of the two names of a previous-token head one is enough.
        let is_previous = self.previous >= MIN_LABEL_SCORE && self.distance == -1;
        let clear = DEFINITIONS.into_iter().filter_map(|(name, definition, _)| {
            let score = self.get(name).filter(|score| *score >= MIN_LABEL_SCORE)?;
            let is_told = (name != "positional" || !is_previous) && rows(name) >= MIN_LABEL_ROWS;
            is_told.then(|| HeadLabel { name: self.label(name), score, definition })
        });
        let mut labels: Vec<HeadLabel> = clear.collect();
        labels.sort_by(|a, b| b.score.total_cmp(&a.score));
        labels
    }

    fn label(&self, name: &str) -> String {
        match (name, self.distance) {
            ("previous", _) => "previous token".into(),
            ("duplicate", _) => "duplicate token".into(),
            ("sink", _) => "first token".into(),
            ("positional", 0) => "same token".into(),
            ("positional", distance) => format!("distance {distance:+}").replace('-', "\u{2212}"),
            _ => name.into(),
        }
    }

    /// One score of all heads of a kind, layers down, heads across.
    #[must_use]
    pub fn map(all: &[Self], kind: &str, name: &str) -> Map {
        let number = |one: &'_ Self| (one.site.clone(), one.get(name).unwrap_or(f64::NAN));
        Map::of_heads(format!("{name} of {kind}"), kind, all.iter().map(number))
    }
}

/// The mean over the rows that count; NaN if there are none.
fn mean(rows: &[f64], counts: &[bool]) -> f64 {
    let own = || rows.iter().zip(counts).filter(|(_, counts)| **counts);
    own().map(|(x, _)| x).sum::<f64>() / own().count() as f64
}

impl Rows {
    /// From queries and keys, in one pass over the weights.
    fn streamed(
        inputs: &Inputs,
        machine: Machine,
        head: usize,
        text: &Text,
    ) -> Result<Self, Error> {
        let view = inputs.view(machine)?.head(0, head)?;
        let n = text.tokens.len();
        let earlier = |measure: Measure| {
            let measure = measure.match_mass(&text.tokens, &text.tokens);
            measure.match_mass(&text.tokens, &text.shifted())
        };
        let all = |measure: Measure| {
            let one = vec![1; n];
            let measure = measure.top_k(1).span_mass(std::iter::once(0..1));
            measure.match_mass(&one, &text.delimiters)
        };
        // The key of the row itself, and with it the one before: masks of two diagonals.
        let diagonals = [0, 1].map(|back| Mask::band(Some(back), Some(0)));
        let near = diagonals.into_iter().fold(Measure::new(), Measure::mass);
        let near = near.of(&view)?.masses;
        let (found, matches) = if inputs.mask == "causal" {
            let mut found = earlier(all(Measure::new())).of(&view)?;
            let matches = found.matches.split_off(1);
            (found, matches)
        } else {
            let matches = earlier(Measure::new()).of(&view.mask(Mask::causal())?)?.matches;
            (all(Measure::new()).of(&view)?, matches)
        };
        let wide = |mass: &Vec<f32>| mass.iter().map(|a| f64::from(*a)).collect::<Vec<f64>>();
        let less = |all: &Vec<f32>, own: &Vec<f32>| {
            let pairs = all.iter().zip(own);
            pairs.map(|(all, own)| f64::from(*all) - f64::from(*own)).collect::<Vec<f64>>()
        };
        Ok(Self {
            previous: less(&near[1], &near[0]),
            duplicate: less(&matches[0], &near[0]),
            induction: wide(&matches[1]),
            delimiter: wide(&found.matches[0]),
            sink: wide(&found.spans[0]),
            top: (0..n).map(|i| found.top.keys(i).first().copied()).collect(),
        })
    }

    /// From weights, as the definitions have it.
    fn dense(weights: &Weights, head: usize, text: &Text) -> Self {
        let tokens = &text.tokens;
        let mut rows = Self::default();
        for i in 0..tokens.len() {
            let row = weights.row(head, i);
            let mass = |is_in: &dyn Fn(usize) -> bool| {
                let own = row.iter().enumerate().filter(|(key, _)| is_in(*key));
                own.map(|(_, a)| f64::from(*a)).sum::<f64>()
            };
            rows.previous.push(mass(&|key| key + 1 == i));
            rows.duplicate.push(mass(&|key| key < i && tokens[key] == tokens[i]));
            let follows = |key: usize| key > 0 && key <= i && tokens[key - 1] == tokens[i];
            rows.induction.push(mass(&follows));
            rows.delimiter.push(mass(&|key| text.delimiters[key] == 1));
            rows.sink.push(mass(&|key| key == 0));
            // The earlier one of equal weights.
            let best = row.iter().enumerate().rev().max_by(|a, b| a.1.total_cmp(b.1));
            rows.top.push(best.filter(|(_, a)| **a > 0.0).map(|(key, _)| key));
        }
        rows
    }

    /// The most frequent distance of the largest weight, the nearest one of equally frequent ones, and the part of the rows that have it.
    fn positional(&self) -> (f64, i64) {
        let mut counts: BTreeMap<(u64, i64), usize> = BTreeMap::new();
        let tops = self.top.iter().enumerate().skip(1);
        for (i, key) in tops.filter_map(|(i, key)| Some((i, (*key)?))) {
            let distance = key.cast_signed() as i64 - i.cast_signed() as i64;
            *counts.entry((distance.unsigned_abs(), distance)).or_default() += 1;
        }
        let rows: usize = counts.values().sum();
        let best = counts.into_iter().rev().max_by_key(|(_, count)| *count);
        best.map_or((f64::NAN, 0), |((_, distance), count)| (count as f64 / rows as f64, distance))
    }
}

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1c1c1c;background:#fff}\
    h1{font-size:1.5rem}h2{font-size:1.15rem;margin:2rem 0 .25rem}p{margin:.25rem 0}img{max-width:100%}\
    @media(prefers-color-scheme:dark){body{color:#e6e6e6;background:#161616}a{color:#8ab4f8}img{background:#fff}}";

/// What each score is, and where it is from.
const DEFINITIONS: [(&str, &str, &str); 8] = [
    ("previous", "mean weight of the token before", "https://arxiv.org/abs/2209.11895"),
    (
        "duplicate",
        "mean mass on earlier occurrences of the same token",
        "https://arxiv.org/abs/2211.00593",
    ),
    (
        "induction",
        "mean mass on the tokens that followed earlier occurrences",
        "https://arxiv.org/abs/2209.11895",
    ),
    (
        "positional",
        "part of the rows whose largest weight is at one distance",
        "https://arxiv.org/abs/1905.09418",
    ),
    (
        "delimiter",
        "mean mass on punctuation and special tokens",
        "https://arxiv.org/abs/1906.04341",
    ),
    ("sink", "mean weight of the first token", "https://arxiv.org/abs/2309.17453"),
    (
        "copy",
        "part of the rows whose largest weight is on the token that comes next",
        "https://arxiv.org/abs/2404.15574",
    ),
    (
        "retrieval",
        "part of a needle that is copied when it is written once more",
        "https://arxiv.org/abs/2404.15574",
    ),
];

/// A page with a table of layers and heads for each score.
#[must_use]
pub fn heads_page(title: &str, all: &[HeadScores]) -> String {
    let mut kinds: Vec<&str> = Vec::new();
    for one in all {
        if !kinds.contains(&one.site.kind.as_str()) {
            kinds.push(&one.site.kind);
        }
    }
    let mut style = Style::new(Metrics::pixels(960.0));
    style.theme = Theme::Light;
    let mut sections = String::new();
    for (name, what, link) in DEFINITIONS {
        let told = |one: &&HeadScores| one.get(name).is_some_and(|score| !score.is_nan());
        if !all.iter().any(|one| told(&one)) {
            continue;
        }
        sections += &format!("<h2>{name}</h2>\n<p>{what} (<a href=\"{link}\">source</a>)</p>\n");
        for kind in &kinds {
            let map = HeadScores::map(all, kind, name);
            style.scale = Scale::up_to(&map);
            let picture = STANDARD.encode(svg(&table(&map, &style)));
            let alt = format!("{name} of {}", escaped(kind));
            sections +=
                &format!("<img alt=\"{alt}\" src=\"data:image/svg+xml;base64,{picture}\">\n");
        }
    }
    let title = escaped(title);
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>{title}: heads</title><style>{STYLE}</style></head>\n<body><h1>{title}: what each head does</h1>\n\
         <p>Scores from 0 to 1, layers down, heads across.</p>\n{sections}</body></html>\n"
    )
}
