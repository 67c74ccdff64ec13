//! How do I define a custom attention mask?
//!
//! `cargo run --release --example custom_mask`
//!
//! First by the algebra: rules joined with `and` and `or`. Then by a rule of one's own: guesses of a small model for how a text goes on,
//! drawn as a tree, all of which a large model judges in one call (speculative decoding). A guess may see the text and the guesses
//! before it on its own branch, and nothing of the others (`Mask::tree` is this rule, built in). Look at the second picture row by row: each is a path to the root.
//!
//! Try next: add a branch to `GUESSES`; join the tree with `Mask::full().window(6)`; a rule for trees of documents and sections.

#![expect(clippy::print_stdout, reason = "a program")]

use regard::mask::MaskRule;
use regard::problem::Scope;
use regard::{AttentionView, Error, Machine, Mask, Plan, Problem, View, attend};
use regard_scope::render::{Depth, term};
use regard_scope::{Axis, Map, Metrics, Scale, Style, Theme, heat};
use regard_testkit::Noise;
use std::io::IsTerminal;
use std::ops::Range;

const DIM: usize = 16;
const PACKED: [&str; 10] =
    ["<s>", "this", "text", "ends", "here", "the", "next", "one", "begins", "there"];
const TEXT: [&str; 5] = ["the", "cat", "sat", "on", "the"];
/// A guess, and the guess that it follows; none for one that follows the text.
const GUESSES: [(&str, Option<usize>); 8] = [
    ("mat", None),
    ("old", None),
    (".", Some(0)),
    ("and", Some(0)),
    ("chair", Some(1)),
    ("wall", Some(1)),
    ("slept", Some(3)),
    ("of", Some(5)),
];

// ANCHOR: heart
// ANCHOR: algebra
/// By the algebra: a word sees itself and the two before it in its own text, and all see the first.
fn packed(texts: &[u32]) -> Mask {
    Mask::causal().window(3).and(Mask::segments(texts)).or(Mask::prefix(1))
}
// ANCHOR_END: algebra

/// By a rule of our own: keys are a text and a tree of guesses behind it, queries the guesses. Each sees the text, itself, and
/// what it follows.
#[derive(Debug)]
struct Tree {
    text: usize,
    follows: Vec<Option<usize>>,
}

impl Tree {
    /// The guesses on the way from the root to `guess`, which ascend: a guess stands behind the one that it follows.
    fn path(&self, guess: usize) -> Vec<usize> {
        let mut path: Vec<usize> =
            std::iter::successors(Some(guess), |guess| self.follows[*guess]).collect();
        path.reverse();
        path
    }
}

impl MaskRule for Tree {
    fn visible(&self, _: &Scope, row: usize, ranges: &mut Vec<Range<usize>>) {
        ranges.push(0..self.text);
        ranges.extend(self.path(row).iter().map(|guess| self.text + guess..self.text + guess + 1));
    }
}
// ANCHOR_END: heart

/// Prints the weights of a call; nothing where a query may not see a key.
fn draw(
    title: &str,
    mask: &Mask,
    words: [&[&str]; 2],
    [q, k]: [View<'_, f32>; 2],
) -> Result<(), Error> {
    let plan = Plan::new(Problem::new(&q, &k, &k).mask(mask.clone()), Machine::detect())?;
    let output = plan.forward(q, k, k)?;
    let scope = plan.problem().scope(0, 0);
    let mut values =
        AttentionView::new(&plan, q, k, &output)?.tile(0..scope.q_len, 0..scope.k_len)?;
    for (at, weight) in values.iter_mut().enumerate() {
        if !mask.is_visible(&scope, at / scope.k_len, at % scope.k_len) {
            *weight = f32::NAN;
        }
    }
    let [rows, cols] = words.map(|words| words.iter().map(ToString::to_string).collect());
    let (rows, cols) = (Axis::new("query", rows), Axis::new("key", cols));
    let map = Map { title: title.into(), values, rows, cols };
    let depth = if std::io::stdout().is_terminal() { Depth::Indexed } else { Depth::Ascii };
    let style = Style::new(Metrics::terminal(72, depth != Depth::Ascii));
    let style = Style { theme: Theme::Dark, scale: Scale::up_to(&map), ..style };
    println!("{}", term(&heat(&map, &style), depth));
    Ok(())
}

fn main() -> Result<(), Error> {
    let mut noise = Noise::new(11);
    let keys = TEXT.len() + GUESSES.len();
    let (q, mut k) = (noise.normals::<f32>(keys * DIM), noise.normals::<f32>(keys * DIM));
    let words: Vec<&str> = TEXT.into_iter().chain(GUESSES.map(|(word, _)| word)).collect();

    let mask = packed(&[0, 0, 0, 0, 0, 1, 1, 1, 1, 1]);
    let [all, seen] = [&q, &k].map(|x| View::matrix(&x[..PACKED.len() * DIM], [PACKED.len(), DIM]));
    draw(&mask.to_string(), &mask, [&PACKED, &PACKED], [all?, seen?])?;

    let seen = View::matrix(&k, [keys, DIM])?;
    let tree = Tree { text: TEXT.len(), follows: GUESSES.map(|(_, follows)| follows).to_vec() };
    let paths: Vec<Vec<usize>> = (0..GUESSES.len()).map(|guess| tree.path(guess)).collect();
    let mask = Mask::custom(tree);
    let guesses = View::matrix(&q[TEXT.len() * DIM..], [GUESSES.len(), DIM])?;
    draw("a tree of guesses", &mask, [&words[TEXT.len()..], &words], [guesses, seen])?;

    // One call for the whole tree, and one plain call for each branch.
    let judged = attend(guesses, seen, seen, mask.clone())?.out;
    let mut apart = 0f32;
    for (guess, path) in paths.iter().enumerate() {
        let branch = (0..TEXT.len()).chain(path.iter().map(|guess| TEXT.len() + guess));
        let rows: Vec<f32> = branch.flat_map(|at| k[at * DIM..][..DIM].to_vec()).collect();
        let branch = View::matrix(&rows, [rows.len() / DIM, DIM])?;
        let query = View::matrix(guesses.row(0, 0, guess), [1, DIM])?;
        let alone = attend(query, branch, branch, Mask::full())?.out;
        let both = alone.data().iter().zip(&judged.data()[guess * DIM..]);
        apart = both.fold(apart, |most, (x, y)| most.max((x - y).abs()));
    }
    println!("All guesses in one call, or each branch alone: {apart:.0e} apart at most.");
    assert!(apart < 1e-5, "a branch of the tree is a text of its own");

    // ANCHOR: hidden
    // "old" and all that follows it become nonsense: 1, 4, 5 and 7.
    for guess in (0..GUESSES.len()).filter(|guess| paths[*guess][0] == 1) {
        k[(TEXT.len() + guess) * DIM..][..DIM].fill(f32::NAN);
    }
    let seen = View::matrix(&k, [keys, DIM])?;
    let spoilt = attend(guesses, seen, seen, mask)?.out;
    let rows = judged.data().chunks(DIM).zip(spoilt.data().chunks(DIM)).zip(GUESSES);
    let same: Vec<&str> =
        rows.filter(|((before, after), _)| before == after).map(|(_, (word, _))| word).collect();
    println!("With NaN in \"old\" and all that follows it, no bit changes of {}.", same.join(" "));
    assert_eq!(same, ["mat", ".", "and", "slept"], "what is hidden is part of no arithmetic");
    // ANCHOR_END: hidden
    Ok(())
}
