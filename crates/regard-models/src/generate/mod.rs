//! Tokens from a model: greedily, by chance, or by beam search.
//!
//! A line: prompts ─► [`Decoder::feed`] ─► scores of every token ─► [`DecodingStrategy`] chooses ─► the chosen tokens are fed ─► … ─►
//! [`GeneratedSequence`]. All rows of a call, and all beams of all rows, are fed together. A row that ended leaves the batch. What a row
//! becomes depends on its prompt, its place and the search, and not on the other rows.
//!
//! ```
//! use regard_models::generate::{Decoder, GenerateError, DecodingStrategy, StoppingCriteria, generate};
//! use std::ops::ControlFlow;
//!
//! /// Says one more than it heard last.
//! struct Counter;
//!
//! impl Decoder for Counter {
//!     type State = ();
//!     type Error = GenerateError;
//!     fn vocab(&self) -> usize {
//!         10
//!     }
//!     fn context(&self) -> Option<usize> {
//!         None
//!     }
//!     fn start(&mut self, _row: usize) -> Result<(), GenerateError> {
//!         Ok(())
//!     }
//!     fn fork(&mut self, _past: &()) -> Result<(), GenerateError> {
//!         Ok(())
//!     }
//!     fn free(&mut self, _past: ()) -> Result<(), GenerateError> {
//!         Ok(())
//!     }
//!     fn feed(&mut self, _: &mut [()], tokens: &[&[u32]], _: &[usize]) -> Result<Vec<f32>, GenerateError> {
//!         let next = tokens.iter().map(|tokens| tokens[tokens.len() - 1] + 1);
//!         Ok(next.flat_map(|next| (0..10).map(move |id| if id == next { 5.0 } else { 0.0 })).collect())
//!     }
//! }
//!
//! let stop = StoppingCriteria { max_tokens: 8, end: vec![7] };
//! let mut on_token = |_row, _token| ControlFlow::Continue(());
//! let said = generate(&mut Counter, &[vec![3], vec![1, 5]], &DecodingStrategy::Greedy, &stop, &mut on_token)?;
//! assert_eq!(said[0].tokens, [4, 5, 6, 7]);
//! assert_eq!(said[1].tokens, [6, 7]);
//! # Ok::<(), GenerateError>(())
//! ```

mod attention;
mod batch;
mod choose;
mod error;
#[cfg(feature = "grammar")]
mod grammar;
mod prefix;
mod process;
mod row;
mod scheduler;
mod search;
mod stop;
#[cfg(test)]
mod toy;

pub use attention::{AttentionProbe, AttentionRow};
pub use error::GenerateError;
#[cfg(feature = "grammar")]
pub use grammar::{Grammar, GrammarCompiler};
pub use process::{Constraint, LogitsProcessors};
pub use scheduler::{Event, GRID, GeneratedToken, OnEvent, Request, Scheduler, Ticket};
pub use search::{
    DecodingStrategy, FinishReason, GeneratedSequence, GenerationOptions, Sampling,
    StoppingCriteria, Usage,
};
pub use stop::{Emit, StopStrings};

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::time::Instant;

/// A model as generation sees it: states that grow by tokens.
pub trait Decoder {
    /// One growing sequence: a handle of cached keys and values, or the state of a GRU.
    type State;
    /// What can go wrong in the model, and in generating with it.
    type Error: std::error::Error + From<GenerateError>;

    /// How many tokens there are; ids are `0..vocab`.
    fn vocab(&self) -> usize;

    /// The most tokens that a state can hold; none if it may grow without end.
    fn context(&self) -> Option<usize>;

    /// An empty state. The row is the place of its prompt in the call: a decoder that translates knows the sentence by it.
    fn start(&mut self, row: usize) -> Result<Self::State, Self::Error>;

    /// A second state that says the same. Feeding one leaves the other as it is.
    fn fork(&mut self, state: &Self::State) -> Result<Self::State, Self::Error>;

    /// Gives back what a state holds. Each state of a call comes here once, also if the call fails.
    fn free(&mut self, state: Self::State) -> Result<(), Self::Error>;

    /// Feeds `tokens[i]` to `states[i]`: one token or more, and not always as many to each.
    /// Returns `[Σ scored, vocab]`: scores of what comes after each of the last `scored[i]` tokens of a state, before any softmax. That is
    /// 0 or 1, and more only if the decoder [speculates](Self::speculates). A score of -inf is never chosen.
    fn feed(
        &mut self,
        states: &mut [Self::State],
        tokens: &[&[u32]],
        scored: &[usize],
    ) -> Result<Vec<f32>, Self::Error>;

    /// Takes the memory of scores back, for the next ones: a vocabulary for each of many states is too much to ask the system for each
    /// time.
    fn recycle(&mut self, _scores: Vec<f32>) {}

    /// Whether it can score more than the last token, and [`truncate`](Self::truncate).
    fn speculates(&self) -> bool {
        false
    }

    /// The memory that all states share, if it has a limit.
    fn memory(&self) -> Option<Pages> {
        None
    }

    /// The layers, and the heads of each, that a probe may ask for.
    fn attention(&self) -> [usize; 2] {
        [0; 2]
    }

    /// From now on, what this state looks at is kept for [`seen`](Self::seen).
    fn probe(&mut self, _state: &mut Self::State, _probe: &AttentionProbe) {}

    /// What a state with a probe looked at when its last token was fed.
    fn seen(&mut self, _state: &mut Self::State) -> Vec<AttentionRow> {
        Vec::new()
    }

    /// A state forgets all but the first `len` tokens that it was fed. It has as many at least.
    fn truncate(&mut self, _state: &mut Self::State, _len: usize) -> Result<(), Self::Error> {
        Err(GenerateError::NoTruncate.into())
    }
}

/// Memory in pages. A state takes whole pages; those of tokens that it shares with others are shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// All there are.
    pub count: usize,
    /// Tokens that a page holds.
    pub tokens: usize,
}

impl Pages {
    /// The pages that tokens take.
    fn of(self, tokens: usize) -> usize {
        tokens.div_ceil(self.tokens)
    }
}

impl<D: Decoder> Decoder for &mut D {
    type State = D::State;
    type Error = D::Error;

    fn vocab(&self) -> usize {
        (**self).vocab()
    }

    fn context(&self) -> Option<usize> {
        (**self).context()
    }

    fn start(&mut self, row: usize) -> Result<D::State, D::Error> {
        (**self).start(row)
    }

    fn fork(&mut self, state: &D::State) -> Result<D::State, D::Error> {
        (**self).fork(state)
    }

    fn free(&mut self, state: D::State) -> Result<(), D::Error> {
        (**self).free(state)
    }

    fn feed(
        &mut self,
        states: &mut [D::State],
        tokens: &[&[u32]],
        scored: &[usize],
    ) -> Result<Vec<f32>, D::Error> {
        (**self).feed(states, tokens, scored)
    }

    fn recycle(&mut self, scores: Vec<f32>) {
        (**self).recycle(scores);
    }

    fn speculates(&self) -> bool {
        (**self).speculates()
    }

    fn memory(&self) -> Option<Pages> {
        (**self).memory()
    }

    fn attention(&self) -> [usize; 2] {
        (**self).attention()
    }

    fn probe(&mut self, state: &mut D::State, probe: &AttentionProbe) {
        (**self).probe(state, probe);
    }

    fn seen(&mut self, state: &mut D::State) -> Vec<AttentionRow> {
        (**self).seen(state)
    }

    fn truncate(&mut self, state: &mut D::State, len: usize) -> Result<(), D::Error> {
        (**self).truncate(state, len)
    }
}

/// Continues each prompt until it ends; one [`GeneratedSequence`] per prompt, in their order.
///
/// Greedy search and sampling tell `on_token` of each token as it is chosen, the end token too; `Break` ends that row, and the others
/// go on. A beam search knows its tokens when the row has ended: it tells those of the best hypothesis then, and `Break` means to
/// hear no more of the row.
///
/// # Errors
/// Everything about the call is checked before the decoder is asked for anything. Later, scores that cannot be chosen from
/// are errors, and those of the decoder are handed on. All states are freed in any case.
pub fn generate<D: Decoder>(
    decoder: &mut D,
    prompts: &[Vec<u32>],
    search: &DecodingStrategy,
    stop: &StoppingCriteria,
    on_token: &mut dyn FnMut(usize, u32) -> ControlFlow<()>,
) -> Result<Vec<GeneratedSequence>, D::Error> {
    let options = GenerationOptions::new(search.clone(), stop.clone());
    Ok(generate_with(decoder, prompts, &options, on_token)?.0)
}

/// [`generate()`] with all that can be asked for; also tells how long it took.
///
/// # Errors
/// Those of [`generate()`], and what a constraint says.
pub fn generate_with<D: Decoder>(
    decoder: &mut D,
    prompts: &[Vec<u32>],
    options: &GenerationOptions,
    on_token: &mut dyn FnMut(usize, u32) -> ControlFlow<()>,
) -> Result<(Vec<GeneratedSequence>, Usage), D::Error> {
    let mut scheduler = Scheduler::new(decoder, PROMPT_TOKENS);
    generate_all(&mut scheduler, prompts, options, None, on_token)
}

/// [`generate_with`] by a scheduler, which may keep beginnings of prompts for this owner.
pub(crate) fn generate_all<D: Decoder>(
    scheduler: &mut Scheduler<D>,
    prompts: &[Vec<u32>],
    options: &GenerationOptions,
    prefix: Option<u64>,
    on_token: &mut dyn FnMut(usize, u32) -> ControlFlow<()>,
) -> Result<(Vec<GeneratedSequence>, Usage), D::Error> {
    let mut rows = HashMap::with_capacity(prompts.len());
    for (row, prompt) in prompts.iter().enumerate() {
        let (prompt, options) = (prompt.clone(), options.clone());
        let ticket = scheduler.admit(Request { prompt, options, row, prefix })?;
        rows.insert(ticket, row);
    }
    let started = Instant::now();
    // When each row had its first token, and what it became.
    let mut prompted = vec![None; prompts.len()];
    let mut sequences: Vec<Option<GeneratedSequence>> = vec![None; prompts.len()];
    let (mut failed, mut cached_tokens) = (None, 0);
    while !scheduler.is_idle() {
        scheduler.step(&mut |ticket, event| {
            let row = rows[&ticket];
            match event {
                Event::Started { cached } => cached_tokens += cached,
                Event::Token(choice) => {
                    prompted[row].get_or_insert_with(|| started.elapsed());
                    return on_token(row, choice.token);
                }
                Event::Finished(sequence) => sequences[row] = Some(sequence),
                Event::Failed(error) => failed = Some(failed.take().unwrap_or(error)),
            }
            ControlFlow::Continue(())
        })?;
        if let Some(error) = failed {
            return Err(error.into());
        }
    }
    let (whole, prompted) = (started.elapsed(), prompted.into_iter().flatten().max());
    let (sequences, prompted): (Vec<_>, _) =
        (sequences.into_iter().flatten().collect(), prompted.unwrap_or_default());
    let usage = Usage {
        prompts: prompts.len(),
        prompt_tokens: prompts.iter().map(Vec::len).sum(),
        cached_tokens,
        generated_tokens: sequences.iter().map(|one| one.tokens.len()).sum(),
        prompt_seconds: prompted.as_secs_f64(),
        generation_seconds: (whole - prompted).as_secs_f64(),
    };
    Ok((sequences, usage))
}

/// Tokens of prompts that are fed at once: bounds the memory of their activations.
pub(crate) const PROMPT_TOKENS: usize = 1 << 12;

#[cfg(test)]
mod tests {
    use super::toy::{Toy, ToyError, beam, run, sample, stop};
    use super::*;

    fn refusal(result: Result<Vec<GeneratedSequence>, ToyError>) -> GenerateError {
        match result {
            Err(ToyError::Generate(error)) => error,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn tokens_are_drawn_as_often_as_the_model_says() {
        let table = [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.25, 0.25, 0.5]];
        for temperature in [0.5, 1.0, 2.0] {
            let sampling = Sampling { temperature, seed: 7, ..Sampling::default() };
            let search = DecodingStrategy::Sample(sampling);
            let forever = StoppingCriteria { max_tokens: 30_000, end: vec![] };
            let tokens = run(&mut Toy::markov(table), &[vec![0]], &search, &forever)
                .unwrap()
                .remove(0)
                .tokens;
            let mut counts = [[0.0; 3]; 3];
            for pair in tokens.windows(2) {
                counts[pair[0] as usize][pair[1] as usize] += 1.0;
            }
            let mut chi = 0.0;
            for (counts, row) in counts.iter().zip(table) {
                let weights = row.map(|p: f32| f64::from(p).powf(1.0 / f64::from(temperature)));
                let (n, total): (f64, f64) = (counts.iter().sum(), weights.iter().sum());
                let expected = weights.map(|weight| n * weight / total);
                chi += counts.iter().zip(expected).map(|(n, e)| (n - e).powi(2) / e).sum::<f64>();
            }
            assert!(chi < 22.5, "{chi}"); // one in a thousand with 6 degrees of freedom
        }
    }

    #[test]
    fn a_seed_means_the_same_tokens_and_each_row_has_its_own_chance() {
        let mut toy = Toy::noise(9, 1);
        let prompts = vec![vec![4]; 3];
        let forever = StoppingCriteria { max_tokens: 4, end: vec![] };
        let mut drawn = |seed| run(&mut toy, &prompts, &sample(seed), &forever).unwrap();
        let first = drawn(5);
        assert_eq!(first, drawn(5));
        assert_ne!(first, drawn(6));
        assert!(first[0] != first[1] && first[1] != first[2]);
        let tokens: Vec<_> = first.iter().map(|row| row.tokens.clone()).collect();
        assert_eq!(
            tokens,
            [[6, 2, 1, 3], [3, 8, 4, 7], [4, 1, 0, 1]],
            "what a seed means is a promise"
        );
    }

    #[test]
    fn a_row_does_not_depend_on_who_shares_its_batch() {
        let prompts = [vec![1], vec![2, 3, 4], vec![5], vec![1, 1], vec![6, 2]];
        let mut toy = Toy::noise(7, 3);
        for search in [DecodingStrategy::Greedy, beam(3, 0.7)] {
            let together = run(&mut toy, &prompts, &search, &stop(12)).unwrap();
            for (prompt, row) in prompts.iter().zip(together) {
                assert_eq!(
                    run(&mut toy, std::slice::from_ref(prompt), &search, &stop(12)).unwrap(),
                    [row]
                );
            }
        }
        // Chance belongs to the place, so the others are replaced and not left out.
        let together = run(&mut toy, &prompts, &sample(1), &stop(12)).unwrap();
        for (place, row) in together.iter().enumerate() {
            let mut others = vec![vec![3, 3, 3]; 5];
            others[place].clone_from(&prompts[place]);
            assert_eq!(run(&mut toy, &others, &sample(1), &stop(12)).unwrap()[place], *row);
        }
    }

    #[test]
    fn rows_that_ended_leave_the_batch() {
        // 3 says 2, 2 says 1, 1 says 0.
        let mut toy = Toy::new(4, |history| {
            let last = history[history.len() - 1];
            (0..4).map(|id| if id + 1 == last { 0.0 } else { f32::NEG_INFINITY }).collect()
        });
        let said = run(&mut toy, &[vec![1], vec![3], vec![2]], &DecodingStrategy::Greedy, &stop(9))
            .unwrap();
        assert_eq!(said.iter().map(|row| row.tokens.len()).collect::<Vec<_>>(), [1, 3, 2]);
        assert!(
            said.iter().all(|row| row.finish_reason == FinishReason::EndToken && row.score == 0.0)
        );
        assert_eq!(toy.fed, [3, 2, 1]);
        let beams = run(&mut toy, &[vec![1], vec![3], vec![2]], &beam(4, 1.0), &stop(9)).unwrap();
        assert_eq!(beams, said);
    }

    #[test]
    fn a_row_ends_when_its_past_is_full() {
        let forever = StoppingCriteria { max_tokens: 4, end: vec![] };
        let mut toy = Toy::noise(5, 8);
        toy.context = Some(5);
        for search in [DecodingStrategy::Greedy, sample(3), beam(2, 1.0)] {
            let prompts = [vec![1; 5], vec![1; 3], vec![1; 2], vec![1]];
            let said = run(&mut toy, &prompts, &search, &forever).unwrap();
            let ends: Vec<_> =
                said.iter().map(|row| (row.tokens.len(), row.finish_reason)).collect();
            let full = [(1, FinishReason::Context), (3, FinishReason::Context)];
            assert_eq!(ends, [&full[..], &[(4, FinishReason::MaxTokens); 2]].concat());
            let error = refusal(run(&mut toy, &[vec![1], vec![1; 6]], &search, &forever));
            assert_eq!(error, GenerateError::TooLong { row: 1, len: 6, context: 5 });
        }
    }

    #[test]
    fn tokens_are_told_as_they_are_chosen_and_break_ends_that_row_only() {
        let mut toy = Toy::noise(8, 2);
        let forever = StoppingCriteria { max_tokens: 5, end: vec![] };
        let prompts = [vec![1], vec![2]];
        for search in [DecodingStrategy::Greedy, sample(4), beam(3, 1.0)] {
            let mut told = vec![Vec::new(); 2];
            let mut hear = |row: usize, token| {
                told[row].push(token);
                if row == 0 && told[0].len() == 2 {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            };
            let said = generate(&mut toy, &prompts, &search, &forever, &mut hear).unwrap();
            let whole = run(&mut toy, &prompts, &search, &forever).unwrap();
            assert_eq!(told, [&whole[0].tokens[..2], &whole[1].tokens[..]]);
            assert_eq!(said[1], whole[1]);
            if let DecodingStrategy::Beam { .. } = search {
                assert_eq!(said[0], whole[0]);
            } else {
                assert_eq!(
                    (&said[0].tokens, said[0].finish_reason),
                    (&told[0], FinishReason::Interrupted)
                );
            }
        }
    }

    #[test]
    fn every_past_is_freed_wherever_the_decoder_fails() {
        let prompts = [vec![1], vec![2, 3], vec![4]];
        for search in [DecodingStrategy::Greedy, sample(2), beam(3, 0.5)] {
            let fails = (0..).take_while(|calls| {
                let mut toy = Toy::noise(6, 11);
                toy.calls_left = Some(*calls);
                match run(&mut toy, &prompts, &search, &stop(6)) {
                    Ok(_) => false,
                    Err(error) => matches!(error, ToyError::Broken),
                }
            });
            assert!(fails.count() > 8, "{search:?}");
        }
    }

    #[test]
    fn every_past_is_freed_when_on_token_panics() {
        let mut toy = Toy::noise(6, 11);
        let call = std::panic::AssertUnwindSafe(|| {
            generate(
                &mut toy,
                &[vec![1], vec![2]],
                &DecodingStrategy::Greedy,
                &stop(6),
                &mut |_, _| panic!("on purpose"),
            )
        });
        assert!(std::panic::catch_unwind(call).is_err());
        assert_eq!(toy.alive(), 0);
    }

    #[test]
    fn usage_counts_tokens_and_divides_the_time() {
        let mut toy = Toy::new(3, |history| {
            std::thread::sleep(std::time::Duration::from_millis(if history.len() == 2 {
                20
            } else {
                1
            }));
            vec![0.0, 1.0, 0.0]
        });
        let options = GenerationOptions::new(DecodingStrategy::Greedy, stop(4));
        let (said, usage) =
            super::toy::run_with(&mut toy, &[vec![1, 2], vec![2, 2]], &options).unwrap();
        assert_eq!(said.len(), 2);
        assert_eq!((usage.prompts, usage.prompt_tokens, usage.generated_tokens), (2, 4, 8));
        assert!(usage.prompt_seconds > 0.039 && usage.generation_seconds > 0.005, "{usage:?}");
        assert!(usage.prompt_tokens_per_second() < 110.0);
        assert!((1.0..1200.0).contains(&usage.generated_tokens_per_second()));
        assert_eq!(Usage::default().prompt_tokens_per_second(), 0.0);
    }

    #[test]
    fn nonsense_is_refused_with_its_place() {
        let nan_after_two = |history: &[u32]| match history.last() {
            Some(2) => vec![0.0, 1.0, f32::NAN],
            Some(1) => vec![f32::NEG_INFINITY; 3],
            _ => vec![0.0],
        };
        let mut toy = Toy::new(3, nan_after_two);
        for search in [DecodingStrategy::Greedy, sample(0), beam(2, 0.0)] {
            let mut refused =
                |prompts: &[Vec<u32>]| refusal(run(&mut toy, prompts, &search, &stop(3)));
            assert_eq!(refused(&[vec![2]]), GenerateError::NotFinite { row: 0, token: 2 });
            assert_eq!(refused(&[vec![1], vec![2]]), GenerateError::NoSelection { row: 0 });
            assert_eq!(
                refused(&[vec![0]]),
                GenerateError::Scores { got: 1, expected: 1, vocab: 3 }
            );
            assert_eq!(refused(&[vec![1], vec![]]), GenerateError::Empty { row: 1 });
            assert_eq!(
                refused(&[vec![1, 3]]),
                GenerateError::Unknown { row: 0, token: 3, vocab: 3 }
            );
        }
        assert_eq!(run(&mut toy, &[], &DecodingStrategy::Greedy, &stop(3)).unwrap(), []);
        let bad = refusal(run(&mut toy, &[vec![1]], &beam(0, 0.0), &stop(3)));
        assert!(matches!(bad, GenerateError::Field { field: "width", .. }));
    }
}
