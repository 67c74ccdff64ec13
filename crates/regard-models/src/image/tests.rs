use super::*;
use crate::files::Resample;
use png::{BitDepth, ColorType};

/// Numbers without a pattern, `[height, width, 3]`.
fn image([height, width]: [usize; 2]) -> Image {
    let place = |i: usize| [i / (3 * width), i / 3 % width, i % 3];
    let level = |[y, x, c]: [usize; 3]| (37 * y + 91 * x + 53 * c + 7 * x * y).to_le_bytes()[0];
    Image::new([height, width], (0..height * width * 3).map(|i| level(place(i))).collect()).unwrap()
}

/// By Pillow 13.0.0: `Image.fromarray(image).resize((width, height), filter)`. The second has its columns reduced first.
#[test]
fn resized_images_have_the_pixels_of_pillow() {
    use Resample::{Bicubic, Bilinear};
    let cases = [
        (
            [5, 7],
            [3, 4],
            Bilinear,
            &[
                65, 113, 159, 140, 136, 112, 107, 160, 126, 93, 146, 132, 119, 146, 137, 117, 129,
                138, 149, 128, 124, 117, 163, 115, 118, 124, 177, 140, 130, 152, 147, 129, 130,
                121, 112, 118,
            ][..],
        ),
        (
            [5, 7],
            [3, 4],
            Bicubic,
            &[
                60, 114, 162, 144, 135, 112, 105, 160, 125, 95, 148, 133, 125, 147, 134, 119, 129,
                139, 149, 127, 123, 112, 165, 112, 115, 122, 180, 140, 130, 149, 153, 131, 128,
                120, 110, 115,
            ],
        ),
        (
            [9, 4],
            [3, 3],
            Bilinear,
            &[
                76, 119, 153, 148, 137, 126, 108, 132, 144, 132, 149, 153, 113, 124, 134, 154, 138,
                134, 103, 111, 122, 121, 142, 147, 140, 129, 105,
            ],
        ),
        (
            [9, 4],
            [3, 3],
            Bicubic,
            &[
                66, 118, 158, 152, 140, 122, 102, 130, 144, 138, 152, 154, 110, 118, 133, 157, 147,
                135, 103, 108, 118, 123, 146, 150, 143, 120, 103,
            ],
        ),
        (
            [3, 2],
            [4, 5],
            Bilinear,
            &[
                0, 53, 106, 9, 62, 115, 46, 99, 152, 82, 135, 188, 91, 144, 197, 23, 76, 129, 33,
                86, 139, 71, 124, 177, 109, 162, 215, 119, 172, 225, 51, 104, 157, 61, 114, 158,
                101, 154, 159, 142, 195, 161, 152, 205, 162, 74, 127, 180, 84, 137, 165, 127, 180,
                105, 169, 222, 44, 179, 232, 29,
            ],
        ),
        (
            [3, 2],
            [4, 5],
            Bicubic,
            &[
                0, 42, 95, 4, 57, 110, 44, 97, 150, 83, 136, 189, 98, 151, 204, 14, 64, 115, 27,
                80, 134, 68, 121, 183, 110, 163, 232, 125, 178, 251, 43, 96, 159, 60, 113, 159,
                104, 157, 162, 148, 201, 165, 165, 218, 166, 66, 119, 198, 83, 136, 171, 129, 182,
                100, 174, 227, 29, 191, 244, 2,
            ],
        ),
    ];
    for (from, to, filter, expected) in cases {
        assert_eq!(image(from).resized(to, filter).rgb(), expected, "{from:?} {to:?} {filter:?}");
    }
}

#[test]
fn an_image_of_one_color_keeps_it_at_every_size() {
    let flat = Image::new([3, 5], vec![201; 45]).unwrap();
    for (size, filter) in [([1, 1], Resample::Bilinear), ([64, 2], Resample::Bicubic)] {
        assert!(flat.resized(size, filter).rgb().iter().all(|level| *level == 201), "{size:?}");
    }
}

/// By `PIL.ImageOps.exif_transpose`, of two rows of three.
#[test]
fn images_are_turned_upright() {
    let rows: Vec<u8> = (0..6).flat_map(|level| [level; 3]).collect();
    let image = Image::new([2, 3], rows).unwrap();
    for (orientation, size, expected) in [
        (1, [2, 3], [0, 1, 2, 3, 4, 5]),
        (2, [2, 3], [2, 1, 0, 5, 4, 3]),
        (3, [2, 3], [5, 4, 3, 2, 1, 0]),
        (4, [2, 3], [3, 4, 5, 0, 1, 2]),
        (5, [3, 2], [0, 3, 1, 4, 2, 5]),
        (6, [3, 2], [3, 0, 4, 1, 5, 2]),
        (7, [3, 2], [5, 2, 4, 1, 3, 0]),
        (8, [3, 2], [2, 5, 1, 4, 0, 3]),
        (9, [2, 3], [0, 1, 2, 3, 4, 5]),
    ] {
        let turned = image.clone().turned(orientation);
        assert_eq!(turned.size(), size, "{orientation}");
        assert_eq!(turned.rgb().iter().step_by(3).copied().collect::<Vec<_>>(), expected);
    }
}

/// A PNG of one row.
fn png(width: u32, color: ColorType, depth: BitDepth, data: &[u8]) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width, 1);
    encoder.set_color(color);
    encoder.set_depth(depth);
    if color == ColorType::Indexed {
        encoder.set_palette(vec![1, 2, 3, 40, 50, 60]);
        encoder.set_trns(vec![0, 255]);
    }
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(data).unwrap();
    writer.finish().unwrap();
    file
}

#[test]
fn every_kind_of_png_becomes_rgb_without_alpha() {
    use BitDepth::{Eight, One, Sixteen};
    for (color, depth, data, expected) in [
        (ColorType::Rgb, Eight, &[1, 2, 3, 40, 50, 60][..], [1, 2, 3, 40, 50, 60]),
        (ColorType::Rgba, Eight, &[1, 2, 3, 0, 40, 50, 60, 9], [1, 2, 3, 40, 50, 60]),
        (ColorType::Grayscale, Eight, &[7, 8], [7, 7, 7, 8, 8, 8]),
        (ColorType::Grayscale, One, &[0b0100_0000], [0, 0, 0, 255, 255, 255]),
        (ColorType::Grayscale, Sixteen, &[7, 255, 8, 0], [7, 7, 7, 8, 8, 8]),
        (ColorType::GrayscaleAlpha, Eight, &[7, 0, 8, 9], [7, 7, 7, 8, 8, 8]),
        (ColorType::Indexed, Eight, &[1, 0], [40, 50, 60, 1, 2, 3]),
    ] {
        let image = Image::decode(&png(2, color, depth, data)).unwrap();
        assert_eq!((image.size(), image.rgb()), ([1, 2], &expected[..]), "{color:?} {depth:?}");
    }
}

/// 16 x 8 pixels, half red and half blue, with orientation 6, by Pillow.
fn jpeg() -> Vec<u8> {
    const HEX: &str = "ffd8ffe000104a46494600010100000100010000ffe100224578696600004d4d002a00000008000101\
        120003000000010006000000000000ffdb00430002010101010102010101020202020204030202020205040403040605060606\
        05060606070908060709070606080b08090a0a0a0a0a06080b0c0b0a0c090a0a0affdb00430102020202020205030305\
        0a0706070a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a\
        0a0a0a0affc00011080008001003011100021101031101ffc4001500010100000000000000000000000000000708ffc40014\
        100100000000000000000000000000000000ffc4001501010100000000000000000000000000000907ffc4001411010000\
        0000000000000000000000000000ffda000c03010002110311003f0097d132803338013dffd9";
    (0..HEX.len() / 2).map(|i| u8::from_str_radix(&HEX[2 * i..2 * i + 2], 16).unwrap()).collect()
}

#[test]
fn a_jpeg_is_turned_as_its_camera_was_held() {
    let image = Image::decode(&jpeg()).unwrap();
    assert_eq!(image.size(), [16, 8]);
    // Its left half is above. Decoders of JPEG may differ by a level or two.
    for (i, (level, expected)) in image
        .rgb()
        .iter()
        .zip([200, 40, 40].repeat(64).iter().chain(&[30, 60, 220].repeat(64)))
        .enumerate()
    {
        assert!(level.abs_diff(*expected) <= 2, "{i}: {level} {expected}");
    }
}

#[test]
fn exif_data_that_are_broken_turn_nothing() {
    let whole = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0";
    assert_eq!(orientation::of_exif(whole), Some(6));
    for len in 0..whole.len() - 2 {
        assert_eq!(orientation::of_exif(&whole[..len]), None, "{len} bytes");
    }
    for (at, byte) in [(0, b'X'), (4, 255), (7, 255), (9, 0), (11, 0), (18, 1), (19, 9), (19, 0)] {
        let mut exif = whole.to_vec();
        exif[at] = byte;
        assert_eq!(orientation::of_exif(&exif), None, "{at}");
    }
}

#[test]
fn files_that_are_cut_off_or_changed_are_errors_or_images() {
    let whole = [png(2, ColorType::Rgb, BitDepth::Eight, &[1, 2, 3, 40, 50, 60]), jpeg()];
    // Without the end of the file: a PNG is whole before it, and the decoder of JPEG reads some zeros there.
    for (file, end) in whole.iter().zip([12, 12]) {
        for len in 0..file.len() - end {
            assert!(Image::decode(&file[..len]).is_err(), "{len} bytes of {}", file.len());
        }
        for at in 0..file.len() {
            for byte in [0, 1, 127, 255] {
                let mut changed = file.clone();
                changed[at] = byte;
                let _ = Image::decode(&changed);
            }
        }
    }
    let error = Image::decode(b"GIF89a").unwrap_err().to_string();
    assert!(error.contains("PNG and JPEG"), "{error}");
}

#[test]
fn sizes_are_believed_up_to_a_limit() {
    let mut png = png(2, ColorType::Rgb, BitDepth::Eight, &[1, 2, 3, 40, 50, 60]);
    png[16..24].copy_from_slice(&[0, 1, 0, 0, 0, 1, 0, 0]);
    // The checksum of the header, which now has 65536 x 65536 pixels.
    let sum = png[12..29].iter().fold(u32::MAX, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |c, _| (c >> 1) ^ (0xEDB8_8320 * (c & 1)))
    });
    png[29..33].copy_from_slice(&(!sum).to_be_bytes());
    let mut jpeg = jpeg();
    let frame = jpeg.windows(2).position(|two| two == [0xFF, 0xC0]).unwrap();
    jpeg[frame + 5..frame + 9].fill(255);
    for (file, size) in [(png, "65536 x 65536"), (jpeg, "65535 x 65535")] {
        let error = Image::decode(&file).unwrap_err().to_string();
        assert!(error.contains(size) && error.contains("16384"), "{error}");
    }
    for (size, len, named) in [
        ([0, 4], 0, "from 1"),
        ([usize::MAX, 1], 0, "16384"),
        ([16384, 16384], 0, "67108864"),
        ([2, 2], 11, "11 bytes"),
    ] {
        let error = Image::new(size, vec![0; len]).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn pixels_are_scaled_by_channel() {
    let config = ImageProcessorConfig {
        size: [1, 2],
        resample: None,
        scale: 1.0 / 255.0,
        mean: [0.5, 0.0, 0.0],
        deviation: [0.5, 1.0, 2.0],
    };
    let image = Image::new([1, 2], vec![0, 0, 0, 255, 255, 255]).unwrap();
    assert_eq!(image.pixels(&config).unwrap(), [-1.0, 1.0, 0.0, 1.0, 0.0, 0.5]);
    let error = self::image([2, 2]).pixels(&config).unwrap_err().to_string();
    assert!(error.contains("2 x 2") && error.contains("1 x 2"), "{error}");
    let config = ImageProcessorConfig { scale: 1e300, ..config };
    assert!(image.pixels(&config).unwrap_err().to_string().contains("inf"));
}
