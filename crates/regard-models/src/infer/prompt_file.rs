//! Keys and values of the beginning of a prompt in a file, for later processes.
//!
//! Nothing in the file says which model, CPU or version has written it. Instead one more token is fed after those of the file: its scores
//! depend on the keys and values of what it looks at in every layer, and must have the bits that they had for the writer. That tells files of
//! other models, CPUs and versions; it is no protection against a file that somebody has made to deceive.

use super::cache::LayerCache;
use super::session::{Session, State};
use crate::error::Error;
use crate::files::{Bytes, atomically};
use crate::generate::{Decoder, GRID};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::io::Write;
use std::path::Path;

/// Tokens; keys and values by layer; scores after one more token.
type Parts<'d> = (Vec<u32>, Vec<[&'d [u8]; 2]>, &'d [u8]);

impl Session<'_> {
    /// The tokens of a file, and the states after each [`GRID`] of them.
    pub(crate) fn read_prompt(&mut self, path: &Path) -> Result<(Vec<u32>, Vec<State>), Error> {
        let wrong = |why: String| Error::file(path, &format!("{why}; {REMEDY}"));
        let bytes = Bytes::map(path)?;
        let (tokens, rows, scores) = self.parts(&bytes).map_err(wrong)?;
        let cells = tokens.len() / GRID;
        let mut states: Vec<State> = Vec::with_capacity(cells);
        for cell in 0..cells {
            let mut state = match states.last() {
                Some(last) => self.fork(last)?,
                None => self.start(0)?,
            };
            for ((cache, sequence), both) in self.caches.iter_mut().zip(&state.layers).zip(&rows) {
                let size = both[0].len() / cells;
                let both = both.map(|rows| &rows[cell * size..(cell + 1) * size]);
                let sizes = cache.layout().1;
                cache.append_bytes(*sequence, both, sizes)?;
            }
            state.len += GRID;
            states.push(state);
        }
        if let Some(state) = states.last()
            && self.proof(&tokens, state)? != scores
        {
            return Err(wrong("of another model, CPU or version".into()));
        }
        Ok((tokens, states))
    }

    /// The tokens of a file, the keys and values of each layer, and the scores, in the sizes of this session; else why not.
    fn parts<'d>(&self, bytes: &'d [u8]) -> Result<Parts<'d>, String> {
        let file = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
        let tensor = |name: &str, dtype: Dtype, shape: &[usize]| {
            let found = file.tensor(name).map_err(|e| format!("{name}: {e}"))?;
            match found.dtype() == dtype && (shape.is_empty() || found.shape() == shape) {
                true => Ok(found.data()),
                false => {
                    let (other, there) = (found.dtype(), found.shape());
                    Err(format!("{name}: {other:?} {there:?}, not {dtype:?} {shape:?}"))
                }
            }
        };
        let tokens = tensor("tokens", Dtype::U32, &[])?.as_chunks().0;
        let tokens: Vec<u32> = tokens.iter().map(|id| u32::from_le_bytes(*id)).collect();
        let (n, vocab) = (tokens.len(), self.vocab());
        if n == 0 || n % GRID != 0 || tokens.iter().any(|id| *id as usize >= vocab) {
            return Err(format!("{n} tokens, not a multiple of {GRID} that are below {vocab}"));
        }
        let (dtype, shape) = self.layout(n);
        let layer = |layer| {
            let rows = |what| tensor(&format!("layers.{layer}.{what}"), dtype, &shape);
            Ok([rows("keys")?, rows("values")?])
        };
        let rows = (0..self.caches.len()).map(layer).collect::<Result<_, String>>()?;
        Ok((tokens, rows, tensor("scores", Dtype::F32, &[vocab])?))
    }

    /// Scores after a state and its last token once more.
    fn proof(&mut self, tokens: &[u32], state: &State) -> Result<Vec<u8>, Error> {
        let mut states = [self.fork(state)?];
        let scores = self.feed(&mut states, &[&tokens[tokens.len() - 1..]], &[1])?;
        let [state] = states;
        self.free(state)?;
        Ok(scores.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    /// The type of keys and values in files, and their shape of so many tokens.
    fn layout(&self, tokens: usize) -> (Dtype, Vec<usize>) {
        let layout = self.caches.first().map(LayerCache::layout);
        layout.map_or((Dtype::F32, Vec::new()), |(dtype, [heads, dim])| {
            (dtype, vec![tokens, heads, dim])
        })
    }

    /// Writes what a state has of these tokens.
    pub(crate) fn write_prompt(
        &mut self,
        tokens: &[u32],
        state: &State,
        path: &Path,
    ) -> Result<(), Error> {
        let (dtype, shape) = self.layout(tokens.len());
        let ids: Vec<u8> = tokens.iter().flat_map(|id| id.to_le_bytes()).collect();
        let scores = self.proof(tokens, state)?;
        let mut rows = vec![
            ("tokens".to_owned(), Dtype::U32, vec![tokens.len()], ids),
            ("scores".to_owned(), Dtype::F32, vec![self.vocab()], scores),
        ];
        for (layer, (cache, sequence)) in self.caches.iter().zip(&state.layers).enumerate() {
            let [keys, values] = cache.bytes(*sequence, 0..tokens.len())?;
            rows.push((format!("layers.{layer}.keys"), dtype, shape.clone(), keys));
            rows.push((format!("layers.{layer}.values"), dtype, shape.clone(), values));
        }
        let wrong = |e: safetensors::SafeTensorError| Error::file(path, &e);
        let views = rows.iter().map(|(name, dtype, shape, data)| {
            Ok((name, TensorView::new(*dtype, shape.clone(), data)?))
        });
        let views = views.collect::<Result<Vec<_>, _>>().map_err(wrong)?;
        let bytes = safetensors::serialize(views, None).map_err(wrong)?;
        atomically(path, |file| file.write_all(&bytes))
    }
}

const REMEDY: &str = "remove the file, or name another as the prompt cache";
