//! Names of this machine.

/// Whether a `Host` header, or the authority of an `Origin`, names this machine; with a port, whether that is the port too (80 where the
/// header has none, as browsers leave it out).
///
/// A page from elsewhere can point a name of its own at 127.0.0.1 (DNS rebinding). Its requests carry that name here.
#[must_use]
pub fn is_local(host: &str, port: Option<u16>) -> bool {
    let (name, own) = match host.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((name, rest)) => (name, rest.strip_prefix(':').unwrap_or("80")),
            None => return false,
        },
        None => host.split_once(':').unwrap_or((host, "80")),
    };
    let Ok(own) = own.parse::<u16>() else { return false };
    ["127.0.0.1", "localhost", "::1"].contains(&name) && port.is_none_or(|port| port == own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn browsers_leave_out_the_port_of_http() {
        for (host, port, own) in [
            ("127.0.0.1:8000", 8000, true),
            ("localhost:8000", 8000, true),
            ("[::1]:8000", 8000, true),
            ("localhost:80", 80, true),
            ("localhost", 80, true),
            ("127.0.0.1", 80, true),
            ("127.0.0.1", 8000, false),
            ("127.0.0.1:80", 8000, false),
            ("127.0.0.1.example:8000", 8000, false),
            ("[::1", 80, false),
            ("localhost:x", 80, false),
            ("", 80, false),
        ] {
            assert_eq!(is_local(host, Some(port)), own, "{host} {port}");
        }
        assert!(is_local("localhost:9", None) && !is_local("example.org:9", None));
    }
}
