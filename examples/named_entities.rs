//! Is Paris a person or a place?
//!
//! `cargo run --release --example named_entities`
//!
//! Some names are always a person, some always a place, and some can be both: who sees a word alone must guess. A tagger with one
//! attention sees the sentence. It is judged by names in parts of sentences that they were never in while it learned. Look at the map
//! at the end: Paris is there twice and looks at the same word, which makes a person of what is before it and a place of what is behind.
//!
//! Try next: `rope: None`, so that words do not know where they stand: both of Paris become the same. Tags of `words` without `seen`:
//! no better than a guess. One head of 32 features: is it enough, and what does each of Paris look at?

#![expect(clippy::print_stdout, reason = "a program")]

use burn::module::Module;
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor};
use regard::rope::{Rope, RopePairs};
use regard::{Machine, Mask};
use regard_burn::{CrossEntropy, cross_entropy};
use regard_models::nn::{Embedding, KeySource, Linear, MultiHead, MultiHeadConfig};
use regard_models::{Pass, Recorder, ids};
use regard_scope::render::{Depth, term};
use regard_scope::{Axis, Map, Metrics, Style, Theme, heat};
use regard_testkit::Noise;
use std::collections::BTreeMap;
use std::error::Error;
use std::io::{IsTerminal, stdout};

type Outcome<T> = Result<T, Box<dyn Error>>;
const TAGS: [&str; 3] = ["other", "person", "place"];
/// A sentence has three parts: a link, a verb and another link, each with its names.
const LINKS: [&str; 4] = ["in PLACE", "near PLACE", "with PERSON", "for PERSON"];
const VERBS: [&str; 4] =
    ["PERSON left PLACE", "PERSON met PERSON", "PLACE awaits PERSON", "PLACE borders PLACE"];
const BOTH: [&str; 8] =
    ["Paris", "Jordan", "Sydney", "Florence", "Austin", "Chelsea", "Victoria", "Lincoln"];
const PERSONS: [&str; 4] = ["Anna", "Peter", "Maria", "Tom"];
const PLACES: [&str; 4] = ["Rome", "Oslo", "Cairo", "Lima"];
/// None of these names was in these parts while the tagger learned.
const SHOWN: &str = "in Rome Paris left Paris with Maria";

/// Words and their tags. Each part is learned with three quarters of the names, and judged with the others.
fn sentence(judged: bool, noise: &mut Noise) -> (Vec<&'static str>, Vec<u32>) {
    let parts = [LINKS, VERBS, LINKS].map(|parts| (noise.below(4), parts));
    let mut name = |of: &[&'static str], part: usize| {
        let all = BOTH.iter().chain(of).zip(part..);
        let some = all.filter(|(_, i)| i.is_multiple_of(4) == judged);
        *noise.pick(&some.collect::<Vec<_>>()).0
    };
    let words = parts.iter().flat_map(|(i, parts)| parts[*i].split(' ').map(|word| (word, *i)));
    let tagged = |(word, part)| match word {
        "PERSON" => (name(&PERSONS, part), 1),
        "PLACE" => (name(&PLACES, part), 2),
        other => (other, 0),
    };
    words.map(tagged).unzip()
}

/// `[sentences, words]`, numbers below 36.
fn numbers(sentences: &[Vec<&str>]) -> Tensor<2, Int> {
    let words = LINKS.iter().chain(&VERBS).flat_map(|part| part.split(' '));
    let table: BTreeMap<_, u32> = words.chain(BOTH).chain(PERSONS).chain(PLACES).zip(0..).collect();
    let row = |words: &Vec<&str>| words.iter().map(|word| table[word]).collect();
    ids::<Vec<u32>>(&sentences.iter().map(row).collect::<Vec<_>>(), &Device::flex())
}

// ANCHOR: heart
#[derive(Module, Debug)]
struct Tagger {
    words: Embedding,
    attention: MultiHead,
    tags: Linear,
}

impl Tagger {
    fn new(device: &Device) -> Self {
        let rope = Some(Rope::new(16, RopePairs::HalfSplit)); // scores know how far apart words stand
        let config = MultiHeadConfig { rope, ..MultiHeadConfig::new(32, 2) };
        Self {
            words: Embedding::new([36, 32], 0.5, device),
            attention: MultiHead::new(&config, device),
            tags: Linear::new([32, TAGS.len()], true, device),
        }
    }

    /// The scores of the tags of each word, `[sentences, words, tags]`.
    fn forward(&self, sentences: Tensor<2, Int>, pass: &mut Pass) -> Outcome<Tensor<3>> {
        let words = self.words.forward(sentences)?;
        let mask = Mask::full(); // every word may look at every word
        let seen = self.attention.forward(words.clone(), KeySource::Itself, &mask, None, pass)?;
        Ok(self.tags.forward(words + seen))
    }
}
// ANCHOR_END: heart

fn learn(noise: &mut Noise) -> Outcome<Tagger> {
    let device = Device::flex().autodiff();
    device.seed(7);
    let (mut tagger, mut adam) = (Tagger::new(&device), AdamConfig::new().init());
    for step in 0..400 {
        let (words, tags): (Vec<_>, Vec<_>) = (0..64).map(|_| sentence(false, noise)).unzip();
        let scores = tagger.forward(numbers(&words), &mut Pass::default())?;
        let tags: Tensor<1, Int> = ids(&tags, &Device::flex()).flatten(0, 1);
        let loss = cross_entropy(scores.flatten(0, 1), tags, CrossEntropy::default())?;
        let gradients = GradientsParams::from_grads(loss.backward(), &tagger);
        tagger = adam.step(1e-2 * (1.0 - f64::from(step) / 400.0), tagger, gradients);
    }
    Ok(tagger)
}

/// What both heads of the two names in the middle look at.
fn show(tagger: &Tagger) -> Outcome<()> {
    let mut pass = Pass { recorder: Recorder::on(), ..Pass::default() };
    let shown = numbers(&[SHOWN.split(' ').collect()]);
    let tags = tagger.forward(shown, &mut pass)?.argmax(2).into_data();
    let (tags, trace) = (tags.iter::<u8>().collect::<Vec<_>>(), pass.recorder.trace("", &[]));
    let (mut labels, mut values) = (vec![], vec![]);
    for row in [2, 4] {
        for site in trace.sites() {
            labels.push(format!("{}, head {}", TAGS[usize::from(tags[row])], site.head));
            values.extend(trace.map(Machine::detect(), &site, row..row + 1, [100; 2])?.values);
        }
    }
    let cols = Axis::new("word", SHOWN.split(' ').map(String::from).collect());
    let map = Map { title: SHOWN.into(), values, rows: Axis::new("Paris", labels), cols };
    let colors = stdout().is_terminal();
    let style = Style { theme: Theme::Dark, ..Style::new(Metrics::terminal(80, colors)) };
    let depth = if colors { Depth::Indexed } else { Depth::Ascii };
    print!("{}", term(&heat(&map, &style), depth));
    Ok(())
}

fn main() -> Outcome<()> {
    let mut noise = Noise::new(7);
    let tagger = learn(&mut noise)?;

    let (words, tags): (Vec<_>, Vec<_>) = (0..500).map(|_| sentence(true, &mut noise)).unzip();
    let found = tagger.forward(numbers(&words), &mut Pass::default())?.argmax(2).into_data();
    let (mut right, mut counts) = (0, BTreeMap::<_, [usize; 3]>::new());
    let all = words.iter().flatten().zip(tags.iter().flatten()).zip(found.iter::<u32>());
    for ((word, tag), found) in all.filter(|((_, tag), _)| **tag > 0) {
        counts.entry(word).or_default()[*tag as usize] += 1;
        right += usize::from(*tag == found);
    }
    // No tagger that sees each word alone can do better than to say its most frequent tag.
    let alone: usize = counts.values().flat_map(|tags| tags.iter().max()).sum();
    println!("{right} of 2000 names are tagged right; without neighbours, at most {alone}.\n");
    show(&tagger)?;
    let told = right >= 1900 && right >= alone + 200;
    told.then_some(()).ok_or_else(|| "neighbours have not told".into())
}
