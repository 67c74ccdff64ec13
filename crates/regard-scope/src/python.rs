//! A Python that is asked for something: for packages, or to compute the same beside us.

use std::path::Path;
use std::process::Command;

/// A Python to be started as a child: no module of the working directory, of `PYTHONPATH` or of the user's own site is found by it, so
/// that whoever fills the directory a command is run in does not have code run by it. Packages of an environment are found.
///
/// It works in `/`: give it whole paths.
pub fn python(program: &Path) -> Command {
    // The system looks for a path after the child has changed its directory, for a bare name in PATH.
    let path = Some(program).filter(|program| program.components().nth(1).is_some());
    let path = path.and_then(|program| std::path::absolute(program).ok());
    let mut command = Command::new(path.as_deref().unwrap_or(program));
    command.arg("-I").current_dir("/");
    command
}
