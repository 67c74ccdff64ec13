//! PNG and JPEG.

use super::{CHANNELS, Image, MAX_PIXELS, allowed, orientation};
use crate::error::Error;
use png::{ColorType, Decoder, Limits, Transformations};
use std::fmt::Display;
use std::io::Cursor;
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

/// An image and its orientation.
pub(super) fn decode(bytes: &[u8]) -> Result<(Image, u8), Error> {
    match bytes {
        [0x89, b'P', b'N', b'G', ..] => png(bytes),
        [0xFF, 0xD8, ..] => jpeg(bytes),
        _ => {
            let known = "PNG and JPEG are known; convert it";
            Err(Error::unsupported("image", &"another format, or no image", known))
        }
    }
}

fn broken(format: &str, why: &dyn Display) -> Error {
    Error::format(format, format!("{why}; is the file whole? If so, save it as a PNG"))
}

fn png(bytes: &[u8]) -> Result<(Image, u8), Error> {
    let wrong = |e: png::DecodingError| broken("PNG", &e);
    let limits = Limits { bytes: 4 * MAX_PIXELS };
    let mut decoder = Decoder::new_with_limits(Cursor::new(bytes), limits);
    decoder.set_transformations(Transformations::normalize_to_color8());
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    let mut reader = decoder.read_info().map_err(wrong)?;
    let [height, width] = [reader.info().height, reader.info().width]
        .map(|side| usize::try_from(side).unwrap_or(usize::MAX));
    allowed([height, width])?;
    let mut numbers = vec![0; reader.output_buffer_size().unwrap_or(0)];
    let color = reader.next_frame(&mut numbers).map_err(wrong)?.color_type;
    // It may be behind the pixels; what is wrong there does not concern them.
    let _ended = reader.finish();
    let exif = reader.info().exif_metadata.as_deref();
    let orientation = exif.and_then(orientation::of_exif).unwrap_or(1);
    let pixels = numbers.chunks_exact(color.samples());
    let rgb = match color {
        ColorType::Rgba => pixels.flat_map(|pixel| &pixel[..CHANNELS]).copied().collect(),
        ColorType::Grayscale | ColorType::GrayscaleAlpha => {
            pixels.flat_map(|pixel| [pixel[0]; CHANNELS]).collect()
        }
        // Palettes are expanded.
        ColorType::Rgb | ColorType::Indexed => numbers,
    };
    Ok((Image::new([height, width], rgb)?, orientation))
}

fn jpeg(bytes: &[u8]) -> Result<(Image, u8), Error> {
    let wrong = |e: zune_jpeg::errors::DecodeErrors| broken("JPEG", &e);
    // Else a file that is cut off has gray where its end would be.
    let options = DecoderOptions::default()
        .set_strict_mode(true)
        .set_max_width(usize::MAX)
        .set_max_height(usize::MAX)
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(wrong)?;
    let (width, height) = decoder.dimensions().unwrap_or_default();
    allowed([height, width])?;
    let rgb = decoder.decode().map_err(wrong)?;
    let exif = decoder.exif().map(Vec::as_slice);
    let orientation = exif.and_then(orientation::of_exif).unwrap_or(1);
    Ok((Image::new([height, width], rgb)?, orientation))
}
