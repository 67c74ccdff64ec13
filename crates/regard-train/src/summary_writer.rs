//! Event files of TensorBoard: scalars, written by hand, for the format is a few lines.
//!
//! A file is records; a record is a length, a checksum of it, an `Event` of protocol buffers and a checksum of that
//! (`tensorflow/core/lib/io/record_writer.h`, `event.proto`).

use crate::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// An open event file.
#[derive(Debug)]
pub struct SummaryWriter {
    path: PathBuf,
    file: BufWriter<File>,
}

impl SummaryWriter {
    /// A new file in a folder; TensorBoard reads all that are there as one run.
    pub fn create(folder: &Path) -> Result<Self, Error> {
        let wrong = |e: &std::io::Error| Error::file(folder, e);
        std::fs::create_dir_all(folder).map_err(|e| wrong(&e))?;
        let now = now();
        let name = format!("events.out.tfevents.{now:.6}.{}.regard", std::process::id());
        let path = folder.join(name);
        let file = BufWriter::new(File::create_new(&path).map_err(|e| Error::file(&path, &e))?);
        let mut board = Self { path, file };
        let mut event = Message::default();
        event.double(1, now);
        event.bytes(3, b"brain.Event:2");
        board.record(&event.0)?;
        Ok(board)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Numbers of a step.
    pub fn scalars(&mut self, step: u64, numbers: &[(&str, f64)]) -> Result<(), Error> {
        let mut summary = Message::default();
        for (name, number) in numbers {
            let mut value = Message::default();
            value.bytes(1, name.as_bytes());
            #[expect(clippy::cast_possible_truncation, reason = "a simple value is an f32")]
            value.float(2, *number as f32);
            summary.bytes(1, &value.0);
        }
        let mut event = Message::default();
        event.double(1, now());
        event.varint(2, step);
        event.bytes(5, &summary.0);
        self.record(&event.0)
    }

    fn record(&mut self, event: &[u8]) -> Result<(), Error> {
        let written = self.file.write_all(&record(event)).and_then(|()| self.file.flush());
        written.map_err(|e| Error::file(&self.path, &e))
    }
}

/// The length, its checksum, the event and its checksum.
fn record(event: &[u8]) -> Vec<u8> {
    let length = (event.len() as u64).to_le_bytes();
    let sums = [masked(&length), masked(event)].map(u32::to_le_bytes);
    [&length, sums[0].as_slice(), event, &sums[1]].concat()
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// A checksum, turned and moved so that one of a checksum is another.
fn masked(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Fields of a message of protocol buffers.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn key(&mut self, field: u64, kind: u64) {
        self.number(field << 3 | kind);
    }

    /// Seven bits a byte, the lowest first.
    fn number(&mut self, mut x: u64) {
        while x >= 0x80 {
            self.0.push((x & 0x7f) as u8 | 0x80);
            x >>= 7;
        }
        self.0.push((x & 0x7f) as u8);
    }

    fn varint(&mut self, field: u64, x: u64) {
        self.key(field, 0);
        self.number(x);
    }

    fn double(&mut self, field: u64, x: f64) {
        self.key(field, 1);
        self.0.extend(x.to_le_bytes());
    }

    fn float(&mut self, field: u64, x: f32) {
        self.key(field, 5);
        self.0.extend(x.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, x: &[u8]) {
        self.key(field, 2);
        self.number(x.len() as u64);
        self.0.extend(x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_what_tensorflow_would_have_written() {
        // What the record writer of TensorBoard 2.21 makes of "abc".
        let theirs = [3, 0, 0, 0, 0, 0, 0, 0, 176, 153, 73, 14, 97, 98, 99, 110, 87, 241, 33];
        assert_eq!(record(b"abc"), theirs);
        let mut value = Message::default();
        value.bytes(1, b"loss");
        value.float(2, 0.5);
        assert_eq!(value.0, [10, 4, b'l', b'o', b's', b's', 21, 0, 0, 0, 63]);
        let mut number = Message::default();
        number.varint(2, 300);
        assert_eq!(number.0, [16, 0xac, 2]);
    }

    #[test]
    fn records_follow_one_another_with_their_checksums() {
        let folder = std::env::temp_dir().join(format!("regard-board-{}", std::process::id()));
        let mut board = SummaryWriter::create(&folder).unwrap();
        board.scalars(7, &[("loss", 1.5), ("lr", 0.1)]).unwrap();
        let bytes = std::fs::read(board.path()).unwrap();
        let (mut rest, mut records) = (bytes.as_slice(), 0);
        while !rest.is_empty() {
            let length =
                usize::try_from(u64::from_le_bytes(rest[..8].try_into().unwrap())).unwrap();
            assert_eq!(rest[8..12], masked(&rest[..8]).to_le_bytes());
            let event = &rest[12..12 + length];
            assert_eq!(rest[12 + length..16 + length], masked(event).to_le_bytes());
            (rest, records) = (&rest[16 + length..], records + 1);
        }
        assert_eq!(records, 2);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
