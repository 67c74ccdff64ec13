//! Verbs that learn, and that judge what was learned.

mod args;
mod data;
mod eval;
mod run;

use crate::args::Format;
use anyhow::Result;
pub(crate) use args::Verb;

pub(crate) fn run(verb: &Verb, format: Format) -> Result<()> {
    match verb {
        Verb::Train(args) => run::run(args, format),
        Verb::Eval(args) => eval::run(args, format),
        Verb::Data(args) => data::run(args.what.as_ref(), format),
    }
}
