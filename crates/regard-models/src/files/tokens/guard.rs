//! Other people's code on untrusted files: a panic in it is an error here.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Whether this thread is within [`guarded`], where a panic is told as an error and not on stderr.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Runs the work; a panic becomes its message. Panics elsewhere are told as before: the hook that was there is called for them.
pub(super) fn guarded<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                before(info);
            }
        }));
    });
    let outer = GUARDED.replace(true);
    // What is broken by a panic is a tokenizer that is only read, or one that is dropped.
    let result = catch_unwind(AssertUnwindSafe(work));
    GUARDED.set(outer);
    result.map_err(|payload| {
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        text.or_else(|| payload.downcast_ref().cloned()).unwrap_or_else(|| "without a word".into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_its_message_and_work_goes_on() {
        assert_eq!(guarded(|| 7), Ok(7));
        let refused: Result<(), _> = guarded(|| panic!("on purpose"));
        assert_eq!(refused, Err("on purpose".into()));
        let list: Vec<u32> = Vec::new();
        let refused = guarded(|| list[std::hint::black_box(3)]);
        assert!(refused.unwrap_err().contains("out of bounds"));
        assert!(!GUARDED.get());
    }
}
