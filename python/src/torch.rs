//! PyTorch's stable C interface: tensors read and made without their attributes in Python, which cost more than a small attention; and
//! PyTorch's threads, which would otherwise spin beside ours.
//!
//! `regard/torch.py` finds the functions in the PyTorch that is loaded and gives their addresses, so nothing is linked. The headers are
//! `torch/csrc/inductor/aoti_torch/c/shim.h` and `torch/csrc/stable/c/shim.h`.

use crate::array::{Array, refused};
use crate::attention::attend_into;
use pyo3::exceptions::{PyMemoryError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use std::any::Any;
use std::borrow::Cow;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::{NonNull, null_mut};
use std::sync::{Mutex, OnceLock, PoisonError};

/// An owned `at::Tensor`.
type Handle = *mut c_void;
/// 0 if it went well.
type Status = i32;

/// Functions of PyTorch, and their names in the same order.
macro_rules! functions {
    ($struct:ident, $names:ident: $($field:ident = $name:literal: fn($($argument:ty),*) -> $result:ty;)*) => {
        #[derive(Debug)]
        struct $struct { $($field: unsafe extern "C" fn($($argument),*) -> $result,)* }

        /// Their names.
        pub(crate) const $names: &[&str] = &[$($name),*];

        impl $struct {
            /// # Safety
            /// The addresses are those of these functions.
            unsafe fn new(addresses: &[usize]) -> Option<Self> {
                let mut addresses = addresses.iter().copied().filter(|address| *address != 0);
                $(
                    let address = addresses.next()?;
                    let address = std::ptr::with_exposed_provenance::<()>(address);
                    // SAFETY: the caller has the address of the function that the header declares with these arguments.
                    let $field = unsafe {
                        std::mem::transmute::<*const (), unsafe extern "C" fn($($argument),*) -> $result>(address)
                    };
                )*
                Some(Self { $($field),* })
            }
        }
    };
}

functions! { Tensors, TENSOR_FUNCTIONS:
    from_python = "torch_tensor_from_pyobject": fn(*mut c_void, *mut Handle) -> Status;
    to_python = "torch_tensor_to_pyobject": fn(Handle, *mut c_void, *mut *mut c_void) -> Status;
    delete = "aoti_torch_delete_tensor_object": fn(Handle) -> Status;
    dim = "aoti_torch_get_dim": fn(Handle, *mut i64) -> Status;
    sizes = "aoti_torch_get_sizes": fn(Handle, *mut *const i64) -> Status;
    strides = "aoti_torch_get_strides": fn(Handle, *mut *const i64) -> Status;
    dtype = "aoti_torch_get_dtype": fn(Handle, *mut i32) -> Status;
    data = "torch_get_const_data_ptr": fn(Handle, *mut *const c_void) -> Status;
    empty = "aoti_torch_empty_strided": fn(i64, *const i64, *const i64, i32, i32, i32, *mut Handle) -> Status;
    cpu = "aoti_torch_device_type_cpu": fn() -> i32;
    f32 = "aoti_torch_dtype_float32": fn() -> i32;
    f64 = "aoti_torch_dtype_float64": fn() -> i32;
    f16 = "aoti_torch_dtype_float16": fn() -> i32;
    bf16 = "aoti_torch_dtype_bfloat16": fn() -> i32;
}

functions! { Threads, THREAD_FUNCTIONS:
    count = "torch_get_num_threads": fn(*mut u32) -> Status;
    run = "torch_parallel_for": fn(i64, i64, i64, unsafe extern "C" fn(i64, i64, *mut c_void), *mut c_void) -> Status;
}

static TENSORS: OnceLock<Option<Tensors>> = OnceLock::new();
static THREADS: OnceLock<Option<Threads>> = OnceLock::new();

/// Takes the addresses of [`TENSOR_FUNCTIONS`] and [`THREAD_FUNCTIONS`], 0 for one that is not there. Tells whether tensors can be read.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "Python has lists")]
pub(crate) fn load_torch(tensors: Vec<usize>, threads: Vec<usize>) -> bool {
    // SAFETY: `regard/torch.py` has looked the names up in the library that PyTorch has loaded, which is never unloaded.
    let (tensors, threads) = unsafe { (Tensors::new(&tensors), Threads::new(&threads)) };
    if THREADS.get_or_init(|| threads).is_some() {
        regard::machine::set_executor(on_threads_of_torch);
    }
    TENSORS.get_or_init(|| tensors).is_some()
}

/// The threads of PyTorch, if it uses as many: see [`regard::machine::Executor`].
fn on_threads_of_torch(threads: usize, work: &(dyn Fn() + Sync)) -> bool {
    let Some(Some(torch)) = THREADS.get() else { return false };
    let mut count = 0;
    // SAFETY: writes the number.
    let known = unsafe { (torch.count)(&mut count) } == 0;
    let Some(end) = i64::try_from(threads).ok().filter(|_| known && count as usize >= threads)
    else {
        return false;
    };
    let parallel = Parallel { work, panic: Mutex::new(None) };
    let context: *const Parallel<'_> = &parallel;
    // SAFETY: `call` takes a `Parallel`, which is shared between threads and outlives this call, as it returns when all have.
    unsafe { (torch.run)(0, end, 1, call, context.cast_mut().cast()) };
    let panic = parallel.panic.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(panic) = panic {
        resume_unwind(panic);
    }
    true
}

/// Work on threads of PyTorch, and the panic of one of them.
struct Parallel<'w> {
    work: &'w (dyn Fn() + Sync),
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// One of them. Panics must not unwind into C++.
///
/// # Safety
/// `context` is a [`Parallel`].
unsafe extern "C" fn call(_begin: i64, _end: i64, context: *mut c_void) {
    // SAFETY: the caller gives one, that is alive.
    let parallel = unsafe { &*context.cast::<Parallel<'_>>() };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(parallel.work)) {
        *parallel.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
    }
}

/// A tensor of PyTorch.
struct Torch<'t> {
    torch: &'t Tensors,
    handle: Handle,
}

impl Drop for Torch<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle is ours, and not used any more.
        unsafe { (self.torch.delete)(self.handle) };
    }
}

/// What a function of PyTorch has written, if it went well.
fn written<T>(status: Status, value: MaybeUninit<T>) -> PyResult<T> {
    if status != 0 {
        return Err(PyTypeError::new_err("expected a strided CPU tensor of PyTorch"));
    }
    // SAFETY: functions that return 0 have written their result.
    Ok(unsafe { value.assume_init() })
}

impl<'t> Torch<'t> {
    fn of(torch: &'t Tensors, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut handle = MaybeUninit::uninit();
        // SAFETY: the object is alive; that it is a tensor is checked there.
        let status = unsafe { (torch.from_python)(object.as_ptr().cast(), handle.as_mut_ptr()) };
        Ok(Self { torch, handle: written(status, handle)? })
    }

    /// An uninitialized one.
    fn empty(torch: &'t Tensors, shape: [i64; 4], strides: [i64; 4], dtype: i32) -> PyResult<Self> {
        let mut handle = MaybeUninit::uninit();
        // SAFETY: both arrays have 4 entries.
        let status = unsafe {
            let (shape, strides) = (shape.as_ptr(), strides.as_ptr());
            (torch.empty)(4, shape, strides, dtype, (torch.cpu)(), 0, handle.as_mut_ptr())
        };
        let no_memory = |_| PyMemoryError::new_err("no memory for the output");
        Ok(Self { torch, handle: written(status, handle).map_err(no_memory)? })
    }

    fn dtype(&self) -> PyResult<i32> {
        let mut dtype = MaybeUninit::uninit();
        // SAFETY: the handle is alive.
        written(unsafe { (self.torch.dtype)(self.handle, dtype.as_mut_ptr()) }, dtype)
    }

    /// Sizes and strides of a tensor with four axes.
    fn axes(&self) -> PyResult<[[i64; 4]; 2]> {
        let (mut dim, torch) = (MaybeUninit::uninit(), self.torch);
        // SAFETY: the handle is alive.
        let dim: i64 = written(unsafe { (torch.dim)(self.handle, dim.as_mut_ptr()) }, dim)?;
        if dim != 4 {
            let message = format!("expected [batch, heads, length, features], found {dim} axes");
            return Err(PyValueError::new_err(message));
        }
        let list = |of: unsafe extern "C" fn(Handle, *mut *const i64) -> Status| {
            let mut first = MaybeUninit::uninit();
            // SAFETY: the handle is alive.
            let first = written(unsafe { of(self.handle, first.as_mut_ptr()) }, first)?;
            // SAFETY: the tensor has four axes, and keeps a list of each.
            Ok::<_, PyErr>(unsafe { *first.cast::<[i64; 4]>() })
        };
        Ok([list(torch.sizes)?, list(torch.strides)?])
    }

    /// As the engine reads arrays, with its sizes and strides.
    fn array(&self, [shape, strides]: [[i64; 4]; 2]) -> PyResult<Array> {
        let (torch, mut data) = (self.torch, MaybeUninit::uninit());
        // SAFETY: the handle is alive.
        let data = written(unsafe { (torch.data)(self.handle, data.as_mut_ptr()) }, data)?;
        let found = self.dtype()?;
        // SAFETY: these return constants.
        let known = unsafe {
            [
                ("f32", (torch.f32)()),
                ("f64", (torch.f64)()),
                ("f16", (torch.f16)()),
                ("bf16", (torch.bf16)()),
            ]
        };
        let name = known.iter().find(|(_, dtype)| *dtype == found).map(|(name, _)| *name);
        let shape = shape.map(|n| usize::try_from(n).unwrap_or(0)).to_vec();
        let strides = strides.map(|n| isize::try_from(n).unwrap_or(-1)).to_vec();
        Ok(Array::new(
            data as usize,
            Cow::Borrowed(name.unwrap_or("another dtype")),
            shape,
            strides,
        ))
    }

    fn into_python(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let mut object = MaybeUninit::uninit();
        // SAFETY: the handle is alive, and we hold the interpreter.
        let status =
            unsafe { (self.torch.to_python)(self.handle, null_mut(), object.as_mut_ptr()) };
        let object: NonNull<ffi::PyObject> = NonNull::new(written(status, object)?.cast())
            .ok_or_else(|| refused("PyTorch has made no object of a tensor"))?;
        // SAFETY: a new reference to a live object.
        Ok(unsafe { Bound::from_owned_ptr(py, object.as_ptr()) }.unbind())
    }
}

/// Attention of CPU tensors `[batch, heads, length, features]` with options without arrays. None if the features of a tensor do not lie side
/// by side. The output has the memory order of q.
#[pyfunction]
pub(crate) fn attend_torch(
    py: Python<'_>,
    options: &str,
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
) -> PyResult<Option<Py<PyAny>>> {
    let Some(Some(torch)) = TENSORS.get() else {
        return Err(refused("this PyTorch has no interface for tensors; 2.14 is the first"));
    };
    let tensors = [Torch::of(torch, q)?, Torch::of(torch, k)?, Torch::of(torch, v)?];
    let mut axes = [[[0; 4]; 2]; 3];
    for (axes, tensor) in axes.iter_mut().zip(&tensors) {
        *axes = tensor.axes()?;
    }
    if axes.iter().any(|[shape, strides]| shape[3] > 1 && strides[3] != 1) {
        return Ok(None);
    }
    let [[[batch, heads, len, _], of_q], _, [[.., dim], _]] = axes;
    let strides = match of_q[1] < of_q[2] {
        true => [len * heads * dim, dim, heads * dim, 1],
        false => [heads * len * dim, len * dim, dim, 1],
    };
    let shape = [batch, heads, len, dim];
    let out = Torch::empty(torch, shape, strides, tensors[0].dtype()?)?;
    let [q, k, v] = &tensors;
    let arrays = [q.array(axes[0])?, k.array(axes[1])?, v.array(axes[2])?];
    attend_into(py, options, &arrays, out.array([shape, strides])?)?;
    out.into_python(py).map(Some)
}
