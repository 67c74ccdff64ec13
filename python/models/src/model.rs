//! A model, by what it does.

use crate::fingerprint::{Source, isa};
use crate::refused;
use crate::request::Request;
use crate::statistics::{Head, Question};
use crate::stream::{Item, TextIterator};
use crate::threads::Threads;
use crate::trace::{Trace, floats};
use pyo3::exceptions::{PyFileNotFoundError, PyOSError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use regard_cli::Shipped;
use regard_models::files::Message;
use regard_models::generate::FinishReason;
use regard_models::{Error, GenerationOutput, Model as Opened};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, OnceLock};

/// A text that was written: text, tokens, score, why it ended.
type Written = (String, Vec<u32>, f64, &'static str);
/// The class of a text: its number, its name, the probabilities of all.
type Class = (usize, String, Vec<f32>);
/// The answer for a row, or why it has none.
type Row<T> = (Option<T>, Option<String>);

/// A model that is open.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct Model {
    model: Arc<Opened>,
    source: Source,
    threads: Threads,
    fingerprint: OnceLock<String>,
}

#[pymethods]
impl Model {
    /// Opens what is known by this name, or a path; languages are those of a translator of many.
    #[new]
    fn new(
        py: Python<'_>,
        name: PathBuf,
        threads: Option<usize>,
        languages: (Option<String>, Option<String>),
    ) -> PyResult<Self> {
        let threads = Threads::new(threads)?;
        let source = match name.to_str().and_then(Shipped::named) {
            Some(shipped) => Source::Shipped(shipped),
            None => Source::Path(
                regard_cli::place(&name)
                    .map_err(|e| PyFileNotFoundError::new_err(e.to_string()))?,
            ),
        };
        let open = || match &source {
            Source::Shipped(shipped) => shipped.open(),
            Source::Path(path) => Ok(Opened::open(path)?),
        };
        let mut model = threads.run(py, open)?.map_err(refused)?;
        if let (source, target) = languages
            && (source.is_some() || target.is_some())
        {
            model.set_languages(source.as_deref(), target.as_deref()).map_err(refused)?;
        }
        Ok(Self { model: Arc::new(model), source, threads, fingerprint: OnceLock::new() })
    }

    /// What it does.
    #[getter]
    fn task(&self) -> &'static str {
        match &*self.model {
            Opened::CausalLm(_) => "generate",
            Opened::Translator(_) => "translate",
            Opened::Encoder(_) => "embed",
            Opened::Classifier(_) => "classify",
            Opened::ImageClassifier(_) => "classify an image",
        }
    }

    #[getter]
    fn title(&self) -> &str {
        self.model.title()
    }

    /// What of its files is followed in part only.
    #[getter]
    fn notes(&self) -> Vec<String> {
        self.model.notes().to_vec()
    }

    #[getter]
    fn threads(&self) -> usize {
        self.threads.count()
    }

    #[getter]
    fn isa(&self) -> &'static str {
        isa()
    }

    fn fingerprint(&self, py: Python<'_>) -> PyResult<&str> {
        if let Some(known) = self.fingerprint.get() {
            return Ok(known);
        }
        let found = py.detach(|| self.source.fingerprint());
        let found = found.map_err(|e| PyOSError::new_err(e.to_string()))?;
        Ok(self.fingerprint.get_or_init(|| found))
    }

    /// How many tokens each text has for this model, with the tokens around it.
    fn count_tokens(&self, py: Python<'_>, texts: Vec<String>) -> PyResult<Vec<usize>> {
        let tokens =
            self.model.tokens().ok_or_else(|| refused("a model of images has no tokens"))?;
        let count = |text: &String| tokens.encode(text).map(|tokens| tokens.len());
        py.detach(|| texts.iter().map(count).collect::<Result<_, _>>()).map_err(refused)
    }

    /// Each text in the other language.
    fn translate(
        &self,
        py: Python<'_>,
        texts: Vec<String>,
        request: &str,
    ) -> PyResult<Vec<Row<Written>>> {
        let request = Request::new(request)?;
        let work = || -> Result<_, Error> {
            let model = self.model.translator()?;
            rows(
                &texts,
                |text| model.prompt(text).map(drop),
                |some| {
                    let all = model.translate(some, &request.strategy(), request.max_tokens)?;
                    Ok(all.into_iter().map(written).collect())
                },
            )
        };
        self.threads.run(py, work)?.map_err(refused)
    }

    /// What comes after each prompt.
    fn generate(
        &self,
        py: Python<'_>,
        prompts: Vec<String>,
        request: &str,
    ) -> PyResult<Vec<Row<Written>>> {
        let request = Request::new(request)?;
        let work = || -> Result<_, Error> {
            let model = self.model.causal_lm()?;
            let options = request.options(model)?;
            rows(
                &prompts,
                |text| model.prompt(text).map(drop),
                |some| {
                    let mut silent = |_: usize, _: &str| ControlFlow::Continue(());
                    let (all, _) = model.generate_with(some, &options, &mut silent)?;
                    Ok(all.into_iter().map(written).collect())
                },
            )
        };
        self.threads.run(py, work)?.map_err(refused)
    }

    /// The same of one prompt, as it is generated.
    fn stream(&self, prompt: String, request: &str) -> PyResult<TextIterator> {
        let request = Request::new(request)?;
        self.model.causal_lm().map_err(refused)?;
        let (pool, model) = (self.threads.pool()?, self.model.clone());
        let (sender, iterator) = TextIterator::new();
        std::thread::spawn(move || {
            let failed = pool.install(|| streamed(&model, &prompt, &request, &sender));
            if let Err(error) = failed {
                // Nobody reads it any more where this fails.
                let _ = sender.send(Err(error.to_string()));
            }
        });
        Ok(iterator)
    }

    /// The prompt that asks for an answer to a conversation: pairs of role and content.
    fn chat(&self, messages: Vec<(String, String)>) -> PyResult<String> {
        let message = |(role, content)| Message { role, content };
        let messages: Vec<Message> = messages.into_iter().map(message).collect();
        self.model.causal_lm().and_then(|model| model.chat(&messages)).map_err(refused)
    }

    /// A vector of each text, `[texts, features]`; that of a text that has none is 0. And why.
    fn embed<'py>(
        &self,
        py: Python<'py>,
        texts: Vec<String>,
    ) -> PyResult<(Vec<Option<String>>, usize, Bound<'py, PyBytes>)> {
        let work = || -> Result<_, Error> {
            let model = self.model.encoder()?;
            rows(&texts, |text| model.prompt(text).map(drop), |some| model.embed(some))
        };
        let all = self.threads.run(py, work)?.map_err(refused)?;
        let features = all.iter().find_map(|(vector, _)| Some(vector.as_ref()?.len())).unwrap_or(0);
        let mut numbers = Vec::with_capacity(all.len() * features);
        for (vector, _) in &all {
            match vector {
                Some(vector) => numbers.extend_from_slice(vector),
                None => numbers.resize(numbers.len() + features, 0.0),
            }
        }
        let errors = all.into_iter().map(|(_, error)| error).collect();
        Ok((errors, features, floats(py, &numbers)))
    }

    /// The class of each text: its number, its name, the probabilities of all.
    fn classify(&self, py: Python<'_>, texts: Vec<String>) -> PyResult<Vec<Row<Class>>> {
        let work = || -> Result<_, Error> {
            let model = self.model.classifier()?;
            rows(
                &texts,
                |text| model.prompt(text).map(drop),
                |some| {
                    let all = model.classify(some)?;
                    Ok(all
                        .into_iter()
                        .map(|one| (one.class, one.label, one.probabilities))
                        .collect())
                },
            )
        };
        self.threads.run(py, work)?.map_err(refused)
    }

    /// What every head looks at in a text; of a translator, in a text and its translation, the best unless one is given.
    fn look(&self, py: Python<'_>, text: String, target: Option<String>) -> PyResult<Trace> {
        let work = || match &target {
            Some(target) => self.model.look_at(&text, target),
            None => self.model.look(&text),
        };
        self.threads.run(py, work)?.map(Trace).map_err(refused)
    }

    /// Attention statistics of each text.
    fn attention_statistics(
        &self,
        py: Python<'_>,
        texts: Vec<String>,
        question: &str,
    ) -> PyResult<Vec<Row<Vec<Head>>>> {
        let question: Question = serde_json::from_str(question).map_err(refused)?;
        let of = |text: &String| -> Row<Vec<Head>> {
            let trace = self.model.look(text).map_err(|e| e.to_string());
            let found = trace.and_then(|trace| question.of(&trace).map_err(|e| e.to_string()));
            match found {
                Ok(heads) => (Some(heads), None),
                Err(why) => (None, Some(why)),
            }
        };
        self.threads.run(py, || texts.iter().map(of).collect())
    }
}

/// Answers for the rows that pass a check; for the others, why they do not.
fn rows<T>(
    texts: &[String],
    check: impl Fn(&str) -> Result<(), Error>,
    work: impl FnOnce(&[&str]) -> Result<Vec<T>, Error>,
) -> Result<Vec<Row<T>>, Error> {
    let errors: Vec<Option<String>> =
        texts.iter().map(|text| check(text).err().map(|e| e.to_string())).collect();
    let fine: Vec<&str> = texts
        .iter()
        .zip(&errors)
        .filter(|(_, error)| error.is_none())
        .map(|(text, _)| text.as_str())
        .collect();
    let mut answers = if fine.is_empty() { Vec::new() } else { work(&fine)? }.into_iter();
    let row = |error: Option<String>| match error {
        Some(_) => (None, error),
        None => (answers.next(), None),
    };
    Ok(errors.into_iter().map(row).collect())
}

fn written(one: GenerationOutput) -> Written {
    let reason = match one.finish_reason {
        FinishReason::EndToken => "end_token",
        FinishReason::MaxTokens => "max_tokens",
        FinishReason::Context => "context",
        FinishReason::Interrupted => "interrupted",
        FinishReason::StopString => "stop_string",
    };
    (one.text, one.tokens, one.score, reason)
}

/// Sends pieces of text until nobody reads them.
fn streamed(
    model: &Opened,
    prompt: &str,
    request: &Request,
    sender: &SyncSender<Item>,
) -> Result<(), Error> {
    let model = model.causal_lm()?;
    let mut on_text = |_: usize, text: &str| match sender.send(Ok(text.to_owned())) {
        Ok(()) => ControlFlow::Continue(()),
        Err(_) => ControlFlow::Break(()),
    };
    model.generate_with(&[prompt], &request.options(model)?, &mut on_text)?;
    Ok(())
}
