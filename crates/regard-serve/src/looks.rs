//! Answers that a page of their attention may be asked of: in memory alone, for a while, for the key that asked for it.

use crate::keys::KeyId;
use crate::models::Entry;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// Answers that are kept; the oldest leaves.
const KEPT: usize = 256;
/// How long they are kept.
const LIFE: Duration = Duration::from_secs(600);

/// An answer that was given: all that it takes to compute its attention again.
#[derive(Debug)]
pub(crate) struct Look {
    pub(crate) entry: Arc<Entry>,
    /// Of the prompt and of what was generated after it.
    pub(crate) tokens: Vec<u32>,
    /// So many of the first are shown without their words.
    pub(crate) unnamed: usize,
}

/// Those of a server.
#[derive(Debug)]
pub(crate) struct Looks<T = Look> {
    /// The oldest first.
    kept: Mutex<VecDeque<Kept<T>>>,
    /// Pages are made one at a time: each takes the threads of an engine, and memory of its own.
    pub(crate) making: Arc<Semaphore>,
}

#[derive(Debug)]
struct Kept<T> {
    id: String,
    key: KeyId,
    until: Instant,
    look: Arc<T>,
}

impl<T> Looks<T> {
    pub(crate) fn new() -> Self {
        Self { kept: Mutex::default(), making: Arc::new(Semaphore::new(1)) }
    }

    fn kept(&self) -> MutexGuard<'_, VecDeque<Kept<T>>> {
        // A list is right after any panic.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an answer by an [id].
    pub(crate) fn keep(&self, id: String, key: KeyId, look: T, now: Instant) {
        let mut kept = self.kept();
        if kept.len() >= KEPT {
            kept.pop_front();
        }
        kept.push_back(Kept { id, key, until: now + LIFE, look: Arc::new(look) });
    }

    /// The answer of an id, for the key that asked for it.
    pub(crate) fn find(&self, id: &str, key: KeyId, now: Instant) -> Option<Arc<T>> {
        let kept = self.kept();
        let own = |one: &&Kept<T>| one.id == id && one.key == key && one.until > now;
        kept.iter().find(own).map(|one| one.look.clone())
    }

    /// Drops what is too old.
    pub(crate) fn forget(&self, now: Instant) {
        self.kept().retain(|one| one.until > now);
    }
}

/// 128 bits that nobody can guess.
pub(crate) fn id() -> Result<String, getrandom::Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)?;
    Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_found_by_its_id_and_its_key() {
        let (looks, now) = (Looks::new(), Instant::now());
        let [first, second] = [id(), id()].map(|id| id.expect("the system has random numbers"));
        assert!(first != second && first.len() == 32, "{first} {second}");
        looks.keep(first.clone(), KeyId(0), 'a', now);
        looks.keep(second.clone(), KeyId(1), 'b', now);
        let find = |id: &str, key| looks.find(id, KeyId(key), now).map(|found| *found);
        assert_eq!([find(&first, 0), find(&second, 1)], [Some('a'), Some('b')]);
        for (id, key) in [(first.as_str(), 1), (&second, 0), ("", 0), (&first[1..], 0), ("+1", 0)] {
            assert_eq!(find(id, key), None, "{id} {key}");
        }
    }

    #[test]
    fn an_answer_is_kept_for_ten_minutes() {
        let (looks, now) = (Looks::new(), Instant::now());
        looks.keep("a".into(), KeyId(0), (), now);
        looks.keep("b".into(), KeyId(0), (), now + Duration::from_secs(1));
        let later = |seconds| now + Duration::from_secs(seconds);
        let there = |id: &str, at| looks.find(id, KeyId(0), at).is_some();
        assert!(there("a", later(599)) && !there("a", later(600)) && there("b", later(600)));
        looks.forget(later(600));
        assert!(!there("a", now) && there("b", now));
        looks.forget(later(601));
        assert!(looks.kept().is_empty());
    }

    #[test]
    fn the_oldest_leaves_for_the_next() {
        let (looks, now) = (Looks::new(), Instant::now());
        for number in 0..=KEPT {
            looks.keep(number.to_string(), KeyId(0), number, now);
        }
        let find = |number: usize| looks.find(&number.to_string(), KeyId(0), now);
        assert_eq!(
            (find(0), find(1).as_deref(), find(KEPT).as_deref()),
            (None, Some(&1), Some(&KEPT))
        );
        assert_eq!(looks.kept().len(), KEPT);
    }
}
