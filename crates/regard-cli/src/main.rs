//! The `regard` command.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    regard_cli::run(std::env::args_os()).into()
}
