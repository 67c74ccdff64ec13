//! Which part of an audio signal does a letter align with?
//!
//! `cargo run --release --example speech_alignment`
//!
//! Something like speech: a letter has a spectrum of its own and lasts for two to five frames, with noise in all of them. One recurrent
//! net listens, another writes, and looks at the frames before each letter (Bahdanau's attention). It learns from sounds and words;
//! nobody tells it which frames belong to which letter. Look at the map at the end: columns are frames, called by the letter that was
//! spoken in them, and what is looked at walks through them at the pace of the speaker.
//!
//! Try next: more noise. Letters that may be doubled: what would tell `oo` from a long `o`? Values that are `heard` instead of `frames`
//! (48 features instead of `BANDS`): a letter may then be read beside its own place, from what the net has heard there.

#![expect(clippy::print_stdout, reason = "a program")]

use burn::module::Module;
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use regard::Mask;
use regard_burn::{CrossEntropy, cross_entropy};
use regard_models::ids;
use regard_models::nn::{Bahdanau, Gru, GruCell, Linear};
use regard_scope::render::{Depth, term};
use regard_scope::{Axis, Map, Metrics, Scale, Style, Theme, heat};
use regard_testkit::Noise;
use std::error::Error;
use std::io::{IsTerminal, stdout};

const LETTERS: [&str; 10] = ["a", "e", "g", "i", "l", "m", "n", "o", "r", "s"];
/// Letters of a word, frames of a sound, numbers of a frame.
const WORD: usize = 5;
const FRAMES: usize = 25;
const BANDS: usize = 12;

struct Spoken {
    frames: Tensor<3>, // [words, FRAMES, BANDS]; behind the last letter there is only noise
    letters: Vec<u32>, // of all words
    spans: Vec<std::ops::Range<usize>>, // the frames of each letter
}

/// Words to learn from, or to be judged by; no word is both.
fn speak(n: usize, judged: bool, noise: &mut Noise) -> Spoken {
    let (mut sound, mut letters, mut spans) = (vec![], vec![], vec![]);
    while letters.len() < n * WORD {
        let word = [0; WORD].map(|_| *noise.pick(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]));
        let doubled = word.windows(2).any(|pair| pair[0] == pair[1]);
        if doubled || word.iter().sum::<u32>().is_multiple_of(5) != judged {
            continue;
        }
        let mut end = 0;
        for letter in word {
            let span = end..end + 2 + noise.below(4);
            let spectrum: Vec<f32> = Noise::new(u64::from(letter)).normals(BANDS); // its own, always
            sound.extend(spectrum.repeat(span.len()));
            end = span.end;
            spans.push(span);
        }
        letters.extend(word);
        sound.resize(letters.len() / WORD * FRAMES * BANDS, 0.0);
    }
    let hiss: Vec<f32> = noise.normals(sound.len());
    sound.iter_mut().zip(hiss).for_each(|(band, hiss)| *band += 0.3 * hiss);
    let frames = Tensor::from_data(TensorData::new(sound, [n, FRAMES, BANDS]), &Device::flex());
    Spoken { frames, letters, spans }
}

// ANCHOR: heart
#[derive(Module, Debug)]
struct Recogniser {
    ear: Gru,
    attention: Bahdanau,
    hand: GruCell,
    head: Linear,
}

impl Recogniser {
    /// The scores of letters, `[words, WORD, letters]`, and the weights of frames, `[words, WORD, FRAMES]`.
    fn write(&self, frames: Tensor<3>) -> Result<[Tensor<3>; 2], regard_models::Error> {
        let heard = self.ear.forward(frames.clone(), None)?.states;
        let keys = self.attention.project(heard.clone());
        let mut state = Tensor::<2>::zeros([frames.dims()[0], 32], &Device::flex());
        let (mut scores, mut queries, all) = (vec![], vec![], Mask::full());
        for _ in 0..WORD {
            // The state asks where to look, what was heard answers, and what is seen there are frames.
            let query = state.clone().unsqueeze_dim(1);
            let seen = self.attention.attend(query, keys.clone(), frames.clone(), &all)?;
            let seen: Tensor<2> = seen.squeeze_dim(1);
            queries.push(state.clone());
            state = self.hand.forward(seen.clone(), state);
            scores.push(self.head.forward(Tensor::cat(vec![state.clone(), seen], 1)));
        }
        let weights = self.attention.weights(Tensor::stack(queries, 1), heard, &all)?;
        Ok([Tensor::stack(scores, 1), weights])
    }
}
// ANCHOR_END: heart

/// The weights of the first word; columns are called by what was spoken.
fn show(spoken: &Spoken, written: &[u32], weights: &[f32]) {
    let name = |letter: &u32| LETTERS[*letter as usize].to_string();
    let mut cols = vec![String::new(); FRAMES];
    for (letter, span) in spoken.letters.iter().zip(&spoken.spans).take(WORD) {
        cols[span.clone()].fill(name(letter));
    }
    let (values, cols) = (weights.to_vec(), Axis::new("spoken", cols));
    let rows = Axis::new("written", written.iter().map(name).collect());
    let map = Map { title: "what each letter looks at".into(), values, rows, cols };
    let (colors, scale) = (stdout().is_terminal(), Scale::up_to(&map));
    let style = Style { theme: Theme::Dark, scale, ..Style::new(Metrics::terminal(80, colors)) };
    let depth = if colors { Depth::Indexed } else { Depth::Ascii };
    print!("{}", term(&heat(&map, &style), depth));
}

fn main() -> Result<(), Box<dyn Error>> {
    let (mut noise, device) = (Noise::new(1), &Device::flex().autodiff());
    device.seed(1);
    let mut model = Recogniser {
        ear: Gru::new([BANDS, 24], true, device), // both ways: states of 48 features
        attention: Bahdanau::new([32, 48, 24], device),
        hand: GruCell::new([BANDS, 32], device),
        head: Linear::new([32 + BANDS, LETTERS.len()], true, device),
    };
    let mut adam = AdamConfig::new().init();
    for step in 0..300 {
        let words = speak(32, false, &mut noise);
        let letters: Tensor<1, Int> = ids(&[words.letters], &Device::flex()).flatten(0, 1);
        let [scores, _] = model.write(words.frames)?;
        let loss = cross_entropy(scores.flatten(0, 1), letters, CrossEntropy::default())?;
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = adam.step(2e-2 * (1.0 - f64::from(step) / 300.0), model, gradients);
    }

    let spoken = speak(200, true, &mut noise);
    let [scores, weights] = model.write(spoken.frames.clone())?;
    let written: Vec<u32> = scores.argmax(2).into_data().iter().collect();
    let weights: Vec<f32> = weights.into_data().iter().collect();
    let right = spoken.letters.iter().zip(&written).filter(|(a, b)| a == b).count();
    let (mut before, mut ahead, mut inside) = (0.0, 0, 0);
    for (i, (row, span)) in weights.chunks(FRAMES).zip(&spoken.spans).enumerate() {
        let mean: f32 = row.iter().zip(0u8..).map(|(weight, at)| weight * f32::from(at)).sum();
        ahead += usize::from(i % WORD > 0 && mean > before);
        inside += usize::from((span.start as f32..span.end as f32).contains(&(mean + 0.5)));
        before = mean;
    }
    println!("{right} of 1000 letters of unseen words are right. The mean frame that is looked");
    println!("at goes ahead {ahead} of 800 times, and is one of the letter's {inside} of 1000.\n");
    show(&spoken, &written[..WORD], &weights[..WORD * FRAMES]);
    let so = right >= 900 && ahead >= 780 && inside >= 700;
    so.then_some(()).ok_or_else(|| "letters do not look at their own frames".into())
}
