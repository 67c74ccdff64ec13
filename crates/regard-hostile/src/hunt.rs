//! The loop: inputs are made and given to a target until there were enough, or one of them is a failure too many.

use crate::chance::Chance;
use crate::mutate;
use crate::targets::{self, Target};
use std::fs;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What one input may take.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// Failures after which a hunt ends: they are mostly the same one.
const MAX_FAILURES: usize = 20;

/// When a hunt ends.
#[derive(Clone, Copy, Debug)]
pub enum Until {
    /// After so many inputs.
    Inputs(u64),
    /// After so many seconds.
    Seconds(u64),
}

/// What came of a hunt.
#[derive(Clone, Debug, Default)]
pub struct HuntReport {
    /// Inputs that were tried.
    pub inputs: u64,
    /// How long it took.
    pub seconds: f64,
    /// Inputs that the target took for what they seem to be.
    pub accepted: u64,
    /// Inputs that it refused.
    pub refused: u64,
    /// Panics: what was said, and where the input is kept.
    pub failures: Vec<(String, PathBuf)>,
}

impl HuntReport {
    /// What is wrong with it, if anything is.
    #[must_use]
    pub fn wrong(&self) -> Option<String> {
        if !self.failures.is_empty() {
            return Some(format!("{} inputs panicked", self.failures.len()));
        }
        let none = |n: u64, what: &str| {
            (n == 0).then(|| format!("no input was {what}; nothing was tested"))
        };
        none(self.accepted, "accepted").or_else(|| none(self.refused, "refused"))
    }
}

/// The root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// What inputs of a target are made of: files in the order of their names, and what is made.
pub fn seeds(target: &Target) -> io::Result<Vec<Vec<u8>>> {
    let folder = root().join("fuzz/seeds").join(target.name);
    let mut paths = Vec::new();
    if folder.is_dir() {
        for entry in fs::read_dir(&folder)? {
            paths.push(entry?.path());
        }
    }
    paths.sort_unstable();
    let mut seeds = paths.iter().map(fs::read).collect::<io::Result<Vec<_>>>()?;
    seeds.extend((target.made)());
    if seeds.is_empty() {
        return Err(io::Error::other(format!("{}: no seeds", folder.display())));
    }
    Ok(seeds)
}

/// Where inputs that fail are kept.
fn kept(target: &Target) -> io::Result<PathBuf> {
    let folder = root().join("target/hostile").join(target.name);
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// What panics say, gathered instead of printed.
fn listen() -> Arc<Mutex<String>> {
    let heard = Arc::new(Mutex::new(String::new()));
    let ear = Arc::clone(&heard);
    set_hook(Box::new(move |info| {
        if let Ok(mut heard) = ear.lock() {
            *heard = info.to_string();
        }
    }));
    heard
}

/// Ends the process if an input takes too long, as nothing else can end it. The input is kept first.
fn watch(folder: PathBuf, name: &'static str) -> (Arc<AtomicU64>, Arc<Mutex<Vec<u8>>>) {
    let (number, input) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(Vec::new())));
    let (seen_number, seen_input) = (Arc::clone(&number), Arc::clone(&input));
    std::thread::spawn(move || {
        let mut last = (0, Instant::now());
        loop {
            std::thread::sleep(PATIENCE / 20);
            let now = seen_number.load(Ordering::Acquire);
            if now == u64::MAX {
                return;
            }
            if now != last.0 {
                last = (now, Instant::now());
            } else if now > 0 && last.1.elapsed() > PATIENCE {
                let path = folder.join(format!("slow-{now}"));
                let written = seen_input.lock().map(|input| fs::write(&path, input.as_slice()));
                eprintln!(
                    "{name}: input {now} took longer than {PATIENCE:?}: {} {written:?}",
                    path.display()
                );
                std::process::exit(1);
            }
        }
    });
    (number, input)
}

/// Gives a target inputs by chance.
pub fn hunt(target: &Target, until: Until, seed: u64) -> io::Result<HuntReport> {
    let (seeds, folder) = (seeds(target)?, kept(target)?);
    let heard = listen();
    let (number, current) = watch(folder.clone(), target.name);
    let (mut chance, mut found, start) = (Chance::new(seed), HuntReport::default(), Instant::now());
    // A process that runs out of memory is gone without a word; to write each input costs more than to try it.
    let keep_each = std::env::var_os("HOSTILE_KEEP").is_some();
    loop {
        let enough = match until {
            Until::Inputs(n) => found.inputs >= n,
            Until::Seconds(n) => start.elapsed() >= Duration::from_secs(n),
        };
        if enough || found.failures.len() == MAX_FAILURES {
            break;
        }
        let input = mutate::input(&seeds, target.dictionary, &mut chance);
        if keep_each {
            fs::write(folder.join("last"), &input)?;
        }
        if let Ok(mut current) = current.lock() {
            current.clone_from(&input);
        }
        found.inputs += 1;
        number.store(found.inputs, Ordering::Release);
        match catch_unwind(AssertUnwindSafe(|| (target.call)(&input))) {
            Ok(true) => found.accepted += 1,
            Ok(false) => found.refused += 1,
            Err(_) => {
                let path = folder.join(format!("panic-{seed}-{}", found.inputs));
                fs::write(&path, &input)?;
                let said = heard.lock().map(|heard| heard.clone()).unwrap_or_default();
                found.failures.push((said, path));
            }
        }
    }
    number.store(u64::MAX, Ordering::Release);
    targets::clean();
    found.seconds = start.elapsed().as_secs_f64();
    Ok(found)
}
