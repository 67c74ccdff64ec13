//! Threads that compute. Each has one model, and a pool of its own for the products inside of a step.

mod batch;
mod generate;

pub(crate) use batch::{BatchJob, Output, Work};
pub(crate) use generate::{Job, Piece, Told};

use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::options::{Options, ServeError};
use crate::queue::Queue;
use regard_models::Model;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What all engines of a server share.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) metrics: Arc<Metrics>,
    /// Set when requests that are left must end.
    pub(crate) stop: AtomicBool,
    /// When engines failed, of the last minute.
    faults: Mutex<VecDeque<Instant>>,
}

/// Faults within a minute after which a server says that it is not well.
const FAULTS: usize = 3;
const MINUTE: Duration = Duration::from_secs(60);
/// How often an engine without work looks whether it shall end.
const IDLE: Duration = Duration::from_millis(100);
/// Bytes of the stack of a compute thread, as the first thread of a process has on Linux.
const STACK: usize = 8 << 20;

impl Common {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Self {
        Self { metrics, stop: AtomicBool::new(false), faults: Mutex::default() }
    }

    fn fault(&self, model: &str, why: &str) {
        // Of the model and not of a request: texts of panics are those of our own code.
        tracing::error!(model, why, "engine failed; it is built anew");
        self.metrics.count("regard_faults_total", ("model", model.to_owned()), 1);
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).push_back(Instant::now());
    }

    /// Clients went away.
    fn cancelled(&self, model: &str, count: u64) {
        if count > 0 {
            self.metrics.count("regard_cancelled_total", ("model", model.to_owned()), count);
        }
    }

    /// Why a request that has not begun ends now, if it does: the server stops, or it is late.
    fn refusal(&self, deadline: Instant) -> Option<ApiError> {
        if self.stopped() {
            return Some(ApiError::stopping());
        }
        (deadline <= Instant::now()).then(ApiError::late)
    }

    /// Whether engines fail again and again.
    pub(crate) fn is_sick(&self) -> bool {
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        faults.retain(|fault| fault.elapsed() < MINUTE);
        faults.len() >= FAULTS
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// The settings of one engine.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) name: String,
    /// Of the engine among those of its model.
    pub(crate) number: usize,
    pub(crate) cache_bytes: usize,
    pub(crate) max_batch: usize,
    pub(crate) max_tokens: usize,
    pub(crate) threads: usize,
}

impl Settings {
    pub(crate) fn new(name: &str, options: &Options, cache_bytes: usize) -> Self {
        let threads = threads(options);
        let Options { max_batch, max_tokens, .. } = *options;
        Self { name: name.to_owned(), number: 0, cache_bytes, max_batch, max_tokens, threads }
    }
}

/// Compute threads of an engine.
pub(crate) fn threads(options: &Options) -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    options.threads.unwrap_or((cpus / options.engines).max(1))
}

/// A pool of compute threads.
pub(crate) fn pool(threads: usize) -> Result<rayon::ThreadPool, rayon::ThreadPoolBuildError> {
    rayon::ThreadPoolBuilder::new().num_threads(threads).stack_size(STACK).build()
}

/// The engines of a model, and how to reach them.
#[derive(Debug)]
pub(crate) struct Engines<J> {
    engines: Vec<(Sender<J>, Arc<AtomicUsize>)>,
}

/// Counts a request of an engine while it lasts.
#[derive(Debug)]
pub(crate) struct Load(Arc<AtomicUsize>);

impl Drop for Load {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<J: Send + 'static> Engines<J> {
    /// Starts threads that take jobs.
    fn start(
        count: usize,
        settings: &Settings,
        threads: &mut Vec<JoinHandle<()>>,
        work: impl Fn(usize, Receiver<J>) + Clone + Send + 'static,
    ) -> Result<Self, ServeError> {
        let mut engines = Vec::with_capacity(count);
        for number in 0..count {
            let (sender, receiver) = channel();
            let pool = pool(settings.threads)
                .map_err(|e| ServeError::Option(format!("--threads {}: {e}", settings.threads)))?;
            let work = work.clone();
            let thread = std::thread::Builder::new()
                .name(format!("engine {}", settings.name))
                .spawn(move || pool.install(move || work(number, receiver)))
                .map_err(|e| ServeError::Io("engine thread".into(), e))?;
            threads.push(thread);
            engines.push((sender, Arc::default()));
        }
        Ok(Self { engines })
    }

    /// Hands a job to the engine with the fewest. False if there is none any more.
    pub(crate) fn submit(&self, job: impl FnOnce(Load) -> J) -> bool {
        let least = self.engines.iter().min_by_key(|(_, load)| load.load(Ordering::Relaxed));
        let Some((sender, load)) = least else { return false };
        load.fetch_add(1, Ordering::Relaxed);
        sender.send(job(Load(load.clone()))).is_ok()
    }
}

/// Engines that generate.
pub(crate) fn generators(
    model: &Arc<Model>,
    (count, settings): (usize, Settings),
    (common, queue): (&Arc<Common>, &Arc<Queue>),
    threads: &mut Vec<JoinHandle<()>>,
) -> Result<Engines<Job>, ServeError> {
    let (model, common, queue) = (model.clone(), common.clone(), queue.clone());
    Engines::start(count, &settings.clone(), threads, move |number, jobs| {
        let settings = &Settings { number, ..settings.clone() };
        if let Model::CausalLm(model) = &*model {
            generate::run(model, settings, &common, &queue, &jobs);
        }
    })
}

/// Engines of the batch lane.
pub(crate) fn batchers(
    model: &Arc<Model>,
    (count, settings): (usize, Settings),
    (common, queue): (&Arc<Common>, &Arc<Queue>),
    threads: &mut Vec<JoinHandle<()>>,
) -> Result<Engines<BatchJob>, ServeError> {
    let (model, common, queue) = (model.clone(), common.clone(), queue.clone());
    Engines::start(count, &settings.clone(), threads, move |_, jobs| {
        batch::run(&model, &settings, &common, &queue, &jobs);
    })
}

/// Waits for a job. None when the engine shall end.
fn wait<J>(jobs: &Receiver<J>, common: &Common) -> Option<J> {
    loop {
        match jobs.recv_timeout(IDLE) {
            Ok(job) => return Some(job),
            Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) if common.stopped() => return None,
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// What a panic said.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic")
}
