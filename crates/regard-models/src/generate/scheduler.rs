//! Requests that come and go while others are generated: continuous batching (Orca, Yu et al. 2022).
//!
//! A line: [`Scheduler::admit`] ─► a request waits for memory ─► its prompt is fed in pieces, beside the tokens of all others ─► tokens are
//! chosen and told, one or more a step ─► its last event. In which pieces a prompt is fed depends on the prompt alone, so what
//! a request becomes does not depend on what else is generated, if a decoder's scores of a state do not depend on the other states.

use super::batch::Batch;
use super::choose::{best, log_sum};
use super::error::check_prompt;
use super::prefix::{CellId, Prefixes};
use super::row::Row;
use super::{AttentionRow, Decoder, GenerateError, GeneratedSequence, GenerationOptions, Pages};
use std::collections::VecDeque;
use std::fmt;
use std::ops::ControlFlow;

/// Tokens of a prompt that are fed at once: those up to the next multiple.
pub const GRID: usize = 256;

/// A prompt to continue.
#[derive(Clone, Debug)]
pub struct Request {
    /// One token at least.
    pub prompt: Vec<u32>,
    /// How to continue it.
    pub options: GenerationOptions,
    /// Its number: errors name it, a translator knows the source by it, and chance is that of (seed, row).
    pub row: usize,
    /// Whose prompt it is. The beginning of a prompt is computed once for all who give the same number here; none: each time.
    pub prefix: Option<u64>,
}

/// A request that was admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(u64);

/// What became of a request in a step. The last one is `Finished` or `Failed`.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Its prompt begins to be fed. So many tokens of it were there from earlier ones.
    Started {
        /// They cost nothing.
        cached: usize,
    },
    /// A token was chosen, the end token too. A beam search knows its tokens when it has ended.
    Token(GeneratedToken),
    /// It has ended.
    Finished(GeneratedSequence),
    /// Nothing could be chosen for it; the others go on.
    Failed(GenerateError),
}

/// A token that was chosen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GeneratedToken {
    /// Its id.
    pub token: u32,
    /// Its log-probability in the model itself, before whatever changes the scores; none in a beam search.
    pub log_probability: Option<f64>,
    /// The likeliest tokens with theirs, as many as were asked for, best first.
    pub top: Vec<(u32, f64)>,
    /// What the model looked at, as far as a [probe](super::AttentionProbe) asked for it.
    pub attention: Vec<AttentionRow>,
}

impl GeneratedToken {
    pub(super) fn new(token: u32, scores: &[f32], top: usize) -> Self {
        let total = log_sum(scores);
        let log = |score: f32| f64::from(score) - total;
        let top = if top == 0 { Vec::new() } else { best(scores, top) };
        let top = top.into_iter().map(|(token, score)| (token, log(score))).collect();
        let log_probability = Some(log(scores[token as usize]));
        Self { token, log_probability, top, attention: Vec::new() }
    }
}

/// Is told what became of requests. `Break` ends that request, as [`Scheduler::cancel`] does; after its last event it means nothing.
pub type OnEvent<'a> = dyn FnMut(Ticket, Event) -> ControlFlow<()> + 'a;

/// Generates many requests together with one decoder.
///
/// Memory for all that a request may come to hold is set aside before its prompt is fed; until there is enough, it waits, and those
/// after it. So none is ever given up for another, and memory never runs out.
pub struct Scheduler<D: Decoder> {
    batch: Batch<D>,
    waiting: VecDeque<Admitted>,
    /// In the order of their states.
    live: Vec<Admitted>,
    prefixes: Prefixes<D::State>,
    prompt_tokens: usize,
    reserved: usize,
    admitted: u64,
}

struct Admitted {
    ticket: Ticket,
    row: Row,
    prefix: Option<u64>,
    /// What is set aside for it.
    pages: usize,
}

impl<D: Decoder> Scheduler<D> {
    /// Without requests. In a step, the prompts that are fed have so many tokens at most, or are one piece of one: few let the others
    /// go on sooner.
    pub fn new(decoder: D, prompt_tokens: usize) -> Self {
        Self {
            batch: Batch::new(decoder),
            waiting: VecDeque::new(),
            live: Vec::new(),
            prefixes: Prefixes::default(),
            prompt_tokens,
            reserved: 0,
            admitted: 0,
        }
    }

    /// The decoder.
    pub fn decoder(&self) -> &D {
        self.batch.decoder()
    }

    /// Requests that wait for memory.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Requests that are generated.
    pub fn live(&self) -> usize {
        self.live.len()
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.live.is_empty()
    }

    /// Pages set aside for requests, pages with beginnings of prompts, and all pages; none if the memory of the decoder has no limit.
    pub fn pages(&self) -> Option<[usize; 3]> {
        let memory = self.decoder().memory()?;
        Some([self.reserved, self.prefixes.len() * memory.of(GRID), memory.count])
    }

    /// The longest beginning of a prompt that is kept: how many tokens, and the decoder with the state after them.
    pub(crate) fn prefix(
        &mut self,
        owner: u64,
        prompt: &[u32],
    ) -> Option<(usize, &mut D, &D::State)> {
        let (tokens, cell) = self.prefixes.find(owner, prompt);
        Some((tokens, self.batch.decoder_mut(), self.prefixes.state(cell?)?))
    }

    /// Keeps the state after these tokens, whole cells, of which all but the last are kept.
    pub(crate) fn insert_prefix(&mut self, owner: u64, tokens: &[u32], state: D::State) {
        if let Some(before) = self.prefixes.lacks(owner, tokens) {
            self.prefixes.insert(owner, before, tokens, state);
        }
    }

    /// Takes a request, which waits for the next step.
    ///
    /// # Errors
    /// If it makes no sense, or needs more memory than there is.
    pub fn admit(&mut self, request: Request) -> Result<Ticket, GenerateError> {
        let decoder = self.batch.decoder();
        let (vocab, context) = (decoder.vocab(), decoder.context());
        request.options.check(vocab)?;
        check_prompt(request.row, &request.prompt, vocab, context)?;
        if let Some(probe) = &request.options.attention {
            probe.check(decoder.attention())?;
        }
        let (number, prefix) = (request.row, request.prefix);
        let row = Row::new(request, context);
        let pages = match decoder.memory() {
            Some(memory) => {
                let [states, tokens] = row.most();
                let pages = states.saturating_mul(memory.of(tokens));
                if pages > memory.count {
                    let all = |pages: usize| pages.saturating_mul(memory.tokens);
                    let (needed, available) = (all(pages), all(memory.count));
                    return Err(GenerateError::Memory { row: number, needed, available });
                }
                pages
            }
            None => 0,
        };
        let ticket = Ticket(self.admitted);
        self.admitted += 1;
        self.waiting.push_back(Admitted { ticket, row, prefix, pages });
        Ok(ticket)
    }

    /// Ends a request and gives back its memory. Nothing more is told of it. Returns whether it was there.
    ///
    /// # Errors
    /// Those of the decoder.
    pub fn cancel(&mut self, ticket: Ticket) -> Result<bool, D::Error> {
        let before = self.waiting.len();
        self.waiting.retain(|waiting| waiting.ticket != ticket);
        let Some(at) = self.live.iter().position(|live| live.ticket == ticket) else {
            return Ok(self.waiting.len() < before);
        };
        let first: usize = self.live[..at].iter().map(|live| live.row.live()).sum();
        let states: usize = self.live.iter().map(|live| live.row.live()).sum();
        let own = first..first + self.live[at].row.live();
        self.reserved -= self.live.remove(at).pages;
        let parents: Vec<usize> = (0..states).filter(|state| !own.contains(state)).collect();
        self.batch.keep(&parents)?;
        Ok(true)
    }

    /// Feeds every request that is generated: the next piece of its prompt, or the tokens that were chosen; then chooses. Requests
    /// that wait begin if there is memory.
    ///
    /// # Errors
    /// Those of the decoder, which concern all requests: states may have been fed or not. Give up the scheduler then.
    pub fn step(&mut self, tell: &mut OnEvent<'_>) -> Result<(), D::Error> {
        self.begin(tell)?;
        let speculates = self.decoder().speculates();
        self.live.iter_mut().for_each(|live| live.row.guess(speculates));
        let unfed = self.live.iter().flat_map(|live| live.row.unfed());
        let (tokens, scored): (Vec<&[u32]>, Vec<usize>) = unfed.unzip();
        if tokens.is_empty() {
            return Ok(());
        }
        let mut all = self.batch.feed(&tokens, &scored)?;
        let mut scores = all.chunks_exact_mut(self.decoder().vocab());
        let mut scored = scored.into_iter();
        let (mut first, mut parents, mut ended) = (0, Vec::new(), Vec::new());
        for i in 0..self.live.len() {
            let Admitted { ticket, row, .. } = &mut self.live[i];
            let states = row.live();
            let count: usize = scored.by_ref().take(states).sum();
            let mut of_row: Vec<&mut [f32]> = scores.by_ref().take(count).collect();
            let was_fed = row.piece().is_some();
            let seen = row.probe().map_or_else(Vec::new, |_| self.batch.seen(first));
            let mut on_token = |choice| tell(*ticket, Event::Token(choice));
            match row.advance(&mut of_row, seen, &mut on_token) {
                Ok(kept) if kept.is_empty() => ended.push((i, None)),
                Ok(kept) => {
                    parents.extend(kept.into_iter().map(|state| first + state));
                    if let Some(len) = row.cut() {
                        self.batch.truncate(first, len)?;
                    }
                    if was_fed {
                        self.keep_prefix(i, first)?;
                    }
                }
                Err(error) => ended.push((i, Some(error))),
            }
            first += states;
        }
        self.batch.recycle(all);
        self.batch.keep(&parents)?;
        for (removed, (i, error)) in ended.into_iter().enumerate() {
            let Admitted { ticket, row, pages, .. } = self.live.remove(i - removed);
            self.reserved -= pages;
            let last = match (error, row.finish()) {
                (Some(error), _) => Event::Failed(error),
                (None, Some(sequence)) => Event::Finished(sequence),
                (None, None) => continue,
            };
            let _over = tell(ticket, last);
        }
        Ok(())
    }

    /// Begins requests that wait, in their order, as far as memory and the prompt tokens of a step allow.
    fn begin(&mut self, tell: &mut OnEvent<'_>) -> Result<(), D::Error> {
        let pieces = self.live.iter().filter_map(|live| live.row.piece());
        let mut fed: usize = pieces.map(|piece| piece.len()).sum();
        while let Some(mut next) = self.waiting.pop_front() {
            let find = |owner| self.prefixes.find(owner, next.row.prompt());
            let (mut cached, mut cell) = next.prefix.map_or((0, None), find);
            next.row.skip(cached);
            let piece = next.row.piece().map_or(0, |piece| piece.len());
            let fits = fed == 0 || fed + piece <= self.prompt_tokens;
            let mut room = fits && self.make_room(next.pages, cell)?;
            if fits && !room && cell.is_some() && self.live.is_empty() {
                // Nothing else would ever end: the beginning that it shares is given up too, and it is fed as a whole.
                (cached, cell) = (0, None);
                next.row.skip(0);
                room = self.make_room(next.pages, cell)?;
            }
            if !room {
                self.waiting.push_front(next);
                return Ok(());
            }
            let from = cell.and_then(|cell| self.prefixes.state(cell));
            self.batch.start(next.row.number(), from)?;
            if let Some(probe) = next.row.probe() {
                self.batch.probe(probe);
            }
            fed += piece;
            self.reserved += next.pages;
            let ticket = next.ticket;
            self.live.push(next);
            if tell(ticket, Event::Started { cached }).is_break() {
                self.cancel(ticket)?;
            }
        }
        Ok(())
    }

    /// Whether so many more pages can be set aside, if need be by giving up beginnings of prompts, but for one that is needed.
    fn make_room(&mut self, pages: usize, needed: Option<CellId>) -> Result<bool, D::Error> {
        let Some(memory) = self.decoder().memory() else { return Ok(true) };
        let free = memory.count - self.reserved;
        Ok(pages <= free && self.shrink(free - pages, memory, needed)?)
    }

    /// Gives up beginnings of prompts until they take so many pages at most.
    fn shrink(
        &mut self,
        pages: usize,
        memory: Pages,
        needed: Option<CellId>,
    ) -> Result<bool, D::Error> {
        while self.prefixes.len() * memory.of(GRID) > pages {
            let Some(state) = self.prefixes.evict(needed) else { return Ok(false) };
            self.batch.free(state)?;
        }
        Ok(true)
    }

    /// Keeps the prompt of a request as far as it was fed, if these are whole cells, for those that begin the same way. Half of the
    /// memory at most is for such beginnings.
    fn keep_prefix(&mut self, row: usize, state: usize) -> Result<(), D::Error> {
        let fed = self.live[row].row.fed();
        let (Some(owner), Some(memory)) = (self.live[row].prefix, self.decoder().memory()) else {
            return Ok(());
        };
        let Some(before) = self.prefixes.lacks(owner, fed) else { return Ok(()) };
        let most = (memory.count - self.reserved).min(memory.count / 2);
        let Some(pages) = most.checked_sub(memory.of(GRID)) else { return Ok(()) };
        if self.shrink(pages, memory, before)? {
            let state = self.batch.fork(state)?;
            self.prefixes.insert(owner, before, self.live[row].row.fed(), state);
        }
        Ok(())
    }
}

impl<D: Decoder> fmt::Debug for Scheduler<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (waiting, live, pages) = (self.waiting(), self.live(), self.pages());
        write!(f, "Scheduler {{ waiting: {waiting}, live: {live}, pages: {pages:?} }}")
    }
}

impl<D: Decoder> Drop for Scheduler<D> {
    fn drop(&mut self) {
        while let Some(state) = self.prefixes.evict(None) {
            // Nobody is there to be told.
            drop(self.batch.free(state));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::toy::{Toy, beam, sample};
    use super::super::{DecodingStrategy, FinishReason, StoppingCriteria};
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn request(prompt: Vec<u32>, strategy: DecodingStrategy, max_tokens: usize) -> Request {
        let stop = StoppingCriteria { max_tokens, end: vec![0] };
        let options = GenerationOptions::new(strategy, stop);
        Request { prompt, options, row: 0, prefix: Some(1) }
    }

    /// Of some beginnings, so that prompts share them.
    fn prompt(beginning: u32, len: usize) -> Vec<u32> {
        let len = u32::try_from(len).unwrap();
        (0..len).map(|i| 1 + (i / 200 * beginning + i * i) % 6).collect()
    }

    fn toy() -> Toy {
        let mut toy = Toy::noise(7, 3);
        toy.memory = Some(Pages { count: 60, tokens: 64 });
        toy.speculates = true;
        toy
    }

    /// All events of requests that come at these steps.
    fn run(toy: &mut Toy, requests: &[(usize, Request)]) -> Vec<Vec<Event>> {
        let mut scheduler = Scheduler::new(toy, GRID);
        let mut events = vec![Vec::new(); requests.len()];
        let mut rows = HashMap::new();
        for step in 0.. {
            for (row, (_, request)) in
                requests.iter().enumerate().filter(|(_, (at, _))| *at == step)
            {
                rows.insert(scheduler.admit(request.clone()).unwrap(), row);
            }
            let mut tell = |ticket, event| {
                events[rows[&ticket]].push(event);
                ControlFlow::Continue(())
            };
            scheduler.step(&mut tell).unwrap();
            let [reserved, cached, all] = scheduler.pages().unwrap();
            assert!(reserved + cached <= all);
            if scheduler.is_idle() && rows.len() == requests.len() {
                assert_eq!(reserved, 0);
                return events;
            }
        }
        unreachable!()
    }

    fn without_start(events: &[Event]) -> &[Event] {
        let (first, rest) = events.split_first().unwrap();
        assert!(matches!(first, Event::Started { .. }));
        rest
    }

    #[test]
    fn what_a_request_becomes_does_not_depend_on_the_others() {
        let strategies = [DecodingStrategy::Greedy, sample(5), beam(3, 0.7)];
        let requests: Vec<_> = (0..40_usize)
            .zip(0_u32..)
            .map(|(i, number)| {
                let len = [3, 300, 512, 700, 257, 1][i % 6];
                let mut one =
                    request(prompt(number % 3, len), strategies[i % 3].clone(), 1 + i % 20);
                one.options.prompt_lookup = [0, 8][i % 2];
                one.options.top_log_probabilities = i % 4;
                one.prefix = (i % 5 != 0).then_some(i as u64 % 2);
                (i * 3 % 50, one)
            })
            .collect();
        let together = run(&mut toy(), &requests);
        let mut cached = 0;
        for ((_, request), events) in requests.iter().zip(&together) {
            if let Event::Started { cached: tokens } = events[0] {
                assert!(tokens % GRID == 0 && tokens < request.prompt.len());
                assert!(tokens == 0 || request.prefix.is_some());
                cached += tokens;
            }
            let alone = run(&mut toy(), &[(0, request.clone())]);
            assert_eq!(without_start(&alone[0]), without_start(events));
        }
        assert!(cached > 10 * GRID, "{cached}");
    }

    #[test]
    fn a_request_that_never_fits_is_refused_and_one_that_does_not_fit_yet_waits() {
        let mut toy = toy();
        let mut scheduler = Scheduler::new(&mut toy, GRID);
        let error = scheduler.admit(request(prompt(1, 300), beam(10, 0.0), 200)).unwrap_err();
        let needed = 10 * 8 * 64; // 499 tokens are 8 pages
        assert_eq!(error, GenerateError::Memory { row: 0, needed, available: 60 * 64 });
        for _ in 0..3 {
            scheduler.admit(request(prompt(1, 300), DecodingStrategy::Greedy, 2000)).unwrap();
        }
        let mut most = 0;
        while !scheduler.is_idle() {
            scheduler.step(&mut |_, _| ControlFlow::Continue(())).unwrap();
            most = most.max(scheduler.live());
        }
        assert_eq!(most, 1);
        drop(scheduler);
        assert_eq!(toy.alive(), 0);
    }

    #[test]
    fn a_beginning_that_leaves_no_room_for_its_own_request_is_given_up() {
        // 60 pages: the first leaves a beginning of 7 cells, 28 pages, and the second needs 41 for itself.
        let requests =
            [50, 600].map(|tokens| request(prompt(1, 1990), DecodingStrategy::Greedy, tokens));
        let mut toy = toy();
        let mut scheduler = Scheduler::new(&mut toy, GRID);
        for one in requests {
            scheduler.admit(one).unwrap();
            let mut started = None;
            for _ in 0..10_000 {
                let mut tell = |_, event| {
                    if let Event::Started { cached } = event {
                        started = Some(cached);
                    }
                    ControlFlow::Continue(())
                };
                scheduler.step(&mut tell).unwrap();
            }
            assert!(scheduler.is_idle() && started == Some(0), "{scheduler:?} {started:?}");
        }
    }

    #[test]
    fn decoding_goes_on_while_prompts_are_fed() {
        let mut toy = toy();
        let mut scheduler = Scheduler::new(&mut toy, GRID);
        let first = scheduler.admit(request(vec![1], DecodingStrategy::Greedy, 50)).unwrap();
        let second = scheduler.admit(request(prompt(2, 900), sample(1), 50)).unwrap();
        let (mut tokens, mut started) = (0, false);
        for _ in 0..4 {
            let mut tell = |ticket, event| {
                tokens += usize::from(ticket == first && matches!(event, Event::Token(_)));
                started |= ticket == second && matches!(event, Event::Token(_));
                ControlFlow::Continue(())
            };
            scheduler.step(&mut tell).unwrap();
        }
        // The second begins a step later, and its 4 pieces take 4 steps.
        assert_eq!((tokens, started), (4, false));
    }

    #[test]
    fn a_failure_concerns_one_request() {
        let mut toy = Toy::new(4, |history| match history.contains(&3) {
            true => vec![f32::NAN; 4],
            false => vec![0.0, 1.0, 0.5, f32::NEG_INFINITY],
        });
        let mut scheduler = Scheduler::new(&mut toy, GRID);
        let bad = scheduler.admit(request(vec![1, 3], DecodingStrategy::Greedy, 3)).unwrap();
        let good = scheduler.admit(request(vec![1, 2], DecodingStrategy::Greedy, 3)).unwrap();
        let mut last = HashMap::new();
        while !scheduler.is_idle() {
            let mut tell = |ticket, event| {
                last.insert(ticket, event);
                ControlFlow::Continue(())
            };
            scheduler.step(&mut tell).unwrap();
        }
        let error = GenerateError::NotFinite { row: 0, token: 0 };
        assert_eq!(last[&bad], Event::Failed(error));
        let Event::Finished(sequence) = &last[&good] else { panic!("{last:?}") };
        assert_eq!(
            (&sequence.tokens[..], sequence.finish_reason),
            (&[1, 1, 1][..], FinishReason::MaxTokens)
        );
    }

    proptest! {
        #[test]
        fn no_page_is_left_behind_whatever_comes_and_goes(
            acts in prop::collection::vec((0..6_u8, 0..900_usize, any::<u8>()), 1..60),
        ) {
            let mut toy = toy();
            let mut scheduler = Scheduler::new(&mut toy, GRID);
            let mut tickets = Vec::new();
            for (act, number, chance) in acts {
                match act {
                    0 | 1 => {
                        let strategy = if chance % 4 == 0 { beam(2, 1.0) } else { sample(9) };
                        let prompt = prompt(u32::from(chance % 3), number + 1);
                        tickets.push(scheduler.admit(request(prompt, strategy, 1 + number % 90)).unwrap());
                    }
                    2 if !tickets.is_empty() => {
                        scheduler.cancel(tickets.swap_remove(number % tickets.len())).unwrap();
                    }
                    _ => scheduler.step(&mut |_, _| match chance {
                        0..20 => ControlFlow::Break(()),
                        _ => ControlFlow::Continue(()),
                    }).unwrap(),
                }
            }
            for ticket in tickets {
                scheduler.cancel(ticket).unwrap();
            }
            prop_assert!(scheduler.is_idle());
            let [reserved, cached, _] = scheduler.pages().unwrap();
            let cells = cached / GRID.div_ceil(64);
            prop_assert_eq!(reserved, 0);
            prop_assert_eq!(scheduler.decoder().alive(), cells);
            drop(scheduler);
            prop_assert_eq!(toy.alive(), 0);
        }
    }
}
