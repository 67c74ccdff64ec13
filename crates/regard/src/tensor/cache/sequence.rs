//! Sequence handles and page tables.

use super::pages::make_room;
use crate::error::Error;

/// Handle of a sequence in a [`KvCache`](crate::KvCache).
///
/// Dropping a handle does not free the sequence; [`KvCache::free`](crate::KvCache::free) does, and using a copy of the handle
/// afterwards is an error. A handle is valid only for the cache that returned it. Caches that start, fork and free the same
/// sequences in the same order, such as the per-layer caches of a model, return equal handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sequence {
    index: usize,
    /// Number of earlier sequences with this index. Distinguishes a stale handle from the current one.
    generation: u64,
}

/// Page table of one sequence.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// Page ids in order of position, starting with page number `evicted` of the sequence.
    pub(super) pages: Vec<usize>,
    /// Number of pages evicted at the front.
    pub(super) evicted: usize,
    /// Length in positions, evicted ones included.
    pub(super) len: usize,
}

impl Table {
    /// A copy of the table. The caller must increment the reference counts of its pages.
    pub(super) fn twin(&self) -> Result<Self, Error> {
        let Self { evicted, len, .. } = *self;
        let mut pages = Vec::new();
        make_room(&mut pages, self.pages.len())?;
        pages.extend_from_slice(&self.pages);
        Ok(Self { pages, evicted, len })
    }

    /// The id of page number `i` of the sequence, counted with the evicted pages.
    pub(super) fn page(&self, i: usize) -> usize {
        self.pages[i - self.evicted]
    }
}

/// An entry of the slot map; reused after its sequence is freed.
#[derive(Debug)]
struct Slot {
    generation: u64,
    table: Option<Table>,
}

/// All sequences of a cache: a slot map with generations.
#[derive(Debug, Default)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    /// Indices of empty slots. Its capacity covers all slots, so that `remove` never allocates.
    free: Vec<usize>,
}

impl Slots {
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

    pub(super) fn get(&self, sequence: Sequence) -> Result<&Table, Error> {
        let slot = self.slots.get(sequence.index).filter(|s| s.generation == sequence.generation);
        slot.and_then(|s| s.table.as_ref()).ok_or(stale(sequence))
    }

    pub(super) fn get_mut(&mut self, sequence: Sequence) -> Result<&mut Table, Error> {
        let slot = self.slots.get_mut(sequence.index);
        let slot = slot.filter(|s| s.generation == sequence.generation);
        slot.and_then(|s| s.table.as_mut()).ok_or(stale(sequence))
    }

    /// Removes a sequence and increments the generation of its slot, which makes the handle stale.
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
