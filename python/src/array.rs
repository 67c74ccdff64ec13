//! Arrays between Python and the engine. Python keeps the memory of what goes in, and says where it lies; what comes out is
//! kept here, and Python is told where.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use regard::tensor::Strides;
use regard::{Element, Shape, View};
use std::any::Any;
use std::sync::Arc;

/// An array of the caller: where it lies, what it holds, its sizes, and its strides in elements.
///
/// Only `regard/_arrays.py` makes these, of arrays that live until the call has returned.
#[derive(Clone, Debug, FromPyObject)]
pub(crate) struct Array(usize, String, Vec<usize>, Vec<isize>);

/// What a Rust type is called in an [`Array`].
pub(crate) trait Named: Copy + Send + Sync + 'static {
    const NAME: &'static str;
    /// As NumPy writes it.
    const TYPE: &'static str;
}

macro_rules! named {
    ($($of:ty, $name:literal, $typestr:literal;)*) => {
        $(impl Named for $of {
            const NAME: &'static str = $name;
            const TYPE: &'static str = $typestr;
        })*
    };
}

named! {
    f32, "f32", "<f4";
    f64, "f64", "<f8";
    regard::f16, "f16", "<f2";
    regard::bf16, "bf16", "<u2"; // NumPy has no name for it
    u8, "bool", "|b1"; // bytes: nobody has promised that they are 0 or 1
    i64, "i64", "<i8";
    u64, "u64", "<u8";
}

impl Array {
    pub(crate) fn dtype(&self) -> &str {
        &self.1
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.2
    }

    fn refuse<T>(&self, name: &str, wanted: &str) -> PyResult<T> {
        let Self(_, dtype, shape, strides) = self;
        let found = format!("{dtype} {shape:?} with strides {strides:?}");
        Err(PyTypeError::new_err(format!("{name}: expected {wanted}, found {found}")))
    }

    /// As many elements from the first on as sizes and strides reach.
    fn reach<T: Named>(&self, name: &str) -> PyResult<&[T]> {
        let Self(address, dtype, shape, strides) = self;
        if dtype != T::NAME {
            return self.refuse(name, T::NAME);
        }
        if shape.contains(&0) {
            return Ok(&[]);
        }
        let far = shape.iter().zip(strides).try_fold(0usize, |far, (n, stride)| {
            let stride = usize::try_from(*stride).ok()?;
            far.checked_add((n - 1).checked_mul(stride)?)
        });
        let bytes = |far: usize| {
            (far + 1).checked_mul(size_of::<T>()).filter(|n| isize::try_from(*n).is_ok())
        };
        let Some(far) = far.filter(|far| shape.len() == strides.len() && bytes(*far).is_some())
        else {
            return self.refuse(name, "sizes with as many strides, none of them negative");
        };
        let first = *address as *const T;
        if first.is_null() || !first.is_aligned() {
            return self.refuse(name, "memory that is aligned for its type");
        }
        // SAFETY: `_arrays.py` took address, type, sizes and strides from one array that it holds for the length of the call,
        // so this memory is alive and is as long as those reach; any bits are a value of these types. Nobody
        // writes to it: the interpreter runs other threads meanwhile, and whoever changes the inputs of a running call there
        // breaks the rule of every library that lets go of the interpreter.
        Ok(unsafe { std::slice::from_raw_parts(first, far + 1) })
    }

    /// `[batch, heads, len, dim]`, or, with offsets, `[total, heads, dim]`.
    pub(crate) fn view<'a, E: Element + Named>(
        &'a self,
        name: &str,
        offsets: Option<&'a [usize]>,
    ) -> PyResult<View<'a, E>> {
        let data = self.reach::<E>(name)?;
        let Self(_, _, shape, strides) = self;
        let stride =
            |axis: usize| strides.get(axis).and_then(|n| usize::try_from(*n).ok()).unwrap_or(0);
        // Arrays without elements may have any strides.
        let is_empty = shape.contains(&0);
        if !is_empty && *shape.last().unwrap_or(&0) > 1 && strides.last() != Some(&1) {
            return self.refuse(name, "features side by side");
        }
        match (&shape[..], offsets) {
            (&[batch, heads, len, dim], None) => {
                let strides = Strides { batch: stride(0), heads: stride(1), len: stride(2) };
                View::strided(data, Shape { batch, heads, len, dim }, strides).map_err(refused)
            }
            (&[_, heads, dim], Some(offsets)) => {
                let dense = self.list(name)?;
                View::packed(dense, offsets, [heads, dim]).map_err(refused)
            }
            (_, Some(_)) => self.refuse(name, "[total, heads, features], for it has offsets"),
            (_, None) => self.refuse(name, "[batch, heads, length, features]"),
        }
    }

    /// All elements of an array that is dense.
    pub(crate) fn list<T: Named>(&self, name: &str) -> PyResult<&[T]> {
        let Self(_, _, shape, strides) = self;
        let mut step = 1;
        for (n, stride) in shape.iter().zip(strides).rev() {
            if *n > 1 && *stride != step && !shape.contains(&0) {
                return self.refuse(name, "elements side by side");
            }
            step *= n.cast_signed();
        }
        self.reach(name)
    }

    /// Whole numbers from 0 on, of an array of i64 that is dense.
    pub(crate) fn counts(&self, name: &str) -> PyResult<Vec<usize>> {
        let count = |x: &i64| {
            let why = || format!("{name}: {x} is not usable; give whole numbers from 0 on");
            usize::try_from(*x).map_err(|_| PyValueError::new_err(why()))
        };
        self.list::<i64>(name)?.iter().map(count).collect()
    }
}

/// What the engine refuses, as Python's `ValueError`.
pub(crate) fn refused(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// Memory of ours that Python reads: `numpy.asarray` makes an array of it without a copy.
#[pyclass(frozen, module = "regard._regard")]
pub(crate) struct OwnedArray {
    _owner: Arc<dyn Any + Send + Sync>,
    address: usize,
    dtype: &'static str,
    typestr: &'static str,
    shape: Vec<usize>,
    /// In bytes.
    strides: Vec<usize>,
}

impl std::fmt::Debug for OwnedArray {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape)
    }
}

impl OwnedArray {
    /// A part of what `owner` holds, dense in the order of `axes`, which are `shape`'s from the outermost in memory on.
    pub(crate) fn part<T: Named>(
        owner: Arc<dyn Any + Send + Sync>,
        data: &[T],
        shape: &[usize],
        axes: &[usize],
    ) -> Self {
        let mut strides = vec![0; shape.len()];
        let mut step = 1;
        for axis in axes.iter().rev() {
            strides[*axis] = step;
            step *= shape[*axis];
        }
        Self::strided(owner, data, shape, &strides)
    }

    /// A part of what `owner` holds, from the first of `data` on, in steps of so many elements.
    pub(crate) fn strided<T: Named>(
        owner: Arc<dyn Any + Send + Sync>,
        data: &[T],
        shape: &[usize],
        strides: &[usize],
    ) -> Self {
        let steps = shape.iter().zip(strides).map(|(n, step)| n.saturating_sub(1) * step);
        let (far, within) = (steps.sum::<usize>(), data.len());
        assert!(shape.contains(&0) || far < within, "{shape:?} in {strides:?} of {within}");
        Self {
            _owner: owner,
            address: data.as_ptr() as usize,
            dtype: T::NAME,
            typestr: T::TYPE,
            shape: shape.to_vec(),
            strides: strides.iter().map(|step| step * size_of::<T>()).collect(),
        }
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// A list, dense in this shape.
    pub(crate) fn new<T: Named>(data: Vec<T>, shape: &[usize]) -> Self {
        let data = Arc::new(data);
        let axes: Vec<usize> = (0..shape.len()).collect();
        Self::part(data.clone(), &data, shape, &axes)
    }
}

#[pymethods]
impl OwnedArray {
    /// `f32`, `f64`, `f16`, `bf16`, `i64`, `u64`, `bool`
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("version", 3)?;
        dict.set_item("typestr", self.typestr)?;
        dict.set_item("shape", pyo3::types::PyTuple::new(py, &self.shape)?)?;
        dict.set_item("strides", pyo3::types::PyTuple::new(py, &self.strides)?)?;
        dict.set_item("data", (self.address, false))?;
        Ok(dict)
    }
}

/// Runs `$body` with `$E` the type that an array says it holds.
macro_rules! by_type {
    ($dtype:expr, $E:ident => $body:expr) => {
        match $dtype {
            "f32" => {
                type $E = f32;
                $body
            }
            "f64" => {
                type $E = f64;
                $body
            }
            "f16" => {
                type $E = regard::f16;
                $body
            }
            "bf16" => {
                type $E = regard::bf16;
                $body
            }
            other => Err(pyo3::exceptions::PyTypeError::new_err(format!(
                "expected f32, f64, f16 or bf16, found {other}"
            ))),
        }
    };
}
pub(crate) use by_type;
