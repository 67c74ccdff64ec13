//! Hierarchical attention (Yang et al. 2016): words make sentences, sentences make a document, and a document has a class.

use crate::batches::{Batch, POSITIONS, in_batches};
use crate::error::Error;
use crate::files::HanConfig;
use crate::nn::{DropoutRates, Embedding, Level, Linear};
use crate::pass::Pass;
use crate::recorder::Recorder;
use crate::seq2seq::sized;
use crate::stack::numbers;
use crate::stack::{EMBEDDINGS, ids};
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use regard_burn::dropout;

/// Lists of numbers, one for each sentence.
type Numbers = Vec<Vec<f32>>;

/// Scores classes of documents. A document is sentences, a sentence is ids of words; one without words is not looked at.
#[derive(Module, Debug)]
pub struct Han {
    /// A row for each word.
    pub embedding: Embedding,
    /// Words to a sentence.
    pub words: Level,
    /// Sentences to a document.
    pub sentences: Level,
    /// The scores of classes.
    pub head: Linear,
    #[module(skip)]
    config: HanConfig,
    #[module(skip)]
    dropout: DropoutRates,
}

/// What a [`Han`] looked at in one document.
#[derive(Clone, Debug, PartialEq)]
pub struct HanWeights {
    /// Of each sentence; 0 for one without words.
    pub sentences: Vec<f32>,
    /// Of each word within its sentence.
    pub words: Vec<Vec<f32>>,
}

/// The sentences of all documents that have words.
struct PackedDocuments {
    /// One after another.
    sentences: Vec<Vec<u32>>,
    /// Words of each.
    lengths: Vec<usize>,
    /// How many each document has.
    counts: Vec<usize>,
}

impl PackedDocuments {
    fn new(documents: &[Vec<Vec<u32>>]) -> Self {
        let full =
            |document: &Vec<Vec<u32>>| document.iter().filter(|words| !words.is_empty()).count();
        let sentences: Vec<_> =
            documents.iter().flatten().filter(|words| !words.is_empty()).cloned().collect();
        Self {
            lengths: sentences.iter().map(Vec::len).collect(),
            counts: documents.iter().map(full).collect(),
            sentences,
        }
    }

    /// Which sentence stands where, `[documents, most]`; `empty` behind those of each document.
    fn places(&self, empty: usize, device: &Device) -> Tensor<2, Int> {
        let most = self.counts.iter().copied().max().unwrap_or(0);
        let mut next = 0;
        let mut places: Vec<i64> = Vec::with_capacity(self.counts.len() * most);
        for count in &self.counts {
            let all = (next..next + count).chain(std::iter::repeat_n(empty, most - count));
            places.extend(all.map(|place| place.cast_signed() as i64));
            next += count;
        }
        Tensor::from_data(TensorData::new(places, [self.counts.len(), most]), device)
    }
}

impl Han {
    /// With random weights. `dropout.rate` is dropped of the words, and of what scores are made of, while training.
    pub fn new(config: &HanConfig, dropout: DropoutRates, device: &Device) -> Result<Self, Error> {
        let HanConfig { embedding, word_hidden, sentence_hidden, .. } = *config;
        sized(&[
            ("embedding", embedding),
            ("word_hidden", word_hidden),
            ("word_attention", config.word_attention),
            ("sentence_hidden", sentence_hidden),
            ("sentence_attention", config.sentence_attention),
            ("vocab", config.vocab),
            ("classes", config.classes),
        ])?;
        Ok(Self {
            embedding: Embedding::new([config.vocab, embedding], 1.0, device),
            words: Level::new([embedding, word_hidden, config.word_attention], device),
            sentences: Level::new(
                [2 * word_hidden, sentence_hidden, config.sentence_attention],
                device,
            ),
            head: Linear::new([2 * sentence_hidden, config.classes], true, device),
            config: *config,
            dropout,
        })
    }

    /// What it is.
    #[must_use]
    pub fn config(&self) -> &HanConfig {
        &self.config
    }

    /// Scores `[documents, classes]`.
    pub fn forward(
        &self,
        documents: &[Vec<Vec<u32>>],
        pass: &mut Pass,
    ) -> Result<Tensor<2>, Error> {
        pass.without_products()?;
        let (packed, rate) = (PackedDocuments::new(documents), self.dropout.rate);
        let words = dropout(self.words(&packed)?, pass.drops(rate, EMBEDDINGS));
        let sentences = self.read(&packed, words)?;
        let documents =
            self.sentences.forward(sentences, Some(&packed.counts), &mut Recorder::off())?;
        Ok(self.head.forward(dropout(documents, pass.drops(rate, 0))))
    }

    /// What it looks at in each document.
    pub fn weights(&self, documents: &[Vec<Vec<u32>>]) -> Result<Vec<HanWeights>, Error> {
        Ok(self.look(documents)?.into_iter().map(|(_, weights)| weights).collect())
    }

    /// The scores of each document and what they were read from, without gradients. Sentences of like length are read together, and
    /// documents too, [`POSITIONS`] at a time: what is in memory grows with the words, however unequal they are.
    pub(crate) fn look(
        &self,
        documents: &[Vec<Vec<u32>>],
    ) -> Result<Vec<(Vec<f32>, HanWeights)>, Error> {
        let packed = PackedDocuments::new(documents);
        let (vectors, of_words) = self.look_at_words(&packed)?;
        let (features, device) = (2 * self.config.word_hidden, Device::flex());
        let ends: Vec<usize> = (packed.counts.iter())
            .scan(0, |end, count| {
                *end += count;
                Some(*end)
            })
            .collect();
        let found = in_batches(&packed.counts, ALL, |some| {
            let counts: Vec<usize> = some.iter().map(|i| packed.counts[*i]).collect();
            let most = counts.iter().copied().max().unwrap_or(0);
            let mut numbers: Vec<f32> = Vec::with_capacity(some.len() * most * features);
            for (i, count) in some.iter().zip(&counts) {
                numbers.extend(vectors[ends[*i] - count..ends[*i]].iter().flatten());
                numbers.resize(numbers.len() + (most - count) * features, 0.0);
            }
            let sentences = TensorData::new(numbers, [some.len(), most, features]);
            let sentences = Tensor::from_data(sentences, &device);
            let (read, weights) = self.sentences.looked(sentences, &counts)?;
            let scores = rows(self.head.forward(read), std::iter::repeat(&self.config.classes));
            Ok(scores.into_iter().zip(rows(weights, &counts)).collect())
        })?;
        let mut of_words = of_words.into_iter();
        let document = |((scores, of_sentences), document): ((_, Vec<f32>), &Vec<Vec<u32>>)| {
            let mut of_sentences = of_sentences.into_iter();
            let weight = |words: &Vec<u32>| match words.is_empty() {
                true => (0.0, Vec::new()),
                false => {
                    (of_sentences.next().unwrap_or_default(), of_words.next().unwrap_or_default())
                }
            };
            let (sentences, words) = document.iter().map(weight).unzip();
            (scores, HanWeights { sentences, words })
        };
        Ok(found.into_iter().zip(documents).map(document).collect())
    }

    /// What each sentence has become, and what was looked at in it.
    fn look_at_words(&self, packed: &PackedDocuments) -> Result<(Numbers, Numbers), Error> {
        let found = in_batches(&packed.lengths, ALL, |some| {
            let sentences: Vec<&[u32]> =
                some.iter().map(|i| packed.sentences[*i].as_slice()).collect();
            let lengths: Vec<usize> = some.iter().map(|i| packed.lengths[*i]).collect();
            let words = self.embedding.forward(ids(&sentences, &Device::flex()))?;
            let (vectors, weights) = self.words.looked(words, &lengths)?;
            let features = vectors.dims()[1];
            let vectors = rows(vectors, std::iter::repeat(&features));
            Ok(vectors.into_iter().zip(rows(weights, &lengths)).collect())
        })?;
        Ok(found.into_iter().unzip())
    }

    /// The words of all sentences, `[sentences, longest, embedding]`.
    fn words(&self, packed: &PackedDocuments) -> Result<Tensor<3>, Error> {
        self.embedding.forward(ids(&packed.sentences, &Device::flex()))
    }

    /// Sentences as vectors, document by document: `[documents, most, 2 word_hidden]`, 0 behind the last of each.
    fn read(&self, packed: &PackedDocuments, words: Tensor<3>) -> Result<Tensor<3>, Error> {
        let device = words.device().inner();
        let n = packed.sentences.len();
        let none: Tensor<2> = Tensor::zeros([1, 2 * self.config.word_hidden], &device);
        let vectors = match n {
            0 => none,
            _ => {
                let vectors =
                    self.words.forward(words, Some(&packed.lengths), &mut Recorder::off())?;
                Tensor::cat(vec![vectors, none], 0)
            }
        };
        Ok(regard_burn::embedding(vectors, packed.places(n, &device))?)
    }
}

/// As many as there are, within [`POSITIONS`].
const ALL: Batch = Batch { rows: usize::MAX, positions: POSITIONS };

/// The rows of a matrix, so much of each.
fn rows<'a>(matrix: Tensor<2>, lengths: impl IntoIterator<Item = &'a usize>) -> Vec<Vec<f32>> {
    let [n, width] = matrix.dims();
    let numbers = numbers(matrix);
    let row = |(i, length): (usize, &usize)| numbers[i * width..i * width + length].to_vec();
    (0..n).zip(lengths).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: HanConfig = HanConfig {
        embedding: 4,
        word_hidden: 3,
        word_attention: 5,
        sentence_hidden: 2,
        sentence_attention: 3,
        vocab: 9,
        classes: 2,
    };

    #[test]
    fn sentences_without_words_are_not_looked_at() {
        let model =
            Han::new(&CONFIG, DropoutRates::default(), &Device::flex()).expect("sizes are sizes");
        let (a, b) = (vec![1, 2, 3], vec![4]);
        let holes = vec![vec![], a.clone(), vec![], b.clone(), vec![]];
        let scores = |documents: &[Vec<Vec<u32>>]| {
            numbers(model.forward(documents, &mut Pass::default()).expect("ids are words"))
        };
        let plain = scores(&[vec![a.clone(), b.clone()]]);
        assert_eq!(scores(&[holes.clone(), vec![b]])[..2], plain);
        let weights = model.weights(&[holes]).expect("ids are words").remove(0);
        assert_eq!(weights.words.iter().map(Vec::len).collect::<Vec<_>>(), [0, 3, 0, 1, 0]);
        assert_eq!([0, 2, 4].map(|i| weights.sentences[i]), [0.0; 3]);
        assert!((weights.sentences.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        assert!((weights.words[1].iter().sum::<f32>() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn what_is_looked_at_in_parts_has_the_scores_of_the_whole() {
        let model =
            Han::new(&CONFIG, DropoutRates::default(), &Device::flex()).expect("sizes are sizes");
        // One sentence and one document that no batch may be padded to.
        let long: Vec<u32> = (0..POSITIONS).map(|i| u32::try_from(i % 9).unwrap_or(0)).collect();
        let many = vec![vec![1]; POSITIONS / 2];
        let documents = [vec![vec![1, 2], long], many, vec![vec![3]], vec![]];
        let looked = model.look(&documents).expect("ids are words");
        for (i, document) in documents.iter().enumerate() {
            let whole = model.forward(std::slice::from_ref(document), &mut Pass::default());
            let whole = numbers(whole.expect("ids are words"));
            let (scores, weights) = &looked[i];
            assert!(scores.iter().zip(whole).all(|(a, b)| (a - b).abs() < 1e-4));
            assert_eq!(weights.sentences.len(), document.len());
            let lengths = weights.words.iter().map(Vec::len);
            assert!(lengths.eq(document.iter().map(Vec::len)));
        }
    }

    #[test]
    fn documents_without_words_have_finite_scores_and_gradients() {
        let model = Han::new(&CONFIG, DropoutRates::default(), &Device::flex().autodiff())
            .expect("sizes are sizes");
        for documents in [
            vec![vec![], vec![vec![1, 2]]],
            vec![vec![], vec![vec![]]],
            vec![vec![vec![3], vec![]]; 2],
        ] {
            let scores = model.forward(&documents, &mut Pass::default()).expect("ids are words");
            assert!(numbers(scores.clone()).iter().all(|x| x.is_finite()));
            let grads = scores.sum().backward();
            let of_context = model.words.attention.context.val().grad(&grads).map(numbers);
            assert!(of_context.unwrap_or_default().iter().all(|x| x.is_finite()));
            assert_eq!(model.weights(&documents).expect("ids are words").len(), documents.len());
        }
        let none = model.forward(&[], &mut Pass::default());
        assert_eq!(none.expect("nothing to read").dims(), [0, 2]);
        assert_eq!(model.weights(&[]), Ok(vec![]));
        let none = HanConfig { classes: 0, ..CONFIG };
        assert!(Han::new(&none, DropoutRates::default(), &Device::flex()).is_err());
    }
}
