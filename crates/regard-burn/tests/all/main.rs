//! Each operation against the same made of Burn's own, whose autodiff knows nothing of ours.

mod attention;
mod gru;
mod layers;

use burn::tensor::{Device, Tensor, TensorData};

/// Numbers that are the same in every run.
pub(crate) fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// A tensor that takes part in autodiff.
pub(crate) fn leaf<const D: usize>(shape: [usize; D], seed: u32) -> Tensor<D> {
    let device = Device::flex().autodiff();
    Tensor::from_data(TensorData::new(noise(shape.iter().product(), seed), shape), &device)
        .require_grad()
}

pub(crate) fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.clone().into_data().iter::<f32>().collect()
}

/// The loss: a sum with uneven weights, so that no gradient is right by symmetry.
pub(crate) fn uneven<const D: usize>(y: Tensor<D>) -> Tensor<1> {
    let shape = y.dims();
    let weights = leaf(shape, 99).detach();
    (y * weights).sum()
}

/// Largest difference over the largest number.
pub(crate) fn apart(found: &[f32], right: &[f32]) -> f32 {
    assert_eq!(found.len(), right.len());
    let top = right.iter().fold(1e-6f32, |a, b| a.max(b.abs()));
    found.iter().zip(right).fold(0.0f32, |a, (x, y)| a.max((x - y).abs())) / top
}

/// Values and gradients of two ways to compute the same from the same leaves.
pub(crate) fn same<const D: usize, const N: usize>(
    what: &str,
    leaves: [&dyn Fn() -> AnyLeaf; N],
    ours: impl Fn(&[AnyLeaf]) -> Tensor<D>,
    theirs: impl Fn(&[AnyLeaf]) -> Tensor<D>,
) {
    let run = |of: &dyn Fn(&[AnyLeaf]) -> Tensor<D>| {
        let inputs: Vec<AnyLeaf> = leaves.iter().map(|leaf| leaf()).collect();
        let y = of(&inputs);
        let out = values(&y);
        let grads = uneven(y).backward();
        let by: Vec<Option<Vec<f32>>> = inputs.iter().map(|leaf| leaf.grad(&grads)).collect();
        (out, by)
    };
    let ((y, by), (right_y, right_by)) = (run(&ours), run(&theirs));
    let off = apart(&y, &right_y);
    assert!(off < 2e-6, "{what}: values are {off} apart");
    for (i, (found, right)) in by.iter().zip(&right_by).enumerate() {
        let (found, right) =
            (found.as_ref().expect("a gradient"), right.as_ref().expect("a gradient"));
        let off = apart(found, right);
        assert!(off < 5e-6, "{what}: gradient {i} is {off} apart");
    }
}

/// A leaf of any number of axes.
#[derive(Clone, Debug)]
pub(crate) enum AnyLeaf {
    One(Tensor<1>),
    Two(Tensor<2>),
    Three(Tensor<3>),
    Four(Tensor<4>),
}

impl AnyLeaf {
    fn grad(&self, grads: &burn::tensor::Gradients) -> Option<Vec<f32>> {
        match self {
            Self::One(t) => t.grad(grads).map(|g| values(&g)),
            Self::Two(t) => t.grad(grads).map(|g| values(&g)),
            Self::Three(t) => t.grad(grads).map(|g| values(&g)),
            Self::Four(t) => t.grad(grads).map(|g| values(&g)),
        }
    }
    pub(crate) fn one(&self) -> Tensor<1> {
        let Self::One(t) = self else { panic!("one axis") };
        t.clone()
    }
    pub(crate) fn two(&self) -> Tensor<2> {
        let Self::Two(t) = self else { panic!("two axes") };
        t.clone()
    }
    pub(crate) fn three(&self) -> Tensor<3> {
        let Self::Three(t) = self else { panic!("three axes") };
        t.clone()
    }
    pub(crate) fn four(&self) -> Tensor<4> {
        let Self::Four(t) = self else { panic!("four axes") };
        t.clone()
    }
}
