//! Strings that end a text, found in a stream of its pieces.

/// Watches a text for strings that end it. A string may begin in one piece and end in another, so text that could still be the start
/// of one is held back. What comes out does not depend on how the text is divided.
///
/// ```
/// use regard_models::generate::StopStrings;
///
/// let mut stops = StopStrings::new(["\nUser:"]);
/// assert_eq!(stops.push("Hello\nUs").text, "Hello");
/// let last = stops.push("er: more");
/// assert!(last.stopped && last.text.is_empty());
/// ```
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    stopped: bool,
}

/// What a piece of text gives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Emit {
    /// Text that belongs to the output for certain.
    pub text: String,
    /// A stop string is complete. The output ends before it, and further pieces give nothing.
    pub stopped: bool,
}

impl StopStrings {
    /// Ends at the first of these that is complete. Empty ones are left out.
    pub fn new(stops: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let stops = stops.into_iter().map(Into::into).filter(|stop| !stop.is_empty());
        Self { stops: stops.collect(), ..Self::default() }
    }

    /// The next piece of the text.
    pub fn push(&mut self, piece: &str) -> Emit {
        if self.stopped {
            return Emit { text: String::new(), stopped: true };
        }
        self.held += piece;
        let found = |stop: &String| self.held.find(stop).map(|at| (at + stop.len(), at));
        // The one that ends first: one that began earlier and ends later would be seen or not by how the text is divided.
        if let Some((_, at)) = self.stops.iter().filter_map(found).min() {
            self.stopped = true;
            self.held.truncate(at);
            return Emit { text: std::mem::take(&mut self.held), stopped: true };
        }
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let from = (self.held.len() + 1).saturating_sub(longest);
        let starts = |at: &usize| {
            self.stops.iter().any(|stop| stop.as_bytes().starts_with(&self.held.as_bytes()[*at..]))
        };
        let at = (from..self.held.len()).find(starts).unwrap_or(self.held.len());
        let rest = self.held.split_off(at);
        Emit { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }

    /// The text that was held back, when no more pieces come.
    #[must_use]
    pub fn finish(self) -> String {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn through(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut watch = StopStrings::new(stops.iter().copied());
        let (mut text, mut stopped) = (String::new(), false);
        for piece in pieces {
            let emit = watch.push(piece);
            assert!(!stopped || emit == Emit { text: String::new(), stopped: true });
            text += &emit.text;
            stopped = emit.stopped;
        }
        (text + &watch.finish(), stopped)
    }

    #[test]
    fn text_is_held_back_only_while_it_could_be_the_start_of_a_stop_string() {
        let mut stops = StopStrings::new(["</s>", "", "\n\n"]);
        let told = ["a<", "b</", "s", " \n", "c\n", "\nd"].map(|piece| stops.push(piece).text);
        assert_eq!(told, ["a", "<b", "", "</s ", "\nc", ""]);
        assert!(stops.push("x").stopped);
        assert_eq!(through(&["aab"], &["a", "a", "a", "b"]), ("a".into(), true));
        assert_eq!(through(&["。end"], &["猫。", "猫"]), ("猫。猫".into(), false));
        assert_eq!(through(&[], &["a", "b"]), ("ab".into(), false));
    }

    proptest! {
        #[test]
        fn the_division_of_a_text_does_not_matter(
            text in "[abé]{0,20}", stops in prop::collection::vec("[abé]{1,4}", 0..4), cuts in any::<u32>(),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let mut pieces = vec![String::new()];
            for (n, c) in text.chars().enumerate() {
                if cuts >> n & 1 == 1 {
                    pieces.push(String::new());
                }
                pieces.last_mut().unwrap().push(c);
            }
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(through(&stops, &pieces), through(&stops, &[&text]));
            let ends = (0..=text.len()).filter(|end| text.is_char_boundary(*end));
            let first = ends.flat_map(|end| stops.iter().map(move |stop| (end, stop)))
                .filter(|(end, stop)| text[..*end].ends_with(**stop))
                .map(|(end, stop)| (end, end - stop.len())).min();
            let want = first.map_or(&text[..], |(_, at)| &text[..at]);
            prop_assert_eq!(through(&stops, &pieces), (want.to_owned(), first.is_some()));
        }
    }
}
