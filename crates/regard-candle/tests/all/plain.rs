//! Attention as its definition has it, in operations that Candle knows the gradients of.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use regard::problem::{Align, Pair, Scope};
use regard_candle::Attention;

/// Numbers between -1 and 1 that look like chance.
pub(crate) fn noise(seed: u64, sizes: &[usize], dtype: DType) -> Tensor {
    let number = |i: usize| {
        let x = (i as f64 * 12.9898 + seed as f64 * 78.233).sin() * 43_758.545_3;
        2.0 * (x - x.floor()) - 1.0
    };
    let numbers: Vec<f64> = (0..sizes.iter().product()).map(number).collect();
    Tensor::from_vec(numbers, sizes, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// The largest difference, relative to the largest number of the second.
pub(crate) fn difference(a: &Tensor, b: &Tensor) -> f64 {
    let [a, b] = [a, b].map(|x| x.to_dtype(DType::F64).unwrap());
    assert_eq!(a.dims(), b.dims());
    let most = |x: Tensor| -> f64 {
        let x = x.abs().unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
        assert!(x.iter().all(|x| x.is_finite()));
        x.into_iter().fold(0.0, f64::max)
    };
    most((a - &b).unwrap()) / most(b).max(1e-300)
}

/// Outputs and the gradients of `sum(out * weights)` by each variable.
pub(crate) fn pulled(out: &Tensor, vars: &[&Var]) -> Vec<Tensor> {
    let weights = noise(99, out.dims(), out.dtype());
    let grads = (out * weights).unwrap().sum_all().unwrap().backward().unwrap();
    let by = |var: &&Var| grads.get(var.as_tensor()).expect("a gradient that is not lost").clone();
    std::iter::once(out.detach()).chain(vars.iter().map(by)).collect()
}

/// 1 where a pair is visible, and what dropout multiplies its weight by: `[batch, heads, q_len, k_len]`.
fn grids(options: &Attention, [batch, heads, q_len, k_len]: [usize; 4]) -> [Vec<f64>; 2] {
    let offset = match options.align {
        Align::End => i64::try_from(k_len).unwrap() - i64::try_from(q_len).unwrap(),
        Align::Start => 0,
        Align::Offset(offset) => offset,
    };
    let (mut visible, mut factors) = (vec![], vec![]);
    for i in 0..batch * heads * q_len * k_len {
        let (key, row) = (i % k_len, i / k_len % q_len);
        let (head, batch) = (i / k_len / q_len % heads, i / k_len / q_len / heads);
        let scope = Scope { batch, head, q_len, k_len, offset };
        visible.push(f64::from(u8::from(options.mask.is_visible(&scope, row, key))));
        let kept = |d: regard::problem::Dropout| {
            let kept = d.keeps(Pair { batch, head, row, key });
            if kept { d.growth() } else { 0.0 }
        };
        factors.push(options.dropout.map_or(1.0, kept));
    }
    [visible, factors]
}

/// Each head of `x` for as many query heads as it serves.
fn repeated(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (batch, kv, len, dim) = x.dims4()?;
    x.unsqueeze(2)?
        .broadcast_as((batch, kv, heads / kv, len, dim))?
        .reshape((batch, heads, len, dim))
}

/// The definition, for the options: mask, align, scale, softcap, bias, dropout.
pub(crate) fn plain(q: &Tensor, k: &Tensor, v: &Tensor, options: &Attention) -> Result<Tensor> {
    let (batch, heads, q_len, dim) = q.dims4()?;
    let (k, v) = (repeated(k, heads)?, repeated(v, heads)?);
    let sizes = [batch, heads, q_len, k.dims()[2]];
    let scale = options.scale.unwrap_or(1.0 / (dim as f64).sqrt());
    let mut scores = (q.contiguous()?.matmul(&k.transpose(2, 3)?.contiguous()?)? * scale)?;
    if let Some(cap) = options.softcap {
        scores = ((scores / cap)?.tanh()? * cap)?;
    }
    if let Some(bias) = &options.bias {
        scores = scores.broadcast_add(bias)?;
    }
    let grid = |numbers| Tensor::from_vec(numbers, &sizes, &Device::Cpu)?.to_dtype(q.dtype());
    let [visible, factors] = grids(options, sizes).map(grid);
    let (visible, factors) = (visible?, factors?);
    let low = (visible.ones_like()? * -1e4)?;
    scores = visible.to_dtype(DType::U8)?.where_cond(&scores, &low)?;
    let most = scores.max_keepdim(D::Minus1)?.detach();
    let powers = (scores.broadcast_sub(&most)?.exp()? * &visible)?;
    // A row that sees nothing is divided by 1.
    let nothing = visible.sum_keepdim(D::Minus1)?.eq(0.0)?.to_dtype(q.dtype())?;
    let sums = (powers.sum_keepdim(D::Minus1)? + nothing)?;
    (powers.broadcast_div(&sums)? * factors)?.matmul(&v.contiguous()?)
}
