//! One prompt on its way: what it became so far, and the step to the next token.

use super::choose::{best, descending, draw, kept, largest, log_sum};
use super::error::check_scores;
use super::process::look_up;
use super::{
    AttentionProbe, AttentionRow, Constraint, DecodingStrategy, FinishReason, GRID, GenerateError,
    GeneratedSequence, GeneratedToken, GenerationOptions, Request,
};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rayon::prelude::*;
use std::mem::take;
use std::ops::{ControlFlow, Range};
use std::slice::from_ref;

/// A hypothesis that goes on.
#[derive(Clone, Default)]
struct Line {
    tokens: Vec<u32>,
    score: f64,
    constraint: Option<Box<dyn Constraint>>,
}

impl Line {
    fn end(self, finish_reason: FinishReason) -> GeneratedSequence {
        GeneratedSequence {
            tokens: self.tokens,
            score: self.score,
            finish_reason,
            others: Vec::new(),
        }
    }
}

/// What the row of a prompt knows.
pub(super) struct Row {
    row: usize,
    prompt: Vec<u32>,
    /// Tokens of the prompt that its state was fed.
    fed: usize,
    options: GenerationOptions,
    /// Scores are chosen from as they are.
    plain: bool,
    /// The most tokens, and what it is called to reach them.
    limit: (usize, FinishReason),
    chance: ChaCha8Rng,
    /// In the order of their states; beams are best first.
    live: Vec<Line>,
    /// The last token and a guess of the next ones; empty without a guess. Only where there is one state.
    draft: Vec<u32>,
    /// Best first.
    done: Vec<GeneratedSequence>,
}

impl Row {
    /// The prompt is one that the context can hold.
    pub(super) fn new(request: Request, context: Option<usize>) -> Self {
        let Request { row, prompt, mut options, .. } = request;
        let max_tokens = options.stop.max_tokens;
        // The last token is not fed, so there is one more of them than there is room.
        let room = context.map_or(usize::MAX, |context| (context - prompt.len()).saturating_add(1));
        let limit = match room < max_tokens {
            true => (room, FinishReason::Context),
            false => (max_tokens, FinishReason::MaxTokens),
        };
        let seed = match &options.strategy {
            DecodingStrategy::Sample(sampling) => sampling.seed,
            _ => 0,
        };
        let plain = options.plain();
        let line = Line { constraint: options.constraint.take(), ..Line::default() };
        Self {
            row,
            prompt,
            fed: 0,
            plain,
            options,
            limit,
            chance: stream(seed, row),
            live: vec![line],
            draft: Vec::new(),
            done: Vec::new(),
        }
    }

    /// How many states it has.
    pub(super) fn live(&self) -> usize {
        self.live.len()
    }

    /// Its states at most, and the tokens that each may come to hold.
    pub(super) fn most(&self) -> [usize; 2] {
        let states = match self.options.strategy {
            DecodingStrategy::Beam { width, .. } => width,
            _ => 1,
        };
        // The last token is not fed.
        [states, self.prompt.len().saturating_add(self.limit.0 - 1)]
    }

    /// Begins after tokens of the prompt that its state holds already.
    pub(super) fn skip(&mut self, tokens: usize) {
        self.fed = tokens;
    }

    /// What is fed next of a prompt that was not fed to its end: up to the next multiple of [`GRID`].
    pub(super) fn piece(&self) -> Option<Range<usize>> {
        let end = self.prompt.len().min((self.fed / GRID + 1) * GRID);
        (self.fed < end).then_some(self.fed..end)
    }

    pub(super) fn probe(&self) -> Option<&AttentionProbe> {
        self.options.attention.as_ref()
    }

    pub(super) fn number(&self) -> usize {
        self.row
    }

    pub(super) fn prompt(&self) -> &[u32] {
        &self.prompt
    }

    /// The prompt up to where it was fed.
    pub(super) fn fed(&self) -> &[u32] {
        &self.prompt[..self.fed]
    }

    /// Guesses the next tokens, or none, if the decoder can check guesses.
    pub(super) fn guess(&mut self, speculates: bool) {
        self.draft.clear();
        // A probe sees one row.
        let speculates = speculates && self.options.attention.is_none();
        let most = if speculates { self.options.prompt_lookup } else { 0 };
        let ([line], false) = (self.live.as_slice(), self.is_beam()) else { return };
        // One token is chosen beyond those that are guessed.
        let most = most.min(self.limit.0 - line.tokens.len() - 1);
        if let (Some(last), 1..) = (line.tokens.last(), most) {
            let history = [self.prompt.as_slice(), &line.tokens].concat();
            let guess = look_up(&history, most);
            if !guess.is_empty() {
                self.draft.push(*last);
                self.draft.extend_from_slice(guess);
            }
        }
    }

    fn is_beam(&self) -> bool {
        matches!(self.options.strategy, DecodingStrategy::Beam { .. })
    }

    /// What each of its states is fed next, and the last how many of these tokens are scored: pieces of the prompt, then the token
    /// that was chosen and what is guessed.
    pub(super) fn unfed(&self) -> impl Iterator<Item = (&[u32], usize)> {
        let piece = self.piece();
        self.live.iter().map(move |line| match &piece {
            Some(piece) => {
                (&self.prompt[piece.clone()], usize::from(piece.end == self.prompt.len()))
            }
            None if self.draft.is_empty() => (line.tokens.last().map_or(&[][..], from_ref), 1),
            None => (self.draft.as_slice(), self.draft.len()),
        })
    }

    /// To how many tokens its state must be cut after a guess.
    pub(super) fn cut(&self) -> Option<usize> {
        let line = self.live.first().filter(|_| !self.draft.is_empty())?;
        Some(self.prompt.len() + line.tokens.len() - 1)
    }

    /// Goes on with what was fed. After the last of the prompt, chooses what comes next by the scores of each of its states. Returns the
    /// states to go on with, none if the row has ended. Changes the scores.
    pub(super) fn advance(
        &mut self,
        scores: &mut [&mut [f32]],
        seen: Vec<AttentionRow>,
        on_token: &mut dyn FnMut(GeneratedToken) -> ControlFlow<()>,
    ) -> Result<Vec<usize>, GenerateError> {
        if let Some(piece) = self.piece() {
            self.fed = piece.end;
            if scores.is_empty() {
                return Ok(vec![0]);
            }
        }
        if let DecodingStrategy::Beam { width, length_penalty } = self.options.strategy {
            let parents = self.widen(scores, width, length_penalty.into())?;
            if let ([], Some(best)) = (parents.as_slice(), self.done.first()) {
                let choice = |token| GeneratedToken { token, ..GeneratedToken::default() };
                let _heard = best.tokens.iter().try_for_each(|token| on_token(choice(*token)));
            }
            return Ok(parents);
        }
        let Some(mut line) = self.live.pop() else { return Ok(Vec::new()) };
        let mut seen = Some(seen);
        for (place, scores) in scores.iter_mut().enumerate() {
            let of_model = (!self.plain).then(|| scores.to_vec());
            self.process(&mut line, scores)?;
            let token = self.choose(scores);
            let of_model = of_model.as_deref().unwrap_or(scores);
            let top = self.options.top_log_probabilities;
            let mut choice = GeneratedToken::new(token, of_model, top);
            choice.attention = seen.take().unwrap_or_default();
            line.score += choice.log_probability.unwrap_or(0.0);
            line.tokens.push(token);
            let heard = on_token(choice);
            let ended = if self.options.stop.end.contains(&token) {
                Some(FinishReason::EndToken)
            } else if heard.is_break() {
                Some(FinishReason::Interrupted)
            } else {
                (line.tokens.len() == self.limit.0).then_some(self.limit.1)
            };
            if let Some(reason) = ended {
                self.done.push(line.end(reason));
                return Ok(Vec::new());
            }
            self.accept(&mut line, token)?;
            // The scores after a wrong guess are those of another text.
            if self.draft.get(place + 1) != Some(&token) {
                break;
            }
        }
        self.live.push(line);
        Ok(vec![0])
    }

    /// Makes the scores of the model those that a hypothesis chooses from: none is NaN or +inf, and one at least is finite.
    fn process(&self, line: &mut Line, scores: &mut [f32]) -> Result<(), GenerateError> {
        check_scores(self.row, scores)?;
        if self.plain {
            return Ok(());
        }
        let options = &self.options;
        options.processors.apply(&self.prompt, &line.tokens, &options.stop.end, scores);
        if let Some(constraint) = &mut line.constraint {
            constraint.mask(scores).map_err(|why| self.refused(why))?;
        }
        check_scores(self.row, scores)
    }

    fn accept(&self, line: &mut Line, token: u32) -> Result<(), GenerateError> {
        let Some(constraint) = &mut line.constraint else { return Ok(()) };
        constraint.accept(token).map_err(|why| self.refused(why))
    }

    fn refused(&self, why: String) -> GenerateError {
        GenerateError::Constraint { row: self.row, why }
    }

    fn choose(&mut self, scores: &[f32]) -> u32 {
        match &self.options.strategy {
            DecodingStrategy::Sample(sampling) => {
                // 53 bits, as many as an f64 in 0..1 can tell apart.
                let place = (self.chance.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
                draw(&kept(scores, sampling), place)
            }
            _ => largest(scores),
        }
    }

    /// One step of a beam search: `scores [live, vocab]`.
    fn widen(
        &mut self,
        scores: &mut [&mut [f32]],
        width: usize,
        penalty: f64,
    ) -> Result<Vec<usize>, GenerateError> {
        // Of each hypothesis so many that `width` remain if all end tokens are among them.
        let end = self.options.stop.end.clone();
        let enough = width.saturating_add(end.len());
        let mut before = take(&mut self.live);
        let next = |(parent, (line, scores)): (usize, (&mut Line, &mut &mut [f32]))| {
            self.process(line, scores)?;
            let (total, next) = (log_sum(scores), best(scores, enough).into_iter());
            let with_score =
                |(token, score)| (parent, token, line.score + (f64::from(score) - total));
            Ok(next.map(with_score).collect())
        };
        // A vocabulary of scores is enough work for a thread.
        let lines = before.par_iter_mut().zip(scores.par_iter_mut()).enumerate();
        let steps: Vec<Vec<_>> = lines.map(next).collect::<Result<_, GenerateError>>()?;
        let mut steps = steps.concat();
        // Stable: of equal ones, the better parent first, then the lower id.
        steps.sort_by(|a, b| descending(a.2, b.2));

        let (mut live, mut parents) = (Vec::new(), Vec::new());
        for (rank, (parent, token, score)) in steps.into_iter().enumerate() {
            let line = || {
                let mut line = Line { score, ..before[parent].clone() };
                line.tokens.push(token);
                line
            };
            match end.contains(&token) {
                true if rank < width => self.done.push(line().end(FinishReason::EndToken)),
                false if live.len() < width => {
                    let mut line = line();
                    self.accept(&mut line, token)?;
                    live.push(line);
                    parents.push(parent);
                }
                _ => {}
            }
        }
        let len = live.first().map_or(0, |line| line.tokens.len());
        if len == self.limit.0 {
            self.done.extend(live.drain(..).map(|line| line.end(self.limit.1)));
        }
        let worth = |score: f64, len: usize| score / (len as f64).powf(penalty);
        let of_done = |done: &GeneratedSequence| worth(done.score, done.tokens.len());
        self.done.sort_by(|a, b| descending(of_done(a), of_done(b)));
        self.done.truncate(width);
        let worst = self.done.get(width - 1).map_or(f64::NEG_INFINITY, of_done);
        if live.first().is_none_or(|best| worth(best.score, len) <= worst) {
            live.clear();
            parents.clear();
        }
        self.live = live;
        Ok(parents)
    }

    /// The best of what it became, with the others in it. A row leaves the batch only with one at least.
    pub(super) fn finish(self) -> Option<GeneratedSequence> {
        self.done.into_iter().reduce(|mut best, other| {
            best.others.push(other);
            best
        })
    }
}

/// The stream of chance that belongs to a row.
fn stream(seed: u64, row: usize) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let mut chance = ChaCha8Rng::from_seed(key);
    chance.set_stream(row as u64);
    chance
}

#[cfg(test)]
mod tests {
    use super::super::toy::{Toy, beam, run, stop};
    use super::*;

    /// All ways to go on from a prompt, best first.
    fn all(toy: &Toy, prompt: &[u32], max_tokens: usize, penalty: f64) -> Vec<GeneratedSequence> {
        let mut open = vec![(Vec::new(), 0.0)];
        let mut done = Vec::new();
        while let Some((tokens, score)) = open.pop() {
            let scores = toy.scores([prompt, &tokens].concat().as_slice());
            let total: f64 = scores.iter().map(|s| f64::from(*s).exp()).sum();
            for (token, s) in (0..).zip(scores) {
                let tokens: Vec<u32> = tokens.iter().copied().chain([token]).collect();
                let score = score + (f64::from(s).exp() / total).ln();
                match (token, tokens.len() == max_tokens) {
                    (0, _) => done.push((tokens, score, FinishReason::EndToken)),
                    (_, true) => done.push((tokens, score, FinishReason::MaxTokens)),
                    _ => open.push((tokens, score)),
                }
            }
        }
        let worth = |(tokens, score, _): &(Vec<u32>, f64, FinishReason)| {
            score / (tokens.len() as f64).powf(penalty)
        };
        done.sort_by(|a, b| worth(b).total_cmp(&worth(a)));
        let done = done.into_iter();
        done.map(|(tokens, score, ended)| GeneratedSequence {
            tokens,
            score,
            finish_reason: ended,
            others: vec![],
        })
        .collect()
    }

    #[test]
    fn a_beam_wide_enough_for_everything_finds_everything_in_order() {
        for (seed, penalty) in [(1, 0.0), (2, 0.6), (3, 1.0), (4, 2.0)] {
            let mut toy = Toy::noise(4, seed);
            let want = all(&toy, &[2, 1], 4, penalty.into());
            let mut found = run(&mut toy, &[vec![2, 1]], &beam(256, penalty), &stop(4)).unwrap();
            let others = std::mem::take(&mut found[0].others);
            found.extend(others);
            assert_eq!(found.len(), 121); // 1 + 3 + 9 + 27 that end with token 0, and 81 that do not
            for (found, want) in found.iter().zip(&want) {
                assert_eq!(
                    (&found.tokens, found.finish_reason),
                    (&want.tokens, want.finish_reason)
                );
                assert!((found.score - want.score).abs() < 1e-9);
            }
        }
    }

    /// The definition: every next step of every hypothesis, sorted.
    fn slow(
        toy: &Toy,
        prompt: &[u32],
        width: usize,
        penalty: f64,
        max_tokens: usize,
    ) -> Vec<Vec<u32>> {
        type Hypothesis = (Vec<u32>, f64);
        let worth = |h: &Hypothesis| h.1 / (h.0.len() as f64).powf(penalty);
        let (mut live, mut done): (Vec<Hypothesis>, Vec<_>) = (vec![(vec![], 0.0)], vec![]);
        while live
            .first()
            .is_some_and(|best| done.len() < width || worth(best) > worth(&done[width - 1]))
        {
            let mut steps = Vec::new();
            for (tokens, score) in &live {
                let scores = toy.scores(&[prompt, tokens].concat());
                let total: f64 = scores.iter().map(|s| f64::from(*s).exp()).sum();
                for (token, s) in (0..).zip(scores) {
                    steps.push((
                        [&tokens[..], &[token]].concat(),
                        score + f64::from(s) - total.ln(),
                    ));
                }
            }
            steps.sort_by(|a, b| b.1.total_cmp(&a.1));
            let ends = |h: &&Hypothesis| h.0.ends_with(&[0]);
            done.extend(steps.iter().take(width).filter(ends).cloned());
            live = steps.iter().filter(|h| !ends(h)).take(width).cloned().collect();
            if live[0].0.len() == max_tokens {
                done.append(&mut live);
            }
            done.sort_by(|a, b| worth(b).total_cmp(&worth(a)));
            done.truncate(width);
        }
        done.into_iter().map(|(tokens, _)| tokens).collect()
    }

    #[test]
    fn a_beam_search_finds_what_its_definition_finds() {
        for case in 0..400_usize {
            let (width, penalty) = (1 + case % 7, [0.0, 0.6, 1.0, 1.7][case % 4]);
            let mut toy = Toy::noise(2 + case % 5, case as u64);
            let want = slow(&toy, &[1], width, f64::from(penalty), 7);
            let best =
                run(&mut toy, &[vec![1]], &beam(width, penalty), &stop(7)).unwrap().remove(0);
            let found: Vec<_> =
                [&best].into_iter().chain(&best.others).map(|one| one.tokens.clone()).collect();
            assert_eq!(found, want, "width {width} penalty {penalty}");
        }
    }

    #[test]
    fn a_beam_of_one_is_greedy_and_wider_ones_find_no_less() {
        let (mut wins, mut sum) = (0, [0.0; 4]);
        for seed in 0..60 {
            let mut toy = Toy::noise(6, seed);
            let prompts = [vec![1], vec![5, 3]];
            let greedy = run(&mut toy, &prompts, &DecodingStrategy::Greedy, &stop(9)).unwrap();
            for penalty in [0.0, 1.0] {
                assert_eq!(run(&mut toy, &prompts, &beam(1, penalty), &stop(9)).unwrap(), greedy);
            }
            for (width, sum) in [1, 2, 4, 8].into_iter().zip(&mut sum) {
                let found = run(&mut toy, &prompts, &beam(width, 0.0), &stop(9)).unwrap();
                assert!(found.iter().all(|best| best.others.len() < width));
                wins += usize::from(found[0].score > greedy[0].score);
                *sum += found[0].score;
            }
        }
        assert!(wins > 20 && sum.is_sorted(), "{wins} {sum:?}");
    }

    #[test]
    fn a_beam_sees_past_a_first_step_that_leads_nowhere() {
        // 1 is the likeliest, and everything after it unlikely; 2 is followed by the end.
        let table = [[0.1, 0.5, 0.4], [0.34, 0.33, 0.33], [0.9, 0.05, 0.05]];
        let mut toy = Toy::markov(table);
        assert_eq!(
            run(&mut toy, &[vec![0]], &DecodingStrategy::Greedy, &stop(5)).unwrap()[0].tokens,
            [1, 0]
        );
        let best = run(&mut toy, &[vec![0]], &beam(2, 0.0), &stop(5)).unwrap().remove(0);
        assert_eq!(
            (best.tokens.as_slice(), best.finish_reason),
            ([2, 0].as_slice(), FinishReason::EndToken)
        );
        assert!((best.score - (0.4_f64 * 0.9).ln()).abs() < 1e-6);
        assert_eq!(best.others[0].tokens, [1, 0]);
    }

    #[test]
    fn a_length_penalty_lets_longer_ones_win() {
        // The end at once: ln 0.4 = -0.92. First 1, then 2: ln 0.6 + ln 0.6 = -1.02, and half of it by token.
        let mut toy = Toy::markov([[0.0, 1.0, 0.0], [0.4, 0.0, 0.6], [0.4, 0.6, 0.0]]);
        let mut best = |penalty| {
            run(&mut toy, &[vec![2]], &beam(3, penalty), &stop(2)).unwrap().remove(0).tokens
        };
        assert_eq!(best(0.0), [0]);
        assert_eq!(best(1.0), [1, 2]);
    }
}
