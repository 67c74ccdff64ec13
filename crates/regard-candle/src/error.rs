//! Every way a call can be wrong.

use candle_core::{DType, DeviceLocation};
use std::fmt;

/// Why a call was refused. Raised before any work, save what only the way back can know.
///
/// Becomes [`candle_core::Error`] by `?`, so that calls stand among those of Candle.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// The engine refused it.
    Engine(regard::Error),
    /// An option that a variable stands behind. An operation of Candle passes gradients to three tensors, here q, k and v.
    Tracked {
        /// The option.
        option: &'static str,
    },
    /// A normalizer through which q and k, which variables stand behind, would learn nothing.
    NothingLearned {
        /// The normalizer.
        normalizer: &'static str,
    },
    /// A gradient of a gradient.
    SecondOrder,
    /// A tensor that is not in the memory of the CPU.
    Device {
        /// The tensor.
        tensor: &'static str,
        /// Where it is.
        found: DeviceLocation,
    },
    /// Numbers of a type that does not fit.
    Type {
        /// The tensor.
        tensor: &'static str,
        /// Its type.
        found: DType,
        /// Types that fit.
        accepted: &'static [DType],
    },
    /// A tensor with other axes than its kind has.
    Axes {
        /// The tensor.
        tensor: &'static str,
        /// Its sizes.
        found: Vec<usize>,
        /// What its kind has, as in `[heads]`.
        expected: &'static str,
    },
    /// Candle refused something.
    Candle {
        /// What it said.
        message: String,
    },
}

impl From<regard::Error> for Error {
    fn from(error: regard::Error) -> Self {
        Self::Engine(error)
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Self::Candle { message: error.to_string() }
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        Self::wrap(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Engine(error) => error.fmt(f),
            Self::Tracked { option } => write!(
                f,
                "{option}: a variable stands behind it, and its gradient would be lost, for an operation of Candle has \
                 gradients for three tensors, q, k and v; detach it if it is not to be learned, or learn it with regard-burn"
            ),
            Self::NothingLearned { normalizer } => write!(
                f,
                "{normalizer} normalizer: variables stand behind q or k, and no gradient passes through its choice of keys; \
                 detach q and k, or take softmax, top k or sparsemax"
            ),
            Self::SecondOrder => write!(
                f,
                "gradient of a gradient: Regard has first derivatives only; unset CANDLE_GRAD_DO_NOT_DETACH, or detach the \
                 gradient"
            ),
            Self::Device { tensor, found } => write!(
                f,
                "{tensor}: it is on {found:?}, Regard computes on the CPU; move it with to_device(&Device::Cpu)"
            ),
            Self::Type { tensor, found, accepted } => {
                let names: Vec<_> = accepted.iter().map(DType::as_str).collect();
                write!(
                    f,
                    "{tensor}: its numbers are {}, they must be {}; cast it with to_dtype",
                    found.as_str(),
                    names.join(", ")
                )
            }
            Self::Axes { tensor, found, expected } => {
                write!(f, "{tensor}: its shape is {found:?}; it must be {expected}")
            }
            Self::Candle { message } => message.fmt(f),
        }
    }
}

/// A message contains that of its source.
impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Engine(error) => Some(error),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_the_tensor_and_the_remedy() {
        let device = Error::Device { tensor: "k", found: DeviceLocation::Cuda { gpu_id: 1 } };
        let message = "k: it is on Cuda { gpu_id: 1 }, Regard computes on the CPU; move it with to_device(&Device::Cpu)";
        assert_eq!(device.to_string(), message);
        let axes = Error::Axes { tensor: "sinks", found: vec![1, 8], expected: "[heads]" };
        assert_eq!(axes.to_string(), "sinks: its shape is [1, 8]; it must be [heads]");
    }
}
