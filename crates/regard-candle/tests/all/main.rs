//! What a user can do, held against Candle's own autodiff over plain operations.

#![expect(clippy::unwrap_used, reason = "what cannot be computed has failed")]

mod attention;
mod plain;
mod refusals;
mod rope;
