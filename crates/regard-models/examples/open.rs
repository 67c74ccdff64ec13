//! Opens folders of Hugging Face and prints what each is: `open FOLDER..`. Ends with an error if one cannot be read.

use regard_models::files::TransformerFiles;
use std::path::Path;
use std::process::ExitCode;

#[expect(clippy::print_stdout, reason = "an example")]
fn main() -> ExitCode {
    let mut failed = false;
    for path in std::env::args().skip(1) {
        match TransformerFiles::open(Path::new(&path)) {
            Ok(files) => {
                let (family, parameters) = (&files.config.family, files.weights.parameters());
                println!("{path}: {family}, {parameters} parameters");
                files.notes.iter().for_each(|note| println!("  {note}"));
            }
            Err(error) => {
                println!("{error}");
                failed = true;
            }
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
