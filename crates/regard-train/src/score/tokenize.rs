//! What a word is to BLEU: sacrebleu's `none`, `13a`, `zh` and `char`.

use super::ScoreError;
use std::fmt;
use std::str::FromStr;

/// How a line is cut into words before they are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Tokenize {
    /// `none`: at white space only, for text that is in tokens already.
    None,
    /// `13a`: as NIST's `mteval-v13a`, for languages that put spaces between words.
    #[default]
    Mteval13a,
    /// `zh`: each Chinese character is a word, and the rest is cut as by `13a`.
    Zh,
    /// `char`: each character is a word, white space left out.
    Char,
}

impl Tokenize {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::None, Self::Mteval13a, Self::Zh, Self::Char];

    /// The name that sacrebleu gives it, and that signatures show.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Mteval13a => "13a",
            Self::Zh => "zh",
            Self::Char => "char",
        }
    }

    /// The words of a line, with one space between them.
    #[must_use]
    pub fn apply(self, line: &str) -> String {
        let line = line.trim_end_matches(is_space);
        let spaced = match self {
            Self::None => line.into(),
            Self::Mteval13a => mteval(line),
            Self::Zh => chinese(line),
            Self::Char => line.chars().flat_map(|c| [c, ' ']).collect(),
        };
        words(&spaced).collect::<Vec<_>>().join(" ")
    }
}

impl fmt::Display for Tokenize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Tokenize {
    type Err = ScoreError;

    fn from_str(name: &str) -> Result<Self, ScoreError> {
        Self::ALL.into_iter().find(|tokenize| tokenize.name() == name).ok_or_else(|| {
            let wanted = "none, 13a, zh or char";
            ScoreError::Setting { name: "tokenize", value: name.into(), wanted }
        })
    }
}

/// What stands between white space.
pub(super) fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(is_space).filter(|word| !word.is_empty())
}

/// White space as Python has it: four separators of ASCII more than Unicode.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\x1c'..='\x1f')
}

fn mteval(line: &str) -> String {
    let mut line = line.replace("<skipped>", "").replace("-\n", "").replace('\n', " ");
    // One after the other: `&amp;lt;` becomes `<`, but `&amp;quot;` stays `&quot;`.
    for (entity, means) in [("&quot;", "\""), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")] {
        if line.contains(entity) {
            line = line.replace(entity, means);
        }
    }
    western(&format!(" {line} "))
}

fn chinese(line: &str) -> String {
    western(&apart(line.trim_start_matches(is_space), is_chinese))
}

/// What `13a` and `zh` have in common: four rules, each of them applied to all that the one before has left.
fn western(line: &str) -> String {
    let digit = |c: char| c.is_ascii_digit();
    let stop = |c: char| matches!(c, '.' | ',');
    let line = apart(line, is_symbol);
    let line = split(&line, |a, b| !digit(a) && stop(b), |a, b| [a, ' ', b, ' ']);
    let line = split(&line, |a, b| stop(a) && !digit(b), |a, b| [' ', a, ' ', b]);
    split(&line, |a, b| digit(a) && b == '-', |a, b| [a, ' ', b, ' '])
}

/// A space before and after each character that is `alone`.
fn apart(line: &str, alone: impl Fn(char) -> bool) -> String {
    let mut spaced = String::with_capacity(2 * line.len());
    for c in line.chars() {
        if alone(c) {
            spaced.extend([' ', c, ' ']);
        } else {
            spaced.push(c);
        }
    }
    spaced
}

/// Puts `spaced` in the place of each pair of neighbours that `is_pair`. As with a regular expression, a character that is
/// in one pair is not in the next: of `a,,` only the first comma follows something.
fn split(
    line: &str,
    is_pair: impl Fn(char, char) -> bool,
    spaced: impl Fn(char, char) -> [char; 4],
) -> String {
    let mut done = String::with_capacity(line.len() + line.len() / 4);
    let mut rest = line.chars().peekable();
    while let Some(a) = rest.next() {
        match rest.next_if(|&b| is_pair(a, b)) {
            Some(b) => done.extend(spaced(a, b)),
            None => done.push(a),
        }
    }
    done
}

/// ASCII punctuation that is always a word of its own: all but `' , - .`
fn is_symbol(c: char) -> bool {
    c.is_ascii_punctuation() && !matches!(c, '\'' | ',' | '-' | '.')
}

/// What `zh` takes for Chinese. sacrebleu means to name two ranges above U+FFFF, but writes them with `\u`, which reads
/// four digits: the first of them has become U+2001 to U+2A6D, where quotation marks, dashes and arrows are, and rare
/// characters and most emoji are in none.
fn is_chinese(c: char) -> bool {
    matches!(c,
        '\u{2001}'..='\u{2a6d}' // punctuation, arrows, mathematics, dingbats
        | '\u{2e80}'..='\u{2fdf}' // radicals
        | '\u{2ff0}'..='\u{303f}' // how characters are composed, punctuation
        | '\u{3100}'..='\u{312f}' // Bopomofo
        | '\u{31a0}'..='\u{31bf}' // more of it
        | '\u{31c0}'..='\u{31ef}' // strokes
        | '\u{3200}'..='\u{4db5}' // enclosed and squared characters, extension A
        | '\u{4e00}'..='\u{9fbb}'
        | '\u{f900}'..='\u{fa2d}' // compatibility
        | '\u{fa30}'..='\u{fa6a}'
        | '\u{fa70}'..='\u{fad9}'
        | '\u{fe10}'..='\u{fe1f}' // vertical punctuation
        | '\u{fe30}'..='\u{fe4f}'
        | '\u{ff00}'..='\u{ffef}' // full width, half width
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_their_points_and_lose_their_dashes() {
        let words = Tokenize::Mteval13a.apply("It's 1,000.5, or 3-4% in the U.S.A.");
        assert_eq!(words, "It's 1,000.5 , or 3 - 4 % in the U . S . A .");
    }

    #[test]
    fn entities_are_read_once() {
        let words = Tokenize::Mteval13a.apply("&quot;a&quot; &amp;lt; &amp;quot;<skipped>");
        assert_eq!(words, "\" a \" < & quot ;");
    }

    #[test]
    fn a_word_broken_at_the_end_of_a_line_is_joined() {
        assert_eq!(Tokenize::Mteval13a.apply("trans-\nlation\nhere-\n"), "translation here-");
    }

    #[test]
    fn chinese_characters_are_words() {
        assert_eq!(Tokenize::Zh.apply("　我有3.5本“Rust”书。"), "我 有 3.5 本 “ Rust ” 书 。");
        assert_eq!(Tokenize::Mteval13a.apply("我有书。"), "我有书。");
        assert_eq!(Tokenize::Char.apply("我 有\t书"), "我 有 书");
    }

    #[test]
    fn names_are_read_back() {
        for tokenize in Tokenize::ALL {
            assert_eq!(tokenize.to_string().parse(), Ok(tokenize));
        }
        let refused = "13b".parse::<Tokenize>().unwrap_err().to_string();
        assert_eq!(refused, "tokenize is \"13b\", and should be none, 13a, zh or char");
    }
}
