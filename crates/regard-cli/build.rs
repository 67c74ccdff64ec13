//! Tells the command the commit it is built from, if it is built in a clone of the repository.

use std::path::Path;
use std::process::Command;

fn main() {
    let clone = Path::new("../../.git/logs/HEAD");
    let commit = if clone.exists() {
        println!("cargo::rerun-if-changed={}", clone.display());
        let git = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output();
        git.ok()
            .filter(|git| git.status.success())
            .and_then(|git| String::from_utf8(git.stdout).ok())
    } else {
        println!("cargo::rerun-if-changed=build.rs");
        None
    };
    println!("cargo::rustc-env=REGARD_COMMIT={}", commit.unwrap_or_default().trim());
}
