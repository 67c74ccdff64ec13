//! Tiles: every level agrees with the weights, sampled or not.

use crate::dense::Outcome;
use regard::Machine;
use regard_scope::{
    Inputs, Labels, Layer, LayerData, Palette, PaletteKind, Pool, Scale, Theme, Trace, Zoom, stats,
    trace_page, zoom_page_of,
};
use std::collections::BTreeMap;

fn trace(n: usize, mask: &str) -> Outcome<Trace> {
    let numbers = |of: f32| (0..n * 8).map(|i| (i as f32 * of).sin() * 2.0).collect::<Vec<f32>>();
    let heads = Inputs::new((numbers(0.31), [1, n, 8]), (numbers(0.17), [1, n, 8]), mask)?;
    let (kind, rows, cols) = ("self".into(), "tokens".into(), "tokens".into());
    let layers = vec![Layer {
        layer: 0,
        kind,
        rows,
        cols,
        data: LayerData::Inputs(heads),
        value_norms: Vec::new(),
    }];
    let axes = BTreeMap::from([("tokens".to_string(), Labels::counted("token", n))]);
    Ok(Trace { title: "</script><b>".into(), axes, layers, ..Trace::default() })
}

/// The same color, but for a rounding.
fn near(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.abs_diff(*b) <= 1)
}

/// Every pixel of every level against the weights that it stands for.
#[test]
fn tiles_show_the_largest_and_the_mean_of_their_pairs() -> Outcome<()> {
    let trace = trace(700, "causal")?;
    let LayerData::Inputs(heads) = trace.layers[0].data.clone() else {
        return Err("weights".into());
    };
    let weights = heads.view(Machine::detect())?.tile(0..700, 0..700)?;
    let zoom = Zoom::new(trace, Machine::detect());
    let palette = Palette::of(Theme::Dark, PaletteKind::Amount);
    // 700 pairs each way are 350 and 175 pixels a level or two up.
    for (level, scale, place, size) in
        [(10, 1, [2, 1], [188, 256]), (9, 2, [1, 1], [94, 94]), (8, 4, [0, 0], [175, 175])]
    {
        for pool in [Pool::Max, Pool::Mean] {
            let tile = zoom.tile(0, pool, level, place)?;
            assert_eq!(([tile.width, tile.height], tile.sampled), (size, None));
            for (i, color) in tile.colors.iter().enumerate() {
                let [x, y] = [place[0] * 256 + i % size[0], place[1] * 256 + i / size[0]];
                let inside = |at: usize| at * scale..((at + 1) * scale).min(700);
                let pairs = inside(y).flat_map(|row| inside(x).map(move |key| (row, key)));
                let own: Vec<f32> = pairs.map(|(row, key)| weights[row * 700 + key]).collect();
                let value = match pool {
                    Pool::Max => own.iter().copied().fold(0.0, f32::max),
                    _ => own.iter().sum::<f32>() / own.len() as f32,
                };
                let expected = palette.index(value, Scale::Log { decades: 4.0 });
                let expected = if value == 0.0 { 0 } else { expected };
                assert!(color.abs_diff(expected) <= 1, "{level} {x} {y}: {color} {expected}");
            }
        }
    }
    assert!(zoom.tile(0, Pool::Max, 10, [3, 0]).is_err());
    assert!(zoom.tile(0, Pool::Max, 11, [0, 0]).is_err());
    assert!(zoom.tile(1, Pool::Max, 0, [0, 0]).is_err());
    Ok(())
}

#[test]
fn a_survey_replaces_samples_by_what_all_rows_say() -> Outcome<()> {
    let zoom = Zoom::new(trace(9000, "full")?, Machine::detect());
    let sampled = zoom.tile(0, Pool::Max, 8, [0, 0])?;
    assert!(sampled.sampled.is_some());
    let finer = zoom.tile(0, Pool::Max, 13, [1, 1])?;
    assert_eq!(finer.sampled, None);
    zoom.survey(0, &|| true)?; // given up at once
    assert!(zoom.tile(0, Pool::Max, 8, [0, 0])?.sampled.is_some());
    zoom.survey(0, &|| false)?;
    let exact = zoom.tile(0, Pool::Max, 8, [0, 0])?;
    assert_eq!(exact.sampled, None);
    // What is largest among some rows is not above what is largest among all.
    assert!(exact.colors.iter().zip(&sampled.colors).all(|(all, some)| all >= some));
    assert!(near(&zoom.tile(0, Pool::Max, 13, [1, 1])?.colors, &finer.colors));
    // All rows have the same weight to give, so a sample of them says what all say, on average.
    let [some, all] =
        [&sampled, &exact].map(|tile| tile.colors.iter().map(|c| f64::from(*c)).sum::<f64>());
    assert!((some / all - 1.0).abs() < 0.2, "{some} {all}");
    Ok(())
}

#[test]
fn hover_tells_the_weight_that_the_row_has() -> Outcome<()> {
    let trace = trace(300, "causal & window 20")?;
    let LayerData::Inputs(heads) = trace.layers[0].data.clone() else {
        return Err("weights".into());
    };
    let zoom = Zoom::new(trace, Machine::detect());
    let row = heads.view(Machine::detect())?.row(100)?;
    for key in [80, 81, 99, 100, 101] {
        let hover = serde_json::to_value(zoom.weight(0, 100, key)?)?;
        let weight = hover["weight"].as_f64().ok_or("a number")?;
        assert!((weight - f64::from(row[key])).abs() < 1e-6);
        assert_eq!(hover["hidden"], !(81..=100).contains(&key));
    }
    assert!(zoom.weight(0, 300, 0).is_err());
    Ok(())
}

/// 12 layers of 12 heads over 64 tokens, as small models have them.
#[test]
fn the_page_of_a_whole_model_is_below_three_megabytes() -> Outcome<()> {
    let mut whole = trace(64, "causal")?;
    let LayerData::Inputs(one) = whole.layers[0].data.clone() else { return Err("weights".into()) };
    let twelve =
        |x: &[f32]| (0..12).flat_map(|i| x.iter().map(move |x| x * (1.0 + i as f32))).collect();
    let (q, k) = (twelve(&one.q), twelve(&one.k));
    let heads = Inputs::new((q, [12, 64, 8]), (k, [12, 64, 8]), "full")?;
    let layer =
        |layer| Layer { layer, data: LayerData::Inputs(heads.clone()), ..whole.layers[0].clone() };
    whole.layers = (0..12).map(layer).collect();
    let page = trace_page(&whole, Machine::detect(), 128, &mut |_, _| {})?;
    assert!(page.len() < 3_000_000, "{} bytes", page.len());
    Ok(())
}

#[test]
fn pages_hold_what_they_show_and_no_word_can_break_out() -> Outcome<()> {
    let trace = trace(300, "causal")?;
    let page = trace_page(&trace, Machine::detect(), 64, &mut |_, _| {})?;
    assert!(!page.contains("</script><b>") && page.contains("&lt;/script&gt;&lt;b&gt;"));
    assert!(!page.contains("/*DATA*/") && !page.contains("{{TITLE}}"));
    let numbers = stats(&trace, Machine::detect(), &mut |_, _| {})?;
    assert_eq!(numbers.len(), 1);
    assert!(numbers[0].entropy > 0.0 && numbers[0].largest <= 1.0);
    let zoom = Zoom::new(trace, Machine::detect());
    let page = zoom_page_of(&zoom, 0, &mut |_, _| {})?;
    assert!(page.contains("0/max/light/9/1/1") && !page.contains("</script><b>"));
    assert!(!zoom.tile(0, Pool::Mean, 9, [0, 0])?.png(Theme::Light).is_empty());
    Ok(())
}
