//! A trace file of any bytes, and a whole one with any damage, is read or refused; what is read can be drawn.
#![no_main]

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use regard::Machine;
use regard_scope::{Inputs, Labels, Layer, LayerData, Pool, Trace, Weights, Zoom};
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// A small file with everything in it.
static WHOLE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let numbers = |n: usize| (0..n).map(|i| (i as f32 * 0.7).sin()).collect::<Vec<f32>>();
    let q = (numbers(24), [2, 3, 4]);
    let heads =
        Inputs::new(q, (numbers(20), [1, 5, 4]), "causal & (window 3 | dilated 2)").unwrap();
    let heads = Inputs { key_bias: numbers(10), ..heads };
    let weights = Weights { values: vec![0.2; 30], shape: [2, 3, 5] };
    let data = [LayerData::Inputs(heads), LayerData::Weights(weights)];
    let layer = |(layer, data)| Layer {
        layer,
        kind: "self".into(),
        rows: "words".into(),
        cols: "keys".into(),
        data,
        value_norms: vec![0.5; 10],
    };
    let words = Labels::new("words", ["a", "b", "c"].map(String::from).to_vec());
    let axes = [("words".to_string(), words), ("keys".to_string(), Labels::counted("keys", 5))];
    let layers = data.into_iter().enumerate().map(layer).collect();
    let interventions = vec!["layer 0 head 1: drop".into()];
    Trace { title: "whole".into(), axes: BTreeMap::from(axes), layers, interventions }.to_bytes().unwrap()
});

fuzz_target!(|data: &[u8]| {
    read(data);
    let _ = damaged(&mut Unstructured::new(data)).map(|bytes| read(&bytes));
});

fn damaged(u: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let mut bytes = WHOLE.clone();
    while !u.is_empty() && !bytes.is_empty() {
        let at = u.choose_index(bytes.len())?;
        match u.int_in_range(0..=4)? {
            0 => bytes[at] = u.arbitrary()?,
            1 => bytes[at] = *u.choose(b"0123456789,:{}[]\"\\-.e")?,
            2 => bytes.truncate(at),
            3 => bytes.insert(at, u.arbitrary()?),
            _ => drop(bytes.remove(at)),
        }
    }
    Ok(bytes)
}

fn read(bytes: &[u8]) {
    let Ok(trace) = Trace::from_bytes(bytes) else { return };
    let machine = Machine::detect().threads(1);
    for site in trace.sites() {
        let rows = trace.layer(&site).unwrap().data.size()[0];
        trace.map(machine, &site, 0..rows, [4, 4]).unwrap();
    }
    let _ = trace.clone().value_weighted(machine);
    let zoom = Zoom::new(trace, machine);
    for site in 0..zoom.sites().len() {
        let _ = zoom.tile(site, Pool::Mean, 1, [0, 0]);
        let _ = (zoom.weight(site, 1, 1), zoom.row(site, 1));
    }
}
