//! The sequences of a cache, and the handles that name them.

use super::pages::make_room;
use crate::error::Error;

/// Names a sequence of a [`KvCache`](crate::KvCache), until that is freed.
///
/// It is a name, not an owner: a sequence is freed by [`KvCache::free`](crate::KvCache::free), and using a copy of its
/// handle afterwards is an error. A handle speaks of the cache that gave it. Caches that were asked for the same sequences
/// in the same order, as the layers of a model are, give equal handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sequence {
    index: usize,
    /// Sequences that had this index before.
    generation: u64,
}

/// The pages of one sequence.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// In order of their positions, from page `evicted` on.
    pub(super) pages: Vec<usize>,
    /// Pages forgotten at the front.
    pub(super) evicted: usize,
    /// Positions, with the forgotten ones.
    pub(super) len: usize,
}

impl Table {
    /// A table of the same pages, which does not count as one that holds them yet.
    pub(super) fn twin(&self) -> Result<Self, Error> {
        let Self { evicted, len, .. } = *self;
        let mut pages = Vec::new();
        make_room(&mut pages, self.pages.len())?;
        pages.extend_from_slice(&self.pages);
        Ok(Self { pages, evicted, len })
    }

    /// The page of the positions from `i` pages on.
    pub(super) fn page(&self, i: usize) -> usize {
        self.pages[i - self.evicted]
    }
}

/// A place for a sequence.
#[derive(Debug)]
struct Slot {
    generation: u64,
    table: Option<Table>,
}

/// All sequences of a cache.
#[derive(Debug, Default)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    /// The empty ones; has room for all, so that removing never allocates.
    free: Vec<usize>,
}

impl Slots {
    /// Gives a sequence a handle.
    pub(super) fn insert(&mut self, table: Table) -> Result<Sequence, Error> {
        let index = if let Some(index) = self.free.pop() {
            index
        } else {
            let index = self.slots.len();
            make_room(&mut self.slots, 1)?;
            make_room(&mut self.free, index + 1)?;
            self.slots.push(Slot { generation: 0, table: None });
            index
        };
        let slot = &mut self.slots[index];
        slot.table = Some(table);
        Ok(Sequence { index, generation: slot.generation })
    }

    /// The sequence of a handle.
    pub(super) fn get(&self, sequence: Sequence) -> Result<&Table, Error> {
        let slot = self.slots.get(sequence.index).filter(|s| s.generation == sequence.generation);
        slot.and_then(|s| s.table.as_ref()).ok_or(stale(sequence))
    }

    /// The same, to be changed.
    pub(super) fn get_mut(&mut self, sequence: Sequence) -> Result<&mut Table, Error> {
        let slot = self.slots.get_mut(sequence.index);
        let slot = slot.filter(|s| s.generation == sequence.generation);
        slot.and_then(|s| s.table.as_mut()).ok_or(stale(sequence))
    }

    /// Takes a sequence out; from then on its handle is stale.
    pub(super) fn remove(&mut self, sequence: Sequence) -> Result<Table, Error> {
        let table = std::mem::take(self.get_mut(sequence)?);
        self.slots[sequence.index] = Slot { generation: sequence.generation + 1, table: None };
        self.free.push(sequence.index);
        Ok(table)
    }
}

fn stale(Sequence { index, generation }: Sequence) -> Error {
    Error::StaleSequence { index, generation }
}
