//! Data: what is read, the vocabulary made of it, and the batches it is cut into.

mod batches;
mod read;
mod vocabulary;

pub use batches::{Batches, windows};
pub use read::{
    Column, Document, Pair, documents, first_documents, first_pairs, pairs, text, texts,
};
pub use vocabulary::{VocabularyKind, VocabularySettings, train as train_vocabulary};
