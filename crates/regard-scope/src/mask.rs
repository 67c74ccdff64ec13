//! Masks as text: rules joined by `&` and `|`.
//!
//! ```text
//! either = both { "|" both }
//! both   = one { "&" one }
//! one    = "(" either ")" | rule | "$" number          the latter: one of the masks given beside the text
//! rule   = name { number | list }          list = number { "," number }
//! ```

use regard::Mask;
use regard::mask::KeyLists;
use std::fmt;

/// What may be written, for the help of a command.
pub const MASK_HELP: &str = "Attention mask: rules joined by & (and) and | (or); & binds tighter, brackets \
group; at most 64 rules and 16 MiB.\n\n  full                    all keys\n  causal                  keys up to the query's own position\n  \
window KEYS             keys at a distance less than KEYS\n  band BACK AHEAD         BACK \
keys before and AHEAD after; `all` is unbounded\n  prefix KEYS             the first KEYS keys\n  lengths N,N,..          \
the first N keys, one N for each batch item\n  segments ID,ID,..       keys of the same segment, an ID for each \
key\n  global AT,AT,..         positions that attend to all keys and are visible to all queries\n  blocks SIZE             keys of the query's \
own block\n  dilated STRIDE          keys at a distance that is a multiple of STRIDE\n  columns BLOCK WIDTH     the last WIDTH keys of each \
block\n  strided STRIDE          window STRIDE | dilated STRIDE\n  fixed BLOCK SUMMARY     blocks BLOCK | columns BLOCK \
SUMMARY\n  longformer WINDOW AT,.. window WINDOW | global AT,..\n  keys AT,AT,..           the listed keys\n  \
tree root,INDEX,..      the last queries are draft tokens of a tree: the parent of each\n\nFor example: 'causal & window 512', 'causal & \
(window 128 | dilated 128)', 'causal | prefix 10'";

const RULES: &str =
    "full, causal, window KEYS, band BACK AHEAD, prefix KEYS, lengths N,.., segments ID,..,
  global AT,.., blocks SIZE, dilated STRIDE, columns BLOCK WIDTH, strided STRIDE,
  fixed BLOCK SUMMARY, longformer WINDOW AT,.., keys AT,.., tree root,INDEX,..";

/// The largest number of a rule: beyond any memory, and small enough that sums of a few cannot overflow.
const MOST: usize = 1 << 40;

/// Bytes of a mask: documents of some million keys.
const LENGTH: usize = 1 << 24;

/// Brackets inside brackets, and rules in all: more than anyone means, few enough for every recursion over a mask.
const DEPTH: usize = 32;
const COUNT: usize = 64;

/// Where a mask stops making sense, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaskError {
    text: String,
    at: usize,
    why: String,
}

impl fmt::Display for MaskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Some text around the place, on one line, so that the mark stands below it.
        const BEFORE: usize = 40;
        let column = self.text[..self.at].chars().count();
        let skipped = column.saturating_sub(BEFORE);
        let near = self.text.chars().skip(skipped).take(2 * BEFORE);
        let near: String = near.map(|c| if c.is_control() { ' ' } else { c }).collect();
        writeln!(f, "{}", self.why)?;
        writeln!(f, "  {near}\n  {:>width$}", "^", width = column - skipped + 1)?;
        write!(f, "known rules, joined with & and |:\n  {RULES}")
    }
}

impl std::error::Error for MaskError {}

/// Reads a mask: rules joined by `&` and `|`, as in `causal & (window 128 | dilated 128)`. [`MASK_HELP`] names them.
pub fn parse_mask(text: &str) -> Result<Mask, MaskError> {
    parse_mask_with(text, &[])
}

/// The same where `$0`, `$1`, .. stand for masks that are given beside the text: those that hold lists of numbers.
pub fn parse_mask_with(text: &str, given: &[Mask]) -> Result<Mask, MaskError> {
    let mut reader = Reader { text, given, at: 0, rules: 0 };
    if text.len() > LENGTH {
        // Not the text itself: it is too long to be kept.
        reader.text = "";
        return reader.fail(format!("{} bytes, and a mask has at most {LENGTH}", text.len()));
    }
    let mask = reader.either(0)?;
    reader.skip_space();
    match reader.rest().chars().next() {
        None => Ok(mask),
        Some(c) => reader.fail(format!("expected & or | or the end, found `{c}`")),
    }
}

struct Reader<'t> {
    text: &'t str,
    given: &'t [Mask],
    at: usize,
    rules: usize,
}

impl<'t> Reader<'t> {
    fn rest(&self) -> &'t str {
        &self.text[self.at..]
    }

    fn fail<T>(&self, why: String) -> Result<T, MaskError> {
        Err(MaskError { text: self.text.into(), at: self.at, why })
    }

    fn skip_space(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    /// Takes `wanted` if it comes next.
    fn take(&mut self, wanted: char) -> bool {
        self.skip_space();
        let found = self.rest().starts_with(wanted);
        self.at += if found { wanted.len_utf8() } else { 0 };
        found
    }

    /// The characters that come next and are `wanted`, not taken yet.
    fn peek(&mut self, wanted: fn(char) -> bool) -> &'t str {
        self.skip_space();
        let rest = self.rest();
        &rest[..rest.find(|c| !wanted(c)).unwrap_or(rest.len())]
    }

    fn either(&mut self, depth: usize) -> Result<Mask, MaskError> {
        let mut mask = self.both(depth)?;
        while self.take('|') {
            mask = mask.or(self.both(depth)?);
        }
        Ok(mask)
    }

    fn both(&mut self, depth: usize) -> Result<Mask, MaskError> {
        let mut mask = self.one(depth)?;
        while self.take('&') {
            mask = mask.and(self.one(depth)?);
        }
        Ok(mask)
    }

    fn one(&mut self, depth: usize) -> Result<Mask, MaskError> {
        if self.take('$') {
            return self.given();
        }
        if !self.take('(') {
            return self.rule();
        }
        if depth == DEPTH {
            return self.fail(format!("more than {DEPTH} brackets inside each other"));
        }
        let mask = self.either(depth + 1)?;
        if self.take(')') {
            Ok(mask)
        } else {
            self.fail("expected & or | or a closing bracket".into())
        }
    }

    fn given(&mut self) -> Result<Mask, MaskError> {
        let n = self.number()?;
        let known = self.given.len();
        match self.given.get(n) {
            Some(mask) => Ok(mask.clone()),
            None => {
                self.fail(format!("there is no ${n}: {known} masks were given beside the text"))
            }
        }
    }

    fn rule(&mut self) -> Result<Mask, MaskError> {
        let name = self.peek(|c| c.is_ascii_alphabetic());
        let start = self.at;
        self.rules += 1;
        if self.rules > COUNT {
            return self.fail(format!("more than {COUNT} rules"));
        }
        self.at += name.len();
        Ok(match name {
            "full" => Mask::full(),
            "causal" => Mask::causal(),
            "window" => Mask::full().window(self.number()?),
            "band" => Mask::band(self.bound()?, self.bound()?),
            "prefix" => Mask::prefix(self.number()?),
            "lengths" => Mask::lengths(&self.list()?),
            "segments" => Mask::segments(&self.documents()?),
            "global" => Mask::global(&self.list()?),
            "blocks" => Mask::blocks(self.number()?),
            "dilated" => Mask::dilated(self.number()?),
            "columns" => Mask::columns(self.number()?, self.number()?),
            "strided" => Mask::strided(self.number()?),
            "fixed" => Mask::fixed(self.number()?, self.number()?),
            "longformer" => Mask::longformer(self.number()?, &self.list()?),
            "keys" => self.keys()?,
            "tree" => Mask::tree(&self.parents()?),
            _ => {
                self.at = start;
                let why = match (name, self.rest().chars().next()) {
                    ("", None) => "expected a rule, found the end".into(),
                    ("", Some(c)) => format!("expected a rule, found `{c}`"),
                    _ => format!("no rule is called `{name}`"),
                };
                return self.fail(why);
            }
        })
    }

    fn number(&mut self) -> Result<usize, MaskError> {
        let digits = self.peek(|c| c.is_ascii_digit());
        if digits.is_empty() {
            return self.fail("expected a number".into());
        }
        let Some(number) = digits.parse().ok().filter(|n| *n <= MOST) else {
            return self.fail(format!("a number above {MOST}"));
        };
        self.at += digits.len();
        Ok(number)
    }

    fn bound(&mut self) -> Result<Option<usize>, MaskError> {
        if self.peek(|c| c.is_ascii_alphabetic()) == "all" {
            self.at += "all".len();
            return Ok(None);
        }
        self.number().map(Some)
    }

    fn list(&mut self) -> Result<Vec<usize>, MaskError> {
        let mut list = vec![self.number()?];
        while self.take(',') {
            list.push(self.number()?);
        }
        Ok(list)
    }

    /// One list for all rows.
    fn keys(&mut self) -> Result<Mask, MaskError> {
        let lists = KeyLists::new(&[self.list()?], [1, 1, 1]);
        match lists {
            Ok(lists) => Ok(Mask::keys(lists.row_block(usize::MAX))),
            Err(error) => self.fail(error.to_string()),
        }
    }

    fn parents(&mut self) -> Result<Vec<Option<usize>>, MaskError> {
        let mut parents = Vec::new();
        loop {
            if self.peek(|c| c.is_ascii_alphabetic()) == "root" {
                self.at += "root".len();
                parents.push(None);
            } else {
                parents.push(Some(self.number()?));
            }
            if !self.take(',') {
                return Ok(parents);
            }
        }
    }

    fn documents(&mut self) -> Result<Vec<u32>, MaskError> {
        let list = self.list()?;
        let ids: Result<Vec<u32>, _> = list.into_iter().map(u32::try_from).collect();
        ids.or_else(|_| self.fail(format!("a document above {}", u32::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use regard::problem::Scope;

    fn same(text: &str, expected: Mask) {
        let mask = parse_mask(text).unwrap();
        let (q_len, k_len) = (13, 17);
        let scope = Scope { batch: 0, head: 0, q_len, k_len, offset: 4 };
        for (row, key) in (0..q_len).flat_map(|row| (0..k_len).map(move |key| (row, key))) {
            let expected = expected.is_visible(&scope, row, key);
            assert_eq!(mask.is_visible(&scope, row, key), expected, "{text}: {row} {key}");
        }
    }

    #[test]
    fn every_rule_reads_as_its_function() {
        same("full", Mask::full());
        same("causal", Mask::causal());
        same("window 3", Mask::full().window(3));
        same("window 0", Mask::full().window(0));
        same("band 3 4", Mask::band(Some(3), Some(4)));
        same("band all 4", Mask::band(None, Some(4)));
        same("prefix 10", Mask::prefix(10));
        same("lengths 7", Mask::lengths(&[7]));
        same("lengths 7 , 5", Mask::lengths(&[7, 5]));
        let documents: Vec<u32> = (0..17).map(|i| i / 6).collect();
        same("segments 0,0,0,0,0,0,1,1,1,1,1,1,2,2,2,2,2", Mask::segments(&documents));
        same("global 0", Mask::global(&[0]));
        same("blocks 4", Mask::blocks(4));
        same("dilated 3", Mask::dilated(3));
        same("columns 4 2", Mask::columns(4, 2));
        same("strided 4", Mask::strided(4));
        same("fixed 4 1", Mask::fixed(4, 1));
        same("longformer 2 0,5", Mask::longformer(2, &[0, 5]));
        let lists = KeyLists::new(&[[3, 9, 0]], [1, 1, 1]).unwrap();
        same("keys 3,9,0", Mask::keys(lists.row_block(13)));
        same("tree root,0, 0 ,root", Mask::tree(&[None, Some(0), Some(0), None]));
    }

    #[test]
    fn and_binds_tighter_than_or_and_brackets_group() {
        let (a, b, c) = (Mask::causal, || Mask::prefix(9), || Mask::dilated(2));
        same("causal|prefix 9&dilated 2", a().or(b().and(c())));
        same("prefix 9 & dilated 2 | causal", a().or(b().and(c())));
        same(" ( causal | prefix 9 ) & dilated 2 ", a().or(b()).and(c()));
        same(
            "causal & (window 3 | dilated 5)",
            a().and(Mask::full().window(3).or(Mask::dilated(5))),
        );
    }

    #[test]
    fn masks_may_be_given_beside_the_text() {
        let given = [Mask::prefix(9), Mask::dilated(2)];
        let scope = Scope { batch: 0, head: 0, q_len: 13, k_len: 17, offset: 4 };
        let mask = parse_mask_with("causal & ($1 | $0)", &given).unwrap();
        let expected = Mask::causal().and(Mask::dilated(2).or(Mask::prefix(9)));
        for (row, key) in (0..13).flat_map(|row| (0..17).map(move |key| (row, key))) {
            assert_eq!(mask.is_visible(&scope, row, key), expected.is_visible(&scope, row, key));
        }
        let why = parse_mask_with("causal & $2", &given).unwrap_err().to_string();
        assert!(why.contains("there is no $2: 2 masks"), "{why}");
    }

    #[test]
    fn errors_point_at_the_place_and_list_the_rules() {
        let why = |text: &str| parse_mask(text).map(|_| ()).unwrap_err();
        for (text, at, part) in [
            ("", 0, "found the end"),
            ("causal & windw 512", 9, "`windw`"),
            ("window", 6, "expected a number"),
            ("window x", 7, "expected a number"),
            ("causal causal", 7, "expected & or |"),
            ("(causal", 7, "closing bracket"),
            ("causal)", 6, "found `)`"),
            ("causal & ", 9, "found the end"),
            ("blocks 99999999999999999999", 7, "a number above"),
            ("segments 4294967296", 19, "a document above"),
            ("lengths 3,", 10, "expected a number"),
            ("tree rot,0", 5, "expected a number"),
            ("keys 4294967295", 15, "below 4294967295"),
            ("causal & é", 9, "found `é`"),
        ] {
            let error = why(text);
            assert_eq!(error.at, at, "{text}");
            assert!(error.to_string().contains(part), "{text}: {error}");
            assert!(error.to_string().contains("longformer WINDOW"), "{error}");
        }
        assert!(why("causal & windw 512").to_string().contains("\n           ^\n"));
    }

    #[test]
    fn length_is_bounded() {
        let list = |n: usize| format!("segments {}0", "0,".repeat(n));
        assert!(parse_mask(&list(100_000)).is_ok());
        let error = parse_mask(&list(LENGTH / 2)).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("16777226 bytes, and a mask has at most 16777216"), "{error}");
    }

    #[test]
    fn depth_and_number_of_rules_are_bounded() {
        let deep = |n: usize| format!("{}causal{}", "(".repeat(n), ")".repeat(n));
        assert!(parse_mask(&deep(DEPTH)).is_ok());
        assert!(parse_mask(&deep(DEPTH + 1)).unwrap_err().why.contains("brackets"));
        assert!(parse_mask(&"(".repeat(1 << 20)).is_err());
        assert!(parse_mask(&vec!["dilated 2"; COUNT].join("&")).is_ok());
        assert!(
            parse_mask(&vec!["dilated 2"; COUNT + 1].join("|"))
                .unwrap_err()
                .why
                .contains("64 rules")
        );
    }

    proptest! {
        #[test]
        fn no_text_panics(text in any::<String>()) {
            let _ = parse_mask(&text).map_err(|e| e.to_string());
        }

        #[test]
        fn no_heap_of_pieces_panics(pieces in prop::collection::vec(prop::sample::select(vec![
            "causal", "window", "band", "all", "tree", "root", "keys", "global", "longformer", "segments", "(", ")", "&", "|", ",", " ", "0",
            "7", "1099511627777", "é", "\n",
        ]), 0..40)) {
            let _ = parse_mask(&pieces.concat()).map_err(|e| e.to_string());
        }
    }
}
