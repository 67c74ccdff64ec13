//! Pictures to where they are wanted: the terminal, or a file.

use crate::args::{ShowArgs, ThemeArg};
use crate::say::{self, say};
use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use regard_scope::render::{Depth, Fonts, svg, term};
use regard_scope::{Metrics, Scene, Style, Theme, write_atomically};
use std::env;
use std::io::{IsTerminal, Write};
use std::path::Path;

/// Pixels of a picture across, if nobody says.
const WIDTH: f32 = 1000.0;
/// Pixels of a PNG for each of them: sharp on fine screens.
const FINE: f32 = 2.0;

/// Where a picture goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Terminal,
    Svg,
    Png,
    Html,
}

impl Target {
    pub(crate) fn of(out: Option<&Path>) -> Result<Self> {
        let Some(path) = out else { return Ok(Self::Terminal) };
        match path.extension().map(|e| e.to_ascii_lowercase()).as_ref().and_then(|e| e.to_str()) {
            Some("svg") => Ok(Self::Svg),
            Some("png") => Ok(Self::Png),
            Some("html") => Ok(Self::Html),
            _ => bail!("--out {}: give a name that ends in .svg, .png or .html", path.display()),
        }
    }
}

/// The style of a picture for its target.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "a width is small"
)]
pub(crate) fn style(args: &ShowArgs, target: Target) -> Style {
    let width = args.width;
    let metrics = match target {
        Target::Terminal => {
            let columns = width.map_or_else(columns, |w| w.min(usize::from(u16::MAX)) as u16);
            Metrics::terminal(columns, depth() != Depth::Ascii)
        }
        _ => Metrics::pixels(width.map_or(WIDTH, |w| w as f32)),
    };
    let theme = match (args.theme, target) {
        (Some(ThemeArg::Dark), _) | (None, Target::Terminal) => Theme::Dark,
        (Some(ThemeArg::Light), _) | (None, _) => Theme::Light,
    };
    Style { theme, ..Style::new(metrics) }
}

/// Draws a scene, or writes it.
pub(crate) fn show(scene: &Scene, args: &ShowArgs, target: Target) -> Result<()> {
    let Some(path) = &args.out else {
        write!(std::io::stdout().lock(), "{}", term(scene, depth()))?;
        return Ok(());
    };
    match target {
        Target::Png => {
            let fonts = Fonts::system();
            let missing: String = fonts.missing(scene).into_iter().take(20).collect();
            if !missing.is_empty() {
                say(format_args!(
                    "no font here has {missing}; install one that does, such as fonts-noto-cjk"
                ));
            }
            write_atomically(path, &fonts.png(scene, FINE)?)?;
        }
        Target::Svg => write_atomically(path, svg(scene).as_bytes())?,
        Target::Html | Target::Terminal => {
            bail!("--out {}: this view has no HTML form; use .svg or .png", path.display())
        }
    }
    told(path)
}

/// Says what was written.
pub(crate) fn told(path: &Path) -> Result<()> {
    let bytes = std::fs::metadata(path)?.len();
    writeln!(std::io::stdout().lock(), "{} ({} kB)", path.display(), bytes.div_ceil(1000))?;
    Ok(())
}

/// A line that tells how far long work is; on a terminal only.
pub(crate) fn progress(what: &str) -> Result<impl FnMut(usize, usize)> {
    let bar = say::bar(ProgressBar::new(1));
    bar.set_style(ProgressStyle::with_template("{msg} {pos}/{len} [{elapsed}, {eta} left]")?);
    bar.set_message(what.to_string());
    Ok(move |done: usize, all: usize| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
        if done == all {
            bar.finish_and_clear();
        }
    })
}

/// As many colors as the terminal says it has; none for what is no terminal, or a dumb one.
fn depth() -> Depth {
    if env::var("TERM").is_ok_and(|term| term == "dumb") {
        return Depth::Ascii;
    }
    let says = |name: &str, what: &str| env::var(name).is_ok_and(|value| value.contains(what));
    let some = env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    if env::var_os("CLICOLOR_FORCE").is_none_or(|value| value.is_empty() || value == "0")
        && !(some && std::io::stdout().is_terminal())
    {
        Depth::Ascii
    } else if says("COLORTERM", "truecolor") || says("COLORTERM", "24bit") || says("TERM", "direct")
    {
        Depth::True
    } else {
        Depth::Indexed
    }
}

/// Columns of the terminal; 80 for what is none.
fn columns() -> u16 {
    let own = rustix::termios::tcgetwinsize(std::io::stdout()).ok().map(|size| size.ws_col);
    let told = env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    own.filter(|n| *n > 0).or(told).unwrap_or(80)
}
