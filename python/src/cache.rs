//! Keys and values of the past, and attention over them.

use crate::array::{Array, OwnedArray, by_type, refused};
use crate::attention::SavedForward;
use crate::options::{ArrayElement, Call, Described};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use regard::cache::{CacheShape, Quantization};
use regard::{Error, KvCache, Plan, Problem};
use std::any::Any;
use std::sync::{Arc, PoisonError, RwLock};

/// Names a sequence of a cache.
#[pyclass(frozen, eq, hash, from_py_object, module = "regard._regard")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Sequence(regard::Sequence);

#[pymethods]
impl Sequence {
    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// A cache of one type. Readers share it, writers wait for them; nobody holds the interpreter while they wait.
#[pyclass(frozen, module = "regard._regard")]
#[derive(Debug)]
pub(crate) struct Cache {
    #[pyo3(get)]
    dtype: String,
    /// An `RwLock<KvCache>` of that type.
    pages: Arc<dyn Any + Send + Sync>,
}

impl Cache {
    fn pages<E: ArrayElement>(&self) -> PyResult<&RwLock<KvCache<E>>> {
        let other = || PyTypeError::new_err(format!("the cache holds {}", self.dtype));
        self.pages.downcast_ref().ok_or_else(other)
    }

    fn read<E: ArrayElement, T: Send>(
        &self,
        py: Python<'_>,
        ask: impl FnOnce(&KvCache<E>) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let pages = self.pages::<E>()?;
        py.detach(|| ask(&pages.read().unwrap_or_else(PoisonError::into_inner))).map_err(refused)
    }

    fn write<E: ArrayElement, T: Send>(
        &self,
        py: Python<'_>,
        change: impl FnOnce(&mut KvCache<E>) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let pages = self.pages::<E>()?;
        let change = || change(&mut pages.write().unwrap_or_else(PoisonError::into_inner));
        py.detach(change).map_err(refused)
    }

    fn attend<E: ArrayElement>(
        &self,
        py: Python<'_>,
        call: &Call,
        sequences: &[regard::Sequence],
    ) -> PyResult<SavedForward> {
        let (q, pages) = (call.query::<E>()?, self.pages::<E>()?);
        let output = py.detach(|| {
            let pages = pages.read().unwrap_or_else(PoisonError::into_inner);
            let problem = Problem::cached(&q, &pages, sequences).map_err(refused)?;
            let plan =
                Plan::new(call.with_own_options(problem)?, call.machine()?).map_err(refused)?;
            plan.forward_cached(q, &pages, sequences).map_err(refused)
        });
        SavedForward::new(py, output?)
    }
}

/// Runs `$body` with `$E` the type of a cache and `$pages` what [`Cache::read`] or [`Cache::write`] hands out.
macro_rules! on_pages {
    ($cache:ident.$way:ident($py:ident), $pages:ident => $body:expr) => {
        by_type!(&$cache.dtype[..], E => $cache.$way::<E, _>($py, |$pages| $body))
    };
}

#[pymethods]
impl Cache {
    /// Of so many heads, features of a key and of a value, and positions in a page; in 8 bits if there is a quantization; `latent`: values
    /// are features of keys.
    #[new]
    fn new(
        dtype: &str,
        sizes: [usize; 4],
        budget: usize,
        quantization: Option<&str>,
        latent: bool,
    ) -> PyResult<Self> {
        let [heads, qk_dim, v_dim, page] = sizes;
        let shape = CacheShape { heads, qk_dim, v_dim, page };
        let quantization = quantization.map(quantization_of).transpose()?;
        by_type!(dtype, E => {
            let pages = match (quantization, latent) {
                (Some(bits), true) => KvCache::<E>::latent_quantized(shape, bits, budget),
                (Some(bits), false) => KvCache::<E>::quantized(shape, bits, budget),
                (None, true) => KvCache::<E>::latent(shape, budget),
                (None, false) => KvCache::<E>::new(shape, budget),
            };
            let pages = pages.map_err(refused)?;
            Ok(Self { dtype: dtype.into(), pages: Arc::new(RwLock::new(pages)) })
        })
    }

    fn start(&self, py: Python<'_>) -> PyResult<Sequence> {
        on_pages!(self.write(py), pages => pages.start()).map(Sequence)
    }

    /// `k [1, heads, n, qk_dim]` and `v [1, heads, n, v_dim]`, or none if values are features of keys.
    #[pyo3(signature = (sequence, k, v))]
    fn append(
        &self,
        py: Python<'_>,
        sequence: Sequence,
        k: Array,
        v: Option<Array>,
    ) -> PyResult<()> {
        by_type!(&self.dtype[..], E => {
            let k = k.view::<E>("k", None)?;
            match v {
                Some(v) => {
                    let v = v.view::<E>("v", None)?;
                    self.write::<E, _>(py, |pages| pages.append(sequence.0, k, v))
                }
                None => self.write::<E, _>(py, |pages| pages.append_keys(sequence.0, k)),
            }
        })
    }

    fn fork(&self, py: Python<'_>, sequence: Sequence) -> PyResult<Sequence> {
        on_pages!(self.write(py), pages => pages.fork(sequence.0)).map(Sequence)
    }

    fn truncate(&self, py: Python<'_>, sequence: Sequence, len: usize) -> PyResult<()> {
        on_pages!(self.write(py), pages => pages.truncate(sequence.0, len))
    }

    fn evict(&self, py: Python<'_>, sequence: Sequence, before: usize) -> PyResult<usize> {
        on_pages!(self.write(py), pages => pages.evict(sequence.0, before))
    }

    fn free(&self, py: Python<'_>, sequence: Sequence) -> PyResult<()> {
        on_pages!(self.write(py), pages => pages.free(sequence.0))
    }

    fn len(&self, py: Python<'_>, sequence: Sequence) -> PyResult<usize> {
        on_pages!(self.read(py), pages => pages.len(sequence.0))
    }

    fn first(&self, py: Python<'_>, sequence: Sequence) -> PyResult<usize> {
        on_pages!(self.read(py), pages => pages.first(sequence.0))
    }

    fn pages_held(&self, py: Python<'_>, sequence: Sequence) -> PyResult<usize> {
        on_pages!(self.read(py), pages => pages.pages_held(sequence.0))
    }

    /// Where the positions begin and end that all these sequences hold in the same pages.
    fn shared_prefix(&self, py: Python<'_>, sequences: Vec<Sequence>) -> PyResult<(usize, usize)> {
        let sequences = handles(&sequences);
        let shared = on_pages!(self.read(py), pages => pages.shared_prefix(&sequences))?;
        Ok((shared.start, shared.end))
    }

    /// How numbers are stored in 8 bits, if they are.
    #[getter]
    fn quantization(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        on_pages!(self.read(py), pages => Ok(pages.quantization().map(Quantization::name)))
    }

    /// The key and the value of a head at a position, copied; in 8 bits, the numbers that they are.
    fn row(
        &self,
        py: Python<'_>,
        sequence: Sequence,
        head: usize,
        position: usize,
    ) -> PyResult<[OwnedArray; 2]> {
        by_type!(&self.dtype[..], E => {
            let numbers = |pages: &KvCache<E>| match pages.quantization() {
                Some(_) => pages.numbers(sequence.0, head, position).map(Some),
                None => Ok(None),
            };
            if let Some([k, v]) = self.read::<E, _>(py, numbers)? {
                let sizes = [k.len(), v.len()];
                return Ok([OwnedArray::new(k, &sizes[..1]), OwnedArray::new(v, &sizes[1..])]);
            }
            let copied = |pages: &KvCache<E>| {
                let (k, v) = pages.row(sequence.0, head, position)?;
                Ok([k.to_vec(), v.to_vec()])
            };
            let [k, v] = self.read::<E, _>(py, copied)?;
            let sizes = [k.len(), v.len()];
            Ok([OwnedArray::new(k, &sizes[..1]), OwnedArray::new(v, &sizes[1..])])
        })
    }

    /// Of all pages, of those in use, and what they may have.
    fn bytes(&self, py: Python<'_>) -> PyResult<[usize; 3]> {
        on_pages!(self.read(py), pages => Ok([pages.bytes(), pages.bytes_in_use(), pages.budget()]))
    }

    /// Attention of q over what each sequence holds; the call has no other tensor.
    fn attention(
        &self,
        py: Python<'_>,
        call: Described,
        sequences: Vec<Sequence>,
    ) -> PyResult<SavedForward> {
        let sequences = handles(&sequences);
        let most = on_pages!(self.read(py), pages => {
            let held = |s: &regard::Sequence| Ok(pages.len(*s)? - pages.first(*s)?);
            let held = sequences.iter().map(held).collect::<Result<Vec<usize>, Error>>()?;
            Ok(held.into_iter().max().unwrap_or(0))
        })?;
        let call = Call::over(call, most)?;
        by_type!(&self.dtype[..], E => self.attend::<E>(py, &call, &sequences))
    }
}

fn quantization_of(name: &str) -> PyResult<Quantization> {
    let found = Quantization::ALL.into_iter().find(|one| one.name() == name);
    found.ok_or_else(|| {
        let known = Quantization::ALL.map(Quantization::name).join(" or ");
        PyValueError::new_err(format!("quantization: expected {known}, found {name}"))
    })
}

fn handles(sequences: &[Sequence]) -> Vec<regard::Sequence> {
    sequences.iter().map(|sequence| sequence.0).collect()
}
