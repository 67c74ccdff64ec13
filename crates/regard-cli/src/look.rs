//! `regard look`: what heads look at.

use crate::args::{Format, LookArgs, ViewArg};
use crate::long_arrays::LongArrays;
use crate::ranks::on_ranks;
use crate::serve;
use crate::show::{Target, progress, show, style, told};
use crate::source;
use anyhow::{Result, anyhow, bail};
use regard::Machine;
use regard_scope::{
    GridItem, Map, Scale, Scene, Site, Style, Trace, Zoom, alignment, difference_page, flow, grid,
    heat, printable, trace_page, write_atomically, zoom_page_of,
};
use serde_json::json;
use std::io::Write;

/// Cells of a map before it is laid out, each way: more than any picture of one shows.
const CELLS: usize = 1024;
/// Cells of a small map among many.
const FEW_CELLS: usize = 128;
/// Powers of ten that colors span.
const DECADES: f32 = 6.0;

pub(crate) fn run(args: &LookArgs, format: Format) -> Result<()> {
    let target = Target::of(args.show.out.as_deref())?;
    check(args, target, format)?;
    if !args.mpi.mpi {
        return on_ranks(args.mpi, |_| {
            let mut trace = source::read(&args.source)?;
            if let Some(file) = &args.spans {
                source::name_spans(&mut trace, &source::spans(file)?);
            }
            draw(trace, args, (target, format))
        });
    }
    on_ranks(args.mpi, |ranks| {
        let mut arrays = LongArrays::open(&args.source)?;
        let one = args.head.is_some() || arrays.heads() == 1 || args.view.is_some_and(of_one_head);
        let cells = if one { CELLS } else { FEW_CELLS };
        let head = one.then_some(args.head.unwrap_or(0));
        let trace = arrays.trace(&*ranks, (head, args.rows.clone()), cells)?;
        if ranks.rank() == 0 { draw(trace, args, (target, format)) } else { Ok(()) }
    })
}

/// Whether a view shows one head, the first if nobody names another.
fn of_one_head(view: ViewArg) -> bool {
    view != ViewArg::Grid
}

fn draw(trace: Trace, args: &LookArgs, (target, format): (Target, Format)) -> Result<()> {
    let machine = Machine::detect();
    let sites = chosen(&trace, args)?;
    let first = trace.sites().iter().position(|site| *site == sites[0]).unwrap_or(0);
    if args.serve {
        return serve::run(Zoom::new(trace, machine), first, args.port);
    }
    let view = args.view.unwrap_or(if sites.len() > 1 { ViewArg::Grid } else { ViewArg::Heat });
    if format == Format::Json {
        return print(&trace, machine, args, &sites);
    }
    if let (Target::Html, Some(path)) = (target, &args.show.out) {
        let page = if view == ViewArg::Zoom {
            zoom_page_of(&Zoom::new(trace, machine), first, &mut progress("tiles")?)?
        } else if let Some(after) = &args.against {
            let after = source::read_against(after, &args.source)?;
            difference_page(&trace, &after, machine, FEW_CELLS, &mut progress("heads")?)
                .map_err(|e| anyhow!("--against: {e}"))?
        } else {
            trace_page(&trace, machine, FEW_CELLS, &mut progress("heads")?)?
        };
        write_atomically(path, page.as_bytes())?;
        return told(path);
    }
    let style = style(&args.show, target);
    show(&scene(&trace, machine, args, (view, &sites), style)?, &args.show, target)
}

/// Refuses flags that would say nothing where they are given.
fn check(args: &LookArgs, target: Target, format: Format) -> Result<()> {
    let zooms = args.view == Some(ViewArg::Zoom);
    let some = args.layer.is_some() || args.head.is_some() || args.kind.is_some();
    let mute = match (target, format) {
        _ if args.mpi.mpi && zooms => Some("--view zoom: not with --mpi; leave one of them out"),
        _ if args.serve && format == Format::Json => {
            Some("--serve answers a browser; leave --format out")
        }
        (Target::Html | Target::Svg | Target::Png, Format::Json) => {
            Some("--out and --format json: give one")
        }
        _ if args.against.is_some() && (target != Target::Html || zooms) => {
            Some("--against: the difference is a page of all heads; write .html without --view")
        }
        _ if args.spans.is_some() && target != Target::Html && !args.serve => Some(
            "--spans: parts of the text are named on pages; write .html, or give --serve; as numbers: regard stats --spans",
        ),
        (Target::Html, _) if args.rows.is_some() => {
            Some("--rows: a page holds all queries; leave it out, or write .svg or .png")
        }
        (Target::Html, _) if args.log => Some("--log: a page has a button for it; leave it out"),
        (Target::Html, _) if args.view.is_some() && !zooms => {
            Some("--view: a page shows all of them; leave it out, or write .svg or .png")
        }
        (Target::Html, _) if some && !zooms => Some(
            "--layer, --head and --kind: a page holds all heads; leave them out, or write .svg or .png",
        ),
        _ => None,
    };
    mute.map_or(Ok(()), |why| bail!("{why}"))
}

/// The heads that the flags name.
fn chosen(trace: &Trace, args: &LookArgs) -> Result<Vec<Site>> {
    let own = |site: &&Site| {
        args.layer.is_none_or(|layer| layer == site.layer)
            && args.head.is_none_or(|head| head == site.head)
            && args.kind.as_ref().is_none_or(|kind| *kind == site.kind)
    };
    let all = trace.sites();
    let found: Vec<Site> = all.iter().filter(own).cloned().collect();
    if found.is_empty() {
        let most = |of: fn(&Site) -> usize| all.iter().map(of).max().unwrap_or(0);
        bail!(
            "no such head; layers 0 to {}, heads 0 to {}, kinds {}",
            most(|site| site.layer),
            most(|site| site.head),
            printable(&trace.kinds().join(", "))
        );
    }
    Ok(found)
}

fn map(
    trace: &Trace,
    machine: Machine,
    args: &LookArgs,
    (site, cells): (&Site, usize),
) -> Result<Map> {
    let rows = trace.layer(site)?.data.size()[0];
    // With --mpi a trace has these rows alone.
    let rows = args.rows.clone().filter(|_| !args.mpi.mpi).unwrap_or(0..rows);
    Ok(trace.map(machine, site, rows, [cells; 2])?)
}

fn scene(
    trace: &Trace,
    machine: Machine,
    args: &LookArgs,
    (view, sites): (ViewArg, &[Site]),
    mut style: Style,
) -> Result<Scene> {
    if view == ViewArg::Grid {
        let item = |site: &Site| {
            let map = map(trace, machine, args, (site, FEW_CELLS))?;
            Ok(GridItem { layer: site.layer, head: site.head, kind: site.kind.clone(), map })
        };
        let items = sites.iter().map(item).collect::<Result<Vec<_>>>()?;
        if args.log {
            style.scale = Scale::Log { decades: DECADES };
        }
        return Ok(grid(&trace.title, &items, &style));
    }
    let mut map = map(trace, machine, args, (&sites[0], CELLS))?;
    if view == ViewArg::Alignment {
        label_by_output(trace, &sites[0], &mut map)?;
    }
    style.scale = if args.log { Scale::Log { decades: DECADES } } else { Scale::up_to(&map) };
    let map = Map { title: format!("{}: {}", trace.title, map.title), ..map };
    Ok(match view {
        ViewArg::Flow => flow(&map, args.lines, &style),
        ViewArg::Alignment => alignment(&map, &style),
        ViewArg::Heat | ViewArg::Grid => heat(&map, &style),
        ViewArg::Zoom => bail!("--view zoom needs --out FILE.html or --serve"),
    })
}

/// Labels the rows of cross-attention with the token that each writes: the one after the token that it reads. An alignment is between what
/// is written and what it was written from, as `translate --alignment` prints it.
fn label_by_output(trace: &Trace, site: &Site, map: &mut Map) -> Result<()> {
    let tokens = trace.labels(&trace.layer(site)?.rows);
    let each = map.rows.labels.len() == map.rows.positions.len();
    if site.kind == "cross" && each {
        let rows = trace.layer(site)?.data.size()[0];
        let label = |row| if row + 1 < rows { tokens.label(row + 1) } else { "(end)".into() };
        map.rows.labels = map.rows.positions.clone().map(label).collect();
    }
    Ok(())
}

/// One object for each head: its weights, as many as a picture shows.
fn print(trace: &Trace, machine: Machine, args: &LookArgs, sites: &[Site]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    for site in sites {
        let cells = if sites.len() > 1 { FEW_CELLS } else { CELLS };
        let map = map(trace, machine, args, (site, cells))?;
        let rows: Vec<_> = (0..map.rows.len()).map(|row| map.row(row)).collect();
        let line = json!({
            "layer": site.layer, "kind": site.kind, "head": site.head,
            "rows": map.rows.labels, "cols": map.cols.labels, "weights": rows,
        });
        writeln!(out, "{line}")?;
    }
    Ok(())
}
