//! Real models: two that are part of the workspace, and three that are fetched.

use regard_models::files::{KnownModel, ModelFiles, cache_dir};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Mutex;

/// A file of the workspace.
pub(crate) fn fixture(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures")).join(path)
}

pub(crate) fn json(path: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(path)).expect(path)).expect(path)
}

/// A model that is part of the workspace.
pub(crate) fn kept(folder: &str) -> ModelFiles {
    ModelFiles::open(&fixture(folder)).expect(folder)
}

/// Where a model is that is known by name, fetched if need be. A test that cannot have its model fails: one that passes without
/// it would look like one that has run.
pub(crate) fn fetched(name: &str) -> PathBuf {
    // Two tests of one model fetch it once.
    static ONE: Mutex<()> = Mutex::new(());
    let one = ONE.lock();
    let base = cache_dir(|name| std::env::var_os(name)).expect("HOME or REGARD_CACHE");
    let path = KnownModel::named(name).expect("a known name").fetch(&base, "python3");
    drop(one);
    path.unwrap_or_else(|why| panic!("run `regard models get {name}`: {why}"))
}
