//! GGUF, the file format of llama.cpp: what it says of itself, and its tensors.
//!
//! Versions 2 and 3, in the byte order of almost every computer. A file may come from anywhere: each number in it is held against
//! the bytes that are there before anything is made of it, tensors may not overlap, and lists may not nest deeply.

use super::dtype::Dtype;
use super::map::Bytes;
use super::weights::{Tensor, Weights, elements};
use crate::error::Error;
use regard_matmul::Format;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// A GGUF file.
#[derive(Clone, Debug)]
pub struct Gguf {
    /// What the file says of itself: sizes, settings, tokens.
    pub metadata: Metadata,
    /// Its tensors. A matrix has shape `[out, in]`: the file says it the other way round.
    pub weights: Weights,
}

/// What a GGUF file says of itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    /// The values by their names.
    pub values: BTreeMap<String, Value>,
}

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Any of the unsigned types.
    Unsigned(u64),
    /// Any of the signed types.
    Signed(i64),
    /// Either of the token types with a point.
    Float(f64),
    /// Yes or no.
    Bool(bool),
    /// A text.
    Text(String),
    /// Texts, or lists.
    List(Vec<Self>),
    /// Numbers of one kind, or yes and no.
    Numbers(Numbers),
}

/// A list of numbers as it stands in the file: a value for each would take 32 times the room of a byte.
#[derive(Clone, Debug, PartialEq)]
pub struct Numbers {
    kind: u32,
    /// The bytes of one.
    size: usize,
    bytes: Vec<u8>,
}

impl Numbers {
    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() / self.size
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Each as a value.
    pub fn iter(&self) -> impl Iterator<Item = Value> {
        self.bytes.chunks(self.size).flat_map(|bytes| number(self.kind, bytes))
    }
}

#[cfg(test)]
impl Numbers {
    /// `f32` numbers by their bytes.
    pub(crate) fn floats(bytes: Vec<u8>) -> Self {
        Self { kind: 6, size: 4, bytes }
    }
}

impl FromIterator<i32> for Numbers {
    fn from_iter<I: IntoIterator<Item = i32>>(numbers: I) -> Self {
        let bytes = numbers.into_iter().flat_map(i32::to_le_bytes).collect();
        Self { kind: 5, size: 4, bytes }
    }
}

/// The bytes of a kind of numbers; none for texts, lists and what is not known.
fn size_of(kind: u32) -> Option<usize> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

/// A number of its kind, of so many bytes as that has.
fn number(kind: u32, bytes: &[u8]) -> Option<Value> {
    Some(match kind {
        0 => Value::Unsigned(u8::from_le_bytes(bytes.try_into().ok()?).into()),
        1 => Value::Signed(i8::from_le_bytes(bytes.try_into().ok()?).into()),
        2 => Value::Unsigned(u16::from_le_bytes(bytes.try_into().ok()?).into()),
        3 => Value::Signed(i16::from_le_bytes(bytes.try_into().ok()?).into()),
        4 => Value::Unsigned(u32::from_le_bytes(bytes.try_into().ok()?).into()),
        5 => Value::Signed(i32::from_le_bytes(bytes.try_into().ok()?).into()),
        6 => Value::Float(f32::from_le_bytes(bytes.try_into().ok()?).into()),
        7 => match bytes {
            [0] => Value::Bool(false),
            [1] => Value::Bool(true),
            _ => return None,
        },
        10 => Value::Unsigned(u64::from_le_bytes(bytes.try_into().ok()?)),
        11 => Value::Signed(i64::from_le_bytes(bytes.try_into().ok()?)),
        12 => Value::Float(f64::from_le_bytes(bytes.try_into().ok()?)),
        _ => return None,
    })
}

/// Lists within lists: nobody writes more than one.
const MAX_DEPTH: usize = 4;
/// Axes of a tensor, as in llama.cpp.
const MAX_AXES: u32 = 4;
/// Where tensors begin, unless the file says otherwise.
const ALIGNMENT: u64 = 32;

impl Gguf {
    /// Reads a file from memory.
    pub fn read(bytes: Vec<u8>) -> Result<Self, Error> {
        Self::of_bytes(bytes.into())
    }

    /// Reads a file in place. The file must not be changed meanwhile; it may be replaced by a new one.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = Self::of_bytes(Bytes::map(path)?).map_err(|e| e.of(path))?;
        Ok(Self { weights: file.weights.of_file(path), ..file })
    }

    fn of_bytes(bytes: Bytes) -> Result<Self, Error> {
        let mut reader = Reader { bytes: &bytes, at: 0 };
        if reader.some(4, "magic")? != b"GGUF" {
            return Err(Error::format("gguf", "the file does not begin with `GGUF`"));
        }
        let version = reader.u32("version")?;
        if !matches!(version, 2 | 3) {
            let why = format!("{version}; 2 and 3 are read, low byte first");
            return Err(Error::format("gguf version", why));
        }
        let (tensors, entries) = (reader.u64("tensor count")?, reader.u64("entry count")?);
        let mut metadata = Metadata::default();
        for _ in 0..entries {
            let name = reader.text("name of an entry")?;
            let value = reader.value(&name, 0)?;
            if metadata.values.insert(name.clone(), value).is_some() {
                return Err(Error::format(name, "there are two entries of this name"));
            }
        }
        let tensors = read_tensors(&mut reader, tensors, metadata.alignment()?)?;
        let single = metadata
            .values
            .iter()
            .filter(|(_, v)| !matches!(v, Value::List(_) | Value::Numbers(_)));
        let single = single.map(|(name, value)| (name.clone(), value.to_string())).collect();
        Ok(Self { metadata, weights: Weights::at(bytes, tensors, single) })
    }
}

/// What the file says of its tensors, checked against what is there.
fn read_tensors(
    reader: &mut Reader<'_>,
    count: u64,
    alignment: u64,
) -> Result<BTreeMap<String, Tensor>, Error> {
    let mut infos = Vec::new();
    for _ in 0..count {
        let name = reader.text("name of a tensor")?;
        let place = || format!("tensor `{name}`");
        let axes = reader.u32(&name)?;
        if axes > MAX_AXES {
            let why = format!("{axes} axes; {MAX_AXES} are the most");
            return Err(Error::format(place(), why));
        }
        let mut shape = Vec::new();
        for _ in 0..axes {
            shape.push(reader.size(&name)?);
        }
        shape.reverse();
        let dtype = dtype(reader.u32(&name)?);
        if dtype.block().is_none() {
            let known = "F64, F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 and Q2_K to Q6_K";
            let why = format!("type {dtype}; {known} are read");
            return Err(Error::format(place(), why));
        }
        infos.push((name, shape, dtype, reader.u64("offset of a tensor")?));
    }
    let begin = (reader.at as u64).checked_next_multiple_of(alignment);
    let mut tensors = BTreeMap::new();
    let mut places = Vec::new();
    for (name, shape, dtype, offset) in infos {
        let place = format!("tensor `{name}`");
        // Blocks do not cross rows.
        let row = shape.last().copied().unwrap_or(1);
        let size = dtype.bytes(row).and(elements(&shape)).and_then(|n| dtype.bytes(n));
        let Some(size) = size.filter(|size| *size > 0) else {
            let why = format!("shape {shape:?} of type {dtype}: rows must be whole blocks");
            return Err(Error::format(place, why));
        };
        let from = begin.and_then(|begin| begin.checked_add(offset));
        let from = from.and_then(|from| usize::try_from(from).ok());
        let to = from.and_then(|from| from.checked_add(size));
        let (Some(from), Some(to)) = (from, to.filter(|to| *to <= reader.bytes.len())) else {
            let why = format!("{size} bytes at {offset}; the file is cut short");
            return Err(Error::format(place, why));
        };
        places.push((from, to, name.clone()));
        if tensors.insert(name, Tensor::new(dtype, shape, from..to)).is_some() {
            return Err(Error::format(place, "there are two of this name"));
        }
    }
    places.sort_unstable();
    if let Some([a, b]) = places.array_windows().find(|[a, b]| a.1 > b.0) {
        return Err(Error::format(format!("tensor `{}`", b.2), format!("overlaps `{}`", a.2)));
    }
    Ok(tensors)
}

/// The types of ggml by their numbers.
fn dtype(number: u32) -> Dtype {
    Dtype::Packed(match number {
        0 => Format::F32,
        1 => Format::F16,
        2 => Format::Q4_0,
        3 => Format::Q4_1,
        6 => Format::Q5_0,
        7 => Format::Q5_1,
        8 => Format::Q8_0,
        10 => Format::Q2K,
        11 => Format::Q3K,
        12 => Format::Q4K,
        13 => Format::Q5K,
        14 => Format::Q6K,
        30 => Format::Bf16,
        28 => return Dtype::F64,
        other => return Dtype::Other(format!("number {other}")),
    })
}

/// What has been read of a file, and what has not.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn some(&mut self, n: usize, what: &str) -> Result<&'a [u8], Error> {
        let rest = &self.bytes[self.at..];
        let some = rest.get(..n).ok_or_else(|| {
            let why = format!("{n} bytes wanted at {}, {} are left", self.at, rest.len());
            Error::format(what, format!("{why}; the file is cut short"))
        })?;
        self.at += n;
        Ok(some)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Error> {
        let some = self.some(N, what)?;
        some.try_into().map_err(|_| Error::format(what, "the file is cut short"))
    }

    fn u32(&mut self, what: &str) -> Result<u32, Error> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, Error> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn size(&mut self, what: &str) -> Result<usize, Error> {
        let size = self.u64(what)?;
        usize::try_from(size).map_err(|_| Error::format(what, format!("{size} is too large")))
    }

    fn text(&mut self, what: &str) -> Result<String, Error> {
        let len = self.size(what)?;
        let bytes = self.some(len, what)?;
        std::str::from_utf8(bytes)
            .map(str::to_owned)
            .map_err(|e| Error::format(what, e.to_string()))
    }

    fn value(&mut self, name: &str, depth: usize) -> Result<Value, Error> {
        let kind = self.u32(name)?;
        self.value_of(kind, name, depth)
    }

    fn value_of(&mut self, kind: u32, name: &str, depth: usize) -> Result<Value, Error> {
        if let Some(size) = size_of(kind) {
            let bytes = self.some(size, name)?;
            let neither = || Error::format(name, format!("{bytes:?} is neither 0 nor 1"));
            return number(kind, bytes).ok_or_else(neither);
        }
        match kind {
            8 => self.text(name).map(Value::Text),
            9 if depth == MAX_DEPTH => {
                Err(Error::format(name, format!("lists nest deeper than {MAX_DEPTH}")))
            }
            9 => self.list(name, depth),
            other => Err(Error::format(name, format!("there is no kind of value {other}"))),
        }
    }

    fn list(&mut self, name: &str, depth: usize) -> Result<Value, Error> {
        let (kind, len) = (self.u32(name)?, self.size(name)?);
        // Texts and lists begin with their lengths.
        let least = size_of(kind).unwrap_or(8);
        let left = self.bytes.len() - self.at;
        if len.checked_mul(least).is_none_or(|bytes| bytes > left) {
            let why = format!("a list of {len}, each of {least} bytes at least, {left} are left");
            return Err(Error::format(name, format!("{why}; the file is cut short")));
        }
        if let Some(size) = size_of(kind) {
            let bytes = self.some(len * size, name)?;
            if let Some(bad) = bytes.iter().find(|byte| kind == 7 && **byte > 1) {
                return Err(Error::format(name, format!("{bad} is neither 0 nor 1")));
            }
            return Ok(Value::Numbers(Numbers { kind, size, bytes: bytes.to_vec() }));
        }
        // Grows as it is filled: the length is only what the file claims.
        let mut list = Vec::new();
        for _ in 0..len {
            list.push(self.value_of(kind, name, depth + 1)?);
        }
        Ok(Value::List(list))
    }
}

impl Metadata {
    /// A value, if there is such a one.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.values.get(name)
    }

    /// A text, if there is such a one.
    pub fn text(&self, name: &str) -> Result<Option<&str>, Error> {
        self.typed(name, "a text", Value::as_text)
    }

    /// A whole number from 0 on, if there is such a one.
    pub fn whole(&self, name: &str) -> Result<Option<u64>, Error> {
        self.typed(name, "a whole number", |value| match value {
            Value::Unsigned(n) => Some(*n),
            Value::Signed(n) => u64::try_from(*n).ok(),
            _ => None,
        })
    }

    /// A number, if there is such a one.
    pub fn number(&self, name: &str) -> Result<Option<f64>, Error> {
        self.typed(name, "a number", |value| match value {
            Value::Float(x) => Some(*x),
            _ => None,
        })
    }

    /// A yes or no, if there is such a one.
    pub fn bool(&self, name: &str) -> Result<Option<bool>, Error> {
        self.typed(name, "true or false", |value| match value {
            Value::Bool(bool) => Some(*bool),
            _ => None,
        })
    }

    /// A list of texts, if there is such a one.
    pub fn texts(&self, name: &str) -> Result<Option<Vec<&str>>, Error> {
        self.typed(name, "a list of texts", |value| match value {
            Value::List(list) => list.iter().map(Value::as_text).collect(),
            _ => None,
        })
    }

    fn typed<'a, T>(
        &'a self,
        name: &str,
        kind: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.values.get(name) else { return Ok(None) };
        let wrong = || Error::format(name, format!("{value}; it should be {kind}"));
        read(value).map(Some).ok_or_else(wrong)
    }

    fn alignment(&self) -> Result<u64, Error> {
        let name = "general.alignment";
        let alignment = self.whole(name)?.unwrap_or(ALIGNMENT);
        if alignment == 0 {
            return Err(Error::format(name, "0; it must be a multiple of 8"));
        }
        Ok(alignment)
    }
}

impl Value {
    fn as_text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsigned(n) => write!(f, "{n}"),
            Self::Signed(n) => write!(f, "{n}"),
            Self::Float(x) => write!(f, "{x}"),
            Self::Bool(bool) => write!(f, "{bool}"),
            Self::Text(text) => f.write_str(text),
            Self::List(list) => write!(f, "a list of {}", list.len()),
            Self::Numbers(numbers) => write!(f, "a list of {}", numbers.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    fn text(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
    }

    fn entry(name: &str, kind: u32, value: &[u8]) -> Vec<u8> {
        [text(name), kind.to_le_bytes().to_vec(), value.to_vec()].concat()
    }

    fn info(name: &str, axes: &[u64], kind: u32, offset: u64) -> Vec<u8> {
        let axes_count = u32::try_from(axes.len()).unwrap().to_le_bytes().to_vec();
        let axes = axes.iter().flat_map(|n| n.to_le_bytes()).collect();
        [text(name), axes_count, axes, kind.to_le_bytes().into(), offset.to_le_bytes().into()]
            .concat()
    }

    fn file(entries: &[Vec<u8>], infos: &[Vec<u8>], data: &[u8]) -> Vec<u8> {
        let mut file = b"GGUF\x03\0\0\0".to_vec();
        file.extend((infos.len() as u64).to_le_bytes());
        file.extend((entries.len() as u64).to_le_bytes());
        file.extend(entries.concat());
        file.extend(infos.concat());
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(data);
        file
    }

    /// All kinds of values, and a tensor each of floats and of blocks.
    fn small() -> Vec<u8> {
        let list = [&8u32.to_le_bytes()[..], &2u64.to_le_bytes(), &text("a"), &text("b")].concat();
        let nested = [&9u32.to_le_bytes()[..], &1u64.to_le_bytes(), &list].concat();
        let entries = [
            entry("u8", 0, &[200]),
            entry("i8", 1, &[200]),
            entry("u16", 2, &[1, 2]),
            entry("i16", 3, &[0xff, 0xff]),
            entry("u32", 4, &7u32.to_le_bytes()),
            entry("i32", 5, &(-7i32).to_le_bytes()),
            entry("f32", 6, &0.5f32.to_le_bytes()),
            entry("bool", 7, &[1]),
            entry("text", 8, &text("hello")),
            entry("list", 9, &list),
            entry("nested", 9, &nested),
            entry(
                "bytes",
                9,
                &[&0u32.to_le_bytes()[..], &3u64.to_le_bytes(), &[1, 2, 255]].concat(),
            ),
            entry(
                "floats",
                9,
                &[&12u32.to_le_bytes()[..], &1u64.to_le_bytes(), &0.5f64.to_le_bytes()].concat(),
            ),
            entry("bools", 9, &[&7u32.to_le_bytes()[..], &2u64.to_le_bytes(), &[1, 0]].concat()),
            entry("u64", 10, &u64::MAX.to_le_bytes()),
            entry("i64", 11, &i64::MIN.to_le_bytes()),
            entry("f64", 12, &0.25f64.to_le_bytes()),
        ];
        let infos = [info("floats", &[2, 3], 0, 0), info("blocks", &[32, 2], 8, 32)];
        let mut data: Vec<u8> = (1..=6u8).flat_map(|i| f32::from(i).to_le_bytes()).collect();
        data.resize(32, 0);
        for row in [1u8, 2] {
            data.extend(f16::from_f32(0.5).to_le_bytes());
            data.extend([row; 32]);
        }
        file(&entries, &infos, &data)
    }

    #[test]
    fn every_kind_of_value_is_read() {
        let Gguf { metadata, weights } = Gguf::read(small()).unwrap();
        let whole = |name| metadata.whole(name).unwrap();
        assert_eq!((whole("u8"), whole("u16"), whole("u32")), (Some(200), Some(513), Some(7)));
        assert_eq!(metadata.get("i8"), Some(&Value::Signed(-56)));
        assert_eq!(metadata.get("i16"), Some(&Value::Signed(-1)));
        assert_eq!(metadata.get("i32"), Some(&Value::Signed(-7)));
        assert_eq!(metadata.get("i64"), Some(&Value::Signed(i64::MIN)));
        assert_eq!(whole("u64"), Some(u64::MAX));
        assert_eq!(metadata.number("f32").unwrap(), Some(0.5));
        assert_eq!(metadata.number("f64").unwrap(), Some(0.25));
        assert_eq!(metadata.bool("bool").unwrap(), Some(true));
        assert_eq!(metadata.text("text").unwrap(), Some("hello"));
        assert_eq!(metadata.texts("list").unwrap(), Some(vec!["a", "b"]));
        assert!(matches!(metadata.get("nested"), Some(Value::List(list)) if list.len() == 1));
        let numbers = |name| match metadata.get(name) {
            Some(Value::Numbers(numbers)) => numbers.iter().collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
        assert_eq!(numbers("bytes"), [1, 2, 255].map(Value::Unsigned));
        assert_eq!(numbers("floats"), [Value::Float(0.5)]);
        assert_eq!(numbers("bools"), [true, false].map(Value::Bool));
        assert_eq!(whole("absent"), None);
        assert!(metadata.whole("text").unwrap_err().to_string().contains("whole number"));
        assert_eq!(weights.metadata()["text"], "hello");
    }

    #[test]
    fn shapes_are_turned_round_and_blocks_opened() {
        let mut weights = Gguf::read(small()).unwrap().weights;
        assert_eq!(weights.take("floats", &[3, 2]).unwrap(), [1., 2., 3., 4., 5., 6.]);
        let blocks = weights.take("blocks", &[2, 32]).unwrap();
        assert_eq!((blocks[0], blocks[31], blocks[32], blocks[63]), (0.5, 0.5, 1.0, 1.0));
        assert!(weights.left().is_empty());
    }

    #[test]
    fn a_file_that_is_cut_anywhere_is_an_error() {
        let whole = small();
        for len in 0..whole.len() {
            assert!(Gguf::read(whole[..len].to_vec()).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn a_file_with_any_byte_changed_never_panics() {
        let whole = small();
        for at in 0..whole.len() {
            for byte in [0, 1, 127, 255] {
                let mut file = whole.clone();
                file[at] = byte;
                let Ok(Gguf { mut weights, .. }) = Gguf::read(file) else { continue };
                let shapes: Vec<_> = weights.names().map(str::to_owned).collect();
                for name in shapes {
                    let shape = weights.shape(&name).unwrap().to_vec();
                    let _ = weights.take(&name, &shape);
                }
            }
        }
    }

    #[test]
    fn a_list_takes_as_much_room_as_in_the_file_and_its_length_is_not_believed() {
        let list = |kind: u32, len: u64, bytes: &[u8]| {
            let list = [&kind.to_le_bytes()[..], &len.to_le_bytes(), bytes].concat();
            Gguf::read(file(&[entry("list", 9, &list)], &[], &[]))
        };
        let read = list(0, 1 << 20, &vec![7; 1 << 20]).unwrap();
        let Some(Value::Numbers(numbers)) = read.metadata.get("list") else { panic!("numbers") };
        assert_eq!((numbers.len(), numbers.bytes.capacity()), (1 << 20, 1 << 20));
        for kind in 0..=12 {
            for len in [64, u64::MAX, 1 << 61, 1 << 40] {
                let error = list(kind, len, &[0; 16]).unwrap_err().to_string();
                assert!(error.contains(&format!("a list of {len}")), "{error}");
            }
        }
        assert!(list(7, 2, &[1, 2]).unwrap_err().to_string().contains("neither"));
    }

    #[test]
    fn what_is_not_read_is_named() {
        let refused =
            |infos: &[Vec<u8>]| Gguf::read(file(&[], infos, &[0; 256])).unwrap_err().to_string();
        let error = refused(&[info("w", &[256], 16, 0)]);
        assert!(error.contains("`w`") && error.contains("number 16"), "{error}");
        for kind in [6, 7, 10, 11, 12, 13, 14, 30] {
            let read = Gguf::read(file(&[], &[info("w", &[256], kind, 0)], &[0; 512])).unwrap();
            assert_eq!(read.weights.clone().take("w", &[256]).unwrap(), [0.0; 256]);
        }
        let error = refused(&[info("w", &[31], 8, 0)]);
        assert!(error.contains("whole blocks"), "{error}");
        let error = refused(&[info("a", &[8], 0, 0), info("b", &[8], 0, 28)]);
        assert!(error.contains("`b`: overlaps `a`"), "{error}");
        let error = refused(&[info("a", &[8], 0, 0), info("a", &[8], 0, 32)]);
        assert!(error.contains("two of this name"), "{error}");
        for shape in [&[u64::MAX, 2][..], &[1 << 40], &[0], &[1 << 32, 1 << 32], &[1; 5]] {
            assert!(!refused(&[info("w", shape, 0, 0)]).is_empty());
        }
        assert!(!refused(&[info("w", &[8], 0, u64::MAX - 31)]).is_empty());
    }
}
