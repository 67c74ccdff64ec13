//! Who may ask.

use crate::error::ApiError;
use crate::host::is_local;
use axum::http::header::{AUTHORIZATION, HOST};
use axum::http::{HeaderMap, StatusCode, Uri};
use std::hint::black_box;

/// API keys. Without any, everybody on this machine may ask.
#[derive(Debug)]
pub(crate) struct Keys(Vec<String>);

/// Whose request it is: beginnings of prompts are shared by requests of one key alone, or timing would tell one what another asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyId(pub(crate) u64);

impl Keys {
    pub(crate) fn new(keys: Vec<String>) -> Self {
        Self(keys)
    }

    /// Checks the header of a request. Where keys are not wanted, its `Host` must be a name of this machine.
    pub(crate) fn check(&self, headers: &HeaderMap, uri: &Uri) -> Result<KeyId, ApiError> {
        if self.0.is_empty() {
            let header = headers.get(HOST).and_then(|host| host.to_str().ok());
            let host = header.or_else(|| uri.authority().map(|own| own.as_str()));
            return match host.is_some_and(|host| is_local(host, None)) {
                true => Ok(KeyId(0)),
                false => {
                    let message = "Host: only names of this machine (localhost, 127.0.0.1) are answered without API keys";
                    Err(ApiError::new(StatusCode::FORBIDDEN, "permission_error", message))
                }
            };
        }
        let given = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let given = given.and_then(|value| value.split_once(' '));
        let given = given.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        self.check_key(given.map(|(_, key)| key.trim()))
    }

    /// Checks a key. The time does not depend on how much of it is right.
    pub(crate) fn check_key(&self, given: Option<&str>) -> Result<KeyId, ApiError> {
        if self.0.is_empty() {
            return Ok(KeyId(0));
        }
        let given = given.unwrap_or_default().as_bytes();
        let mut found = None;
        for (id, key) in (0..).zip(&self.0) {
            let key = key.as_bytes();
            let differ =
                key.iter().zip(given).fold(0, |differ, (a, b)| black_box(differ | (a ^ b)));
            if black_box(key.len() == given.len() && differ == 0) {
                found = Some(KeyId(id));
            }
        }
        found.ok_or_else(|| {
            let message = "wrong or missing API key; send `Authorization: Bearer KEY` with a key of the server's --key-file";
            ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", message)
                .with_code("invalid_api_key")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(keys: &[&str], name: &'static str, value: &str) -> Option<u64> {
        let keys = Keys::new(keys.iter().map(|key| (*key).to_owned()).collect());
        let headers = HeaderMap::from_iter([(
            axum::http::HeaderName::from_static(name),
            value.parse().expect("a header"),
        )]);
        keys.check(&headers, &Uri::from_static("/")).ok().map(|KeyId(id)| id)
    }

    #[test]
    fn a_key_is_known_by_its_place() {
        let keys = ["first", "second"];
        assert_eq!(check(&keys, "authorization", "Bearer first"), Some(0));
        assert_eq!(check(&keys, "authorization", "bearer  second"), Some(1));
        for wrong in
            ["", "first", "Bearer", "Bearer ", "Bearer firs", "Bearer firstsecond", "Basic first"]
        {
            assert_eq!(check(&keys, "authorization", wrong), None, "{wrong}");
        }
        assert_eq!(check(&keys, "host", "localhost"), None);
    }

    #[test]
    fn without_keys_only_names_of_this_machine_are_answered() {
        assert_eq!(check(&[], "host", "localhost:8080"), Some(0));
        assert_eq!(check(&[], "host", "evil.example:8080"), None);
        assert_eq!(check(&[], "accept", "x"), None);
    }
}
