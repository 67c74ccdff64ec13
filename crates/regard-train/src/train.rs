//! The loop: batches to gradients to weights, with validations and checkpoints on the way.

use crate::card::card;
use crate::corpus::{Corpus, Vocabularies};
use crate::error::Error;
use crate::optim::{AdamW, numbers};
use crate::run::{BestCheckpoint, Checkpoint, IntervalSums, Progress, Run, Times};
use crate::schedule::{Schedule, ramp};
use crate::settings::{SelectionMetric, Settings};
use crate::trainable_model::{Batch, TrainableModel, config};
use crate::validation::{ValidationMetrics, validate};
use burn::tensor::Device;
use regard_burn::with_products;
use regard_models::files::{Config, ModelFiles, WeightFormat};
use regard_models::{Entropies, Pass};
use regard_ranks::{Alone, Ranks, any, broadcast, gather, share, shares};
use serde::Serialize;
use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

/// Callback of the training loop: receives metrics and can end the run.
pub trait Callback {
    /// Called every `log_every` steps.
    fn on_step(&mut self, report: &StepMetrics);
    /// Called after each validation.
    fn on_validation(&mut self, report: &ValidationMetrics);
    /// Called after each step; `true` saves a checkpoint and ends the run.
    fn should_stop(&mut self) -> bool;
}

/// Metrics of the steps since the last report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepMetrics {
    /// Steps that were made.
    pub step: u64,
    /// The epoch, from 0, and how far it has come.
    pub epoch: f64,
    /// The mean loss of an answer since the last report, smoothing included.
    pub loss: f64,
    /// `e^loss`
    pub perplexity: f64,
    /// The learning rate.
    pub lr: f64,
    /// Global norm of the gradient of the last step, before clipping.
    pub grad_norm: f64,
    /// Tokens that were read and written in a second. With the times, not with the metrics.
    #[serde(skip)]
    pub tokens_per_second: f64,
    /// Seconds of work since the run began.
    #[serde(skip)]
    pub seconds: f64,
}

/// What a run takes: nothing that it computes depends on it.
#[derive(Clone, Copy, Debug, Default)]
struct Clock {
    /// Since the run began.
    seconds: f64,
    /// Since the last report, of steps, with their tokens.
    interval: f64,
    tokens: u64,
}

/// Why the training loop ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunOutcome {
    /// All steps are done.
    Completed,
    /// Early stopping: no improvement in `training.patience` validations.
    EarlyStopped,
    /// Stopped by the callback; the run can be resumed.
    Interrupted,
}

/// How large a run is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Size {
    /// Numbers to learn.
    pub parameters: usize,
    /// Tokens of the vocabularies.
    pub vocabulary: Vec<usize>,
    /// Examples to learn from: pairs, tokens of a text, documents.
    pub examples: usize,
    /// Examples to judge by.
    pub validation: usize,
    /// Examples that were left out, as longer than `data.max_length` or the context of the model.
    pub left_out: usize,
    /// Batches of an epoch.
    pub batches: usize,
    /// Steps in all.
    pub steps: u64,
}

/// A run that can be gone on with.
#[derive(Debug)]
pub struct Trainer {
    settings: Settings,
    corpus: Corpus,
    vocabularies: Vocabularies,
    config: Config,
    model: TrainableModel,
    optimizer: AdamW,
    progress: Progress,
    schedule: Schedule,
    /// The batches of an epoch.
    epoch: (u64, Vec<Vec<usize>>),
    ranks: Rc<dyn Ranks>,
    clock: Clock,
}

impl Trainer {
    /// From the beginning, without a directory: to ask for its size, or to time it.
    pub fn new(settings: &Settings) -> Result<Self, Error> {
        Self::with(settings, None, true)
    }

    /// From the beginning in a new directory.
    pub fn create(path: &Path, settings: &Settings) -> Result<(Self, Run), Error> {
        Run::refuse_full(path)?;
        // What is wrong with the data is known before anything is written.
        let mut trainer = Self::with(settings, None, true)?;
        let mut run = Run::create(path, settings)?;
        run.save_vocabularies(&trainer.vocabularies)?;
        trainer.checkpoint(Some(&mut run))?;
        Ok((trainer, run))
    }

    /// From where a run was left.
    pub fn resume(path: &Path) -> Result<(Self, Run), Error> {
        // Nothing is opened in a directory that is no run.
        Run::settings(path)?;
        let mut run = Run::open(path)?;
        let settings = Run::settings(path)?;
        let saved = run.load_checkpoint()?;
        settings.refuse_changes(&saved.settings, &run.settings_file())?;
        let vocabularies = run.vocabularies()?;
        let lost = vocabularies.is_none();
        let mut trainer = Self::with(&settings, vocabularies, false)?;
        trainer.refuse_other_data(&saved.progress)?;
        let batches = trainer.corpus.epoch(saved.progress.epoch).len();
        saved.check(batches, settings.training.accumulate)?;
        if lost {
            run.save_vocabularies(&trainer.vocabularies)?;
        }
        let (optimizer, progress) = run.restore(saved, &trainer.optimizer)?;
        trainer.clock.seconds = run.seconds(progress.step);
        trainer.restore(optimizer, progress);
        Ok((trainer, run))
    }

    /// The run that rank 0 has created or resumed, on all ranks: they compute the parts of each step together, and end with the same bits
    /// as one process. Rank 0 alone has the directory; all read the data.
    pub fn among(
        ranks: Rc<dyn Ranks>,
        begun: Option<(Self, Run)>,
    ) -> Result<(Self, Option<Run>), Error> {
        if ranks.count() == 1
            && let Some((trainer, run)) = begun
        {
            return Ok((trainer, Some(run)));
        }
        let (settings, vocabularies, saved) = match &begun {
            Some((trainer, run)) => {
                let Vocabularies { tokens, target } = trainer.vocabularies.clone();
                (trainer.settings.to_toml()?, [tokens, target.unwrap_or_default()], run.saved()?)
            }
            None => Default::default(),
        };
        let settings = broadcast(&*ranks, settings.into_bytes())?;
        let [tokens, target] = vocabularies.map(|own| broadcast(&*ranks, own));
        let saved = broadcast(&*ranks, saved)?;
        let (mut trainer, run) = match begun {
            Some((trainer, run)) => (trainer, Some(run)),
            None => {
                let settings = Settings::new(&String::from_utf8_lossy(&settings), &[])?;
                let (tokens, target) = (tokens?, target?);
                let target = (!target.is_empty()).then_some(target);
                let mut trainer =
                    Self::with(&settings, Some(Vocabularies { tokens, target }), false)?;
                let saved = Checkpoint::from_bytes("the checkpoint of rank 0".into(), saved)?;
                trainer.refuse_other_data(&saved.progress)?;
                let (optimizer, progress) = saved.restore(&trainer.optimizer)?;
                trainer.restore(optimizer, progress);
                (trainer, None)
            }
        };
        trainer.settings.refuse_more_ranks(ranks.count())?;
        let parts = trainer.settings.training.accumulate;
        trainer.optimizer.deal(&*ranks, parts);
        trainer.ranks = ranks;
        Ok((trainer, run))
    }

    /// Weights and progress of a checkpoint.
    fn restore(&mut self, optimizer: AdamW, progress: Progress) {
        self.model = self.model.with(&optimizer.current());
        (self.optimizer, self.progress) = (optimizer, progress);
    }

    /// Refuses to go on with other data than those that a run began with.
    fn refuse_other_data(&self, began: &Progress) -> Result<(), Error> {
        let now = &self.progress;
        let both =
            [("train", began.data, now.data), ("validation", began.validation, now.validation)];
        match both.iter().find(|(_, began, now)| began != now) {
            Some((part, began, now)) => Err(Error::data(format!(
                "{}: the data of `{part}` are not those that the run began with (fingerprint {now:016x}, \
                 and the checkpoint has {began:016x}); put them back, or begin anew",
                self.settings.data.folder
            ))),
            None => Ok(()),
        }
    }

    /// Fresh weights may be those of another model; others are to be restored.
    fn with(
        settings: &Settings,
        vocabularies: Option<Vocabularies>,
        fresh: bool,
    ) -> Result<Self, Error> {
        let init_from = Path::new(&settings.training.init_from);
        let initialize = fresh && !settings.training.init_from.is_empty();
        let vocabularies =
            if initialize { Some(Vocabularies::of_model(init_from)?) } else { vocabularies };
        let (corpus, vocabularies) = Corpus::read(settings, vocabularies)?;
        let config = config(settings, &corpus);
        let mut model = TrainableModel::new(settings, &config, &Device::flex().autodiff())?;
        if initialize {
            model = model.load(&mut ModelFiles::open(init_from)?.weights)?;
        }
        let optimizer = model.optimizer(settings);
        let epoch = (0, corpus.epoch(0));
        let t = &settings.training;
        let a_step = t.accumulate as u64;
        let batches = epoch.1.len() as u64;
        if batches == 0 {
            return Err(Error::data(format!(
                "{} tokens make no batch with model.context = {}; give more text, or a smaller context",
                corpus.train.len(),
                settings.model.context
            )));
        }
        let steps = if t.steps > 0 { t.steps } else { (t.epochs * batches).div_ceil(a_step) };
        let [data, validation] = corpus.fingerprints();
        Ok(Self {
            schedule: settings.schedule(steps),
            settings: settings.clone(),
            progress: Progress { data, validation, ..Progress::default() },
            corpus,
            vocabularies,
            config,
            model,
            optimizer,
            epoch,
            ranks: Rc::new(Alone),
            clock: Clock::default(),
        })
    }

    /// How large it is.
    #[must_use]
    pub fn size(&self) -> Size {
        let vocabularies = std::iter::once(&self.corpus.tokens).chain(&self.corpus.target);
        Size {
            parameters: self.optimizer.parameters(),
            vocabulary: vocabularies.map(regard_models::files::Tokens::len).collect(),
            examples: self.corpus.train.len(),
            validation: self.corpus.validation.len(),
            left_out: self.corpus.left_out,
            batches: self.epoch.1.len(),
            steps: self.schedule.steps,
        }
    }

    /// Where it stands.
    #[must_use]
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Seconds of work since the run began.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.clock.seconds
    }

    fn times(&self, tokens_per_second: Option<f64>) -> Times {
        Times { step: self.progress.step, seconds: self.clock.seconds, tokens_per_second }
    }

    /// What it was asked for.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The weights and the way that they move.
    #[must_use]
    pub fn optimizer(&self) -> &AdamW {
        &self.optimizer
    }

    /// One step: the length of its gradient.
    pub fn step(&mut self) -> Result<f64, Error> {
        let start = Instant::now();
        let parts = self.settings.training.accumulate;
        let batches: Vec<Vec<usize>> = (0..parts).map(|_| self.next_batch()).collect();
        let (rank, count) = (self.ranks.rank(), self.ranks.count());
        let mut sums = Vec::new();
        for part in share(parts, rank, count) {
            sums.push(self.part(part, &batches[part])?);
        }
        // Those of all parts, added in their order.
        for sums in gather(&*self.ranks, &sums, &shares(parts, count))? {
            let [loss, answers, tokens] = sums;
            if !f64::from_bits(loss).is_finite() {
                let (step, value) = (self.progress.step + 1, f64::from_bits(loss));
                return Err(Error::Diverged { step, what: "the loss", value });
            }
            let since = &mut self.progress.since;
            since.loss += f64::from_bits(loss) * answers as f64;
            since.answers += answers;
            since.tokens += tokens;
            self.progress.tokens += tokens;
            self.clock.tokens += tokens;
        }
        self.progress.step += 1;
        let lr = self.schedule.lr(self.progress.step);
        let norm = self.optimizer.step(lr, &*self.ranks)?;
        if !norm.is_finite() {
            let (step, what) = (self.progress.step, "the gradient");
            return Err(Error::Diverged { step, what, value: norm });
        }
        self.model = self.model.with(&self.optimizer.current());
        let seconds = start.elapsed().as_secs_f64();
        self.clock.seconds += seconds;
        self.clock.interval += seconds;
        Ok(norm)
    }

    /// Adds the gradients of one part of a step: the bits of its loss, its answers and its tokens.
    fn part(&mut self, part: usize, items: &[usize]) -> Result<[u64; 3], Error> {
        let t = &self.settings.training;
        let (smoothing, context) = (t.label_smoothing, self.settings.model.context);
        let products = t.precision.into();
        let step = self.progress.step;
        let a = &self.settings.attention;
        let (entropy, temperature) =
            (a.entropy, ramp(a.temperature, a.last_temperature, a.temperature_steps, step));
        let chance = mix([self.settings.seed, step, part as u64]);
        let mut pass = Pass { seed: Some(chance), temperature, ..Pass::default() };
        if entropy != 0.0 {
            pass.entropies = Some(Entropies::default());
        }
        let cuts = match self.settings.data.strip_punct_prob {
            0.0 => vec![],
            share => self.corpus.cuts(items, share, chance),
        };
        let (examples, cuts) = (&self.corpus.train, &cuts[..]);
        let batch = Batch { examples, items, cuts, context, smoothing };
        let loss = with_products(products, || self.model.loss(&batch, &mut pass))?;
        let value = numbers(loss.mean.clone()).first().copied().map_or(f64::NAN, f64::from);
        let total = match pass.entropy() {
            Some(mean) => loss.mean + mean * entropy,
            None => loss.mean,
        };
        let gradients = total.backward();
        self.model.add(&mut self.optimizer, &gradients, loss.answers as f64);
        Ok([value.to_bits(), loss.answers as u64, loss.tokens as u64])
    }

    fn next_batch(&mut self) -> Vec<usize> {
        if self.epoch.0 != self.progress.epoch {
            self.epoch = (self.progress.epoch, self.corpus.epoch(self.progress.epoch));
        }
        let batch = self.epoch.1[self.progress.batch].clone();
        self.progress.batch += 1;
        if self.progress.batch >= self.epoch.1.len() {
            self.progress.epoch += 1;
            self.progress.batch = 0;
        }
        batch
    }

    /// Why there is nothing left to do, if that is so.
    #[must_use]
    pub fn outcome(&self) -> Option<RunOutcome> {
        let patience = self.settings.training.patience;
        if self.progress.step >= self.schedule.steps {
            return Some(RunOutcome::Completed);
        }
        (patience > 0 && self.progress.waited >= patience).then_some(RunOutcome::EarlyStopped)
    }

    fn checkpoint(&mut self, run: Option<&mut Run>) -> Result<(), Error> {
        let whole = self.optimizer.collect(&*self.ranks)?;
        match (run, whole) {
            (Some(run), Some(whole)) => {
                let times = self.times(None);
                run.log_times(&times)?;
                run.save_checkpoint(&self.settings, &whole, &mut self.progress)
            }
            _ => Ok(()),
        }
    }

    /// Goes on to the end, or until it is told to stop, on any rank. Rank 0 has the run.
    pub fn train<'a>(
        &mut self,
        run: impl Into<Option<&'a mut Run>>,
        callback: &mut dyn Callback,
    ) -> Result<RunOutcome, Error> {
        let mut run = run.into();
        if let Some(ended) = self.outcome() {
            return Ok(ended);
        }
        let (steps, t) = (self.schedule.steps, self.settings.training.clone());
        loop {
            let before = self.progress.epoch;
            let norm = self.step()?;
            let step = self.progress.step;
            let last = step == steps;
            if step.is_multiple_of(t.log_every) || last {
                let report = self.report(norm);
                if let Some(run) = &mut run {
                    run.log(&report)?;
                    run.log_times(&self.times(Some(report.tokens_per_second)))?;
                }
                callback.on_step(&report);
            }
            let due = match t.validate_every {
                0 => self.progress.epoch > before,
                every => step.is_multiple_of(every),
            };
            if due || last {
                self.validate(run.as_deref_mut(), callback)?;
            }
            let stop = any(&*self.ranks, callback.should_stop())?;
            if let Some(ended) = self.outcome() {
                self.checkpoint(run)?;
                return Ok(ended);
            }
            if stop || step.is_multiple_of(t.checkpoint_every) {
                self.checkpoint(run.as_deref_mut())?;
            }
            if stop {
                return Ok(RunOutcome::Interrupted);
            }
        }
    }

    /// What happened since the last report.
    fn report(&mut self, norm: f64) -> StepMetrics {
        let IntervalSums { loss, answers, .. } = std::mem::take(&mut self.progress.since);
        let Clock { seconds, interval, tokens } = self.clock;
        self.clock = Clock { seconds, ..Clock::default() };
        let loss = loss / answers.max(1) as f64;
        let of_epoch = self.progress.batch as f64 / self.epoch.1.len().max(1) as f64;
        StepMetrics {
            step: self.progress.step,
            epoch: self.progress.epoch as f64 + of_epoch,
            loss,
            perplexity: loss.exp(),
            lr: self.schedule.lr(self.progress.step),
            grad_norm: norm,
            tokens_per_second: tokens as f64 / interval.max(1e-9),
            seconds,
        }
    }

    fn validate(
        &mut self,
        mut run: Option<&mut Run>,
        callback: &mut dyn Callback,
    ) -> Result<(), Error> {
        let start = Instant::now();
        let ranks = &*self.ranks;
        let weights = self.optimizer.averaged(ranks)?;
        let mut report = validate(&self.settings, &self.corpus, &self.config, &weights, ranks)?;
        self.clock.seconds += start.elapsed().as_secs_f64();
        report.step = self.progress.step;
        if !report.validation_loss.is_finite() {
            let (step, value) = (report.step, report.validation_loss);
            return Err(Error::Diverged { step, what: "the loss of the validation", value });
        }
        report.seconds = self.clock.seconds;
        let value = match (self.settings.validation.metric, report.score) {
            // Where there is nothing to judge by, the last is as good as any.
            _ if self.corpus.validation.is_empty() => self.progress.step as f64,
            (SelectionMetric::Score, Some(score)) => score,
            _ => -report.validation_loss,
        };
        let best = BestCheckpoint { step: report.step, value };
        let kept = self.progress.keep(best.clone(), self.settings.training.save_top_k);
        report.best = kept.as_ref().is_some_and(|kept| kept.position == 0);
        self.progress.waited = if report.best { 0 } else { self.progress.waited + 1 };
        if let (Some(run), Some(kept)) = (&mut run, kept) {
            run.keep(&weights, &best, &kept.dropped)?;
        }
        if let (Some(run), true) = (&run, report.best) {
            let card = card(&self.settings, &self.size(), &report);
            let stored = if self.settings.training.save_fp16 {
                WeightFormat::F16
            } else {
                WeightFormat::F32
            };
            run.export(&self.config, &self.vocabularies, &weights, (&card, stored))?;
        }
        if let Some(run) = run {
            run.log(&report)?;
            run.log_times(&self.times(None))?;
        }
        callback.on_validation(&report);
        Ok(())
    }
}

/// One number of several, each of which changes all of it (splitmix64).
fn mix(numbers: [u64; 3]) -> u64 {
    numbers.iter().fold(0x9e37_79b9_7f4a_7c15, |state, number| {
        let mut x = state ^ number.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    })
}
