//! `regard steps`: attention on a few small random inputs, step by step, every number and every shape.

use crate::args::{Format, SimilarityArg};
use crate::job::StepsJob;
use anyhow::Result;
use regard::problem::{Additive, Similarity};
use regard::reference::steps;
use regard::{Problem, Shape, Tensor, View};
use regard_testkit::Noise;
use serde_json::json;
use std::io::Write;

/// The inputs, and what a similarity needs beside them.
struct Inputs {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    w: [Vec<f32>; 3],
}

pub(crate) fn run(job: &StepsJob, format: Format) -> Result<()> {
    let [q, k, v] = job.shapes;
    let mut noise = Noise::new(job.seed);
    let mut numbers = |shape: Shape| noise.normals::<f32>(shape.to_array().iter().product());
    let square = Shape { batch: 1, heads: 1, len: q.dim, dim: q.dim };
    let row = Shape { len: 1, ..square };
    let inputs = Inputs {
        q: numbers(q),
        k: numbers(k),
        v: numbers(v),
        w: [numbers(square), numbers(square), numbers(row)],
    };
    let view = |data| View::bhsd(data, q.to_array());
    let (of_q, of_k) = (view(&inputs.q)?, View::bhsd(&inputs.k, k.to_array())?);
    let of_v = View::bhsd(&inputs.v, v.to_array())?;
    let w = |i: usize, shape: Shape| View::bhsd(&inputs.w[i], shape.to_array());
    let similarity = match job.score.similarity {
        SimilarityArg::Dot => Similarity::Dot,
        SimilarityArg::Distance => Similarity::Distance,
        SimilarityArg::General => Similarity::General(w(0, square)?),
        SimilarityArg::Additive => Similarity::Additive(Additive {
            w_q: w(0, square)?,
            w_k: Some(w(1, square)?),
            v: w(2, row)?,
        }),
    };
    let problem = Problem::new(&of_q, &of_k, &of_v)
        .mask(job.score.mask.clone())
        .score(job.score.score())
        .similarity(similarity)
        .normalizer(job.normalizer);
    let seen = steps(&problem, of_q, of_k, of_v)?;
    let softcap = job.score.softcap.map_or_else(String::new, |cap| format!(", softcap {cap}"));
    let mask = job.score.mask.to_string();
    let mask = if mask == "full" { String::new() } else { format!(", {mask} only") };
    let parts = [
        ("q", "the queries".into(), tensor(inputs.q, q)?),
        ("k", "the keys".into(), tensor(inputs.k, k)?),
        ("v", "the values".into(), tensor(inputs.v, v)?),
        ("1 similarity", how(job.score.similarity).into(), seen.similarities),
        ("2 score", format!("times {:.4}{softcap}{mask}", problem.scale()), seen.scores),
        ("3 weight", format!("{} over each row", job.normalizer), seen.weights),
        ("4 output", "the mean of v by these weights".into(), seen.out),
    ];
    let mut out = std::io::stdout().lock();
    for (name, what, tensor) in &parts {
        match format {
            Format::Text => print(&mut out, name, what, tensor)?,
            Format::Json => {
                let data: Vec<_> =
                    tensor.data().iter().map(|x| x.is_finite().then_some(*x)).collect();
                let shape = tensor.shape().to_array();
                let step = name.trim_start_matches(|c: char| c.is_ascii_digit() || c == ' ');
                writeln!(
                    out,
                    "{}",
                    json!({ "step": step, "what": what, "shape": shape, "data": data })
                )?;
            }
        }
    }
    Ok(())
}

fn how(similarity: SimilarityArg) -> &'static str {
    match similarity {
        SimilarityArg::Dot => "q . k of each pair",
        SimilarityArg::General => "q^T W k of each pair",
        SimilarityArg::Distance => "-|q - k|^2 of each pair",
        SimilarityArg::Additive => "v^T tanh(W_q^T q + W_k^T k) of each pair",
    }
}

fn tensor(data: Vec<f32>, shape: Shape) -> Result<Tensor<f32>> {
    Ok(Tensor::new(data, shape, regard::Layout::Bhsd)?)
}

/// One table a head: rows are queries (or positions), columns keys (or features). What is hidden is a dot.
fn print(out: &mut impl Write, name: &str, what: &str, tensor: &Tensor<f32>) -> Result<()> {
    let Shape { heads, len, dim, .. } = tensor.shape();
    let shape =
        if heads == 1 { format!("[{len}, {dim}]") } else { format!("[{heads}, {len}, {dim}]") };
    writeln!(out, "{name:13} {shape:12} {what}")?;
    let sums = name.ends_with("weight");
    for head in 0..heads {
        for row in 0..len {
            let label = if heads == 1 { format!("{row}") } else { format!("{head}.{row}") };
            write!(out, "  {label:>5} ")?;
            let numbers = tensor.view().row(0, head, row);
            for x in numbers {
                if *x == f32::NEG_INFINITY {
                    write!(out, "        .")?;
                } else {
                    write!(out, " {x:8.4}")?;
                }
            }
            if sums {
                write!(out, "   sum {:.4}", numbers.iter().sum::<f32>())?;
            }
            writeln!(out)?;
        }
    }
    writeln!(out)?;
    Ok(())
}
