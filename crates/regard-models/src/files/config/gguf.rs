//! What a GGUF file says of its model.

mod names;
mod transformer;

use crate::error::Error;
use crate::files::gguf::Metadata;

fn size(metadata: &Metadata, name: &str) -> Result<Option<usize>, Error> {
    let size = metadata.whole(name)?;
    size.map(|n| usize::try_from(n).map_err(|e| Error::format(name, e.to_string()))).transpose()
}

/// The shortest number that is the same `f32`: the file has 1e-5 as 0.00000999999974.
fn round(x: f64) -> f64 {
    #[expect(clippy::cast_possible_truncation, reason = "it was written as f32")]
    let narrow = x as f32;
    narrow.to_string().parse().unwrap_or(x)
}
