//! Labels made harmless, and how much room they take.
//!
//! Labels are words of any text, so they may hold anything. A label must not move a cursor, turn a line around or
//! close an SVG element: what controls is replaced by a sign that can be seen, or left out.

use unicode_width::UnicodeWidthChar;

/// Labels are cut to what fits; this bounds the work before, and marks that stand on each other without end.
const LONGEST: usize = 256;

/// A label without anything that controls.
pub(crate) fn clean(label: &str) -> String {
    let mut out = String::new();
    let mut marks = 0;
    for c in label.chars().take(LONGEST) {
        let Some(c) = harmless(c) else { continue };
        marks = if c.width() == Some(0) { marks + 1 } else { 0 };
        if marks <= 3 {
            out.push(c);
        }
    }
    if out.trim().is_empty() { out.replace(char::is_whitespace, "␣") } else { out }
}

/// Text of any length, in its lines, without anything else that controls: for what is printed of a file that may come from anywhere.
#[must_use]
pub fn printable(text: &str) -> String {
    text.chars().filter_map(|c| if c == '\n' { Some(c) } else { harmless(c) }).collect()
}

fn harmless(c: char) -> Option<char> {
    match c {
        '\n' | '\r' | '\u{2028}' | '\u{2029}' => Some('⏎'),
        '\t' => Some('⇥'),
        // Joiners stay: Persian and Indic words need them.
        '\u{200c}' | '\u{200d}' => Some(c),
        // Soft hyphen, marks and overrides of direction, invisible operators, byte order mark, tags, selectors.
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' => {
            None
        }
        '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fe00}'..='\u{fe0f}' => None,
        '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}' => None,
        // XML has no way to write these two.
        '\u{fffe}' | '\u{ffff}' => Some('\u{fffd}'),
        c if c.is_control() => Some('\u{fffd}'),
        c if c.is_whitespace() => Some(' '),
        c => Some(c),
    }
}

/// Whether a text is read from the right: its first letter tells (Unicode annex 9, P2).
pub(crate) fn from_right(text: &str) -> bool {
    let right = |c: char| matches!(c, '\u{590}'..='\u{8ff}' | '\u{fb1d}'..='\u{fdff}' | '\u{fe70}'..='\u{fefc}' | '\u{10800}'..='\u{10fff}' | '\u{1e800}'..='\u{1efff}');
    text.chars().find(|c| c.is_alphabetic()).is_some_and(right)
}

/// Columns of a terminal that a character takes.
pub(crate) fn columns(c: char) -> usize {
    c.width().unwrap_or(0)
}

/// How wide a character is, in parts of the height of the font.
pub(crate) fn em(c: char) -> f32 {
    /// DejaVu Sans, from the space on, in hundredths. Few fonts are wider, so what fits with it fits with any.
    const ASCII: [u8; 95] = [
        32, 40, 46, 84, 64, 95, 78, 27, 39, 39, 50, 84, 32, 36, 32, 34, 64, 64, 64, 64, 64, 64, 64,
        64, 64, 64, 34, 34, 84, 84, 84, 53, 100, 68, 69, 70, 77, 63, 58, 77, 75, 29, 29, 66, 56,
        86, 75, 79, 60, 79, 69, 63, 61, 73, 68, 99, 69, 61, 69, 39, 34, 39, 84, 50, 50, 61, 63, 55,
        63, 62, 35, 63, 63, 28, 28, 58, 28, 97, 63, 61, 63, 63, 41, 52, 39, 63, 59, 82, 59, 59, 52,
        64, 34, 64, 84,
    ];
    match (c, columns(c)) {
        (' '..='~', _) => f32::from(ASCII[c as usize - 32]) / 100.0,
        ('…', _) => 1.0,
        (_, 0) => 0.0,
        (_, 1) => 0.68,
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_controls_is_left() {
        assert_eq!(clean("\x1b[31mred\x07"), "\u{fffd}[31mred\u{fffd}");
        assert_eq!(clean("a\nb\tc"), "a⏎b⇥c");
        assert_eq!(clean("\u{202e}abc\u{2066}"), "abc");
        assert_eq!(clean("\u{9b}31m\u{ffff}"), "\u{fffd}31m\u{fffd}");
        assert_eq!(clean("  "), "␣␣");
        assert_eq!(clean(" the"), " the");
        assert_eq!(clean(&"x".repeat(9999)).len(), LONGEST);
        assert_eq!(clean(&format!("e{}", "\u{301}".repeat(99))).chars().count(), 4);
    }

    #[test]
    fn the_first_letter_tells_the_direction() {
        assert!(from_right("«سلام»") && from_right("שלום") && !from_right("a سلام"));
        assert!(!from_right("") && !from_right("12"));
    }
}
