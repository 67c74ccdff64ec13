//! `preprocessor_config.json` of Hugging Face's Transformers: how pixels become the numbers that a model reads.

use super::PatchConfig;
use super::fields::Fields;
use crate::error::Error;
use serde_json::Value;

/// How pixels become numbers: resized, multiplied, less the mean of their channel and divided by its deviation.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageProcessorConfig {
    /// Height and width that the model reads.
    pub size: [usize; 2],
    /// How other sizes become that one; without it they are errors.
    pub resample: Option<Resample>,
    /// Multiplies the 0 to 255 of a channel.
    pub scale: f64,
    /// Subtracted from a channel after that.
    pub mean: [f64; PatchConfig::CHANNELS],
    /// Divides it then.
    pub deviation: [f64; PatchConfig::CHANNELS],
}

/// A filter of Pillow's `resize`, as wide as the reduction: every pixel has its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resample {
    /// A triangle over two pixels.
    Bilinear,
    /// A cubic over four pixels, with a = -0.5.
    Bicubic,
}

impl ImageProcessorConfig {
    /// Reads a `preprocessor_config.json` for a model that reads images of this height and width. What would change the numbers is
    /// followed, or it is an error.
    pub fn from_json(json: &str, image: [usize; 2]) -> Result<Self, Error> {
        let value: Value =
            serde_json::from_str(json).map_err(|e| Error::format("preprocessor", e.to_string()))?;
        let Value::Object(map) = value else {
            return Err(Error::format("preprocessor", "an object `{..}` is wanted"));
        };
        let mut fields = Fields::new(map);
        for name in UNREAD {
            fields.map.remove(*name);
        }
        fields.only("do_center_crop", &[false.into()])?;
        fields.only("do_pad", &[false.into()])?;
        fields.map.remove("crop_size");
        let resample = resample(&mut fields)?;
        let size = size(&mut fields)?;
        let resample = fields.bool("do_resize")?.unwrap_or(true).then_some(resample);
        if let Some(size) = size.filter(|size| resample.is_some() && *size != image) {
            let why = format!("{size:?}, the model reads images of {image:?}; they must be equal");
            return Err(Error::format("size", why));
        }
        let scale = fields.number("rescale_factor")?.unwrap_or(1.0 / 255.0);
        let scales = fields.bool("do_rescale")?.unwrap_or(true);
        let mean = channels(&mut fields, "image_mean")?.unwrap_or([0.5; 3]);
        let deviation = channels(&mut fields, "image_std")?.unwrap_or([0.5; 3]);
        let centers = fields.bool("do_normalize")?.unwrap_or(true);
        for (name, number) in [("rescale_factor", scale), ("image_std", least(deviation))] {
            if !(number.is_finite() && number > 0.0) {
                return Err(Error::format(name, format!("{number}; it must be above 0")));
            }
        }
        fields.finish()?;
        Ok(Self {
            size: image,
            resample,
            scale: if scales { scale } else { 1.0 },
            mean: if centers { mean } else { [0.0; 3] },
            deviation: if centers { deviation } else { [1.0; 3] },
        })
    }
}

/// What says nothing about the numbers: names of programs, and forms of tensors in them. Images are made RGB in any case.
const UNREAD: &[&str] = &[
    "_valid_processor_keys",
    "data_format",
    "default_to_square",
    "do_convert_rgb",
    "feature_extractor_type",
    "image_processor_type",
    "processor_class",
];

fn least(numbers: [f64; 3]) -> f64 {
    numbers.into_iter().fold(f64::INFINITY, f64::min)
}

/// The filter by its number in Pillow.
fn resample(fields: &mut Fields) -> Result<Resample, Error> {
    const NAMES: [&str; 6] = ["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"];
    match fields.optional_size("resample")? {
        None | Some(2) => Ok(Resample::Bilinear),
        Some(3) => Ok(Resample::Bicubic),
        Some(other) => {
            let name = NAMES.get(other).copied().unwrap_or("no filter of Pillow");
            let value = format!("{other} ({name})");
            Err(Error::unsupported("resample", &value, "2 (bilinear) and 3 (bicubic) are known"))
        }
    }
}

/// Height and width: both, or one number for both.
fn size(fields: &mut Fields) -> Result<Option<[usize; 2]>, Error> {
    if !fields.map.get("size").is_some_and(Value::is_object) {
        return sides(fields, "size");
    }
    let Some(mut size) = fields.part("size")? else { return Ok(None) };
    if let Some(name) = size.map.keys().find(|name| !["height", "width"].contains(&name.as_str())) {
        return Err(Error::unsupported("size", name, "height and width are known"));
    }
    Ok(Some([size.size("height")?, size.size("width")?]))
}

/// Height and width as a list of two, or one number for both.
pub(super) fn sides(fields: &mut Fields, name: &str) -> Result<Option<[usize; 2]>, Error> {
    let side = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
    let sides = |value: &Value| match value.as_array().map(Vec::as_slice) {
        Some([height, width]) => Some([side(height)?, side(width)?]),
        Some(_) => None,
        None => side(value).map(|side| [side; 2]),
    };
    fields.read(name, "a whole number, or height and width", sides)
}

/// A number of each channel, or one for all.
fn channels(fields: &mut Fields, name: &str) -> Result<Option<[f64; 3]>, Error> {
    let read = |value: &Value| match value.as_array().map(Vec::as_slice) {
        Some([r, g, b]) => Some([r.as_f64()?, g.as_f64()?, b.as_f64()?]),
        Some(_) => None,
        None => value.as_f64().map(|x| [x; 3]),
    };
    fields.read(name, "a number of each of 3 channels", read)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(more: &Value) -> Result<ImageProcessorConfig, Error> {
        let mut json = json!({
            "do_normalize": true, "do_rescale": true, "do_resize": true, "image_mean": [0.1, 0.2, 0.3],
            "image_processor_type": "ViTImageProcessor", "image_std": [0.4, 0.5, 0.6], "resample": 2,
            "rescale_factor": 0.5, "size": {"height": 32, "width": 48}
        });
        for (field, value) in more.as_object().unwrap() {
            json[field] = value.clone();
        }
        ImageProcessorConfig::from_json(&json.to_string(), [32, 48])
    }

    #[test]
    fn settings_are_followed() {
        let plain = read(&json!({})).unwrap();
        let expected = ImageProcessorConfig {
            size: [32, 48],
            resample: Some(Resample::Bilinear),
            scale: 0.5,
            mean: [0.1, 0.2, 0.3],
            deviation: [0.4, 0.5, 0.6],
        };
        assert_eq!(plain, expected);
        let other =
            json!({"do_resize": false, "do_rescale": false, "do_normalize": false, "size": 224});
        let other = read(&other).unwrap();
        assert_eq!((other.resample, other.scale, other.mean[0]), (None, 1.0, 0.0));
        assert_eq!(other.deviation, [1.0; 3]);
        let cubic = read(&json!({"resample": 3, "size": [32, 48], "image_mean": 0.5})).unwrap();
        assert_eq!((cubic.resample, cubic.mean), (Some(Resample::Bicubic), [0.5; 3]));
        // As `google/vit-base-patch16-224` has it, whose numbers are the defaults.
        let old = r#"{"do_normalize": true, "do_resize": true, "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5], "size": 224}"#;
        let old = ImageProcessorConfig::from_json(old, [224; 2]).unwrap();
        assert_eq!(ImageProcessorConfig::from_json("{}", [224; 2]).unwrap(), old);
        assert!((old.scale - 1.0 / 255.0).abs() < 1e-12);
    }

    #[test]
    fn settings_that_are_not_followed_are_refused() {
        for (field, value, named) in [
            ("resample", json!(1), "1 (lanczos)"),
            ("resample", json!(9), "9 (no filter of Pillow)"),
            (
                "size",
                json!({"height": 32, "width": 32}),
                "[32, 32], the model reads images of [32, 48]",
            ),
            ("size", json!({"shortest_edge": 32}), "size = shortest_edge"),
            ("size", json!({"height": 32}), "width"),
            ("size", json!("32"), "height and width"),
            ("do_center_crop", json!(true), "do_center_crop"),
            ("do_pad", json!(true), "do_pad"),
            ("image_std", json!([0.5, 0.0, 0.5]), "above 0"),
            ("image_std", json!([0.5, 0.5]), "3 channels"),
            ("image_mean", json!(["0", 0, 0]), "3 channels"),
            ("rescale_factor", json!(-1.0), "above 0"),
            ("do_flip", json!(true), "do_flip"),
        ] {
            let error = read(&json!({ (field): value })).unwrap_err().to_string();
            assert!(error.contains(named), "{field}: {error}");
        }
        for json in ["", "[]", "null"] {
            assert!(ImageProcessorConfig::from_json(json, [1, 1]).is_err(), "{json}");
        }
    }
}
