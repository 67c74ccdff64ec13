//! Candle's tensors as slices and views, without copies where their strides allow it, and back.

use crate::error::Error;
use candle_core::{
    CpuStorage, DType, Device, Shape as CandleShape, Storage, StorageRef, Tensor, WithDType,
};
use regard::tensor::Strides;
use regard::{Element, Layout, Shape, View, bf16, f16};
use std::fmt;
use std::sync::Mutex;

/// A type of numbers that both Candle and Regard have.
pub(crate) trait TensorElement: Element<Num: WithDType> + WithDType {
    /// The type itself, to be told as the only one accepted.
    const ONLY: &'static [DType] = &[Self::DTYPE];
    /// The one that its arithmetic is done in.
    const NUMBER: &'static [DType] = &[<Self::Num as WithDType>::DTYPE];
}

impl TensorElement for f32 {}
impl TensorElement for f64 {}
impl TensorElement for f16 {}
impl TensorElement for bf16 {}

/// All of them.
const TYPES: &[DType] = &[DType::F32, DType::F64, DType::F16, DType::BF16];

/// That a tensor has none of them.
pub(crate) fn no_type(tensor: &'static str, found: DType) -> Error {
    Error::Type { tensor, found, accepted: TYPES }
}

/// What a tensor must be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorSpec {
    pub(crate) name: &'static str,
    /// How many there are, and what they stand for.
    pub(crate) axes: (usize, &'static str),
    pub(crate) types: &'static [DType],
}

impl TensorSpec {
    pub(crate) fn check(self, tensor: &Tensor) -> Result<(), Error> {
        let Self { name, axes: (rank, expected), types } = self;
        let place = tensor.device().location();
        if place != Device::Cpu.location() {
            return Err(Error::Device { tensor: name, found: place });
        }
        if !types.contains(&tensor.dtype()) {
            return Err(Error::Type { tensor: name, found: tensor.dtype(), accepted: types });
        }
        if tensor.rank() != rank {
            return Err(Error::Axes { tensor: name, found: tensor.dims().to_vec(), expected });
        }
        Ok(())
    }
}

/// A tensor whose rows can be viewed: features one after another. Of one that has gradients, so has this.
pub(crate) fn viewable(tensor: &Tensor) -> Result<Tensor, Error> {
    let rows = tensor.stride().last() == Some(&1) || tensor.dims().last() == Some(&1);
    Ok(if rows { tensor.clone() } else { tensor.contiguous()? })
}

/// A tensor while it is read.
pub(crate) struct StorageGuard<'a> {
    storage: StorageRef<'a>,
    tensor: &'a Tensor,
}

impl<'a> StorageGuard<'a> {
    pub(crate) fn new(tensor: &'a Tensor) -> Self {
        Self { storage: tensor.storage_and_layout().0, tensor }
    }

    /// From its first number to the end of the memory that it lies in.
    fn tail<N: WithDType>(&self) -> Result<&[N], Error> {
        let Storage::Cpu(storage) = &*self.storage else {
            let found = self.tensor.device().location();
            return Err(Error::Device { tensor: "a tensor", found });
        };
        let all = N::cpu_storage_as_slice(storage)?;
        Ok(&all[self.tensor.layout().start_offset().min(all.len())..])
    }

    /// The numbers of a contiguous tensor.
    pub(crate) fn numbers<N: WithDType>(&self) -> Result<&[N], Error> {
        Ok(&self.tail()?[..self.tensor.elem_count()])
    }

    /// `[batch, heads, length, features]` of a [`viewable`] tensor.
    pub(crate) fn view<E: TensorElement>(&self) -> Result<View<'_, E>, Error> {
        let (batch, heads, len, dim) = self.tensor.dims4()?;
        let stride = self.tensor.stride();
        let strides = Strides { batch: stride[0], heads: stride[1], len: stride[2] };
        Ok(View::strided(self.tail()?, Shape { batch, heads, len, dim }, strides)?)
    }
}

/// Sizes in the order of memory.
fn sizes(shape: Shape, layout: Layout) -> [usize; 4] {
    let Shape { batch, heads, len, dim } = shape;
    match layout {
        Layout::Bhsd => [batch, heads, len, dim],
        Layout::Bshd => [batch, len, heads, dim],
    }
}

/// `[batch, heads, length, features]` of a tensor whose axes are in the order of memory.
pub(crate) fn in_order(tensor: &Tensor, layout: Layout) -> Result<Tensor, Error> {
    Ok(match layout {
        Layout::Bhsd => tensor.clone(),
        Layout::Bshd => tensor.transpose(1, 2)?,
    })
}

/// The engine's tensor as Candle's, with no past.
pub(crate) fn from_engine<E: TensorElement>(tensor: regard::Tensor<E>) -> Result<Tensor, Error> {
    let (shape, layout) = (tensor.shape(), tensor.layout());
    let tensor = Tensor::from_vec(tensor.into_data(), &sizes(shape, layout), &Device::Cpu)?;
    in_order(&tensor, layout)
}

/// The result of an operation, for the moment in which Candle asks for it.
///
/// Operations run before Candle is told of them: an error that passes through Candle comes back as text. Candle takes every result
/// for contiguous, so the sizes are in the order of memory, and [`in_order`] follows.
pub(crate) struct OpResult {
    storage: Mutex<Option<CpuStorage>>,
    sizes: [usize; 4],
    pub(crate) layout: Layout,
}

impl OpResult {
    pub(crate) fn new<E: TensorElement>(tensor: regard::Tensor<E>) -> Self {
        let (shape, layout) = (tensor.shape(), tensor.layout());
        let storage = Mutex::new(Some(E::to_cpu_storage_owned(tensor.into_data())));
        Self { storage, sizes: sizes(shape, layout), layout }
    }

    /// Gives it away: Candle asks once.
    pub(crate) fn take(&self) -> candle_core::Result<(CpuStorage, CandleShape)> {
        let storage = self.storage.lock().ok().and_then(|mut storage| storage.take());
        let gone = || candle_core::Error::msg("the result of this operation was taken before");
        Ok((storage.ok_or_else(gone)?, self.sizes.to_vec().into()))
    }
}

impl fmt::Debug for OpResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OpResult {:?} {:?}", self.sizes, self.layout)
    }
}
