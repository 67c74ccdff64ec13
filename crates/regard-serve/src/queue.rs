//! Bounded admission: what cannot be computed soon is refused at once.

use crate::error::ApiError;
use crate::metrics::Metrics;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Requests of one model that wait.
#[derive(Debug)]
pub(crate) struct Queue {
    model: String,
    max_requests: usize,
    max_tokens: usize,
    engines: usize,
    metrics: Arc<Metrics>,
    state: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    requests: usize,
    tokens: usize,
    /// Tokens and seconds of steps, old ones less and less.
    computed: [f64; 2],
}

/// Of a measurement that is left after the next one.
const DECAY: f64 = 0.95;
/// Seconds after which a client is told to try again, at most.
const LONGEST: f64 = 60.0;

impl Queue {
    pub(crate) fn new(
        model: &str,
        [max_requests, max_tokens]: [usize; 2],
        engines: usize,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        let (model, state) = (model.to_owned(), Mutex::default());
        Arc::new(Self { model, max_requests, max_tokens, engines, metrics, state })
    }

    fn state(&self) -> MutexGuard<'_, Waiting> {
        // Numbers are right after any panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a request would be refused whatever its length: told before time is spent on its tokens.
    pub(crate) fn has_room(&self) -> Result<(), ApiError> {
        let state = self.state();
        match state.requests < self.max_requests {
            true => Ok(()),
            false => Err(self.full(&state)),
        }
    }

    /// Places for requests with so many tokens each: all or none.
    pub(crate) fn enter(self: &Arc<Self>, tokens: &[usize]) -> Result<Vec<Place>, ApiError> {
        let (requests, all): (usize, usize) = (tokens.len(), tokens.iter().sum());
        if all > self.max_tokens || requests > self.max_requests {
            let message = format!(
                "the request has {requests} prompts with {all} tokens together; the queue takes {} and {} \
                 (--max-queued, --max-queued-tokens); divide it",
                self.max_requests, self.max_tokens
            );
            return Err(ApiError::invalid(message).with_code("request_too_large"));
        }
        let mut state = self.state();
        if state.requests + requests > self.max_requests || state.tokens + all > self.max_tokens {
            return Err(self.full(&state));
        }
        state.requests += requests;
        state.tokens += all;
        drop(state);
        self.show([requests as f64, all as f64]);
        Ok(tokens.iter().map(|tokens| Place { queue: self.clone(), tokens: *tokens }).collect())
    }

    fn full(&self, state: &Waiting) -> ApiError {
        let [tokens, seconds] = state.computed;
        let rate = if seconds > 0.0 { tokens / seconds * self.engines as f64 } else { 0.0 };
        let wait = if rate > 0.0 { state.tokens as f64 / rate } else { 1.0 };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "1 to 60")]
        let wait = wait.clamp(1.0, LONGEST).ceil() as u64;
        let message = format!(
            "{} requests with {} tokens wait already; try again in {wait} s",
            state.requests, state.tokens
        );
        ApiError::busy(message, wait)
    }

    /// A step computed so many tokens.
    pub(crate) fn measured(&self, tokens: usize, took: Duration) {
        let mut state = self.state();
        let [all, seconds] = state.computed;
        state.computed = [all * DECAY + tokens as f64, seconds * DECAY + took.as_secs_f64()];
    }

    fn show(&self, [requests, tokens]: [f64; 2]) {
        self.metrics.add("regard_queued_requests", &self.model, requests);
        self.metrics.add("regard_queued_tokens", &self.model, tokens);
    }
}

/// A place in the queue; dropped when the request begins, or is given up.
#[derive(Debug)]
pub(crate) struct Place {
    queue: Arc<Queue>,
    tokens: usize,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.queue.state();
        state.requests -= 1;
        state.tokens -= self.tokens;
        drop(state);
        self.queue.show([-1.0, -(self.tokens as f64)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_bounded_in_requests_and_tokens() {
        let metrics = Arc::new(Metrics::new().expect("metrics"));
        let queue = Queue::new("m", [3, 100], 2, metrics.clone());
        let two = queue.enter(&[40, 40]).expect("room");
        let error = queue.enter(&[30]).expect_err("too many tokens");
        assert_eq!((error.status.as_u16(), error.retry_after), (429, Some(1)));
        let _third = queue.enter(&[20]).expect("room");
        assert!(queue.has_room().is_err());
        // 80 tokens wait, two engines compute 2 a second each: 25 s with the third.
        queue.measured(20, Duration::from_secs(10));
        assert_eq!(queue.has_room().expect_err("full").retry_after, Some(25));
        assert!(metrics.render().contains("regard_queued_tokens{model=\"m\"} 100"));
        drop(two);
        assert!(queue.has_room().is_ok());
        assert_eq!(queue.enter(&[101]).expect_err("never").status, 400);
        assert_eq!(queue.state().tokens, 20);
    }
}
