//! The batch lane: embeddings and translations of all that waits are computed together.

use super::{Common, Load, Settings, panic_text, wait};
use crate::error::ApiError;
use crate::queue::{Place, Queue};
use regard_models::Model;
use regard_models::generate::DecodingStrategy;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Receiver;
use std::time::Instant;
use tokio::sync::oneshot;

/// Texts of one request.
#[derive(Debug)]
pub(crate) struct BatchJob {
    pub(crate) work: Work,
    pub(crate) tokens: usize,
    pub(crate) came: Instant,
    pub(crate) deadline: Instant,
    pub(crate) tell: oneshot::Sender<Result<Output, ApiError>>,
    pub(crate) place: Place,
    pub(crate) load: Load,
}

/// What is wanted of them.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    /// Vectors of texts, which are tokens.
    Embed(Vec<Vec<u32>>),
    /// Translations.
    Translate(Vec<String>),
}

/// What comes out, one for each text.
#[derive(Debug)]
pub(crate) enum Output {
    Vectors(Vec<Vec<f32>>),
    Texts(Vec<String>),
}

/// Tokens of requests that are computed together.
const TOKENS: usize = 4096;
/// Tokens of a translation: sentences and paragraphs.
const LONGEST: usize = 512;

/// Takes jobs until their channel is closed or the server stops.
pub(super) fn run(
    model: &Model,
    settings: &Settings,
    common: &Common,
    queue: &Queue,
    jobs: &Receiver<BatchJob>,
) {
    // A job that did not fit into the last batch.
    let mut next = None;
    while let Some(first) = next.take().or_else(|| wait(jobs, common)) {
        let mut tokens = first.tokens;
        let mut batch = vec![first];
        for job in jobs.try_iter() {
            if tokens + job.tokens > TOKENS {
                next = Some(job);
                break;
            }
            tokens += job.tokens;
            batch.push(job);
        }
        let batch: Vec<BatchJob> =
            batch.into_iter().filter_map(|job| wanted(job, settings, common)).collect();
        if batch.is_empty() {
            continue;
        }
        let start = Instant::now();
        common.metrics.observe("regard_batch_rows", &settings.name, batch.len() as f64);
        common.metrics.count("regard_tokens_total", ("kind", "prompt".into()), tokens as u64);
        answer(model, settings, common, batch);
        queue.measured(tokens, start.elapsed());
    }
}

/// A job that is not late, and that somebody waits for.
fn wanted(job: BatchJob, settings: &Settings, common: &Common) -> Option<BatchJob> {
    let (metrics, name) = (&common.metrics, &settings.name);
    metrics.observe("regard_queue_seconds", name, job.came.elapsed().as_secs_f64());
    if job.tell.is_closed() {
        common.cancelled(name, 1);
        return None;
    }
    let Some(error) = common.refusal(job.deadline) else { return Some(job) };
    let _gone = job.tell.send(Err(error));
    None
}

/// Computes jobs together; where that fails, each alone, so that a job fails by its own fault only.
fn answer(model: &Model, settings: &Settings, common: &Common, jobs: Vec<BatchJob>) {
    let (works, tells): (Vec<_>, Vec<_>) = jobs
        .into_iter()
        .map(|BatchJob { work, tell, place, load, .. }| {
            drop(place);
            (work, (tell, load))
        })
        .unzip();
    let together = compute(model, settings, &works);
    let outputs: Vec<Result<Output, ApiError>> = match together {
        Ok(outputs) => outputs.into_iter().map(Ok).collect(),
        Err(why) if works.len() == 1 => {
            common.fault(&settings.name, &why);
            vec![Err(ApiError::internal())]
        }
        Err(_) => works
            .chunks(1)
            .map(|work| {
                let alone = compute(model, settings, work).map(|mut all| all.pop());
                alone.map_err(|why| common.fault(&settings.name, &why)).ok().flatten()
            })
            .map(|output| output.ok_or_else(ApiError::internal))
            .collect(),
    };
    for ((tell, _load), output) in tells.into_iter().zip(outputs) {
        let _gone = tell.send(output);
    }
}

/// The outputs of jobs, in their order. Errors are texts.
fn compute(model: &Model, settings: &Settings, works: &[Work]) -> Result<Vec<Output>, String> {
    let all = catch_unwind(AssertUnwindSafe(|| {
        #[cfg(feature = "failpoints")]
        fail::fail_point!("batch");
        compute_all(model, settings, works)
    }));
    all.map_err(|panic| panic_text(&*panic).to_owned())?
}

fn compute_all(model: &Model, settings: &Settings, works: &[Work]) -> Result<Vec<Output>, String> {
    match model {
        Model::Encoder(model) => {
            let of = |work: &Work| match work {
                Work::Embed(rows) => rows.clone(),
                Work::Translate(_) => Vec::new(),
            };
            let rows: Vec<Vec<u32>> = works.iter().flat_map(of).collect();
            let mut vectors = model.embed_tokens(&rows).map_err(|e| e.to_string())?.into_iter();
            let take = |work| Output::Vectors(vectors.by_ref().take(count(work)).collect());
            Ok(works.iter().map(take).collect())
        }
        Model::Translator(model) => {
            let texts: Vec<&str> = works.iter().flat_map(sources).collect();
            let most = settings.max_tokens.min(LONGEST);
            let written = model.translate(&texts, &DecodingStrategy::Greedy, most);
            let mut written = written.map_err(|e| e.to_string())?.into_iter();
            let take = |work| {
                let texts = written.by_ref().take(count(work));
                Output::Texts(texts.map(|one| one.text.trim().to_owned()).collect())
            };
            Ok(works.iter().map(take).collect())
        }
        _ => Err("this model has no batch lane".into()),
    }
}

fn count(work: &Work) -> usize {
    match work {
        Work::Embed(rows) => rows.len(),
        Work::Translate(texts) => texts.len(),
    }
}

fn sources(work: &Work) -> Vec<&str> {
    match work {
        Work::Translate(texts) => texts.iter().map(String::as_str).collect(),
        Work::Embed(_) => Vec::new(),
    }
}
