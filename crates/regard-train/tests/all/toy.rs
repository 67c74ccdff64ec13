//! A language that is spelled backwards: small enough to be learned in seconds, and not without attention.

use regard_train::{Callback, Settings, StepMetrics, ValidationMetrics};
use std::path::{Path, PathBuf};

/// A folder of this test alone, gone when it ends.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("regard-train-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("a folder can be made");
        Self(path)
    }

    pub(crate) fn run(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Words of letters, each beside itself spelled backwards.
pub(crate) fn pairs(folder: &Path) {
    let mut state = 1u32;
    let mut next = |limit: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) % limit
    };
    let mut lines = String::new();
    for _ in 0..96 {
        let word: String = (0..2 + next(5))
            .map(|_| ['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'][next(8) as usize])
            .collect();
        let back: String = word.chars().rev().collect();
        lines.push_str(&format!("{word}\t{back}\n"));
    }
    std::fs::write(folder.join("pairs.tsv"), lines).expect("a file can be written");
}

const TOML: &str = r#"
[[data.parts]]
train = "pairs.tsv"
validation = "pairs.tsv"
columns = [0, 1]
source = "ab"
target = "ba"

[vocabulary]
kind = "char"

[target_vocabulary]
kind = "char"

[model]
d_model = 32
n_layers = 1
decoder_layers = 1
heads = 2
d_ff = 64
hidden = 16
attention = 16

[training]
batch_tokens = 256
lr = 5e-3
warmup = 10
label_smoothing = 0.0
dropout = 0.1
attention_dropout = 0.1
log_every = 5
checkpoint_every = 7

[optimizer]
ema_decay = 0.9
"#;

/// Settings of the toy, with changes.
pub(crate) fn settings(folder: &Folder, changes: &[&str]) -> Settings {
    pairs(&folder.0);
    let mut all = vec![format!("data.folder={:?}", folder.0.display().to_string())];
    all.extend(changes.iter().map(|change| change.to_string()));
    Settings::new(TOML, &all).expect("settings of a toy")
}

/// Collects metrics, and stops the run after a number of steps.
#[derive(Default)]
pub(crate) struct TestCallback {
    pub(crate) stepped: Vec<StepMetrics>,
    pub(crate) validated: Vec<ValidationMetrics>,
    pub(crate) left: Option<u64>,
}

impl Callback for TestCallback {
    fn on_step(&mut self, report: &StepMetrics) {
        self.stepped.push(report.clone());
    }

    fn on_validation(&mut self, report: &ValidationMetrics) {
        self.validated.push(report.clone());
    }

    fn should_stop(&mut self) -> bool {
        match &mut self.left {
            Some(left) => {
                *left = left.saturating_sub(1);
                *left == 0
            }
            None => false,
        }
    }
}
