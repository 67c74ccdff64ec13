//! Cells as a small PNG: a pixel for each, and the palette beside it.

use crate::palette::Palette;
use crate::scene::Cells;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// The cells as `data:image/png;base64,..`; nothing if there are none, or fewer than their grid needs.
pub(crate) fn data_uri(cells: &Cells, palette: &Palette) -> Option<String> {
    indexed_png([cells.cols, cells.rows], &cells.colors, palette).map(|bytes| png_uri(&bytes))
}

/// A PNG as a page can hold it.
pub(crate) fn png_uri(bytes: &[u8]) -> String {
    format!("data:image/png;base64,{}", STANDARD.encode(bytes))
}

/// So many pixels across and down; nothing if there are none, or fewer than that.
pub(crate) fn indexed_png(
    [cols, rows]: [usize; 2],
    colors: &[u8],
    palette: &Palette,
) -> Option<Vec<u8>> {
    if colors.is_empty() || colors.len() != rows.checked_mul(cols)? {
        return None;
    }
    let (cols, rows) = (u32::try_from(cols).ok()?, u32::try_from(rows).ok()?);
    // Only the colors that occur: small images are mostly palette.
    let mut used: Vec<u8> = colors.to_vec();
    used.sort_unstable();
    used.dedup();
    let mut place = [0u8; 256];
    for (i, &color) in (0..=255).zip(&used) {
        place[usize::from(color)] = i;
    }
    let pixels: Vec<u8> = colors.iter().map(|&c| place[usize::from(c)]).collect();
    let color = |&i: &u8| {
        let c = palette.color(i);
        [c.0, c.1, c.2]
    };
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, cols, rows);
    encoder.set_color(png::ColorType::Indexed);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::High);
    encoder.set_palette(used.iter().flat_map(color).collect::<Vec<u8>>());
    let mut writer = encoder.write_header().ok()?;
    writer.write_image_data(&pixels).ok()?;
    writer.finish().ok()?;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::color::Theme;
    use crate::palette::PaletteKind;
    use crate::scene::Area;

    fn cells(rows: usize, cols: usize, colors: Vec<u8>) -> Cells {
        Cells { at: Area { x: 0.0, y: 0.0, w: 1.0, h: 1.0 }, rows, cols, colors, tips: Vec::new() }
    }

    #[test]
    fn every_pixel_has_the_color_of_its_cell() {
        let palette = Palette::of(Theme::Dark, PaletteKind::Amount);
        let wanted: Vec<u8> = vec![0, 255, 7, 7, 128, 1];
        let uri = data_uri(&cells(2, 3, wanted.clone()), palette).unwrap();
        let bytes = STANDARD.decode(uri.strip_prefix("data:image/png;base64,").unwrap()).unwrap();
        let mut decoder = png::Decoder::new(std::io::Cursor::new(bytes));
        decoder.set_transformations(png::Transformations::EXPAND);
        let mut reader = decoder.read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let frame = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((frame.width, frame.height), (3, 2));
        for (pixel, index) in pixels.chunks(3).zip(wanted) {
            let c = palette.color(index);
            assert_eq!(pixel, [c.0, c.1, c.2]);
        }
    }

    #[test]
    fn cells_that_do_not_fill_their_grid_are_no_image() {
        let palette = Palette::of(Theme::Dark, PaletteKind::Amount);
        for bad in [cells(0, 0, vec![]), cells(2, 2, vec![1]), cells(usize::MAX, 2, vec![1])] {
            assert_eq!(data_uri(&bad, palette), None);
        }
    }
}
