//! Mutated inputs for everything of Regard that reads files of others.
//!
//! `hostile TARGET [--seconds N | --inputs N] [--seed S]` takes the files of `fuzz/seeds/TARGET`, changes them by chance that is a function
//! of the seed, and gives them to the [target](targets::TARGETS). A target may accept an input or refuse it. A panic is a failure, and so
//! is an input that takes longer than [`hunt::PATIENCE`]; both are written to `target/hostile/TARGET`. So is a hunt in which nothing is
//! accepted, or nothing refused: it has tested nothing.
//!
//! Memory is limited from outside, by `fuzz/hostile`, which calls the program under `ulimit -v`: an allocator that counts would be unsafe
//! code. An input that asks for more aborts; called again with the same seed and `HOSTILE_KEEP=1`, its bytes are in
//! `target/hostile/TARGET/last`.
//!
//! It is not libFuzzer (as `fuzz/` is, for the engine): instrumented builds would compile Burn and all that it needs once more, for ten
//! minutes and some gigabytes. These inputs are small and the readers under test plain, so mutation without coverage finds most of it, and
//! the program is built from what the tests have built already.

#![forbid(unsafe_code)]

pub mod chance;
pub mod hunt;
pub mod mutate;
pub mod targets;
