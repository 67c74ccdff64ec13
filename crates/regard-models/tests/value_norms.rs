//! Norms of values that a model records are those of its weights, computed by their definition in f64.

use regard::Machine;
use regard_models::Model;
use regard_scope::{LayerData, Trace};
use safetensors::SafeTensors;
use std::path::Path;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/stories260K");
const HEADS: usize = 8;
const KV_HEADS: usize = 4;
const DIM: usize = 8;
const WIDTH: usize = 64;
const TEXT: &str = "Once upon a time, there was a little girl.";

/// A tensor of f32.
fn tensor(file: &SafeTensors<'_>, name: &str) -> Vec<f64> {
    let data = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).data();
    data.as_chunks().0.iter().map(|x| f64::from(f32::from_le_bytes(*x))).collect()
}

/// `W x` of `W [outputs, inputs]`.
fn product(w: &[f64], x: &[f64]) -> Vec<f64> {
    w.chunks(x.len()).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
}

fn look(model: &mut Model) -> Trace {
    model.record_value_norms().expect("a Transformer");
    model.look(TEXT).expect("a trace")
}

#[test]
fn recorded_norms_are_those_of_the_weights() {
    let mut model = Model::open(Path::new(FOLDER)).expect("a model");
    let trace = look(&mut model);
    let tokens = model.causal_lm().expect("it generates").prompt(TEXT).expect("tokens");
    let bytes = std::fs::read(Path::new(FOLDER).join("model.safetensors")).expect("a file");
    let file = SafeTensors::deserialize(&bytes).expect("tensors");
    let embedding = tensor(&file, "model.embed_tokens.weight");
    let [norm, v, out] = ["input_layernorm", "self_attn.v_proj", "self_attn.o_proj"]
        .map(|name| tensor(&file, &format!("model.layers.0.{name}.weight")));
    let norms = &trace.layers[0].value_norms;
    assert_eq!(norms.len(), HEADS * tokens.len());
    for (j, token) in tokens.iter().enumerate() {
        let x = &embedding[*token as usize * WIDTH..][..WIDTH];
        let mean = x.iter().map(|x| x * x).sum::<f64>() / WIDTH as f64;
        let scaled: Vec<f64> =
            x.iter().zip(&norm).map(|(x, g)| x / (mean + 1e-5).sqrt() * g).collect();
        let values = product(&v, &scaled);
        for head in 0..HEADS {
            // What the head alone writes: the value in its place, 0 elsewhere.
            let mut place = vec![0.0; WIDTH];
            let own = &values[head * KV_HEADS / HEADS * DIM..][..DIM];
            place[head * DIM..][..DIM].copy_from_slice(own);
            let expected = product(&out, &place).iter().map(|x| x * x).sum::<f64>().sqrt();
            let found = f64::from(norms[head * tokens.len() + j]);
            assert!((found - expected).abs() < 1e-5 * expected, "{head} {j}: {found} {expected}");
        }
    }
}

#[test]
fn value_weighted_rows_are_products_with_the_norms() {
    let mut model = Model::open(Path::new(FOLDER)).expect("a model");
    let trace = look(&mut model);
    let weighted = trace.clone().value_weighted(Machine::detect()).expect("norms are there");
    for (layer, moved) in trace.layers.iter().zip(&weighted.layers) {
        let (LayerData::Inputs(plain), LayerData::Inputs(inputs)) = (&layer.data, &moved.data)
        else {
            panic!("q and k are recorded")
        };
        let n = plain.k_shape[1];
        let rows = [plain, inputs].map(|inputs| {
            let view = inputs.view(Machine::detect()).expect("a view");
            view.row(n - 1).expect("a row")
        });
        for head in 0..HEADS {
            let of_head = |all: &[f32]| all[head * n..][..n].to_vec();
            let (plain, found) = (of_head(&rows[0]), of_head(&rows[1]));
            let norms = of_head(&layer.value_norms);
            let product = plain.iter().zip(&norms).map(|(a, f)| f64::from(*a) * f64::from(*f));
            let product: Vec<f64> = product.collect();
            let sum: f64 = product.iter().sum();
            for (found, expected) in found.iter().zip(product) {
                assert!((f64::from(*found) - expected / sum).abs() < 1e-6);
            }
        }
    }
    // They are recorded only where they are asked for.
    let plain = Model::open(Path::new(FOLDER)).expect("a model").look(TEXT).expect("a trace");
    assert!(plain.layers.iter().all(|layer| layer.value_norms.is_empty()));
    let error = plain.value_weighted(Machine::detect()).unwrap_err().to_string();
    assert!(error.contains("no norms of values; record them"), "{error}");
}
