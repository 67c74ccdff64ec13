//! Models by name, with their engines.

use crate::engine::{self, BatchJob, Common, Engines, Job, Settings};
use crate::error::ApiError;
use crate::options::{NamedModel, Options, ServeError};
use crate::queue::Queue;
use axum::http::StatusCode;
use regard_models::generate::GrammarCompiler;
use regard_models::{CausalLm, Encoder, Model, Translator};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

/// A model that is served.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    /// Seconds since 1970 when it was opened.
    pub(crate) created: u64,
    pub(crate) model: Arc<Model>,
    pub(crate) queue: Arc<Queue>,
    lane: Lane,
    /// Made when a grammar is first asked for: its tree of tokens takes a while.
    grammars: OnceLock<Result<GrammarCompiler, String>>,
}

#[derive(Debug)]
enum Lane {
    Generate(Engines<Job>),
    Batch(Engines<BatchJob>),
}

impl Entry {
    /// The model and its engines, if it continues texts.
    pub(crate) fn causal_lm(&self) -> Result<(&CausalLm, &Engines<Job>), ApiError> {
        match (&*self.model, &self.lane) {
            (Model::CausalLm(model), Lane::Generate(engines)) => Ok((model, engines)),
            _ => Err(self.cannot("continue a text; it needs a causal language model")),
        }
    }

    pub(crate) fn encoder(&self) -> Result<(&Encoder, &Engines<BatchJob>), ApiError> {
        match (&*self.model, &self.lane) {
            (Model::Encoder(model), Lane::Batch(engines)) => Ok((model, engines)),
            _ => Err(self.cannot("embed a text; it needs an encoder")),
        }
    }

    pub(crate) fn translator(&self) -> Result<(&Translator, &Engines<BatchJob>), ApiError> {
        match (&*self.model, &self.lane) {
            (Model::Translator(model), Lane::Batch(engines)) => Ok((model, engines)),
            _ => Err(self.cannot("translate; it needs a translator")),
        }
    }

    fn cannot(&self, what: &str) -> ApiError {
        ApiError::field("model", format!("model `{}` cannot {what}", self.name))
    }

    pub(crate) fn grammars(&self) -> Result<&GrammarCompiler, ApiError> {
        let (model, _) = self.causal_lm()?;
        let made = self.grammars.get_or_init(|| model.grammars().map_err(|e| e.to_string()));
        made.as_ref().map_err(|why| {
            ApiError::unsupported(
                "response_format",
                &format!("the vocabulary of this model cannot do it: {why}"),
            )
        })
    }

    /// The languages of a translator by its name, `..zh-en`: its source and its target.
    pub(crate) fn languages(&self) -> Option<(&str, &str)> {
        let (rest, target) = self.name.rsplit_once('-')?;
        let source = rest.rsplit(['-', '/', '_']).next()?;
        let is_code = |code: &str| {
            (2..=3).contains(&code.len()) && code.bytes().all(|c| c.is_ascii_lowercase())
        };
        (is_code(source) && is_code(target)).then_some((source, target))
    }
}

/// All models of a server.
#[derive(Debug)]
pub(crate) struct Models {
    pub(crate) entries: Vec<Arc<Entry>>,
}

impl Models {
    /// Starts the engines of models.
    pub(crate) fn start(
        models: Vec<NamedModel>,
        options: &Options,
        common: &Arc<Common>,
        threads: &mut Vec<JoinHandle<()>>,
    ) -> Result<Self, ServeError> {
        let decoders = models.iter().filter(|one| matches!(one.model, Model::CausalLm(_))).count();
        let cache_bytes = options.kv_memory / (decoders * options.engines).max(1);
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let created = since.map_or(0, |since| since.as_secs());
        let mut entries: Vec<Arc<Entry>> = Vec::with_capacity(models.len());
        for NamedModel { name, model } in models {
            if entries.iter().any(|one| one.name == name) {
                return Err(ServeError::Model(format!(
                    "{name}: two models have this name; give NAME=PATH"
                )));
            }
            if let Model::CausalLm(model) = &model {
                // Whether a cache of this size can be had at all is told at the start.
                drop(model.scheduler(cache_bytes)?);
            }
            let model = Arc::new(model);
            let limits = [options.max_queued, options.max_queued_tokens];
            let queue = Queue::new(&name, limits, options.engines, common.metrics.clone());
            let engines = (options.engines, Settings::new(&name, options, cache_bytes));
            let shared = (common, &queue);
            let lane = match &*model {
                Model::CausalLm(_) => {
                    Lane::Generate(engine::generators(&model, engines, shared, threads)?)
                }
                Model::Encoder(_) | Model::Translator(_) => {
                    Lane::Batch(engine::batchers(&model, engines, shared, threads)?)
                }
                Model::Classifier(_) | Model::ImageClassifier(_) => {
                    let why = "no route serves classifiers; give a language model, an encoder or a translator";
                    return Err(ServeError::Model(format!("{name}: {why}")));
                }
            };
            let grammars = OnceLock::new();
            entries.push(Arc::new(Entry { name, created, model, queue, lane, grammars }));
        }
        match entries.is_empty() {
            true => Err(ServeError::Model("no model; give one at least".into())),
            false => Ok(Self { entries }),
        }
    }

    /// A model by its name; without a name, the only one that will do.
    pub(crate) fn get(
        &self,
        name: Option<&str>,
        will_do: impl Fn(&Entry) -> bool,
    ) -> Result<&Arc<Entry>, ApiError> {
        if let Some(name) = name {
            let found = self.entries.iter().find(|entry| entry.name == name);
            return found.ok_or_else(|| {
                let known: Vec<&str> = self.entries.iter().map(|one| one.name.as_str()).collect();
                let name: String = name.chars().take(80).collect();
                let message =
                    format!("model `{name}` is not served; give one of {}", known.join(", "));
                let error = ApiError::field("model", message).with_code("model_not_found");
                ApiError { status: StatusCode::NOT_FOUND, ..error }
            });
        }
        let mut fitting = self.entries.iter().filter(|entry| will_do(entry));
        match (fitting.next(), fitting.next()) {
            (Some(only), None) => Ok(only),
            (None, _) => Err(ApiError::field("model", "no model of this server can do that")),
            (Some(_), Some(_)) => {
                Err(ApiError::field("model", "several models can do that; name one in `model`"))
            }
        }
    }
}
