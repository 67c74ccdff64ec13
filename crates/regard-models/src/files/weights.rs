//! The named tensors of a model, read when they are asked for.
//!
//! The bytes of the files stay as they are, mapped, and a tensor becomes `f32` when it is taken: a quantised model never stands in
//! memory twice. Every place in the file is checked before anything is made of it, so memory never exceeds a small multiple of the file,
//! and the worst that reading can end with is an error.

use super::dtype::Dtype;
use super::map::Bytes;
use super::write;
use crate::error::Error;
use half::f16;
use regard_matmul::{Format, Matrix};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The tensors of a model by name, as `f32`.
#[derive(Clone)]
pub struct Weights {
    files: Vec<Bytes>,
    pub(crate) tensors: BTreeMap<String, Tensor>,
    metadata: BTreeMap<String, String>,
    /// The file that they are of, for messages.
    path: Option<PathBuf>,
}

/// Where a tensor stands, and what is to be made of it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tensor {
    pub(crate) dtype: Dtype,
    /// Which of the files.
    file: usize,
    /// As it stands in the file.
    stored: Vec<usize>,
    place: Range<usize>,
    /// Whether rows and columns change places.
    pub(crate) transposed: bool,
    /// Which rows are meant, after that, in their order.
    rows: Vec<Range<usize>>,
    /// What comes out.
    shape: Vec<usize>,
    taken: bool,
}

/// How many names are offered for one that is missing.
const NEAR: usize = 3;

impl Weights {
    /// Reads a safetensors file from memory.
    pub fn safetensors(bytes: Vec<u8>) -> Result<Self, Error> {
        Self::of_bytes(bytes.into())
    }

    /// Reads a safetensors file in place. The file must not be changed meanwhile; it may be replaced by a new one.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Self::of_bytes(Bytes::map(path)?).map_err(|e| e.of(path)).map(|own| own.of_file(path))
    }

    fn of_bytes(bytes: Bytes) -> Result<Self, Error> {
        let refused = |e: safetensors::SafeTensorError| Error::format("safetensors", e.to_string());
        let (header, entries) = SafeTensors::read_metadata(&bytes).map_err(refused)?;
        let begin = header.checked_add(8).ok_or_else(|| Error::format("safetensors", "header"))?;
        let mut tensors = BTreeMap::new();
        for (name, info) in entries.tensors() {
            use safetensors::Dtype as Theirs;
            let dtype = match info.dtype {
                Theirs::F32 => Dtype::F32,
                Theirs::F64 => Dtype::F64,
                Theirs::F16 => Dtype::F16,
                Theirs::BF16 => Dtype::Bf16,
                other => Dtype::Other(format!("{other:?}")),
            };
            let (from, to) = info.data_offsets;
            let place = from.checked_add(begin).zip(to.checked_add(begin));
            let place = place.map(|(from, to)| from..to).filter(|p| p.end <= bytes.len());
            let place = place.ok_or_else(|| {
                let why = format!("ends at byte {to} of {}; the file is cut short", bytes.len());
                Error::format(format!("tensor `{name}`"), why)
            })?;
            tensors.insert(name.clone(), Tensor::new(dtype, info.shape.clone(), place));
        }
        let metadata = entries.metadata().clone().unwrap_or_default().into_iter().collect();
        Ok(Self::at(bytes, tensors, metadata))
    }

    /// Tensors that are in memory already: name, shape and numbers.
    pub fn new(
        named: impl IntoIterator<Item = (String, Vec<usize>, Vec<f32>)>,
    ) -> Result<Self, Error> {
        let (mut bytes, mut tensors) = (Vec::new(), BTreeMap::new());
        for (name, shape, numbers) in named {
            if elements(&shape) != Some(numbers.len()) {
                return Err(wrong_length(&name, &shape, numbers.len()));
            }
            let begin = bytes.len();
            bytes.extend(numbers.iter().flat_map(|x| x.to_le_bytes()));
            let tensor = Tensor::new(Dtype::F32, shape, begin..bytes.len());
            if tensors.insert(name.clone(), tensor).is_some() {
                return Err(twice(&name));
            }
        }
        Ok(Self::at(bytes, tensors, BTreeMap::new()))
    }

    /// Tensors at places of a file that have been checked.
    pub(crate) fn at(
        bytes: impl Into<Bytes>,
        tensors: BTreeMap<String, Tensor>,
        metadata: BTreeMap<String, String>,
    ) -> Self {
        Self { files: vec![bytes.into()], tensors, metadata, path: None }
    }

    /// These and those of another file. No two may have the same name.
    pub(crate) fn join(mut self, other: Self) -> Result<Self, Error> {
        let first = self.files.len();
        for (name, tensor) in other.tensors {
            let tensor = Tensor { file: tensor.file + first, ..tensor };
            if self.tensors.insert(name.clone(), tensor).is_some() {
                return Err(twice(&name));
            }
        }
        self.files.extend(other.files);
        self.metadata.extend(other.metadata);
        Ok(self)
    }

    /// The same, known to be of this file.
    pub(crate) fn of_file(self, path: &Path) -> Self {
        Self { path: Some(path.into()), ..self }
    }

    /// An error about a tensor, with the file that it is of.
    pub(crate) fn named(&self, error: Error) -> Error {
        match &self.path {
            Some(path) => error.of(path),
            None => error,
        }
    }

    /// All names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The shape of a tensor, if there is such a one.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|tensor| tensor.shape.as_slice())
    }

    /// How the numbers of a tensor are written, if there is such a one.
    pub fn dtype(&self, name: &str) -> Option<&Dtype> {
        self.tensors.get(name).map(|tensor| &tensor.dtype)
    }

    /// What else the file says: all entries of a safetensors file, the single values of a GGUF.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The numbers of a tensor, which can be taken once.
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, Error> {
        let tensor = self.wanted(name, shape)?;
        let numbers = tensor.numbers(&self.files).ok_or_else(|| tensor.unread(name))?;
        self.mark(name);
        Ok(numbers)
    }

    /// The same, all of which must be finite.
    pub(crate) fn finite(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, Error> {
        finite(name, self.take(name, shape)?)
    }

    /// A matrix for products, packed as its numbers stand in the file; it can be taken once.
    pub fn matrix(&mut self, name: &str, [outputs, inputs]: [usize; 2]) -> Result<Matrix, Error> {
        let tensor = self.wanted(name, &[outputs, inputs])?;
        let packed = |format, bytes: &[u8]| {
            Matrix::new(format, [outputs, inputs], bytes)
                .map_err(|e| Error::format(format!("tensor `{name}`"), e.to_string()))
        };
        let matrix = match (&tensor.dtype, tensor.transposed) {
            (Dtype::Packed(format), false) => {
                let pieces = tensor.pieces(&self.files).ok_or_else(|| tensor.unread(name))?;
                if pieces.iter().any(|bytes| has_not_finite(*format, bytes)) {
                    finite(name, tensor.numbers(&self.files).unwrap_or_default())?;
                }
                match pieces.as_slice() {
                    [whole] => packed(*format, whole)?,
                    pieces => packed(*format, &pieces.concat())?,
                }
            }
            _ => {
                let numbers = tensor.numbers(&self.files).ok_or_else(|| tensor.unread(name))?;
                let numbers = finite(name, numbers)?;
                let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
                packed(Format::F32, &bytes)?
            }
        };
        // A part is of one file; the others leave it alone.
        for part in tensor.pieces(&self.files).unwrap_or_default() {
            self.files.iter().for_each(|file| file.release(part));
        }
        self.mark(name);
        Ok(matrix)
    }

    /// A tensor that is there, of this shape, and not taken yet.
    fn wanted(&self, name: &str, shape: &[usize]) -> Result<&Tensor, Error> {
        let tensor = self.tensors.get(name).ok_or_else(|| self.missing(name))?;
        if tensor.shape != shape {
            let (there, wanted) = (tensor.shape.clone(), shape.to_vec());
            return Err(Error::Shape { tensor: name.into(), there, wanted });
        }
        if tensor.taken {
            let why = "taken already; a model takes each tensor once";
            return Err(Error::format(format!("tensor `{name}`"), why));
        }
        Ok(tensor)
    }

    fn mark(&mut self, name: &str) {
        if let Some(tensor) = self.tensors.get_mut(name) {
            tensor.taken = true;
        }
    }

    /// The same with one module under another name.
    pub(crate) fn with_module(mut self, from: &str, to: &str) -> Self {
        for ending in ["weight", "bias"] {
            if let Some(tensor) = self.tensors.remove(&format!("{from}.{ending}")) {
                self.tensors.insert(format!("{to}.{ending}"), tensor);
            }
        }
        self
    }

    /// The same without one module.
    pub(crate) fn without_module(mut self, name: &str) -> Self {
        for ending in ["weight", "bias"] {
            self.tensors.remove(&format!("{name}.{ending}"));
        }
        self
    }

    /// The names of tensors that nobody has taken.
    pub fn left(&self) -> Vec<&str> {
        self.tensors.iter().filter(|(_, t)| !t.taken).map(|(name, _)| name.as_str()).collect()
    }

    /// Refuses tensors that have no place in the model.
    pub(crate) fn all_taken(&self) -> Result<(), Error> {
        let left = self.left();
        let Some(first) = left.first() else { return Ok(()) };
        let why = format!(
            "{} of its tensors have no place in the model, `{first}` among them",
            left.len()
        );
        Err(Error::format("weights", why))
    }

    /// How many numbers all tensors have together.
    pub fn parameters(&self) -> usize {
        self.tensors.values().filter_map(|tensor| elements(&tensor.shape)).sum()
    }

    /// Whether two tensors hold the same numbers.
    pub(crate) fn same(&self, a: &str, b: &str) -> bool {
        let tensors = self.tensors.get(a).zip(self.tensors.get(b));
        tensors.is_some_and(|(a, b)| a.same(b, &self.files))
    }

    /// Whether two tensors of these files hold the same numbers.
    pub(crate) fn equal(&self, a: &Tensor, b: &Tensor) -> bool {
        a.same(b, &self.files)
    }

    /// What is said of a tensor that is not there.
    pub(crate) fn missing(&self, name: &str) -> Error {
        Error::Missing { tensor: name.into(), near: self.near(name) }
    }

    /// The names that are most like one that is not there.
    fn near(&self, name: &str) -> Vec<String> {
        // The comparison costs the product of both lengths; a name that is far longer is not meant.
        let alike = self.names().filter(|own| own.len() <= 2 * name.len());
        let mut near: Vec<_> = alike.map(|own| (distance(name, own), own)).collect();
        near.sort_unstable();
        near.into_iter().take(NEAR).map(|(_, name)| name.to_owned()).collect()
    }
}

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tensors, files) = (self.tensors.len(), &self.files);
        let bytes: usize = files.iter().map(|file| file.len()).sum();
        write!(f, "Weights({tensors} tensors, {bytes} bytes)")
    }
}

impl Tensor {
    /// A tensor as it stands at a place that is within the file and as long as it should be.
    pub(crate) fn new(dtype: Dtype, shape: Vec<usize>, place: Range<usize>) -> Self {
        let (stored, transposed, taken) = (shape.clone(), false, false);
        let rows = only(0..shape.first().copied().unwrap_or(1));
        Self { dtype, file: 0, stored, place, transposed, rows, shape, taken }
    }

    /// What comes out of it.
    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The same with rows and columns changed, if it has both; a bias stays what it is.
    pub(crate) fn transpose(&mut self) {
        if let [rows, cols] = *self.shape {
            self.transposed = !self.transposed;
            self.shape = vec![cols, rows];
            self.rows = only(0..cols);
        }
    }

    /// The same without its first axis, if that is 1 and there are others. Anything else stays what it is.
    pub(crate) fn unwrap_first(&mut self) {
        if let ([1, rest @ ..], false) = (self.shape.as_slice(), self.transposed)
            && let [rows, ..] = *rest
        {
            self.shape = rest.to_vec();
            self.stored.clone_from(&self.shape);
            self.rows = only(0..rows);
        }
    }

    /// The same with all axes after the first as one. A list stays what it is.
    pub(crate) fn flatten_rows(&mut self) {
        if let ([rows, rest @ ..], false) = (self.shape.as_slice(), self.transposed)
            && let Some(row) = elements(rest).filter(|_| !rest.is_empty())
        {
            self.shape = vec![*rows, row];
            self.stored.clone_from(&self.shape);
        }
    }

    /// These rows of a whole tensor, in this order. None if it does not have them.
    pub(crate) fn select(&self, rows: Vec<Range<usize>>) -> Option<Self> {
        let all = *self.shape.first()?;
        if rows.iter().any(|range| range.start > range.end || range.end > all) {
            return None;
        }
        let mut shape = self.shape.clone();
        shape[0] = rows.iter().map(Range::len).sum();
        Some(Self { rows, shape, ..self.clone() })
    }

    /// The first, second, .. of so many equal parts of the rows. None if they do not come out even.
    pub(crate) fn part(&self, part: usize, parts: usize) -> Option<Self> {
        let rows = *self.shape.first()?;
        if rows % parts != 0 {
            return None;
        }
        let rows = rows / parts;
        self.select(only(part * rows..(part + 1) * rows))
    }

    fn unread(&self, name: &str) -> Error {
        let why = format!("its numbers are {}; give F32, F16, BF16 or F64", self.dtype);
        Error::format(format!("tensor `{name}`"), why)
    }

    /// The bytes of the rows that are meant, piece by piece. None for numbers that are not read.
    fn pieces<'a>(&self, files: &'a [Bytes]) -> Option<Vec<&'a [u8]>> {
        let bytes = files.get(self.file)?.get(self.place.clone())?;
        let row = elements(self.stored.get(1..).unwrap_or(&[]))?;
        // Blocks lie along the rows, so rows are whole blocks, and parts of rows are parts of bytes.
        let place = |row_number: usize| self.dtype.bytes(row_number.checked_mul(row)?);
        let piece = |rows: &Range<usize>| bytes.get(place(rows.start)?..place(rows.end)?);
        self.rows.iter().map(piece).collect()
    }

    /// None for numbers that are not read.
    fn numbers(&self, files: &[Bytes]) -> Option<Vec<f32>> {
        let (&[height, width], true) = (self.stored.as_slice(), self.transposed) else {
            return match self.pieces(files)?.as_slice() {
                [whole] => self.dtype.decode(whole),
                pieces => self.dtype.decode(&pieces.concat()),
            };
        };
        let numbers = self.dtype.decode(files.get(self.file)?.get(self.place.clone())?)?;
        let column = |col: usize| (0..height).map(move |row| row * width + col);
        let all = self.rows.iter().cloned().flatten().flat_map(column);
        all.map(|at| numbers.get(at).copied()).collect()
    }

    /// Whether another holds the same numbers: by their bytes, if both stand alike.
    fn same(&self, other: &Self, files: &[Bytes]) -> bool {
        let alike = self.dtype == other.dtype && self.transposed == other.transposed;
        let whole = self.stored == other.stored && self.rows == other.rows;
        self.shape == other.shape
            && if alike && whole {
                self.pieces(files).is_some_and(|own| Some(own) == other.pieces(files))
            } else {
                let numbers = self.numbers(files);
                numbers.is_some() && numbers == other.numbers(files)
            }
    }
}

/// How numbers are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightFormat {
    /// As they are.
    #[default]
    F32,
    /// Rounded to half of that: a relative 0.0005, and no number above 65504.
    F16,
}

impl WeightFormat {
    /// Its name in a file, and the bytes of a number.
    fn form(self) -> (&'static str, usize) {
        match self {
            Self::F32 => ("F32", 4),
            Self::F16 => ("F16", 2),
        }
    }

    fn write(self, x: f32, file: &mut impl Write) -> std::io::Result<()> {
        match self {
            Self::F32 => file.write_all(&x.to_le_bytes()),
            Self::F16 => file.write_all(&f16::from_f32(x).to_le_bytes()),
        }
    }

    /// The first number that would become another one altogether.
    fn refused(self, numbers: &[f32]) -> Option<f32> {
        let lost = |x: &&f32| x.is_finite() && !f16::from_f32(**x).is_finite();
        if self == Self::F16 { numbers.iter().find(lost).copied() } else { None }
    }
}

/// Writes tensors as a safetensors file: whole, or not at all. Equal tensors and metadata make equal bytes.
pub fn save<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (String, Vec<usize>, &'a [f32])>,
    metadata: &BTreeMap<String, String>,
) -> Result<(), Error> {
    save_as(WeightFormat::F32, path, tensors, metadata)
}

/// The same with numbers as they are told. One that would be lost is an error. The crate safetensors writes metadata in the order of a hash
/// map: equal models would have other checksums.
pub fn save_as<'a>(
    stored: WeightFormat,
    path: &Path,
    tensors: impl IntoIterator<Item = (String, Vec<usize>, &'a [f32])>,
    metadata: &BTreeMap<String, String>,
) -> Result<(), Error> {
    let (dtype, bytes) = stored.form();
    let (mut header, mut at) = (serde_json::Map::new(), 0);
    let mut all = Vec::new();
    if !metadata.is_empty() {
        header.insert("__metadata__".into(), serde_json::json!(metadata));
    }
    for (name, shape, numbers) in tensors {
        if elements(&shape) != Some(numbers.len()) {
            return Err(wrong_length(&name, &shape, numbers.len()).of(path));
        }
        if let Some(number) = stored.refused(numbers) {
            let why = format!("{number} is beyond what F16 holds, 65504; write F32");
            return Err(Error::format(format!("tensor `{name}`"), why).of(path));
        }
        let end = at + bytes * numbers.len();
        let info = serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]});
        if header.insert(name.clone(), info).is_some() {
            return Err(twice(&name).of(path));
        }
        at = end;
        all.push(numbers);
    }
    let mut header = serde_json::Value::Object(header).to_string();
    // Numbers begin at a multiple of eight bytes, for readers that map the file.
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    write::atomically(path, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        all.iter().flat_map(|numbers| numbers.iter()).try_for_each(|x| stored.write(*x, file))
    })
}

/// One range of rows.
pub(super) fn only(rows: Range<usize>) -> Vec<Range<usize>> {
    vec![rows]
}

/// Whether floats have a number that is infinite or NaN: all bits of its exponent are set. Quantised numbers are not looked at; their
/// scores would be refused.
fn has_not_finite(format: Format, bytes: &[u8]) -> bool {
    let (size, mask) = match format {
        Format::F32 => (4, 0x7F80),
        Format::Bf16 => (2, 0x7F80),
        Format::F16 => (2, 0x7C00),
        _ => return false,
    };
    let is_bad =
        |number: &[u8]| u16::from_le_bytes([number[size - 2], number[size - 1]]) & mask == mask;
    // A fold without exits becomes vectors.
    let block = |block: &[u8]| block.chunks_exact(size).fold(false, |bad, x| bad | is_bad(x));
    bytes.chunks(1 << 16).any(block)
}

/// Refuses numbers that would make nonsense of all that is computed with them. One look at each, beside the work of reading them.
fn finite(name: &str, numbers: Vec<f32>) -> Result<Vec<f32>, Error> {
    // Counted, not searched for: so the loop is one over vectors.
    let wrong = |x: f32| u32::from(!x.is_finite());
    if numbers.chunks(1 << 16).all(|some| some.iter().map(|x| wrong(*x)).sum::<u32>() == 0) {
        return Ok(numbers);
    }
    let at = numbers.iter().position(|x| !x.is_finite()).unwrap_or(0);
    let why = format!(
        "number {at} of {} is {}; weights must be finite: get the file again, or train anew from an earlier one",
        numbers.len(),
        numbers[at]
    );
    Err(Error::format(format!("tensor `{name}`"), why))
}

/// How many numbers a shape has; None if they cannot be counted.
pub(crate) fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |all, n| all.checked_mul(*n))
}

fn wrong_length(name: &str, shape: &[usize], len: usize) -> Error {
    let why = format!("{len} numbers do not have shape {shape:?}");
    Error::format(format!("tensor `{name}`"), why)
}

fn twice(name: &str) -> Error {
    Error::format(format!("tensor `{name}`"), "there are two of this name; give each its own")
}

/// How many letters must change to make one name of the other (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=a.len()).collect();
    for (i, b) in b.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, a) in a.bytes().enumerate() {
            let changed = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[a.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: u8) -> Vec<f32> {
        (0..n).map(f32::from).collect()
    }

    fn small() -> Weights {
        let linear = ("up.weight".to_owned(), vec![6, 2], numbers(12));
        Weights::new([linear, ("up.bias".to_owned(), vec![6], numbers(6))]).unwrap()
    }

    #[test]
    fn a_tensor_is_taken_once_and_counted() {
        let mut weights = small();
        assert_eq!(weights.left(), ["up.bias", "up.weight"]);
        assert_eq!(weights.take("up.bias", &[6]).unwrap(), numbers(6));
        assert_eq!(weights.left(), ["up.weight"]);
        assert!(weights.take("up.bias", &[6]).unwrap_err().to_string().contains("already"));
        assert_eq!(weights.parameters(), 18);
    }

    #[test]
    fn errors_name_both_shapes_and_the_names_that_are_near() {
        let mut weights = small();
        let error = weights.take("up.weight", &[2, 6]).unwrap_err().to_string();
        assert!(error.contains("[6, 2]") && error.contains("[2, 6]"), "{error}");
        let error = weights.take("up.weights", &[6, 2]).unwrap_err();
        let Error::Missing { near, .. } = error else { panic!("{error}") };
        assert_eq!(near, ["up.weight", "up.bias"]);
    }

    #[test]
    fn parts_are_rows_of_what_comes_out() {
        let mut weights = small();
        let whole = weights.tensors["up.weight"].clone();
        assert_eq!(whole.part(1, 3).unwrap().numbers(&weights.files).unwrap(), [4., 5., 6., 7.]);
        assert_eq!(whole.part(0, 4), None);
        let mut turned = whole;
        turned.transpose();
        let second = turned.part(1, 2).unwrap();
        assert_eq!(second.shape, [1, 6]);
        assert_eq!(second.numbers(&weights.files).unwrap(), [1., 3., 5., 7., 9., 11.]);
        weights.tensors.get_mut("up.bias").unwrap().transpose();
        assert_eq!(weights.take("up.bias", &[6]).unwrap(), numbers(6));
    }

    #[test]
    fn what_is_saved_is_read_again_and_equal_inputs_make_equal_files() {
        let path = std::env::temp_dir().join(format!("regard-save-{}", std::process::id()));
        let (a, b) = (numbers(6), numbers(1));
        let tensors = || [("a".to_owned(), vec![2, 3], &a[..]), ("b".to_owned(), vec![], &b[..])];
        let metadata = BTreeMap::from([("format".to_owned(), "regard".to_owned())]);
        save(&path, tensors(), &metadata).unwrap();
        let first = std::fs::read(&path).unwrap();
        save(&path, tensors(), &metadata).unwrap();
        assert_eq!(first, std::fs::read(&path).unwrap());
        std::fs::remove_file(&path).unwrap();

        let mut weights = Weights::safetensors(first.clone()).unwrap();
        assert_eq!(weights.metadata(), &metadata);
        assert_eq!(weights.take("a", &[2, 3]).unwrap(), a);
        assert_eq!(weights.take("b", &[]).unwrap(), b);
        for len in 0..first.len() {
            assert!(Weights::safetensors(first[..len].to_vec()).is_err(), "{len} bytes");
        }
        for at in 0..first.len() {
            for byte in [b'0', b'9', b'"', b'[', 0, 255] {
                let mut file = first.clone();
                file[at] = byte;
                let Ok(mut weights) = Weights::safetensors(file) else { continue };
                let names: Vec<_> = weights.names().map(str::to_owned).collect();
                for name in names {
                    let shape = weights.shape(&name).unwrap().to_vec();
                    let _ = weights.take(&name, &shape);
                }
            }
        }
        let twice = [("a".to_owned(), vec![6], &a[..]), ("a".to_owned(), vec![6], &a[..])];
        assert!(save(&path, twice, &metadata).is_err());
        let wrong = [("a".to_owned(), vec![7], &a[..])];
        assert!(save(&path, wrong, &metadata).is_err());
        assert!(!path.exists());
    }

    #[test]
    fn halves_take_half_and_lose_nothing_but_digits() {
        let path = std::env::temp_dir().join(format!("regard-halves-{}", std::process::id()));
        let numbers = [0.0, 1.0, -0.1, 1e-3, 65504.0];
        let tensors = |numbers| [("a".to_owned(), vec![5], numbers)];
        save_as(WeightFormat::F16, &path, tensors(&numbers[..]), &BTreeMap::new()).unwrap();
        let mut weights = Weights::safetensors(std::fs::read(&path).unwrap()).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(weights.dtype("a"), Some(&Dtype::F16));
        for (found, x) in weights.take("a", &[5]).unwrap().into_iter().zip(numbers) {
            assert!((found - x).abs() <= x.abs() * 5e-4, "{found} {x}");
        }
        let large = [0.0, 1.0, 2.0, 3.0, 7e4];
        let error =
            save_as(WeightFormat::F16, &path, tensors(&large[..]), &BTreeMap::new()).unwrap_err();
        assert!(error.to_string().contains("`a`: 70000"), "{error}");
    }

    #[test]
    fn numbers_that_are_not_read_are_named_when_they_are_taken() {
        let header = r#"{"ids":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}"#;
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend([0; 8]);
        let mut weights = Weights::safetensors(file).unwrap();
        let error = weights.take("ids", &[1]).unwrap_err().to_string();
        assert!(error.contains("`ids`") && error.contains("I64"), "{error}");
    }
}
