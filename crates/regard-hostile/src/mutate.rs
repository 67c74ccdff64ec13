//! Inputs made of others by chance.

use crate::chance::Chance;

/// Bytes of an input at most: enough for any small file, and little to copy.
pub const MAX_BYTES: usize = 1 << 16;

/// Changes of one input at most.
const MAX_CHANGES: usize = 6;

/// Numbers at the edges of types, and where sizes become too large to be meant.
const NUMBERS: [&str; 24] = [
    "0",
    "1",
    "-1",
    "2",
    "127",
    "255",
    "256",
    "65535",
    "65536",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "268435456",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "1e999",
    "-0.0",
    "1e-320",
    "0.5",
    "99999999999999999999999999999999",
];

/// The same as words of 8 bytes.
const WORDS: [u64; 12] = [
    0,
    1,
    7,
    255,
    0x7FFF_FFFF,
    0x8000_0000,
    0xFFFF_FFFF,
    1 << 32,
    1 << 40,
    1 << 61,
    u64::MAX - 31,
    u64::MAX,
];

/// One of the seeds, changed; now and then as it is.
#[must_use]
pub fn input(seeds: &[Vec<u8>], dictionary: &[&str], chance: &mut Chance) -> Vec<u8> {
    let mut bytes = seeds.get(chance.below(seeds.len())).cloned().unwrap_or_default();
    // Many changes at once are refused by the first of them: few are tried more often.
    let changes = chance.below(MAX_CHANGES + 1).min(chance.below(MAX_CHANGES + 1));
    for _ in 0..changes {
        change(&mut bytes, seeds, dictionary, chance);
        bytes.truncate(MAX_BYTES);
    }
    bytes
}

fn change(bytes: &mut Vec<u8>, seeds: &[Vec<u8>], dictionary: &[&str], chance: &mut Chance) {
    let at = chance.below(bytes.len());
    match chance.below(10) {
        0 => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << chance.below(8);
            }
        }
        1 => {
            let edges = [0, 1, 0x7F, 0x80, 0xFF, b'"', b'0', b'{', b'\n', b','];
            if let Some(byte) = bytes.get_mut(at) {
                *byte = edges[chance.below(edges.len())];
            }
        }
        2 => bytes.truncate(at),
        3 => drop(bytes.drain(range(at, bytes.len(), chance))),
        4 => {
            let other = seeds.get(chance.below(seeds.len())).map_or(&[][..], Vec::as_slice);
            let from = chance.below(other.len());
            let piece = other[range(from, other.len(), chance)].to_vec();
            put(bytes, at, &piece);
        }
        5 => {
            let piece = bytes[range(at, bytes.len(), chance)].to_vec();
            let times = 1 << chance.below(8);
            put(bytes, at, &piece.repeat(times.min(MAX_BYTES / piece.len().max(1))));
        }
        6 | 7 => number(bytes, at, chance),
        8 => {
            let word = WORDS[chance.below(WORDS.len())].to_le_bytes();
            let size = [1, 2, 4, 8][chance.below(4)];
            for (byte, new) in bytes.iter_mut().skip(at).zip(&word[..size]) {
                *byte = *new;
            }
        }
        _ => {
            if let Some(token) = chance.one_of(dictionary) {
                put(bytes, at, token.as_bytes());
            }
        }
    }
}

/// From here to somewhere, not far as a rule.
fn range(from: usize, end: usize, chance: &mut Chance) -> std::ops::Range<usize> {
    let most = [4, 16, 256, MAX_BYTES][chance.below(4)];
    from..from + chance.below((end - from).min(most) + 1)
}

/// Puts a piece there, or writes over what is there: chance has been had by whoever made the piece.
fn put(bytes: &mut Vec<u8>, at: usize, piece: &[u8]) {
    let at = at.min(bytes.len());
    bytes.splice(at..at, piece.iter().copied());
}

/// Replaces the first number in a text from here on.
fn number(bytes: &mut Vec<u8>, at: usize, chance: &mut Chance) {
    let Some(first) = bytes.iter().skip(at).position(u8::is_ascii_digit) else { return };
    let from = at + first;
    let digits = bytes[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let new = NUMBERS[chance.below(NUMBERS.len())];
    bytes.splice(from..from + digits, new.bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_means_the_same_inputs_and_they_are_of_bounded_size() {
        let seeds = [b"{\"a\": 12, \"b\": [1, 2]}".to_vec(), vec![7; 3000], vec![]];
        let made = |seed: u64| -> Vec<Vec<u8>> {
            let mut chance = Chance::new(seed);
            (0..5000).map(|_| input(&seeds, &["null", "[["], &mut chance)).collect()
        };
        let first = made(1);
        assert_eq!(first, made(1));
        assert_ne!(first, made(2));
        assert!(first.iter().all(|input| input.len() <= MAX_BYTES));
        assert!(seeds.iter().all(|seed| first.contains(seed)));
        assert!(first.iter().collect::<std::collections::BTreeSet<_>>().len() > 2000);
    }
}
