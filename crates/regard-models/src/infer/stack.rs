//! Embeddings, blocks and the final norm.

use super::block::{Block, Keys, Role, Step};
use super::cache::LayerCache;
use super::layers::{Linear, Norm, project};
use super::ops::{self, Rotations, each_row};
use super::record::Recorder;
use super::work::Workspace;
use crate::error::Error;
use crate::files::{AddedPositions, PairLayout, PatchConfig, RopeConfig, StackConfig, Weights};
use regard::{Machine, Sequence};
use regard_matmul::{Matrix, Rows};
use std::sync::Arc;

/// A stack with its weights.
#[derive(Debug)]
pub(super) struct Stack {
    pub(super) config: StackConfig,
    pub(super) embedding: Arc<Matrix>,
    /// From the numbers of a patch to a row.
    patches: Option<Linear>,
    /// `[entries, d_model]`, where they are learned.
    positions: Option<Vec<f32>>,
    /// Row 0 of the token types.
    token_type: Option<Vec<f32>>,
    embedding_norm: Option<Norm>,
    pub(super) blocks: Vec<Block>,
    norm: Option<Norm>,
    relative: Option<Vec<f32>>,
    ropes: Vec<RopeConfig>,
}

/// Which part of a model a stack is; its tensors are named by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// All of it.
    Whole,
    Encoder,
    Decoder,
}

impl Part {
    fn name(self, part: &str) -> String {
        match (self, part) {
            (Self::Whole, part) => part.into(),
            (Self::Encoder, "embedding") => "source".into(),
            (Self::Decoder, "embedding") => "target".into(),
            (Self::Encoder, "blocks") => "encoder".into(),
            (Self::Decoder, "blocks") => "decoder".into(),
            (Self::Encoder, part) => format!("encoder_{part}"),
            (Self::Decoder, part) => format!("decoder_{part}"),
        }
    }
}

/// The rows of a pass: tokens of sequences, one after another.
#[derive(Debug, Default)]
pub(super) struct Packed {
    pub(super) tokens: Vec<u32>,
    /// In place of tokens: rows `[rows, d_model]`, to which positions are added.
    given: Option<Vec<f32>>,
    pub(super) positions: Vec<usize>,
    pub(super) offsets: Vec<usize>,
}

impl Packed {
    /// Sequences that go on at these positions.
    pub(super) fn new<'a>(sequences: impl Iterator<Item = (usize, &'a [u32])>) -> Self {
        let mut packed = Self { offsets: vec![0], ..Self::default() };
        for (first, tokens) in sequences {
            packed.tokens.extend_from_slice(tokens);
            packed.positions.extend(first..first + tokens.len());
            packed.offsets.push(packed.tokens.len());
        }
        packed
    }
}

/// Caches of the source, and its sequences by layer.
pub(super) type SourceCaches<'a> = (&'a [LayerCache], &'a [Vec<Sequence>]);

/// Caches of all layers, each with the sequences of a batch.
#[derive(Debug)]
pub(super) struct Caches<'a> {
    pub(super) own: &'a mut [LayerCache],
    /// By layer.
    pub(super) sequences: &'a [Vec<Sequence>],
    /// The same of the source.
    pub(super) source: Option<SourceCaches<'a>>,
}

impl Stack {
    pub(super) fn take(
        weights: &mut Weights,
        part: Part,
        config: &StackConfig,
        role: Role,
        shared: Option<&Arc<Matrix>>,
    ) -> Result<Self, Error> {
        let d = config.d_model;
        let name = |what: &str| part.name(what);
        let table = |what: &str| format!("{}.weight", name(what));
        let embedding = match shared {
            Some(shared) => shared.clone(),
            None => Arc::new(weights.matrix(&table("embedding"), [config.vocab, d])?),
        };
        let linear =
            |of: PatchConfig| Linear::take(weights, &name("patches"), [d, of.inputs()], true);
        let patches = config.patches.map(linear).transpose()?;
        let positions = match config.positions {
            AddedPositions::Learned { entries, .. } => {
                Some(weights.finite(&table("positions"), &[entries, d])?)
            }
            _ => None,
        };
        let token_type = config.token_types.map(|n| weights.finite(&table("token_types"), &[n, d]));
        let token_type = token_type.transpose()?.map(|mut rows| {
            rows.truncate(d);
            rows
        });
        let mut norm = |what: &str, is_there: bool| {
            let take = |_| Norm::take(weights, &name(what), d, config.norm);
            is_there.then_some(()).map(take).transpose()
        };
        let embedding_norm = norm("embedding_norm", config.embedding_norm)?;
        let last = norm("norm", config.final_norm)?;
        let heads = config.heads.q;
        let relative = config
            .relative
            .map(|sizes| weights.finite(&table("relative"), &[sizes.buckets, heads]))
            .transpose()?;
        let mut ropes: Vec<RopeConfig> = Vec::new();
        let blocks = config.layers.iter().enumerate().map(|(layer, own)| {
            let rope = own.rope.as_ref().map(|rope| {
                ropes.iter().position(|known| known == rope).unwrap_or_else(|| {
                    ropes.push(rope.clone());
                    ropes.len() - 1
                })
            });
            Block::take(weights, (&name("blocks"), layer), config, role, rope)
        });
        let blocks = blocks.collect::<Result<_, _>>()?;
        let (config, norm) = (config.clone(), last);
        Ok(Self {
            config,
            embedding,
            patches,
            positions,
            token_type,
            embedding_norm,
            blocks,
            norm,
            relative,
            ropes,
        })
    }

    /// Rows of images, each `[channels, height, width]`: the class token, then the patches, row by row.
    pub(super) fn patch_rows(&self, images: &[Vec<f32>]) -> Result<Packed, Error> {
        let (Some(linear), Some(sizes)) = (&self.patches, self.config.patches) else {
            let known = "a model of images can do that";
            return Err(Error::unsupported("images", &"a model of texts", known));
        };
        let (d, [down, across]) = (self.config.d_model, sizes.grid());
        let rows = down * across + 1;
        let mut x = vec![0.0; images.len() * rows * d];
        let mut input = Rows::new();
        for (image, own) in images.iter().zip(x.chunks_exact_mut(rows * d)) {
            let (class, own) = own.split_at_mut(d);
            self.embedding.row(0, class)?;
            cut(image, sizes, input.reset(rows - 1, sizes.inputs())?)?;
            project(&input, &mut [(linear, own)])?;
        }
        Ok(Packed {
            tokens: Vec::new(),
            given: Some(x),
            positions: images.iter().flat_map(|_| 0..rows).collect(),
            offsets: (0..=images.len()).map(|i| i * rows).collect(),
        })
    }

    /// Embeddings of tokens, `[tokens, d_model]`.
    fn look_up(&self, tokens: &[u32]) -> Result<Vec<f32>, Error> {
        let (vocab, d) = (self.config.vocab, self.config.d_model);
        if self.patches.is_some() {
            let known = "a model of texts can do that";
            return Err(Error::unsupported("tokens", &"a model of images", known));
        }
        let mut x = vec![0.0; tokens.len() * d];
        for (token, row) in tokens.iter().zip(x.chunks_exact_mut(d)) {
            if *token as usize >= vocab {
                let why =
                    format!("the model has {vocab} tokens; does the vocabulary belong to it?");
                return Err(Error::format(format!("token {token}"), why));
            }
            self.embedding.row(*token as usize, row)?;
        }
        Ok(x)
    }

    /// Embeddings of tokens, or the rows that are given, with what is added to them: `[rows, d_model]`.
    pub(super) fn embed(&self, rows: &Packed) -> Result<Vec<f32>, Error> {
        let (config, d) = (&self.config, self.config.d_model);
        let mut x = match &rows.given {
            Some(given) => given.clone(),
            None => self.look_up(&rows.tokens)?,
        };
        if let Some(scale) = config.embedding_scale {
            #[expect(clippy::cast_possible_truncation, reason = "numbers are f32")]
            x.iter_mut().for_each(|x| *x *= scale as f32);
        }
        match (config.positions, &self.positions) {
            (AddedPositions::None, _) => {}
            (AddedPositions::Learned { entries, offset }, Some(table)) => {
                for (position, row) in rows.positions.iter().zip(x.chunks_exact_mut(d)) {
                    let at = position + offset;
                    if at >= entries {
                        return Err(too_long(position + 1, entries - offset.min(entries)));
                    }
                    row.iter_mut().zip(&table[at * d..]).for_each(|(x, add)| *x += add);
                }
            }
            (AddedPositions::Sinusoidal { pairs, first, inclusive }, _) => {
                for (position, row) in rows.positions.iter().zip(x.chunks_exact_mut(d)) {
                    add_sinusoid(row, position + first, pairs, inclusive);
                }
            }
            (AddedPositions::Learned { .. }, None) => {}
        }
        if let Some(row) = &self.token_type {
            each_row(&mut x, d, &ops::Add { other: row, factor: 1.0 });
        }
        if let Some(norm) = &self.embedding_norm {
            norm.apply(&mut x, d);
        }
        Ok(x)
    }

    /// What all layers of a pass have in common.
    pub(super) fn step<'a>(&'a self, rows: &'a Packed) -> Step<'a> {
        Step {
            config: &self.config,
            offsets: &rows.offsets,
            rotations: self
                .ropes
                .iter()
                .map(|rope| Rotations::new(rope, &rows.positions))
                .collect(),
            relative: self.relative.as_deref(),
            machine: Machine::detect(),
        }
    }

    /// Rows through all blocks, without the final norm.
    pub(super) fn forward(
        &self,
        rows: &Packed,
        caches: Option<Caches<'_>>,
        work: &mut Workspace,
        recorder: &mut Recorder,
        (kind, axis): (&'static str, &'static str),
    ) -> Result<Vec<f32>, Error> {
        let mut x = self.embed(rows)?;
        let step = self.step(rows);
        let mut caches = caches;
        let layers = || {
            for (layer, block) in self.blocks.iter().enumerate() {
                recorder.at(layer, kind, axis);
                let keys = match &mut caches {
                    None => [None, None],
                    Some(Caches { own, sequences, source }) => {
                        // Without a cache of its own a decoder looks at the rows themselves: it is looked at as a whole.
                        let own = own.get_mut(layer);
                        let own = own.map(|own| Keys::Append(own, &sequences[layer]));
                        [own, source.map(|(caches, read)| Keys::Read(&caches[layer], &read[layer]))]
                    }
                };
                block.forward(&mut x, &step, keys, work, recorder)?;
            }
            Ok(x)
        };
        // On a thread of the pool: another one would be put to sleep and woken up at each of a dozen products of a layer.
        rayon::scope(|_| layers())
    }

    /// The final norm.
    pub(super) fn finish(&self, x: &mut [f32]) {
        if let Some(norm) = &self.norm {
            norm.apply(x, self.config.d_model);
        }
    }
}

/// The numbers of each patch of an image `[channels, height, width]`, `[patches, channels, height, width]`.
fn cut(image: &[f32], sizes: PatchConfig, to: &mut [f32]) -> Result<(), Error> {
    let (PatchConfig { image: [height, width], patch }, [_, across]) = (sizes, sizes.grid());
    if image.len() != to.len() {
        let why = format!("{} numbers; {height} x {width} pixels have {}", image.len(), to.len());
        return Err(Error::format("image", why));
    }
    for (i, to) in to.chunks_exact_mut(sizes.inputs()).enumerate() {
        let [top, left] = [i / across * patch[0], i % across * patch[1]];
        for (row, to) in to.chunks_exact_mut(patch[1]).enumerate() {
            let [channel, y] = [row / patch[0], top + row % patch[0]];
            to.copy_from_slice(&image[(channel * height + y) * width + left..][..patch[1]]);
        }
    }
    Ok(())
}

fn too_long(tokens: usize, most: usize) -> Error {
    let why = format!("it has {tokens} tokens, the model holds {most}; shorten it");
    Error::Tokens { what: "the text".into(), why }
}

#[expect(clippy::cast_possible_truncation, reason = "numbers are f32")]
fn add_sinusoid(row: &mut [f32], position: usize, pairs: PairLayout, inclusive: bool) {
    let half = row.len() / 2;
    let last = if inclusive { half.saturating_sub(1) } else { half }.max(1) as f64;
    for i in 0..half {
        let angle = position as f64 * 1e4f64.powf(-(i as f64) / last);
        let [sin, cos] = match pairs {
            PairLayout::Interleaved => [2 * i, 2 * i + 1],
            PairLayout::HalfSplit => [i, i + half],
        };
        row[sin] += angle.sin() as f32;
        row[cos] += angle.cos() as f32;
    }
}
