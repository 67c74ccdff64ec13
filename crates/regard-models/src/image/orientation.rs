//! How a camera was held: tag 274 of Exif, a number from 1 to 8.

use super::{CHANNELS, Image};

/// The orientation that Exif data say, which begin with the header of TIFF; none if they are broken.
pub(super) fn of_exif(exif: &[u8]) -> Option<u8> {
    const TAG: u16 = 274;
    let little = match exif.get(..4)? {
        b"II*\0" => true,
        b"MM\0*" => false,
        _ => return None,
    };
    let short = |at: usize| {
        let bytes: [u8; 2] = exif.get(at..at.checked_add(2)?)?.try_into().ok()?;
        Some(if little { u16::from_le_bytes(bytes) } else { u16::from_be_bytes(bytes) })
    };
    let bytes: [u8; 4] = exif.get(4..8)?.try_into().ok()?;
    let first = if little { u32::from_le_bytes(bytes) } else { u32::from_be_bytes(bytes) };
    let first = usize::try_from(first).ok()?;
    // An entry has 12 bytes: tag, type, count, value.
    let entries = usize::from(short(first)?);
    let entry = |i: usize| first.checked_add(2 + 12 * i);
    let own = (0..entries).filter_map(entry).find(|at| short(*at) == Some(TAG))?;
    let value = short(own.checked_add(8)?)?;
    u8::try_from(value).ok().filter(|value| (1..=8).contains(value))
}

impl Image {
    /// The image upright, whose orientation is this.
    pub(super) fn turned(self, orientation: u8) -> Self {
        if !(2..=8).contains(&orientation) {
            return self;
        }
        let [height, width] = self.size();
        let is_swapped = orientation >= 5;
        let [rows, cols] = if is_swapped { [width, height] } else { [height, width] };
        let (from_below, from_right) =
            (matches!(orientation, 3 | 4 | 6 | 7), matches!(orientation, 2 | 3 | 7 | 8));
        let mut rgb = Vec::with_capacity(self.rgb.len());
        for row in 0..rows {
            for col in 0..cols {
                let [y, x] = if is_swapped { [col, row] } else { [row, col] };
                let y = if from_below { height - 1 - y } else { y };
                let x = if from_right { width - 1 - x } else { x };
                rgb.extend_from_slice(&self.rgb[(y * width + x) * CHANNELS..][..CHANNELS]);
            }
        }
        Self { height: rows, width: cols, rgb }
    }
}
