//! Real models: two that are kept beside the workspace, and three that are fetched.

use regard_models::files::{Known, ModelFiles, cache_dir};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Mutex;

/// A file beside the workspace. None, saying so, where there is no such file, unless `REGARD_REQUIRE_DATA` is set.
pub(crate) fn shared(path: &str) -> Option<PathBuf> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data");
    let path = PathBuf::from(folder).join(path);
    if !path.exists() {
        assert!(
            std::env::var_os("REGARD_REQUIRE_DATA").is_none(),
            "{} is required",
            path.display()
        );
        eprintln!("skipped: {} is not there", path.display());
        return None;
    }
    Some(path)
}

pub(crate) fn json(path: &str) -> Option<Value> {
    let bytes = std::fs::read(shared(path)?).expect(path);
    Some(serde_json::from_slice(&bytes).expect(path))
}

/// A model that is kept beside the workspace.
pub(crate) fn kept(folder: &str) -> Option<ModelFiles> {
    Some(ModelFiles::open(&shared(folder)?).expect(folder))
}

/// Where a model is that is known by name, fetched if need be. None, saying so, where it cannot be fetched, unless
/// `REGARD_REQUIRE_MODELS` is set.
pub(crate) fn fetched(name: &str) -> Option<PathBuf> {
    // Two tests of one model fetch it once.
    static ONE: Mutex<()> = Mutex::new(());
    let one = ONE.lock();
    let base = cache_dir(|name| std::env::var_os(name)).expect("HOME or REGARD_CACHE");
    let path = Known::named(name).expect("a known name").fetch(&base, "python3");
    drop(one);
    match path {
        Ok(path) => Some(path),
        Err(why) if std::env::var_os("REGARD_REQUIRE_MODELS").is_some() => panic!("{why}"),
        Err(why) => {
            eprintln!("skipped: {why}");
            None
        }
    }
}
