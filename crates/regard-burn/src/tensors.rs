//! Burn's tensors as slices and views, without copies where their layout allows it, and back.

use burn::backend::flex::{FlexTensor, Layout as FlexLayout};
use burn::tensor::{Bytes, DType, Element as BurnElement, Shape as BurnShape};
use bytemuck::Pod;
use regard::tensor::Strides;
use regard::{Element, Error, Layout, Shape, Tensor, View};

/// A number that both Burn and Regard have.
pub(crate) trait Number: Element + BurnElement + Pod {}
impl<E: Element + BurnElement + Pod> Number for E {}

/// The same numbers one after another.
pub(crate) fn dense(tensor: &FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor.clone() } else { tensor.to_contiguous() }
}

/// The numbers of a [`dense`] tensor.
pub(crate) fn numbers<E: Number>(tensor: &FlexTensor) -> &[E] {
    let layout = tensor.layout();
    let first = layout.start_offset();
    &tensor.storage::<E>()[first..first + layout.num_elements()]
}

/// A tensor of numbers one after another.
pub(crate) fn tensor<E: Number>(numbers: Vec<E>, shape: &[usize]) -> FlexTensor {
    let layout = FlexLayout::contiguous(BurnShape::from(shape.to_vec()));
    FlexTensor::new(Bytes::from_elems(numbers), layout, <E as BurnElement>::dtype())
}

/// The sizes of a tensor.
pub(crate) fn sizes(tensor: &FlexTensor) -> Vec<usize> {
    tensor.layout().shape().to_vec()
}

/// Its last size and the product of the others.
pub(crate) fn rows(tensor: &FlexTensor) -> [usize; 2] {
    let sizes = sizes(tensor);
    let (last, others) = sizes.split_last().expect("a tensor has at least one axis");
    [others.iter().product(), *last]
}

/// A tensor whose rows can be viewed: features one after another, and no axis that runs backwards.
pub(crate) fn viewable(tensor: &FlexTensor) -> FlexTensor {
    let layout = tensor.layout();
    let rows = layout.has_contiguous_inner() || layout.shape().to_vec().last() == Some(&1);
    if rows && layout.has_positive_strides() { tensor.clone() } else { tensor.to_contiguous() }
}

/// `[batch, heads, length, features]` where it lies in memory; of a [`viewable`] tensor.
pub(crate) fn view<E: Number>(tensor: &FlexTensor) -> Result<View<'_, E>, Error> {
    let layout = tensor.layout();
    let [batch, heads, len, dim] = layout.shape().dims::<4>();
    let stride = |axis: usize| layout.strides()[axis].unsigned_abs();
    let strides = Strides { batch: stride(0), heads: stride(1), len: stride(2) };
    let shape = Shape { batch, heads, len, dim };
    let data = tensor.storage::<E>();
    View::strided(&data[layout.start_offset().min(data.len())..], shape, strides)
}

/// The engine's tensor as Burn's, `[batch, heads, length, features]` in whichever order it lies in memory.
pub(crate) fn from_engine<E: Number>(result: Tensor<E>) -> FlexTensor {
    let (shape, layout) = (result.shape(), result.layout());
    let Shape { batch, heads, len, dim } = shape;
    let signed = usize::cast_signed;
    let strides = match layout {
        Layout::Bhsd => [heads * len * dim, len * dim, dim, 1],
        Layout::Bshd => [len * heads * dim, dim, heads * dim, 1],
    };
    let sizes = BurnShape::from(vec![batch, heads, len, dim]);
    let layout = FlexLayout::new(sizes, strides.map(signed).to_vec(), 0);
    FlexTensor::new(Bytes::from_elems(result.into_data()), layout, <E as BurnElement>::dtype())
}

/// Runs a piece of generic code for the type of a tensor's numbers.
macro_rules! by_type {
    ($tensor:expr, $E:ident => $body:expr) => {
        match $tensor.dtype() {
            burn::tensor::DType::F32 => {
                type $E = f32;
                $body
            }
            burn::tensor::DType::F64 => {
                type $E = f64;
                $body
            }
            burn::tensor::DType::F16 => {
                type $E = regard::f16;
                $body
            }
            burn::tensor::DType::BF16 => {
                type $E = regard::bf16;
                $body
            }
            other => panic!("Regard computes in f32, f64, f16 and bf16; the tensor has {other:?}"),
        }
    };
}
pub(crate) use by_type;

/// Refuses numbers that are not f32, which is what this operation computes in.
///
/// # Panics
/// If they are not.
pub(crate) fn only_f32(what: &str, tensors: &[FlexTensor]) {
    for tensor in tensors {
        let found = tensor.dtype();
        assert!(
            found == DType::F32,
            "{what} computes in f32; the tensor has {found:?}: cast it first"
        );
    }
}
