//! What changes the scores of a model before a token is chosen.

use super::GenerateError;
use super::search::field;
use std::collections::BTreeMap;
use std::fmt;

/// Changes of the scores before a token is chosen, the same in every strategy. The defaults change nothing.
///
/// They work in the order of the fields. `repetition_penalty` and `no_repeat_ngram_size` look at the prompt and at what was generated,
/// as in Transformers; `presence_penalty` and `frequency_penalty` at what was generated, as in the API of OpenAI.
#[derive(Clone, Debug, PartialEq)]
pub struct LogitsProcessors {
    /// Divides the scores above 0 of tokens that were there before, and multiplies those below: above 1 for less repetition.
    pub repetition_penalty: f32,
    /// Subtracted from the score of each token that was generated before.
    pub presence_penalty: f32,
    /// Subtracted from the score of a token for each time that it was generated before.
    pub frequency_penalty: f32,
    /// Added to the scores of these tokens. At -inf a token is never chosen.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Tokens that are never chosen.
    pub suppressed: Vec<u32>,
    /// No sequence of so many tokens comes twice. 0: any may.
    pub no_repeat_ngram_size: usize,
    /// No end token before so many others were generated.
    pub min_tokens: usize,
}

impl Default for LogitsProcessors {
    fn default() -> Self {
        Self {
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            suppressed: Vec::new(),
            no_repeat_ngram_size: 0,
            min_tokens: 0,
        }
    }
}

impl LogitsProcessors {
    /// Whether the numbers make sense for a model with so many tokens.
    pub fn check(&self, vocab: usize) -> Result<(), GenerateError> {
        let penalty = self.repetition_penalty;
        let fine = penalty.is_finite() && penalty > 0.0;
        field(fine, "repetition_penalty", penalty, "finite and above 0; 1 changes nothing")?;
        for (name, penalty) in [
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ] {
            field(penalty.is_finite(), name, penalty, "finite; 0 changes nothing")?;
        }
        for (token, bias) in &self.logit_bias {
            let fine = bias.is_finite() || *bias == f32::NEG_INFINITY;
            field(fine, "logit_bias", bias, "finite or -inf")?;
            let below = format!("below {vocab}, as all ids");
            field((*token as usize) < vocab, "logit_bias", token, below)?;
        }
        match self.suppressed.iter().find(|token| **token as usize >= vocab) {
            Some(token) => field(false, "suppressed", token, format!("below {vocab}, as all ids")),
            None => Ok(()),
        }
    }

    /// The scores after `prompt` and `generated`.
    pub(super) fn apply(&self, prompt: &[u32], generated: &[u32], end: &[u32], scores: &mut [f32]) {
        let mut of = |token: u32, change: &dyn Fn(f32) -> f32| {
            if let Some(score) = scores.get_mut(token as usize) {
                // What no change may allow stays so, and no large number becomes +inf.
                *score = change(*score).min(f32::MAX);
            }
        };
        if self.repetition_penalty != 1.0 {
            let penalty = self.repetition_penalty;
            let change = |score: f32| if score < 0.0 { score * penalty } else { score / penalty };
            for token in counts(prompt.iter().chain(generated)).into_keys() {
                of(token, &change);
            }
        }
        if (self.presence_penalty, self.frequency_penalty) != (0.0, 0.0) {
            for (token, count) in counts(generated.iter()) {
                let less = self.presence_penalty + self.frequency_penalty * count as f32;
                of(token, &|score| score - less);
            }
        }
        for (token, bias) in &self.logit_bias {
            of(*token, &|score| score + bias);
        }
        let early = if generated.len() < self.min_tokens { end } else { &[] };
        for token in self.suppressed.iter().chain(early) {
            of(*token, &|_| f32::NEG_INFINITY);
        }
        if let Some(last) = self.no_repeat_ngram_size.checked_sub(1) {
            let whole = [prompt, generated].concat();
            let Some(start) = whole.len().checked_sub(last) else { return };
            for ngram in whole.windows(last + 1).filter(|ngram| ngram[..last] == whole[start..]) {
                of(ngram[last], &|_| f32::NEG_INFINITY);
            }
        }
    }
}

fn counts<'a>(tokens: impl Iterator<Item = &'a u32>) -> BTreeMap<u32, usize> {
    let mut counts = BTreeMap::new();
    for token in tokens {
        *counts.entry(*token).or_default() += 1;
    }
    counts
}

/// A language that the generated tokens must belong to, and the place in it that a sequence has reached.
pub trait Constraint: fmt::Debug + Send + Sync {
    /// A second one at the same place.
    fn fork(&self) -> Box<dyn Constraint>;

    /// Sets the scores of tokens that cannot come next to -inf, and leaves the others. End tokens can come where the language may end.
    /// Errors are texts.
    fn mask(&mut self, scores: &mut [f32]) -> Result<(), String>;

    /// Goes on by a token that the mask has left. Not called for end tokens.
    fn accept(&mut self, token: u32) -> Result<(), String>;
}

impl Clone for Box<dyn Constraint> {
    fn clone(&self) -> Self {
        self.fork()
    }
}

/// The continuation, of at most `most` tokens, of the last earlier place with the same 3 tokens at its end, or the same 2.
pub(super) fn look_up(history: &[u32], most: usize) -> &[u32] {
    let found = [3, 2].into_iter().find_map(|n| {
        let end = history.len().checked_sub(n)?;
        // The windows that end before the last token, so that something follows.
        let mut before = history[..history.len() - 1].windows(n);
        before.rposition(|ngram| *ngram == history[end..]).map(|at| at + n)
    });
    let rest = found.map_or(&[][..], |at| &history[at..]);
    &rest[..rest.len().min(most)]
}

#[cfg(test)]
mod tests {
    use super::super::toy::{Toy, beam, run_with, sample, stop};
    use super::super::{DecodingStrategy, GenerateError, GenerationOptions};
    use super::*;

    fn applied(processors: LogitsProcessors, scores: &[f32]) -> Vec<f32> {
        let mut scores = scores.to_vec();
        processors.apply(&[0, 1], &[1, 3, 3], &[4], &mut scores);
        scores
    }

    fn inert() -> LogitsProcessors {
        LogitsProcessors::default()
    }

    #[test]
    fn each_one_does_what_its_definition_says() {
        let (scores, never) = ([2.0, -1.0, 1.0, 0.5, 0.25], f32::NEG_INFINITY);
        assert_eq!(applied(inert(), &scores), scores);
        let repetition = LogitsProcessors { repetition_penalty: 2.0, ..inert() };
        assert_eq!(applied(repetition, &scores), [1.0, -2.0, 1.0, 0.25, 0.25]);
        let presence = LogitsProcessors { presence_penalty: 0.5, ..inert() };
        assert_eq!(applied(presence, &scores), [2.0, -1.5, 1.0, 0.0, 0.25]);
        let frequency = LogitsProcessors { frequency_penalty: 0.5, ..inert() };
        assert_eq!(applied(frequency, &scores), [2.0, -1.5, 1.0, -0.5, 0.25]);
        let logit_bias = BTreeMap::from([(0, never), (2, 3.0)]);
        let bias = LogitsProcessors { logit_bias, ..inert() };
        assert_eq!(applied(bias, &scores), [never, -1.0, 4.0, 0.5, 0.25]);
        let suppressed = LogitsProcessors { suppressed: vec![2], ..inert() };
        assert_eq!(applied(suppressed, &scores), [2.0, -1.0, never, 0.5, 0.25]);
        let min = |min_tokens| LogitsProcessors { min_tokens, ..inert() };
        assert_eq!(applied(min(4), &scores), [2.0, -1.0, 1.0, 0.5, never]);
        assert_eq!(applied(min(3), &scores), scores);
        let ngram = |no_repeat_ngram_size| LogitsProcessors { no_repeat_ngram_size, ..inert() };
        assert_eq!(applied(ngram(1), &scores), [never, never, 1.0, never, 0.25]);
        assert_eq!(applied(ngram(2), &scores), [2.0, -1.0, 1.0, never, 0.25]);
        assert_eq!(applied(ngram(3), &scores), scores);
        assert_eq!(applied(ngram(9), &scores), scores);
    }

    #[test]
    fn every_strategy_follows_them_and_tells_the_scores_of_the_model() {
        let processors = LogitsProcessors {
            no_repeat_ngram_size: 1,
            suppressed: vec![2],
            min_tokens: 3,
            ..inert()
        };
        for strategy in [DecodingStrategy::Greedy, sample(3), beam(3, 1.0)] {
            for seed in 0..20 {
                let mut toy = Toy::noise(9, seed);
                let options = GenerationOptions {
                    processors: processors.clone(),
                    ..GenerationOptions::new(strategy.clone(), stop(5))
                };
                let said = run_with(&mut toy, &[vec![1]], &options).unwrap().0.remove(0);
                let mut seen = [&[1, 2], said.tokens.as_slice()].concat();
                seen.sort_unstable();
                seen.dedup();
                assert_eq!(seen.len(), said.tokens.len() + 2, "{said:?}");
                assert!(said.tokens.iter().position(|token| *token == 0).unwrap_or(3) >= 3);
                if matches!(strategy, DecodingStrategy::Beam { .. }) {
                    continue;
                }
                let (mut history, mut sum) = (vec![1], 0.0);
                for token in said.tokens {
                    let scores = toy.scores(&history);
                    let total: f64 = scores.iter().map(|s| f64::from(*s).exp()).sum();
                    sum += f64::from(scores[token as usize]) - total.ln();
                    history.push(token);
                }
                assert!((sum - said.score).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn nonsense_is_refused_with_its_field() {
        let says = |processors: LogitsProcessors, start: &str| {
            let message = processors.check(5).unwrap_err().to_string();
            assert!(message.starts_with(start), "{message}");
        };
        says(LogitsProcessors { repetition_penalty: 0.0, ..inert() }, "repetition_penalty: 0;");
        says(LogitsProcessors { presence_penalty: f32::NAN, ..inert() }, "presence_penalty: NaN;");
        says(LogitsProcessors { frequency_penalty: f32::INFINITY, ..inert() }, "frequency_pen");
        let logit_bias = BTreeMap::from([(5, 1.0)]);
        says(LogitsProcessors { logit_bias, ..inert() }, "logit_bias: 5; it must be below 5");
        let logit_bias = BTreeMap::from([(1, f32::INFINITY)]);
        says(LogitsProcessors { logit_bias, ..inert() }, "logit_bias: inf; it must be finite or");
        says(
            LogitsProcessors { suppressed: vec![7], ..inert() },
            "suppressed: 7; it must be below",
        );
        let mut options = GenerationOptions::new(DecodingStrategy::Greedy, stop(3));
        options.processors.suppressed = vec![0, 1, 2];
        let error = run_with(&mut Toy::noise(3, 1), &[vec![1]], &options).unwrap_err();
        assert!(error.to_string().contains("NoSelection"), "{error}");
        options.constraint = Some(Box::new(Parity(0)));
        options.stop.end.clear();
        assert!(matches!(options.check(3), Err(GenerateError::Field { field: "end", .. })));
    }

    /// Even and odd tokens take turns; the end after an odd one.
    #[derive(Clone, Debug)]
    struct Parity(u32);

    impl Constraint for Parity {
        fn fork(&self) -> Box<dyn Constraint> {
            Box::new(self.clone())
        }

        fn mask(&mut self, scores: &mut [f32]) -> Result<(), String> {
            for (id, score) in (0..).zip(scores) {
                if (id + self.0) % 2 == 1 {
                    *score = f32::NEG_INFINITY;
                }
            }
            Ok(())
        }

        fn accept(&mut self, token: u32) -> Result<(), String> {
            self.0 += 1;
            if token == 8 { Err("8 is too much".into()) } else { Ok(()) }
        }
    }

    #[test]
    fn every_hypothesis_has_a_constraint_of_its_own() {
        for strategy in [DecodingStrategy::Greedy, sample(3), beam(3, 1.0)] {
            let mut options = GenerationOptions::new(strategy, stop(8));
            options.constraint = Some(Box::new(Parity(0)));
            let mut toy = Toy::noise(7, 5);
            let said = run_with(&mut toy, &[vec![1], vec![2]], &options).unwrap().0;
            for one in said.iter().flat_map(|one| std::iter::once(one).chain(&one.others)) {
                assert!(one.tokens.iter().zip(0..).all(|(token, i)| token % 2 == i % 2), "{one:?}");
            }
            options.processors.suppressed = (0..8).collect();
            let error = run_with(&mut Toy::noise(9, 5), &[vec![1]], &options).unwrap_err();
            assert!(error.to_string().contains("8 is too much"), "{error}");
        }
    }

    #[test]
    fn the_last_place_of_the_longest_match_is_continued() {
        assert_eq!(look_up(&[1, 2, 3, 9, 8, 2, 3, 7, 1, 2, 3], 2), [9, 8]);
        assert_eq!(look_up(&[2, 3, 9, 2, 3, 7, 6, 2, 3], 8), [7, 6, 2, 3]);
        assert_eq!(look_up(&[5, 5, 5], 8), [5]);
        assert_eq!(look_up(&[5, 5, 5, 5], 8), [5]);
        assert!(look_up(&[1, 2, 3], 8).is_empty());
        assert!(look_up(&[1], 8).is_empty());
    }

    #[test]
    fn prompt_lookup_changes_no_token_and_saves_steps() {
        let prompts = [vec![1, 2, 3, 1, 2], vec![4], vec![2, 2, 2, 5]];
        let mut saved = 0;
        for seed in 0..60 {
            for strategy in [DecodingStrategy::Greedy, sample(seed), beam(2, 1.0)] {
                // A text that depends on its last two tokens, and so repeats itself.
                let vocab = [4, 5, 6, 7][usize::try_from(seed % 4).unwrap()];
                let noise = Toy::noise(vocab, seed);
                let mut toy = Toy::new(vocab, move |history| {
                    noise.scores(&history[history.len().saturating_sub(2)..])
                });
                toy.context = (seed % 3 == 0).then_some(25);
                let mut options = GenerationOptions::new(strategy, stop(40));
                if seed % 2 == 0 {
                    options.stop.end.clear();
                }
                options.processors.frequency_penalty = if seed % 5 == 0 { 0.1 } else { 0.0 };
                let prompts: Vec<Vec<u32>> =
                    prompts.iter().map(|p| p.iter().map(|t| t % 4).collect()).collect();
                let plain = run_with(&mut toy, &prompts, &options).unwrap().0;
                let steps = std::mem::take(&mut toy.fed).len();
                options.prompt_lookup = 8;
                // A decoder that cannot is asked once.
                assert_eq!(run_with(&mut toy, &prompts, &options).unwrap().0, plain);
                assert_eq!(std::mem::take(&mut toy.fed).len(), steps);
                toy.speculates = true;
                assert_eq!(run_with(&mut toy, &prompts, &options).unwrap().0, plain);
                assert!(toy.fed.len() <= steps);
                saved += steps - toy.fed.len();
            }
        }
        assert!(saved > 500, "{saved}");
    }
}
