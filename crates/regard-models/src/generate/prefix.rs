//! Beginnings of prompts that were fed, for prompts that begin the same way.
//!
//! A prompt is a chain of cells of [`GRID`] tokens. A cell is known by the one before it and its own tokens, all of which are compared:
//! there are no hashes that could collide. Its state is that after the cell, and shares its pages with those before. What a state holds
//! was computed cell by cell, as it would be computed again: nothing that follows has other bits.

use super::scheduler::GRID;
use std::collections::HashMap;

/// The number of a cell.
pub(super) type CellId = u64;

/// What comes before a cell: another, or nothing, for the first of an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Before {
    Owner(u64),
    Cell(CellId),
}

/// What a cell is known by.
type Key = (Before, Box<[u32]>);

pub(super) struct Prefixes<S> {
    ids: HashMap<Key, CellId>,
    cells: HashMap<CellId, Cell<S>>,
    /// Counts cells and uses.
    clock: u64,
}

struct Cell<S> {
    key: Key,
    state: S,
    used: u64,
    /// Cells that follow it. It cannot be given up before them: they hold its pages.
    followers: usize,
}

impl<S> Default for Prefixes<S> {
    fn default() -> Self {
        Self { ids: HashMap::new(), cells: HashMap::new(), clock: 0 }
    }
}

impl<S> Prefixes<S> {
    /// How many cells there are.
    pub(super) fn len(&self) -> usize {
        self.cells.len()
    }

    /// The longest beginning of a prompt that leaves one token to feed: its tokens and its last cell.
    pub(super) fn find(&mut self, owner: u64, prompt: &[u32]) -> (usize, Option<CellId>) {
        let chain = self.chain(owner, &prompt[..prompt.len().saturating_sub(1)]);
        (chain.len() * GRID, chain.last().copied())
    }

    pub(super) fn state(&self, cell: CellId) -> Option<&S> {
        self.cells.get(&cell).map(|cell| &cell.state)
    }

    /// The cells before the last of these tokens, if they are whole cells, those before are there and the last is not.
    pub(super) fn lacks(&mut self, owner: u64, tokens: &[u32]) -> Option<Option<CellId>> {
        let (cells, rest) = tokens.as_chunks::<GRID>();
        let chain = self.chain(owner, tokens);
        (rest.is_empty() && chain.len() + 1 == cells.len()).then(|| chain.last().copied())
    }

    /// Adds the state after tokens that end with a whole cell, behind the cell that [`lacks`](Self::lacks) has found.
    pub(super) fn insert(&mut self, owner: u64, before: Option<CellId>, tokens: &[u32], state: S) {
        let last = &tokens[tokens.len() - GRID..];
        let key = (before.map_or(Before::Owner(owner), Before::Cell), last.into());
        if let Some(before) = before.and_then(|id| self.cells.get_mut(&id)) {
            before.followers += 1;
        }
        self.clock += 1;
        let (id, used) = (self.clock, self.clock);
        self.ids.insert(Key::clone(&key), id);
        self.cells.insert(id, Cell { key, state, used, followers: 0 });
    }

    /// Takes out the least recently used cell that none follows and that is not spared.
    pub(super) fn evict(&mut self, spared: Option<CellId>) -> Option<S> {
        let ends =
            self.cells.iter().filter(|(id, cell)| cell.followers == 0 && Some(**id) != spared);
        let (id, _) = ends.min_by_key(|(id, cell)| (cell.used, **id))?;
        let cell = self.cells.remove(&id.clone())?;
        self.ids.remove(&cell.key);
        if let Before::Cell(id) = cell.key.0
            && let Some(before) = self.cells.get_mut(&id)
        {
            before.followers -= 1;
        }
        Some(cell.state)
    }

    /// The cells that tokens begin with, which are used now.
    fn chain(&mut self, owner: u64, tokens: &[u32]) -> Vec<CellId> {
        self.clock += 1;
        let (mut chain, mut before) = (Vec::new(), Before::Owner(owner));
        for tokens in tokens.as_chunks::<GRID>().0 {
            let Some(id) = self.ids.get(&(before, tokens.as_slice().into())) else { break };
            if let Some(cell) = self.cells.get_mut(id) {
                cell.used = self.clock;
            }
            before = Before::Cell(*id);
            chain.push(*id);
        }
        chain
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(cells: &[u32]) -> Vec<u32> {
        cells.iter().flat_map(|cell| vec![*cell; GRID]).collect()
    }

    /// Adds all cells of a prompt; its states are their last tokens.
    fn add(prefixes: &mut Prefixes<u32>, owner: u64, cells: &[u32]) {
        for n in 1..=cells.len() {
            let fed = tokens(&cells[..n]);
            if let Some(before) = prefixes.lacks(owner, &fed) {
                prefixes.insert(owner, before, &fed, cells[n - 1]);
            }
        }
    }

    #[test]
    fn the_longest_beginning_of_the_same_owner_is_found() {
        let mut prefixes = Prefixes::default();
        add(&mut prefixes, 1, &[5, 6, 7]);
        add(&mut prefixes, 1, &[5, 8]);
        assert_eq!(prefixes.len(), 4);
        let mut found = |owner, cells: &[u32], more: usize| {
            let (n, cell) = prefixes.find(owner, &[tokens(cells), vec![0; more]].concat());
            (n / GRID, cell.and_then(|cell| prefixes.state(cell).copied()))
        };
        assert_eq!(found(1, &[5, 6, 7], 1), (3, Some(7)));
        assert_eq!(found(1, &[5, 6, 7], 0), (2, Some(6)), "one token is left to feed");
        assert_eq!(found(1, &[5, 8, 7], 9), (2, Some(8)));
        assert_eq!(found(1, &[6], 9), (0, None), "a cell in another place is another cell");
        assert_eq!(found(2, &[5, 6], 9), (0, None), "others share nothing");
    }

    #[test]
    fn the_least_recently_used_end_of_a_chain_goes_first() {
        let mut prefixes = Prefixes::default();
        add(&mut prefixes, 1, &[1, 2, 3]);
        add(&mut prefixes, 1, &[4, 5]);
        prefixes.find(1, &[tokens(&[1, 2]), vec![0]].concat());
        let (_, spared) = prefixes.find(1, &[tokens(&[4, 5]), vec![0]].concat());
        let mut order = Vec::new();
        while let Some(state) = prefixes.evict(spared) {
            order.push(state);
        }
        assert_eq!(order, [3, 2, 1]);
        assert_eq!([prefixes.evict(None), prefixes.evict(None)], [Some(5), Some(4)]);
        assert_eq!((prefixes.len(), prefixes.ids.len(), prefixes.evict(None)), (0, 0, None));
    }
}
