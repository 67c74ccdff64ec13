//! Traces and pictures of two real models, as the gallery of the documentation shows them:
//! `cargo run -p regard-scope --example gallery -- DIR`.

#[path = "../tests/all/aren.rs"]
mod aren;
#[expect(dead_code, reason = "the tests ask for more of it")]
#[path = "../tests/all/dense.rs"]
mod dense;
#[path = "../tests/all/record.rs"]
mod record;
#[path = "../tests/all/stories.rs"]
mod stories;

use dense::Outcome;
use record::trace_of;
use regard::Machine;
use regard_scope::render::Fonts;
use regard_scope::{
    GridItem, HeadStats, Inputs, LayerData, Metrics, PaletteKind, Scale, Scene, Site, Style, Theme,
    Trace, alignment, flow, grid, heat, stats, table, trace_page, write_atomically,
};
use std::path::{Path, PathBuf};

/// Pixels across, and of a PNG for each of them.
const WIDTH: f32 = 760.0;
const FINE: f32 = 1.5;

fn main() -> Outcome<()> {
    let to = PathBuf::from(std::env::args().nth(1).ok_or("say where: gallery DIR")?);
    std::fs::create_dir_all(&to)?;
    let (fonts, machine) = (Fonts::system(), Machine::detect());
    let draw = |name: &str, scene: &Scene| -> Outcome<()> {
        Ok(write_atomically(&to.join(name), &fonts.png(scene, FINE)?)?)
    };
    let names =
        trace_of("آتشيسون becomes achison", &aren::Aren::load()?.transliterate("آتشيسون")?, 4)?;
    let story = stories::Stories::load()?.tell(48)?;
    let story = trace_of("a story of 260,000 parameters", &story, 8)?;
    for (name, trace) in [("aren", &names), ("story", &story)] {
        trace.save(&to.join(format!("{name}.safetensors")))?;
        let page = trace_page(trace, machine, 128, &mut |_, _| {})?;
        write_atomically(&to.join(format!("{name}.html")), page.as_bytes())?;
    }
    after(&story)?.save(&to.join("story-after.safetensors"))?;
    draw("alignment.png", &alignment(&map(&names, "cross", 5, 0)?, &style(Theme::Light)))?;
    draw("flow.png", &flow(&map(&names, "cross", 5, 0)?, 16, &style(Theme::Light)))?;
    draw("heat.png", &heat(&map(&story, "self", 1, 3)?, &style(Theme::Dark)))?;
    draw("grid.png", &grid(&story.title, &all(&story)?, &style(Theme::Dark)))?;
    let numbers = stats(&story, machine, &mut |_, _| {})?;
    let entropy = HeadStats::map(&numbers, "self", "entropy");
    let scale = Scale::up_to(&entropy);
    draw(
        "table.png",
        &table(&entropy, &Style { scale, unit: "nats".into(), ..style(Theme::Light) }),
    )?;
    told(&to)
}

/// The story where scores of one layer are halved: what an intervention does to its heads.
fn after(story: &Trace) -> Outcome<Trace> {
    let mut after = story.clone();
    after.title = "with flat scores in layer 2".into();
    after.interventions =
        vec!["layers [2]: scores times 0.5 <img src=x onerror=window.hacked=1>".into()];
    for layer in after.layers.iter_mut().filter(|layer| layer.layer == 2) {
        if let LayerData::Inputs(inputs) = &layer.data {
            let scale = inputs.scale.unwrap_or((inputs.q_shape[2] as f64).sqrt().recip());
            let inputs = Inputs { scale: Some(scale / 2.0), ..inputs.clone() };
            layer.data = LayerData::Inputs(inputs.with_lse(Machine::detect())?);
        }
    }
    Ok(after)
}

fn style(theme: Theme) -> Style {
    Style { theme, kind: PaletteKind::Amount, ..Style::new(Metrics::pixels(WIDTH)) }
}

/// All queries of a head.
fn map(trace: &Trace, kind: &str, layer: usize, head: usize) -> Outcome<regard_scope::Map> {
    let site = Site { kind: kind.into(), layer, head };
    let rows = trace.layer(&site)?.data.size()[0];
    Ok(trace.map(Machine::detect(), &site, 0..rows, [512; 2])?)
}

fn all(trace: &Trace) -> Outcome<Vec<GridItem>> {
    let item = |Site { kind, layer, head }| {
        Ok(GridItem { map: map(trace, &kind, layer, head)?, kind, layer, head })
    };
    trace.sites().into_iter().map(item).collect()
}

/// Says what was made, and how large it is.
#[expect(clippy::print_stdout, reason = "that is how an example answers")]
fn told(to: &Path) -> Outcome<()> {
    let mut files: Vec<_> = std::fs::read_dir(to)?.collect::<Result<_, _>>()?;
    files.sort_by_key(std::fs::DirEntry::file_name);
    for file in files {
        println!("{:>9} {}", file.metadata()?.len(), file.file_name().to_string_lossy());
    }
    Ok(())
}
