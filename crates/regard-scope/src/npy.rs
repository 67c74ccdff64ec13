//! Arrays as NumPy saves them (NEP 1): a line of Python that says what follows, then the numbers.
//!
//! A file may come from anywhere: the line is read in one walk, its sizes are held against the bytes that are there, and memory grows
//! only with what was read.

use crate::error::Error;
use regard::f16;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;

/// Bytes of the line that says what follows, at most; NumPy itself refuses more than 10000.
const LINE: u32 = 1 << 14;
/// Numbers that are read at a time.
const CHUNK: usize = 1 << 16;
/// Characters of a file that an error shows.
const SHOWN: usize = 40;

/// Reads an array as `[heads, len, dim]`; `[len, dim]` is one head, and a first axis of 1 is left out. `there` is how many bytes there
/// are, where that is known before they are read.
///
/// Whatever the bytes are, the worst that can happen is an error. It does not name the file, which is not known here.
pub fn read_npy(mut from: impl Read, there: Option<u64>) -> Result<(Vec<f32>, [usize; 3]), Error> {
    let content = Content::read(&mut from)?;
    let needed = content.bytes(there)?;
    let data = numbers(from.take(needed as u64), content.size, content.number)?;
    if data.len() != needed / content.size {
        return Err(content.short((data.len() * content.size) as u64));
    }
    Ok((data, content.axes))
}

/// An array that is read in parts, as `[heads, len, dim]` like [`read_npy`]: for files that are larger than memory.
#[derive(Debug)]
pub struct NpyReader<R> {
    from: R,
    content: Content,
}

impl<R: Read + Seek> NpyReader<R> {
    /// Reads what the array is, and checks that all of it is there.
    pub fn new(mut from: R) -> Result<Self, Error> {
        let content = Content::read(&mut from)?;
        let there = from.seek(SeekFrom::End(0)).map_err(|e| failed(&e))?;
        content.bytes(Some(there))?;
        Ok(Self { from, content })
    }

    /// Heads, positions and features.
    #[must_use]
    pub fn shape(&self) -> [usize; 3] {
        self.content.axes
    }

    /// Some positions of some heads, `[heads, positions, dim]`.
    pub fn positions(
        &mut self,
        heads: Range<usize>,
        range: Range<usize>,
    ) -> Result<Vec<f32>, Error> {
        let Content { size, number, axes: [all_heads, len, dim], start, .. } = self.content;
        for (axis, range, len) in [("heads", &heads, all_heads), ("positions", &range, len)] {
            if range.start > range.end || range.end > len {
                let what = format!("{axis} {}..{}", range.start, range.end);
                return Err(Error::NotThere { what, there: format!("0..{len}") });
            }
        }
        let mut all = Vec::new();
        for head in heads {
            let first = start + ((head * len + range.start) * dim * size) as u64;
            self.from.seek(SeekFrom::Start(first)).map_err(|e| failed(&e))?;
            let bytes = (range.len() * dim * size) as u64;
            let data = numbers(self.from.by_ref().take(bytes), size, number)?;
            if data.len() != range.len() * dim {
                return Err(self.content.short(first - start + (data.len() * size) as u64));
            }
            all.extend(data);
        }
        Ok(all)
    }
}

/// What a file holds, and where.
#[derive(Debug)]
struct Content {
    /// Bytes of a number.
    size: usize,
    number: fn(&[u8]) -> f32,
    axes: [usize; 3],
    /// Where the numbers start.
    start: u64,
    /// As the file says it, for errors.
    told: String,
}

impl Content {
    fn read(from: &mut impl Read) -> Result<Self, Error> {
        let (line, start) = line(from)?;
        let Header { descr, fortran_order, shape } = Reader { line: &line, at: 0 }.header()?;
        let (size, number): (usize, fn(&[u8]) -> f32) = match descr {
            "<f2" => (2, |b| f16::from_le_bytes([b[0], b[1]]).to_f32()),
            "<f4" => (4, |b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
            #[expect(clippy::cast_possible_truncation, reason = "pictures show no more digits")]
            "<f8" => {
                (8, |b| f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]) as f32)
            }
            other => {
                let why = "give little-endian float32, float64 or float16";
                return Err(Error::format("descr", format!("{:?}; {why}", start_of(other))));
            }
        };
        if fortran_order {
            let why = "True: Fortran order; save numpy.ascontiguousarray(x)";
            return Err(Error::format("fortran_order", why));
        }
        let axes = match shape.as_slice() {
            [len, dim] => [1, *len, *dim],
            [heads, len, dim] | [1, heads, len, dim] => [*heads, *len, *dim],
            _ => {
                let why = "give [len, dim], [heads, len, dim] or [1, heads, len, dim]";
                return Err(Error::format("shape", format!("{shape:?}; {why}")));
            }
        };
        if axes.contains(&0) {
            return Err(Error::format("shape", format!("{shape:?}: there is nothing in it")));
        }
        Ok(Self { size, number, axes, start, told: format!("{shape:?} of {descr}") })
    }

    /// Bytes of all numbers; refuses a file of `there` bytes that has fewer.
    fn bytes(&self, there: Option<u64>) -> Result<usize, Error> {
        let held = there.map(|there| there.saturating_sub(self.start));
        match (self.needed(), held) {
            (Some(needed), held) if held.is_none_or(|held| needed as u64 <= held) => Ok(needed),
            (_, held) => Err(self.short(held.unwrap_or(0))),
        }
    }

    fn needed(&self) -> Option<usize> {
        self.axes.iter().try_fold(self.size, |n, axis| n.checked_mul(*axis))
    }

    fn short(&self, held: u64) -> Error {
        let needed = self.needed().map_or_else(|| "more than memory has".into(), |n| n.to_string());
        let (told, why) = (&self.told, "a part is missing; save it again");
        Error::format(
            "shape",
            format!("{told} takes {needed} bytes, the file has {held} for it: {why}"),
        )
    }
}

/// The line that says what follows, and where that starts.
fn line(from: &mut impl Read) -> Result<(String, u64), Error> {
    let mut start = [0; 8];
    from.read_exact(&mut start).map_err(|e| failed(&e))?;
    let Some([major, _]) = start.strip_prefix(b"\x93NUMPY") else {
        return Err(Error::format("start", "not that of an array of NumPy; give a .npy file"));
    };
    let mut len = [0; 4];
    let of_len = match major {
        1 => 2,
        2 | 3 => 4,
        other => {
            return Err(Error::format("version", format!("{other}; 1 to 3 can be read")));
        }
    };
    from.read_exact(&mut len[..of_len]).map_err(|e| failed(&e))?;
    let len = u32::from_le_bytes(len);
    if len > LINE {
        let why = format!("{len} bytes, at most {LINE} are read; save a plain array");
        return Err(Error::format("header", why));
    }
    let mut line = Vec::new();
    from.take(len.into()).read_to_end(&mut line).map_err(|e| failed(&e))?;
    if line.len() as u64 != u64::from(len) {
        let why = format!("{len} bytes are promised, {} are there; save it again", line.len());
        return Err(Error::format("header", why));
    }
    let line = String::from_utf8(line)
        .map_err(|e| Error::format("header", format!("{e}; save a plain array")))?;
    Ok((line, 8 + of_len as u64 + u64::from(len)))
}

/// All whole numbers that there are.
fn numbers(mut from: impl Read, size: usize, number: fn(&[u8]) -> f32) -> Result<Vec<f32>, Error> {
    let (mut data, mut chunk) = (Vec::new(), Vec::new());
    loop {
        chunk.clear();
        let some = from.by_ref().take((CHUNK * size) as u64).read_to_end(&mut chunk);
        if some.map_err(|e| failed(&e))? == 0 {
            return Ok(data);
        }
        data.extend(chunk.chunks_exact(size).map(number));
    }
}

fn failed(error: &std::io::Error) -> Error {
    Error::format("reading", error.to_string())
}

fn start_of(text: &str) -> String {
    text.chars().take(SHOWN).collect()
}

/// What the line says.
struct Header<'t> {
    descr: &'t str,
    fortran_order: bool,
    shape: Vec<usize>,
}

/// The part of Python that NumPy writes: a dictionary of a string, a truth value and a tuple of whole numbers, in any order.
struct Reader<'t> {
    line: &'t str,
    at: usize,
}

impl<'t> Reader<'t> {
    fn header(mut self) -> Result<Header<'t>, Error> {
        let (mut descr, mut order, mut shape) = (None, None, None);
        self.need('{')?;
        while !self.take('}') {
            let key = self.string()?;
            self.need(':')?;
            match key {
                "descr" => descr = Some(self.string()?),
                "fortran_order" => order = Some(self.truth()?),
                "shape" => shape = Some(self.tuple()?),
                other => {
                    let why = format!("{:?} is no field of an array", start_of(other));
                    return Err(Error::format("header", why));
                }
            }
            if !self.take(',') {
                self.need('}')?;
                break;
            }
        }
        if !self.rest().is_empty() {
            return self.fail("the end");
        }
        let missing = |field| Error::format(field, "missing in the header; save a plain array");
        Ok(Header {
            descr: descr.ok_or_else(|| missing("descr"))?,
            fortran_order: order.ok_or_else(|| missing("fortran_order"))?,
            shape: shape.ok_or_else(|| missing("shape"))?,
        })
    }

    /// What is left, after space.
    fn rest(&mut self) -> &'t str {
        let rest = self.line[self.at..].trim_start();
        self.at = self.line.len() - rest.len();
        rest
    }

    fn take(&mut self, wanted: char) -> bool {
        let found = self.rest().starts_with(wanted);
        self.at += if found { wanted.len_utf8() } else { 0 };
        found
    }

    fn need(&mut self, wanted: char) -> Result<(), Error> {
        if self.take(wanted) { Ok(()) } else { self.fail(&format!("`{wanted}`")) }
    }

    fn fail<T>(&mut self, expected: &str) -> Result<T, Error> {
        let found = start_of(self.rest());
        let why = format!(
            "expected {expected} at byte {}, found {found:?}; save a plain array of numbers",
            self.at
        );
        Err(Error::format("header", why))
    }

    /// Nothing that NumPy writes here needs an escape.
    fn string(&mut self) -> Result<&'t str, Error> {
        let rest = self.rest();
        let quote = rest.chars().next().filter(|c| ['\'', '"'].contains(c));
        let Some((string, _)) = quote.and_then(|quote| rest[1..].split_once(quote)) else {
            return self.fail("a string");
        };
        self.at += string.len() + 2;
        Ok(string)
    }

    fn truth(&mut self) -> Result<bool, Error> {
        let rest = self.rest();
        for (word, value) in [("False", false), ("True", true)] {
            if rest.starts_with(word) {
                self.at += word.len();
                return Ok(value);
            }
        }
        self.fail("True or False")
    }

    fn tuple(&mut self) -> Result<Vec<usize>, Error> {
        let mut numbers = Vec::new();
        self.need('(')?;
        while !self.take(')') {
            let rest = self.rest();
            let digits = &rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())];
            let Ok(number) = digits.parse() else { return self.fail("a size") };
            self.at += digits.len();
            // Python 2 wrote long numbers so.
            self.take('L');
            numbers.push(number);
            if !self.take(',') {
                self.need(')')?;
                break;
            }
        }
        Ok(numbers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Cursor;

    /// A file as NumPy writes it.
    fn file(version: u8, header: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = [b"\x93NUMPY".as_slice(), &[version, 0]].concat();
        let len = u32::try_from(header.len()).unwrap().to_le_bytes();
        bytes.extend(if version == 1 { &len[..2] } else { &len[..] });
        [&bytes, header.as_bytes(), data].concat()
    }

    fn read(bytes: &[u8]) -> Result<(Vec<f32>, [usize; 3]), Error> {
        let told = read_npy(bytes, Some(bytes.len() as u64));
        // From a pipe nobody knows how much will come.
        assert_eq!(told.as_ref().ok(), read_npy(bytes, None).as_ref().ok());
        let parts = NpyReader::new(Cursor::new(bytes)).and_then(|mut reader| {
            let shape = reader.shape();
            Ok((reader.positions(0..shape[0], 0..shape[1])?, shape))
        });
        assert_eq!(parts, told);
        told
    }

    #[test]
    fn every_type_and_version_is_read() {
        let header = |descr: &str| {
            format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': (1, 2), }}   \n")
        };
        let f8 = [1.5f64, -2.0].map(f64::to_le_bytes).concat();
        let f4 = [1.5f32, -2.0].map(f32::to_le_bytes).concat();
        let f2 = [f16::from_f32(1.5), f16::from_f32(-2.0)].map(f16::to_le_bytes).concat();
        for (descr, data) in [("<f8", f8), ("<f4", f4.clone()), ("<f2", f2)] {
            for version in 1..=3 {
                let (numbers, shape) = read(&file(version, &header(descr), &data)).unwrap();
                assert_eq!((numbers, shape), (vec![1.5, -2.0], [1, 1, 2]), "{descr} {version}");
            }
        }
        let other = "{\"shape\":(1L,2,1,1,),\"fortran_order\":False,\"descr\":\"<f4\"}";
        assert_eq!(read(&file(1, other, &f4)).unwrap().1, [2, 1, 1]);
        // Another array may follow.
        let more = [f4.clone(), f4].concat();
        assert_eq!(read(&file(1, &header("<f4"), &more)).unwrap().0.len(), 2);
    }

    #[test]
    fn some_positions_and_heads_are_read() {
        let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3, 2)}";
        let data: Vec<u8> = (0..12u8).flat_map(|i| f32::from(i).to_le_bytes()).collect();
        let bytes = file(1, header, &data);
        let mut reader = NpyReader::new(Cursor::new(&bytes)).unwrap();
        let read = reader.positions(0..2, 1..3).unwrap();
        assert_eq!(read, [2.0, 3.0, 4.0, 5.0, 8.0, 9.0, 10.0, 11.0]);
        assert_eq!(reader.positions(1..2, 0..1).unwrap(), [6.0, 7.0]);
        assert_eq!(reader.positions(0..2, 2..2).unwrap(), [0.0; 0]);
        let error = reader.positions(0..2, 1..4).unwrap_err().to_string();
        assert!(error.contains("positions 1..4") && error.contains("0..3"), "{error}");
        let error = reader.positions(2..3, 0..1).unwrap_err().to_string();
        assert!(error.contains("heads 2..3") && error.contains("0..2"), "{error}");
    }

    #[test]
    fn errors_name_the_field_and_both_numbers() {
        let of =
            |shape: &str| format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}");
        let deep = |n: usize| of(&format!("{}1{}", "(".repeat(n), ")".repeat(n)));
        let most = u64::MAX;
        for (header, parts) in [
            (of("(3, 4)"), vec!["shape: [3, 4]", "48 bytes", "has 40"]),
            (of(&format!("({most}, {most})")), vec!["shape", "more than memory", "has 40"]),
            (of("(1000000, 1000000)"), vec!["4000000000000 bytes", "has 40"]),
            (of("(99999999999999999999, 1)"), vec!["a size", "byte 51"]),
            (of("(0, 4)"), vec!["shape: [0, 4]", "nothing"]),
            (of("(4,)"), vec!["shape: [4]", "[len, dim]"]),
            (of("(2, 2)").replace("<f4", ">f4"), vec!["descr: \">f4\"", "little-endian"]),
            (of("(2, 2)").replace("'<f4'", "[('a', '<f4')]"), vec!["a string", "[('a'"]),
            (of("(2, 2)").replace("False", "True"), vec!["fortran_order: True", "contiguous"]),
            ("{'descr': '<f4'}".into(), vec!["fortran_order: missing"]),
            ("{'descr': '<f4', \u{1b}[2J}".into(), vec!["a string", "\\u{1b}"]),
            (of("(2, 2)") + "}", vec!["expected the end"]),
            (deep(40), vec!["a size", "\"((("]),
        ] {
            let error = read(&file(1, &header, &[0; 40])).unwrap_err().to_string();
            for part in parts {
                assert!(error.contains(part), "{header}: no {part:?} in {error}");
            }
        }
        let error = |bytes: &[u8]| read(bytes).unwrap_err().to_string();
        assert!(error(b"\x93NUMPY\x04\0").contains("version: 4; 1 to 3"));
        assert!(error(b"PK\x03\x04\0\0\0\0").contains(".npy"));
        let long = "{".repeat(20_000);
        assert!(error(&file(1, &long, &[])).contains("20000 bytes, at most 16384"));
        let cut = &file(2, &of("(1, 1)"), &[])[..30];
        assert!(error(cut).contains("are promised, 18 are there"), "{}", error(cut));
    }

    /// A parser that goes back at every bracket takes ages for these few bytes.
    #[test]
    fn brackets_in_brackets_are_refused_at_once() {
        for (open, close) in [("(", ")"), ("[", "]"), ("{", "}"), ("{'shape':", "}"), ("-", "")] {
            let header = open.repeat(1800) + "0" + &close.repeat(1800);
            let start = std::time::Instant::now();
            assert!(read(&file(2, &header[..header.len().min(16_384)], &[])).is_err());
            assert!(start.elapsed().as_secs() < 5, "{open}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), version in 0u8..5) {
            let _ = read(&bytes);
            let _ = read(&file(version, &String::from_utf8_lossy(&bytes), &bytes));
        }

        #[test]
        fn no_heap_of_pieces_panics(pieces in prop::collection::vec(prop::sample::select(vec![
            "{", "}", "(", ")", "'descr'", "'shape'", "'fortran_order'", ":", ",", "False", "True", "'<f4'", "'", "\"",
            "7", "18446744073709551615", "L", "é", "\n",
        ]), 0..40)) {
            let _ = read(&file(1, &pieces.concat(), &[0; 64]));
        }
    }
}
