//! Bodies, field by field. A field that is not known, or not done, is a 400 that names it: an option that is silently left out
//! gives a wrong answer that looks right.

use crate::error::ApiError;
use percent_encoding::percent_decode;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// The fields of an object that have not been read yet. `null` is the same as no field, as in OpenAI's API.
#[derive(Debug)]
pub(crate) struct Fields {
    /// Of the object, where it is inside of another: `response_format.`.
    path: String,
    map: Map<String, Value>,
}

/// A value in which whole numbers are written as such: 3.0 is an integer in JSON Schema.
fn whole(value: Value) -> Value {
    match value {
        Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
            // Beyond 2^53 not every integer is a float: it stays as it was written.
            #[expect(clippy::cast_possible_truncation, reason = "it is whole and small")]
            Some(x) if x.fract() == 0.0 && x.abs() <= 9_007_199_254_740_992.0 => (x as i64).into(),
            _ => Value::Number(number),
        },
        Value::Array(list) => list.into_iter().map(whole).collect(),
        Value::Object(map) => map.into_iter().map(|(name, value)| (name, whole(value))).collect(),
        other => other,
    }
}

/// Characters of a value that an error repeats.
const SHOWN: usize = 80;

impl Fields {
    pub(crate) fn of_body(bytes: &[u8]) -> Result<Self, ApiError> {
        let value = serde_json::from_slice(bytes)
            .map_err(|e| ApiError::invalid(format!("the body is not JSON: {e}")))?;
        match whole(value) {
            Value::Object(map) => Ok(Self { path: String::new(), map }),
            _ => {
                Err(ApiError::invalid("the body is not a JSON object; give {\"field\": value, ..}"))
            }
        }
    }

    /// Of a form (`application/x-www-form-urlencoded`): all are strings.
    pub(crate) fn of_form(bytes: &[u8]) -> Result<Self, ApiError> {
        let decoded = |part: &[u8]| {
            let spaced: Vec<u8> =
                part.iter().map(|byte| if *byte == b'+' { b' ' } else { *byte }).collect();
            let text = percent_decode(&spaced).decode_utf8().map(Into::into);
            text.map_err(|_| ApiError::invalid("the form is not UTF-8; encode it so, then by %"))
        };
        let mut map = Map::new();
        for pair in bytes.split(|byte| *byte == b'&').filter(|pair| !pair.is_empty()) {
            let mut parts = pair.splitn(2, |byte| *byte == b'=').map(decoded);
            let name: String = parts.next().transpose()?.unwrap_or_default();
            let value: String = parts.next().transpose()?.unwrap_or_default();
            if map.contains_key(&name) {
                let name = shown(&name);
                let why = format!("{name}: it is there twice; give it once, or send JSON");
                return Err(ApiError::field(&name, why));
            }
            map.insert(name, value.into());
        }
        Ok(Self { path: String::new(), map })
    }

    /// An object inside of another.
    pub(crate) fn of_value(path: &str, value: Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { path: format!("{path}."), map }),
            other => Err(wrong(path, &other, "an object")),
        }
    }

    /// The name of a field with where it is.
    pub(crate) fn name(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// Whether a field is there.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(|value| !value.is_null())
    }

    /// Takes a field; `wanted` says what it may be.
    pub(crate) fn take<T: DeserializeOwned>(
        &mut self,
        name: &str,
        wanted: &str,
    ) -> Result<Option<T>, ApiError> {
        match self.map.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match T::deserialize(&value) {
                Ok(read) => Ok(Some(read)),
                Err(_) => Err(wrong(&self.name(name), &value, wanted)),
            },
        }
    }

    /// Takes a field that must be there.
    pub(crate) fn need<T: DeserializeOwned>(
        &mut self,
        name: &str,
        wanted: &str,
    ) -> Result<T, ApiError> {
        let missing = || {
            let name = self.name(name);
            ApiError::field(&name, format!("`{name}` is missing; give {wanted}"))
                .with_code("missing_required_parameter")
        };
        let missing = missing();
        self.take(name, wanted)?.ok_or(missing)
    }

    /// Takes a number in a range.
    pub(crate) fn number(&mut self, name: &str, range: [f32; 2]) -> Result<Option<f32>, ApiError> {
        let [least, most] = range;
        let wanted = format!("a number from {least} to {most}");
        let number = self.take::<f32>(name, &wanted)?;
        match number.filter(|number| !(least..=most).contains(number)) {
            Some(number) => Err(wrong(&self.name(name), &Value::from(number), &wanted)),
            None => Ok(number),
        }
    }

    /// Takes a whole number in a range.
    pub(crate) fn count(
        &mut self,
        name: &str,
        range: [usize; 2],
    ) -> Result<Option<usize>, ApiError> {
        let [least, most] = range;
        let wanted = format!("a whole number from {least} to {most}");
        let count = self.take::<usize>(name, &wanted)?;
        match count.filter(|count| !(least..=most).contains(count)) {
            Some(count) => Err(wrong(&self.name(name), &Value::from(count), &wanted)),
            None => Ok(count),
        }
    }

    /// Leaves out a field where it says what is done anyway; refuses it otherwise.
    pub(crate) fn only(&mut self, name: &str, same: &[Value], why: &str) -> Result<(), ApiError> {
        match self.map.remove(name) {
            Some(value) if !value.is_null() && !same.contains(&value) => {
                Err(ApiError::unsupported(&self.name(name), why))
            }
            _ => Ok(()),
        }
    }

    /// Leaves out fields that change nothing in an answer.
    pub(crate) fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.map.remove(*name);
        }
    }

    /// Refuses what has not been read.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        match self.map.iter().find(|(_, value)| !value.is_null()) {
            Some((name, _)) => {
                let name = shown(&self.name(name));
                Err(ApiError::unsupported(&name, "this server does not know it; leave it out"))
            }
            None => Ok(()),
        }
    }
}

/// A field that is something else than it may be.
pub(crate) fn wrong(name: &str, value: &Value, wanted: &str) -> ApiError {
    ApiError::field(name, format!("{name}: {}; give {wanted}", shown(&value.to_string())))
}

/// The beginning of a text that a client sent.
fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(value: &Value) -> Fields {
        Fields::of_body(value.to_string().as_bytes()).expect("an object")
    }

    #[test]
    fn a_field_is_read_refused_or_left_out() {
        let mut body =
            fields(&json!({"n": 3, "x": 2.5, "text": 7, "tools": [], "user": "u", "none": null}));
        assert_eq!(body.count("n", [1, 4]).expect("a count"), Some(3));
        assert_eq!(body.number("absent", [0.0, 1.0]).expect("none"), None);
        let error = body.number("x", [0.0, 2.0]).expect_err("too much");
        assert_eq!(
            (error.param.as_deref(), &error.message[..]),
            (Some("x"), "x: 2.5; give a number from 0 to 2")
        );
        let error = body.need::<String>("text", "a string").expect_err("a number");
        assert_eq!(error.message, "text: 7; give a string");
        assert_eq!(
            body.need::<String>("none", "a string").expect_err("null").code,
            Some("missing_required_parameter")
        );
        body.ignore(&["user"]);
        let error = body.finish().expect_err("tools");
        assert_eq!(
            (error.param.as_deref(), error.code),
            (Some("tools"), Some("unsupported_parameter"))
        );
    }

    #[test]
    fn what_says_what_is_done_anyway_is_no_error() {
        let mut body = fields(&json!({"echo": false, "best_of": 2}));
        assert!(body.only("echo", &[json!(false)], "prompts are not repeated").is_ok());
        assert!(body.only("best_of", &[json!(1)], "send one request for each").is_err());
        assert!(body.finish().is_ok());
    }

    #[test]
    fn a_form_is_strings() {
        let mut form = Fields::of_form(b"q=a%20b+c%26%E5%A5%BD&&n&m=1=2&").expect("a form");
        let mut take = |name| form.take::<String>(name, "a string").expect("a string");
        assert_eq!(
            ["q", "n", "m", "x"].map(&mut take),
            [Some("a b c&好".into()), Some(String::new()), Some("1=2".into()), None]
        );
        assert!(form.finish().is_ok());
        // Percent signs that begin nothing are themselves, as everywhere.
        let mut form = Fields::of_form(b"q=100%&p=%zz").expect("a form");
        assert_eq!(
            form.take::<String>("q", "a string").expect("a string").as_deref(),
            Some("100%")
        );
        for wrong in [&b"q=%ff"[..], b"q=\xe9", b"%c3=1"] {
            assert_eq!(Fields::of_form(wrong).expect_err("no text").status, 400);
        }
        assert_eq!(Fields::of_form(b"q=1&q=2").expect_err("twice").param.as_deref(), Some("q"));
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for body in ["", "[]", "{", "\u{0}", "1", "{\"a\":1e999}"] {
            assert_eq!(Fields::of_body(body.as_bytes()).expect_err(body).status, 400, "{body}");
        }
    }
}
