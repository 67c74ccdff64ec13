//! The places of a terminal, each with what is drawn there: two halves of color, a character, or eight dots.

use crate::text::columns;

/// What stands at one place.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Place {
    /// Colors of the upper and the lower half.
    pub(crate) halves: [Option<u8>; 2],
    /// A character with its marks, and how it is written.
    pub(crate) glyph: Option<(String, Pen)>,
    /// The right half of a wide character to the left.
    pub(crate) covered: bool,
    /// Dots of lines, as braille numbers them, and their color.
    pub(crate) dots: u8,
    pub(crate) dot_color: u8,
}

/// How a character is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pen {
    Quiet,
    Plain,
    Strong,
    /// In black or white, on a cell of this color.
    On(u8),
    /// In the color of outlines.
    Accent,
}

#[derive(Debug)]
pub(crate) struct Canvas {
    pub(crate) width: usize,
    pub(crate) height: usize,
    places: Vec<Place>,
}

impl Canvas {
    pub(crate) fn new(width: usize, height: usize) -> Self {
        Self { width, height, places: vec![Place::default(); width * height] }
    }

    pub(crate) fn row(&self, y: usize) -> &[Place] {
        &self.places[y * self.width..][..self.width]
    }

    pub(crate) fn place(&mut self, x: i64, y: i64) -> Option<&mut Place> {
        let (x, y) = (usize::try_from(x).ok()?, usize::try_from(y).ok()?);
        if x < self.width && y < self.height {
            self.places.get_mut(y * self.width + x)
        } else {
            None
        }
    }

    /// Colors half a place; `y` counts halves.
    pub(crate) fn half(&mut self, x: i64, y: i64, color: u8) {
        if let Some(place) = self.place(x, y.div_euclid(2)) {
            place.halves[usize::from(y.rem_euclid(2) == 1)] = Some(color);
        }
    }

    /// A dot of a line: two across and four down in each place.
    pub(crate) fn dot(&mut self, x: i64, y: i64, color: u8) {
        // Unicode 28xx: the bits of the left column are 0, 1, 2, 6, of the right one 3, 4, 5, 7.
        const BITS: [[u8; 2]; 4] = [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]];
        if let Some(place) = self.place(x.div_euclid(2), y.div_euclid(4)) {
            place.dots |= BITS[usize::try_from(y.rem_euclid(4)).unwrap_or(0)]
                [usize::from(x.rem_euclid(2) == 1)];
            place.dot_color = color;
        }
    }

    /// Writes a character, and says where the next one goes. Marks join the character before them.
    pub(crate) fn put(&mut self, x: i64, y: i64, c: char, pen: Pen) -> i64 {
        let wide = i64::try_from(columns(c)).unwrap_or(0);
        if wide == 0 {
            let before = [x - 1, x - 2]
                .into_iter()
                .find(|&x| self.place(x, y).is_some_and(|p| p.glyph.is_some()));
            if let Some((text, _)) = before.and_then(|x| self.place(x, y)?.glyph.as_mut()) {
                text.push(c);
            }
            return x;
        }
        // A wide character needs both its places.
        if self.place(x, y).is_none() || self.place(x + wide - 1, y).is_none() {
            return x + wide;
        }
        for x in x..x + wide {
            self.clear(x, y);
        }
        if let Some(place) = self.place(x, y) {
            place.glyph = Some((c.into(), pen));
        }
        if wide == 2
            && let Some(place) = self.place(x + 1, y)
        {
            place.covered = true;
        }
        x + wide
    }

    /// Takes the character at a place away, whichever half of it stands here.
    fn clear(&mut self, x: i64, y: i64) {
        let Some(place) = self.place(x, y) else { return };
        let (covered, had) = (place.covered, place.glyph.is_some());
        place.covered = false;
        place.glyph = None;
        place.dots = 0;
        if covered && let Some(left) = self.place(x - 1, y) {
            left.glyph = None;
        }
        if had && let Some(right) = self.place(x + 1, y) {
            right.covered = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_characters_are_whole_or_not_there() {
        let mut c = Canvas::new(4, 1);
        assert_eq!(c.put(0, 0, '注', Pen::Plain), 2);
        assert!(c.row(0)[1].covered);
        c.put(1, 0, 'a', Pen::Plain);
        assert!(c.row(0)[0].glyph.is_none() && !c.row(0)[1].covered);
        c.put(3, 0, '注', Pen::Plain);
        assert!(c.row(0)[3].glyph.is_none());
        c.put(2, 0, '\u{301}', Pen::Plain);
        assert_eq!(c.row(0)[1].glyph.as_ref().unwrap().0, "a\u{301}");
        c.put(-5, 9, 'x', Pen::Plain);
    }
}
