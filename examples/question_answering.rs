//! Which sentence answers a question, and which sentences summarize a text?
//!
//! `cargo run --release --example question_answering`
//!
//! A pretrained encoder (MiniLM) makes a vector of each sentence of a text and of each question. Then attention itself answers: the
//! question is the query, the sentences are the keys, and the weights say where the answer is. For a summary every sentence attends to all
//! others, and those that receive the most are it. Look at the bars: how sure is each answer?
//!
//! The encoder is downloaded once, 84 MB: `cargo run --release -p regard-cli -- models get minilm`.
//!
//! Try next: ask "How does a bee tell the others where flowers are?". The sentence that wins is about bees and blossoms, and it is not the
//! answer: these vectors say what a sentence is about. Or a smaller `SCALE`: 5 layer_entropies the weights.

#![expect(clippy::print_stdout, reason = "a program")]

use regard::mask::MaskRule;
use regard::problem::Scope;
use regard::{AttentionView, Machine, Mask, Plan, Problem, Score, View};
use regard_models::Model;
use regard_models::files::{KnownModel, cache_dir};
use regard_scope::Measure;
use std::error::Error;
use std::ops::Range;

const TEXT: [&str; 12] = [
    "A colony of honey bees has one queen, some drones and up to sixty thousand workers.",
    "The queen lays as many as two thousand eggs a day in early summer.",
    "Drones are the males of the hive, and they have no sting.",
    "Workers begin as nurses and become foragers when they are three weeks old.",
    "A forager that has found food dances on the comb to show the others the way.",
    "The angle of the dance to the vertical is the angle between the flowers and the sun.",
    "Foragers carry nectar home in a stomach of its own, apart from the one they digest with.",
    "In the hive the nectar is fanned with wings until it has thickened into honey.",
    "Honey keeps for years, because it holds too little water for anything to grow in it.",
    "In the cold months the bees crowd around their queen and shiver to keep the hive warm.",
    "Wax comes out of glands on the belly of young workers, who build combs of it.",
    "Orchards need bees: a blossom without pollen from another one bears no apple.",
];
/// A question, and the sentence that answers it.
const QUESTIONS: [(&str, usize); 3] = [
    ("Why does honey not go bad?", 8),
    ("How do bees get through the winter?", 9),
    ("Which bees cannot sting?", 2),
];
/// Vectors have length 1, so a score is 20 times a cosine: 0.05 more, and a weight is e times as large.
const SCALE: f64 = 20.0;

// ANCHOR: heart
/// Everyone sees all others.
#[derive(Debug)]
struct Others;

impl MaskRule for Others {
    fn visible(&self, scope: &Scope, row: usize, ranges: &mut Vec<Range<usize>>) {
        ranges.extend([0..row, row + 1..scope.k_len]);
    }
}

/// The weights of `queries` for `keys`, `[queries, keys]`, and what each key receives from all of them.
fn weights(
    queries: &[f32],
    keys: &[f32],
    dim: usize,
    mask: Mask,
) -> Result<(Vec<f32>, Vec<f32>), regard::Error> {
    let q = View::matrix(queries, [queries.len() / dim, dim])?;
    let k = View::matrix(keys, [keys.len() / dim, dim])?;
    let problem = Problem::new(&q, &k, &k).mask(mask).score(Score::new().scale(SCALE));
    let plan = Plan::new(problem, Machine::detect())?;
    let output = plan.forward(q, k, k)?;
    let view = AttentionView::new(&plan, q, k, &output)?;
    let found = Measure::new().col_sum().of(&view)?;
    Ok((view.tile(0..q.shape().len, 0..k.shape().len)?, found.col_sum))
}
// ANCHOR_END: heart

/// The encoder, from where `regard models` keeps it.
fn encoder() -> Result<Model, Box<dyn Error>> {
    let known = KnownModel::named("minilm").ok_or("minilm: no such name")?;
    let base = cache_dir(|name| std::env::var_os(name)).ok_or("no HOME: set REGARD_CACHE")?;
    let get =
        "minilm is not here yet; get it by: cargo run --release -p regard-cli -- models get minilm";
    Ok(Model::open(&known.path(&base).ok_or(get)?)?)
}

/// One line for each sentence: how much it gets, and its beginning.
fn bars(weights: &[f32]) {
    let most = weights.iter().copied().fold(0.0, f32::max);
    for (sentence, weight) in TEXT.iter().zip(weights) {
        let bar: String = (0..20u8)
            .map(|i| if f32::from(i) + 0.5 < 20.0 * weight / most { '█' } else { ' ' })
            .collect();
        let start: String = sentence.chars().take(46).collect();
        println!("  {weight:4.2} {bar} {start}…");
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let model = encoder()?;
    let all: Vec<&str> = TEXT.into_iter().chain(QUESTIONS.map(|(question, _)| question)).collect();
    let vectors = model.encoder()?.embed(&all)?;
    let dim = vectors[0].len();
    let (sentences, questions) = vectors.split_at(TEXT.len());
    let (sentences, questions) = (sentences.concat(), questions.concat());

    let (asked, _) = weights(&questions, &sentences, dim, Mask::full())?;
    for ((question, answer), weights) in QUESTIONS.iter().zip(asked.chunks(TEXT.len())) {
        let best = (0..TEXT.len()).max_by(|a, b| weights[*a].total_cmp(&weights[*b])).unwrap_or(0);
        println!("{question}\n{}", TEXT[best]);
        bars(weights);
        println!();
        assert_eq!(best, *answer, "{question}: the wrong sentence");
    }

    let (_, received) = weights(&sentences, &sentences, dim, Mask::custom(Others))?;
    let mut order: Vec<usize> = (0..TEXT.len()).collect();
    order.sort_by(|a, b| received[*b].total_cmp(&received[*a]));
    let mut summary = order[..3].to_vec();
    summary.sort_unstable();
    println!("In short, by what each sentence receives from all others:");
    bars(&received);
    println!();
    summary.iter().for_each(|at| println!("{}", TEXT[*at]));
    let sum: f32 = received.iter().sum();
    assert!((sum - 12.0).abs() < 1e-4, "the 12 sentences have a weight of 1 each to give");
    assert_eq!(summary[0], 0, "the sentence that introduces all others is part of it");
    Ok(())
}
