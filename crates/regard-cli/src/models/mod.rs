//! Verbs that open a model; all that needs Burn is here, in `train` and in `lab`.

mod align;
mod args;
mod classify;
mod embed;
mod generate;
mod list;
mod open;
#[cfg(feature = "serve")]
mod serve;
mod shipped;
mod text;
mod translate;

use crate::args::Format;
use anyhow::Result;
pub(crate) use args::{Verb, kv_dtypes};
pub use open::place;
#[cfg(feature = "train")]
pub(crate) use open::{busy, is_run, open};
pub(crate) use open::{look, look_at_image, look_with_caches};
pub use shipped::Shipped;

pub(crate) fn run(verb: &Verb, format: Format) -> Result<()> {
    match verb {
        Verb::Generate(args) => generate::run(args, format),
        Verb::Translate(args) => translate::run(args, format),
        Verb::Align(args) => align::run(args, format),
        Verb::Classify(args) => classify::run(args, format),
        Verb::Embed(args) => embed::run(args, format),
        #[cfg(feature = "serve")]
        Verb::Serve(args) => serve::run(args),
        Verb::Models(args) => list::run(args.what.as_ref(), format),
    }
}
