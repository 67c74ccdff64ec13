//! Exit statuses of the command, and what it says of itself.

use regard::Isa;
use std::fmt;
use std::sync::LazyLock;

/// The result is negative: a check found errors, or a claim does not hold.
pub(crate) const NEGATIVE: u8 = 1;
/// The command cannot be run as it was given.
pub(crate) const REFUSED: u8 = 2;
/// The command failed.
pub(crate) const FAILURE: u8 = 3;

/// What the help says of them. clap ends with [`REFUSED`] by itself.
pub(crate) const HELP: &str = "Exit status: 0 success; 1 the command ran and the result is negative (check, lab); \
2 invalid arguments; 3 failure";

/// The same for the long help, after examples.
pub(crate) const LONG_HELP: &str = "Examples:
  regard info
  regard look zh-en 好久不见
  regard help bench run

Exit status: 0 success; 1 the command ran and the result is negative (check, lab); 2 invalid arguments; 3 failure";

/// The error of a command that ran to its end with a negative result.
#[derive(Debug)]
pub(crate) struct Negative(pub(crate) String);

impl fmt::Display for Negative {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Negative {}

/// The error of a command that would fail again if it were started again as it is.
#[derive(Debug)]
pub(crate) struct Refused(pub(crate) String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

/// The exit status of an error.
pub(crate) fn of(error: &anyhow::Error) -> u8 {
    if error.is::<Negative>() {
        NEGATIVE
    } else if error.is::<Refused>() {
        REFUSED
    } else {
        FAILURE
    }
}

/// Version, commit, features and the instruction sets of this CPU.
pub(crate) static VERSION: LazyLock<String> = LazyLock::new(|| {
    let commit = env!("REGARD_COMMIT");
    let commit = if commit.is_empty() { String::new() } else { format!(" ({commit})") };
    let features = [
        ("models", cfg!(feature = "models")),
        ("shipped", cfg!(feature = "shipped")),
        ("serve", cfg!(feature = "serve")),
        ("train", cfg!(feature = "train")),
        ("lab", cfg!(feature = "lab")),
        ("mpi", cfg!(feature = "mpi")),
    ];
    let features: Vec<_> = features.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
    let features = if features.is_empty() { "none".to_owned() } else { features.join(", ") };
    let isas: Vec<_> = Isa::available().iter().map(|isa| isa.name()).collect();
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "{version}{commit}\nfeatures: {features}\ninstruction sets of this CPU: {}",
        isas.join(", ")
    )
});
