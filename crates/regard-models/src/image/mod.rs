//! Images: decoded within limits, and made the numbers that a model reads.

mod decode;
mod orientation;
mod resize;

use crate::error::Error;
use crate::files::{ImageProcessorConfig, PatchConfig};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

const CHANNELS: usize = PatchConfig::CHANNELS;

/// An image of 8 bits for each of red, green and blue.
#[derive(Clone, PartialEq, Eq)]
pub struct Image {
    height: usize,
    width: usize,
    /// `[height, width, channels]`
    rgb: Vec<u8>,
}

/// Bytes of a file, pixels of a side and pixels of an image that are read. What is decoded takes up to 10 bytes for each pixel.
const MAX_FILE: u64 = 1 << 28;
const MAX_SIDE: usize = 1 << 14;
const MAX_PIXELS: usize = 1 << 26;

impl Image {
    /// Of pixels `[height, width, 3]`: red, green, blue.
    pub fn new([height, width]: [usize; 2], rgb: Vec<u8>) -> Result<Self, Error> {
        allowed([height, width])?;
        let wanted = height * width * CHANNELS;
        if rgb.len() != wanted {
            let why = format!("{} bytes; {height} x {width} pixels have {wanted}", rgb.len());
            return Err(Error::format("image", why));
        }
        Ok(Self { height, width, rgb })
    }

    /// Opens a PNG or a JPEG.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let mut bytes = Vec::new();
        let read =
            File::open(path).and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut bytes));
        read.map_err(|e| Error::file(path, &e))?;
        Self::decode(&bytes).map_err(|e| e.of(path))
    }

    /// Decodes a PNG or a JPEG, as Pillow does with `exif_transpose` and `convert("RGB")`: turned as its Exif data say, without its alpha.
    pub fn decode(bytes: &[u8]) -> Result<Self, Error> {
        if bytes.len() as u64 > MAX_FILE {
            let why = format!("more than {MAX_FILE} bytes; make it smaller");
            return Err(Error::format("image", why));
        }
        let (image, orientation) = decode::decode(bytes)?;
        Ok(image.turned(orientation))
    }

    /// Height and width.
    #[must_use]
    pub fn size(&self) -> [usize; 2] {
        [self.height, self.width]
    }

    /// Its pixels `[height, width, 3]`: red, green, blue.
    #[must_use]
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }

    /// The numbers that a model reads, `[3, height, width]`.
    pub fn pixels(&self, config: &ImageProcessorConfig) -> Result<Vec<f32>, Error> {
        let resized;
        let image = match config.resample {
            _ if self.size() == config.size => self,
            Some(filter) => {
                resized = self.resized(config.size, filter);
                &resized
            }
            None => {
                let [height, width] = config.size;
                let why = format!("{} x {} pixels", self.height, self.width);
                let why = format!("{why}, the model reads {height} x {width}; resize it");
                return Err(Error::format("image", why));
            }
        };
        let mut pixels = Vec::with_capacity(image.rgb.len());
        for channel in 0..CHANNELS {
            let values = values(config, channel)?;
            let own = image.rgb.iter().skip(channel).step_by(CHANNELS);
            pixels.extend(own.map(|level| values[usize::from(*level)]));
        }
        Ok(pixels)
    }
}

/// The numbers of all levels of a channel, rounded where NumPy rounds them.
fn values(config: &ImageProcessorConfig, channel: usize) -> Result<[f32; 256], Error> {
    #[expect(clippy::cast_possible_truncation, reason = "numbers are f32")]
    let [mean, deviation] = [config.mean[channel] as f32, config.deviation[channel] as f32];
    let mut values = [0.0; 256];
    for (level, value) in (0u8..=255).zip(&mut values) {
        #[expect(clippy::cast_possible_truncation, reason = "numbers are f32")]
        let scaled = (f64::from(level) * config.scale) as f32;
        *value = (scaled - mean) / deviation;
    }
    match values.iter().find(|value| !value.is_finite()) {
        None => Ok(values),
        Some(value) => {
            let why = format!("{value} comes out of channel {channel}; all must be finite");
            Err(Error::format("rescale_factor, image_mean or image_std", why))
        }
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Image({} x {})", self.height, self.width)
    }
}

/// Refuses images of no pixels, and those that are too large.
fn allowed([height, width]: [usize; 2]) -> Result<(), Error> {
    let sides = 1..=MAX_SIDE;
    if !sides.contains(&height) || !sides.contains(&width) {
        let why = format!("{height} x {width} pixels; a side has from 1 to {MAX_SIDE}");
        return Err(Error::format("image", why));
    }
    if height * width > MAX_PIXELS {
        let why = format!("{height} x {width} pixels; at most {MAX_PIXELS} are read, resize it");
        return Err(Error::format("image", why));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
