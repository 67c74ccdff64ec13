//! Which image patches does a classifier attend to?
//!
//! `cargo run --release --example image_patches`
//!
//! A shape lies somewhere in noise. A vision transformer cuts the image into patches; a row beside them, the class, looks at all of
//! them and says which shape it is. Nobody tells it where the shape lies. Look at the two pictures at the end: the image, and how much
//! weight the class gives to each patch. Most of it goes to the few patches that have something to tell.
//!
//! Try next: twice the noise. Shapes that begin at any pixel, not only at even ones: a patch then shows any part of them, and far
//! fewer are named right. Two blocks: patches hear of one another first, and the last map need not show where the shape is.

#![expect(clippy::print_stdout, reason = "a program")]

use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use regard::Machine;
use regard_burn::{CrossEntropy, cross_entropy};
use regard_models::{Pass, Recorder, Vit, VitConfig};
use regard_scope::render::{Depth, term};
use regard_scope::{Axis, Map, Metrics, Style, Theme, heat};
use regard_testkit::Noise;
use std::error::Error;
use std::io::{IsTerminal, stdout};

type Outcome<T> = Result<T, Box<dyn Error>>;

const IMAGE: usize = 16;
const PATCH: usize = 4;
/// Patches beside one another.
const SIDE: usize = IMAGE / PATCH;
const SHAPES: [(&str, [&str; 5]); 4] = [
    ("cross", ["#...#", ".#.#.", "..#..", ".#.#.", "#...#"]),
    ("ring", [".###.", "#...#", "#...#", "#...#", ".###."]),
    ("plus", ["..#..", "..#..", "#####", "..#..", "..#.."]),
    ("bars", ["#...#", "#...#", "#...#", "#...#", "#...#"]),
];

/// A shape somewhere in noise.
struct Picture {
    shape: usize,
    pixels: Vec<f32>,
    /// Whether a patch has some of the shape.
    covered: Vec<bool>,
}

fn picture(noise: &mut Noise) -> Picture {
    let shape = noise.below(SHAPES.len());
    let [left, top] = [IMAGE / 2 - 2; 2].map(|n| 2 * noise.below(n));
    let mut pixels: Vec<f32> = noise.normals(IMAGE * IMAGE);
    pixels.iter_mut().for_each(|pixel| *pixel *= 0.3);
    let mut covered = vec![false; SIDE * SIDE];
    for (y, row) in SHAPES[shape].1.iter().enumerate() {
        for (x, _) in row.bytes().enumerate().filter(|(_, dot)| *dot == b'#') {
            let (x, y) = (left + x, top + y);
            pixels[y * IMAGE + x] += 1.0;
            covered[y / PATCH * SIDE + x / PATCH] = true;
        }
    }
    Picture { shape, pixels, covered }
}

fn pixels(pictures: &[Picture]) -> Tensor<4> {
    let all: Vec<f32> = pictures.iter().flat_map(|picture| picture.pixels.clone()).collect();
    let sizes = [pictures.len(), 1, IMAGE, IMAGE]; // one number for each pixel, no colors
    Tensor::from_data(TensorData::new(all, sizes), &Device::flex())
}

// ANCHOR: heart
fn learn(noise: &mut Noise) -> Outcome<Vit> {
    let config = VitConfig {
        image: IMAGE,
        patch: PATCH,
        channels: 1,
        classes: SHAPES.len(),
        d_model: 32,
        n_heads: 1,
        n_layers: 1,
        d_ff: 64,
        eps: 1e-5,
    };
    let device = Device::flex().autodiff();
    device.seed(1);
    let (mut model, mut adam) = (Vit::new(&config, &device)?, AdamConfig::new().init());
    for step in 0..300 {
        let pictures: Vec<Picture> = (0..64).map(|_| picture(noise)).collect();
        let shapes: Vec<i64> = pictures.iter().map(|picture| picture.shape as i64).collect();
        let shapes: Tensor<1, Int> = Tensor::from_data(shapes.as_slice(), &Device::flex());
        let scores = model.forward(pixels(&pictures), &mut Pass::default())?;
        let loss = cross_entropy(scores, shapes, CrossEntropy::default())?;
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = adam.step(5e-3 * (1.0 - f64::from(step) / 300.0), model, gradients);
        if step % 100 == 0 {
            println!("step {step:3}   loss {:.3}", loss.into_scalar::<f32>());
        }
    }
    Ok(model)
}

/// The weight that the class gives to each patch.
fn look(model: &Vit, picture: &Picture) -> Outcome<Vec<f32>> {
    let mut pass = Pass { recorder: Recorder::on(), ..Pass::default() };
    model.forward(pixels(std::slice::from_ref(picture)), &mut pass)?;
    let trace = pass.recorder.trace("", &[]);
    let head = trace.sites().pop().ok_or("no head has looked")?;
    let class = trace.map(Machine::detect(), &head, 0..1, [100; 2])?;
    Ok(class.values[1..].to_vec()) // the first is what it gives to itself
}
// ANCHOR_END: heart

/// The image, and beside it what each patch of it gets, each up to its largest number.
fn show(picture: &Picture, weights: &[f32]) {
    let most = |of: &[f32]| of.iter().copied().fold(0.0, f32::max);
    let (brightest, heaviest) = (most(&picture.pixels), most(weights));
    let mut values = vec![];
    for (y, row) in picture.pixels.chunks(IMAGE).enumerate() {
        values.extend(row.iter().map(|pixel| pixel / brightest));
        values.push(f32::NAN); // nothing is drawn between them
        let weight = |x: usize| weights[y / PATCH * SIDE + x / PATCH];
        values.extend((0..IMAGE).map(|x| weight(x) / heaviest));
    }
    let axis = |n: usize| Axis::new("", vec![String::new(); n]);
    let map = Map { title: String::new(), values, rows: axis(IMAGE), cols: axis(2 * IMAGE + 1) };
    let colors = stdout().is_terminal();
    let style = Style { theme: Theme::Dark, ..Style::new(Metrics::terminal(80, colors)) };
    let depth = if colors { Depth::Indexed } else { Depth::Ascii };
    let lines = term(&heat(&map, &style), depth);
    lines.lines().skip(1).take(IMAGE).for_each(|line| println!("{line}"));
}

fn main() -> Outcome<()> {
    let mut noise = Noise::new(1);
    let model = learn(&mut noise)?;
    let unseen: Vec<Picture> = (0..200).map(|_| picture(&mut noise)).collect();
    let found = model.forward(pixels(&unseen), &mut Pass::default())?.argmax(1).into_data();
    let (mut right, mut weight, mut patches) = (0, 0.0, 0);
    for (found, one) in found.iter::<u32>().zip(&unseen) {
        right += usize::from(found as usize == one.shape);
        let weights = look(&model, one)?;
        let covered = one.covered.iter().zip(weights).filter(|(covered, _)| **covered);
        patches += covered.clone().count();
        weight += covered.map(|(_, weight)| weight).sum::<f32>() / 200.0;
    }
    println!("{right} of 200 unseen shapes are named right.");
    println!("They lie in {patches} of 3200 patches, and these get {weight:.2} of all weight.");
    println!("\n {} in noise, and where the class looks:", SHAPES[unseen[4].shape].0);
    show(&unseen[4], &look(&model, &unseen[4])?);
    let so = right >= 180 && weight > 0.6;
    so.then_some(()).ok_or_else(|| "it does not look at shapes".into())
}
