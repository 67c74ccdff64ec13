//! Arrays between Python and the engine. Python keeps the memory of what goes in, and says where it lies; what comes out is
//! kept here, and Python is told where.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};
use regard::tensor::{Strides, ViewMut};
use regard::{Element, Shape, View};
use std::any::Any;
use std::borrow::Cow;
use std::ffi::{c_char, c_int};
use std::sync::Arc;

/// An array of the caller: where it lies, what it holds, its sizes, and its strides in elements.
///
/// Only `regard/*.py` makes these, of arrays that live until the call has returned: as tuples, or of NumPy arrays as they are.
#[derive(Clone, Debug)]
pub(crate) struct Array(usize, Cow<'static, str>, Vec<usize>, Vec<isize>);

/// By hand: what `derive` makes takes three times as long, as long as a small call.
impl<'a, 'py> FromPyObject<'a, 'py> for Array {
    type Error = PyErr;

    fn extract(from: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let Ok(parts) = from.cast::<PyTuple>() else { return Self::of_numpy(from) };
        let part = |i| parts.get_borrowed_item(i);
        let dtype = part(1)?;
        let dtype = dtype.extract::<Cow<'_, str>>()?;
        let known = DTYPES.iter().find(|known| **known == dtype);
        let dtype = known.map_or_else(|| dtype.into_owned().into(), |known| Cow::Borrowed(*known));
        Ok(Self(part(0)?.extract()?, dtype, numbers(part(2)?)?, numbers(part(3)?)?))
    }
}

/// `PyArrayInterface` of NumPy's array interface protocol, version 3.
#[repr(C)]
struct NumpyArray {
    /// 2, by which the struct is known.
    two: c_int,
    nd: c_int,
    typekind: c_char,
    itemsize: c_int,
    flags: c_int,
    shape: *const isize,
    /// In bytes.
    strides: *const isize,
    data: *const u8,
}

/// Flags of [`NumpyArray`]: aligned, in native byte order.
const PLAIN: c_int = 0x100 | 0x200;

impl Array {
    /// A NumPy array of f32, f64 or f16. Ten times as fast as its attributes in Python.
    fn of_numpy(array: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let capsule = array.getattr(intern!(array.py(), "__array_struct__"))?;
        let capsule = capsule.cast::<PyCapsule>()?;
        let found = capsule.pointer_checked(None)?.cast::<NumpyArray>();
        // SAFETY: NumPy documents that the capsule holds this struct, which lives as long as the capsule.
        let found = unsafe { found.as_ref() };
        let dtype = match (found.typekind.cast_unsigned(), found.itemsize) {
            (b'f', 4) => "f32",
            (b'f', 8) => "f64",
            (b'f', 2) => "f16",
            _ => "another dtype",
        };
        let nd = usize::try_from(found.nd).unwrap_or(0);
        if found.two != 2 || found.flags & PLAIN != PLAIN || dtype.len() > 3 || nd == 0 {
            return Err(PyTypeError::new_err("expected a NumPy array of f32, f64 or f16, aligned"));
        }
        // SAFETY: both have `nd` entries, as the protocol has it.
        let (shape, strides) = unsafe {
            (
                std::slice::from_raw_parts(found.shape, nd),
                std::slice::from_raw_parts(found.strides, nd),
            )
        };
        let size = found.itemsize as isize;
        // NumPy gives an empty array strides of 0.
        let is_empty = shape.contains(&0);
        let strides = shape.iter().zip(strides);
        let strides = strides.map(|(n, s)| if *n > 1 && !is_empty { s / size } else { 1 });
        let strides = strides.collect();
        let shape = shape.iter().map(|n| n.unsigned_abs()).collect();
        Ok(Self(found.data as usize, Cow::Borrowed(dtype), shape, strides))
    }
}

/// The numbers of a tuple.
fn numbers<'a, 'py, T>(from: Borrowed<'a, 'py, PyAny>) -> PyResult<Vec<T>>
where
    T: for<'b> FromPyObject<'b, 'py, Error = PyErr>,
{
    let tuple = from.cast::<PyTuple>()?;
    (0..tuple.len()).map(|i| tuple.get_borrowed_item(i)?.extract()).collect()
}

/// What a Rust type is called in an [`Array`].
pub(crate) trait Named: Copy + Send + Sync + 'static {
    const NAME: &'static str;
    /// As NumPy writes it.
    const TYPE: &'static str;
}

macro_rules! named {
    ($($of:ty, $name:literal, $typestr:literal;)*) => {
        const DTYPES: &[&str] = &[$($name),*];
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
    /// The array must live until the call has returned.
    pub(crate) fn new(
        address: usize,
        dtype: Cow<'static, str>,
        shape: Vec<usize>,
        strides: Vec<isize>,
    ) -> Self {
        Self(address, dtype, shape, strides)
    }

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

    /// `[batch, heads, len, dim]`, to be written.
    ///
    /// # Safety
    /// Nothing else may read or write this memory while the view is alive.
    pub(crate) unsafe fn view_mut<'a, E: Element + Named>(
        &'a self,
        name: &str,
    ) -> PyResult<ViewMut<'a, E>> {
        let (len, first) = (self.reach::<E>(name)?.len(), self.0 as *mut E);
        let Self(_, _, shape, strides) = self;
        let (&[batch, heads, len_of, dim], &[b, h, l, 1]) = (&shape[..], &strides[..]) else {
            return self.refuse(name, "[batch, heads, length, features], features side by side");
        };
        let strides = [b, h, l].map(|n| usize::try_from(n).unwrap_or(0));
        let strides = Strides { batch: strides[0], heads: strides[1], len: strides[2] };
        // An array without elements may have no address.
        let data = match len {
            0 => &mut [],
            // SAFETY: `reach` has checked address and length, and the caller promises that it has this memory alone.
            _ => unsafe { std::slice::from_raw_parts_mut(first, len) },
        };
        ViewMut::strided(data, Shape { batch, heads, len: len_of, dim }, strides).map_err(refused)
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
