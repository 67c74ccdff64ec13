//! An engine that generates: continuous batching with a scheduler of its own.

use super::{Common, Load, Settings, panic_text, wait};
use crate::error::ApiError;
use crate::queue::{Place, Queue};
use regard_models::generate::{Event, FinishReason, GeneratedToken, Request, Scheduler, Ticket};
use regard_models::infer::Session;
use regard_models::{CausalLm, TextStream};
use std::collections::{HashMap, VecDeque};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Receiver;
use std::time::Instant;
use tokio::sync::mpsc::UnboundedSender;

/// A prompt to continue.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) request: Request,
    pub(crate) stops: Vec<String>,
    /// Its number among the choices of its call.
    pub(crate) index: usize,
    pub(crate) came: Instant,
    pub(crate) deadline: Instant,
    /// Not bounded: `max_tokens` bounds what is told, and an engine never waits for a slow client.
    pub(crate) tell: UnboundedSender<(usize, Told)>,
    pub(crate) place: Place,
    pub(crate) load: Load,
}

/// What becomes of a job. The last one is `Ended` or `Failed`.
#[derive(Debug)]
pub(crate) enum Told {
    /// So many tokens of its prompt were cached.
    Started(usize),
    Piece(Piece),
    Ended(Ended),
    Failed(ApiError),
}

/// A token, with the text that it completes.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) text: String,
    pub(crate) choice: GeneratedToken,
}

/// How a text ends.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    /// Text that was held back.
    pub(crate) rest: String,
    /// As in OpenAI's API: `stop` or `length`; or `deadline`.
    pub(crate) reason: &'static str,
}

/// A job that the scheduler has.
struct Live<'m> {
    stream: TextStream<'m>,
    index: usize,
    came: Instant,
    deadline: Instant,
    tell: UnboundedSender<(usize, Told)>,
    /// Until it begins.
    place: Option<Place>,
    _load: Load,
    /// Tokens of its prompt that are to be computed.
    prompt: usize,
    told: usize,
    last: Instant,
}

impl Live<'_> {
    fn tell(&self, told: Told) -> ControlFlow<()> {
        match self.tell.send((self.index, told)) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    }

    fn end(self, reason: &'static str) {
        let (rest, _, _) = self.stream.finish();
        // A client that has gone needs no answer.
        let _gone = self.tell.send((self.index, Told::Ended(Ended { rest, reason })));
    }
}

struct Engine<'m> {
    model: &'m CausalLm,
    settings: &'m Settings,
    common: &'m Common,
    queue: &'m Queue,
    /// Not yet given to the scheduler, which would begin all that fit into memory.
    waiting: VecDeque<Job>,
    live: HashMap<Ticket, Live<'m>>,
}

/// Takes jobs until their channel is closed or the server stops.
pub(super) fn run(
    model: &CausalLm,
    settings: &Settings,
    common: &Common,
    queue: &Queue,
    jobs: &Receiver<Job>,
) {
    let (waiting, live) = (VecDeque::new(), HashMap::new());
    let mut engine = Engine { model, settings, common, queue, waiting, live };
    loop {
        let mut scheduler = match model.scheduler(settings.cache_bytes) {
            Ok(scheduler) => scheduler,
            Err(error) => {
                common.fault(&settings.name, &error.to_string());
                return;
            }
        };
        let why = match engine.serve(&mut scheduler, jobs) {
            Ok(()) => return,
            Err(why) => why,
        };
        common.fault(&settings.name, &why);
        for (_, live) in engine.live.drain() {
            let _gone = live.tell(Told::Failed(ApiError::internal()));
        }
        // Its states may be in disorder: what it does with them at its end must not end this thread.
        let _disorder = catch_unwind(AssertUnwindSafe(|| drop(scheduler)));
    }
}

impl<'m> Engine<'m> {
    /// Steps until there are no more jobs; an error means that the scheduler must be built anew.
    fn serve(
        &mut self,
        scheduler: &mut Scheduler<Session<'m>>,
        jobs: &Receiver<Job>,
    ) -> Result<(), String> {
        loop {
            if scheduler.is_idle() && self.waiting.is_empty() {
                self.show(scheduler);
                match wait(jobs, self.common) {
                    Some(job) => self.waiting.push_back(job),
                    None => return Ok(()),
                }
            }
            self.waiting.extend(jobs.try_iter());
            let step = catch_unwind(AssertUnwindSafe(|| self.step(scheduler)));
            step.map_err(|panic| panic_text(&*panic).to_owned())??;
        }
    }

    fn step(&mut self, scheduler: &mut Scheduler<Session<'m>>) -> Result<(), String> {
        self.end_late(scheduler)?;
        self.admit(scheduler);
        if scheduler.is_idle() {
            return Ok(());
        }
        #[cfg(feature = "failpoints")]
        fail::fail_point!("step");
        let (start, mut tokens) = (Instant::now(), 0);
        let (live, common, name) = (&mut self.live, self.common, &self.settings.name);
        scheduler
            .step(&mut |ticket, event| heard(live, (common, name), &mut tokens, ticket, event))
            .map_err(|e| e.to_string())?;
        if tokens > 0 {
            self.queue.measured(tokens, start.elapsed());
        }
        let rows = scheduler.live();
        if rows > 0 {
            self.common.metrics.observe("regard_batch_rows", name, rows as f64);
        }
        self.show(scheduler);
        Ok(())
    }

    /// Ends what is late or not wanted any more; between steps, so that long prompts end, too.
    fn end_late(&mut self, scheduler: &mut Scheduler<Session<'m>>) -> Result<(), String> {
        let (common, mut cancelled) = (self.common, 0);
        self.waiting.retain(|job| {
            if job.tell.is_closed() {
                cancelled += 1;
                return false;
            }
            let Some(error) = common.refusal(job.deadline) else { return true };
            let _gone = job.tell.send((job.index, Told::Failed(error)));
            false
        });
        let over =
            |live: &Live<'_>| live.tell.is_closed() || common.refusal(live.deadline).is_some();
        let over: Vec<Ticket> =
            self.live.iter().filter(|(_, live)| over(live)).map(|(ticket, _)| *ticket).collect();
        for ticket in over {
            let _there = scheduler.cancel(ticket).map_err(|e| e.to_string())?;
            let Some(live) = self.live.remove(&ticket) else { continue };
            if live.tell.is_closed() {
                cancelled += 1;
            } else if live.told > 0 {
                live.end("deadline");
            } else if let Some(error) = common.refusal(live.deadline) {
                let _gone = live.tell(Told::Failed(error));
            }
        }
        common.cancelled(&self.settings.name, cancelled);
        Ok(())
    }

    fn admit(&mut self, scheduler: &mut Scheduler<Session<'m>>) {
        while scheduler.live() + scheduler.waiting() < self.settings.max_batch {
            let Some(job) = self.waiting.pop_front() else { return };
            let Job { request, stops, index, came, deadline, tell, place, load } = job;
            let (prompt, stream) =
                (request.prompt.len(), self.model.stream(&request.prompt, &stops));
            match scheduler.admit(request) {
                Err(error) => {
                    let _gone = tell.send((index, Told::Failed(ApiError::generate(&error))));
                }
                Ok(ticket) => {
                    let live = Live {
                        stream,
                        index,
                        came,
                        deadline,
                        tell,
                        place: Some(place),
                        _load: load,
                        prompt,
                        told: 0,
                        last: came,
                    };
                    self.live.insert(ticket, live);
                }
            }
        }
    }

    fn show(&self, scheduler: &Scheduler<Session<'m>>) {
        let Some(pages) = scheduler.pages() else { return };
        for (state, pages) in ["reserved", "cached", "all"].into_iter().zip(pages) {
            let engine = (self.settings.name.as_str(), self.settings.number);
            self.common.metrics.pages(engine, state, pages as f64);
        }
    }
}

/// What a step says of one job.
fn heard(
    lives: &mut HashMap<Ticket, Live<'_>>,
    (common, name): (&Common, &str),
    tokens: &mut usize,
    ticket: Ticket,
    event: Event,
) -> ControlFlow<()> {
    let Some(live) = lives.get_mut(&ticket) else { return ControlFlow::Break(()) };
    let metrics = &common.metrics;
    match event {
        Event::Started { cached } => {
            live.place = None;
            live.prompt -= cached;
            metrics.observe("regard_queue_seconds", name, live.came.elapsed().as_secs_f64());
            metrics.count("regard_tokens_total", ("kind", "cached".into()), cached as u64);
            if cached > 0 {
                metrics.count("regard_prefix_hits_total", ("model", name.to_owned()), 1);
            }
            live.tell(Told::Started(cached))
        }
        Event::Token(choice) => {
            let now = Instant::now();
            let what = if live.told == 0 {
                *tokens += live.prompt;
                metrics.count("regard_tokens_total", ("kind", "prompt".into()), live.prompt as u64);
                "regard_ttft_seconds"
            } else {
                "regard_token_seconds"
            };
            metrics.observe(what, name, (now - live.last).as_secs_f64());
            metrics.count("regard_tokens_total", ("kind", "generated".into()), 1);
            *tokens += 1;
            (live.last, live.told) = (now, live.told + 1);
            let emit = live.stream.push(choice.token);
            let heard = live.tell(Told::Piece(Piece { text: emit.text, choice }));
            if emit.stopped { ControlFlow::Break(()) } else { heard }
        }
        Event::Finished(sequence) => {
            if let Some(live) = lives.remove(&ticket) {
                let reason = match sequence.finish_reason {
                    FinishReason::MaxTokens | FinishReason::Context => "length",
                    _ => "stop",
                };
                if live.tell.is_closed() {
                    common.cancelled(name, 1);
                }
                live.end(reason);
            }
            ControlFlow::Continue(())
        }
        Event::Failed(error) => {
            if let Some(live) = lives.remove(&ticket) {
                let _gone = live.tell(Told::Failed(ApiError::generate(&error)));
            }
            ControlFlow::Continue(())
        }
    }
}
