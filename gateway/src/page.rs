//! The page: files of `gateway/web/`, carried in the program and served as they are.
//!
//! The page loads nothing from elsewhere and has no script or style in its markup, so its policy
//! forbids both. The files hold nothing secret and need no key; what they ask for does.

use axum::Router;
use axum::body::Body;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, HeaderName, HeaderValue,
    IF_NONE_MATCH, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use axum::http::{HeaderMap, Response, StatusCode};
use axum::response::IntoResponse;
use axum::routing::get;
use sha2::{Digest as _, Sha256};

use crate::gateway::Shared;

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const PICTURE: &str = "image/svg+xml";

/// What the browser may do for the page: load our files and ask this gateway.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

/// Bytes of the hash that make a file's tag.
const TAG_BYTES: usize = 8;

/// A file, and where it is found.
struct File {
    path: &'static str,
    content: &'static str,
    bytes: &'static [u8],
}

static FILES: [File; 10] = [
    File { path: "/", content: HTML, bytes: include_bytes!("../web/index.html") },
    File { path: "/page/style.css", content: STYLE, bytes: include_bytes!("../web/style.css") },
    File { path: "/page/icon.svg", content: PICTURE, bytes: include_bytes!("../web/icon.svg") },
    File { path: "/page/main.js", content: SCRIPT, bytes: include_bytes!("../web/main.js") },
    File { path: "/page/ask.js", content: SCRIPT, bytes: include_bytes!("../web/ask.js") },
    File { path: "/page/chat.js", content: SCRIPT, bytes: include_bytes!("../web/chat.js") },
    File { path: "/page/dom.js", content: SCRIPT, bytes: include_bytes!("../web/dom.js") },
    File { path: "/page/fleet.js", content: SCRIPT, bytes: include_bytes!("../web/fleet.js") },
    File { path: "/page/theme.js", content: SCRIPT, bytes: include_bytes!("../web/theme.js") },
    File { path: "/page/times.js", content: SCRIPT, bytes: include_bytes!("../web/times.js") },
];

/// The routes of all files.
pub(crate) fn routes() -> Router<Shared> {
    FILES.iter().fold(Router::new(), |router, file| {
        let tag = tag(file.bytes);
        let serve = move |headers: HeaderMap| {
            let response = file.response(&tag, &headers);
            async move { response }
        };
        router.route(file.path, get(serve))
    })
}

/// The name of some content, as HTTP writes it.
fn tag(bytes: &[u8]) -> String {
    let hash = Sha256::digest(bytes);
    let digits: String = hash.iter().take(TAG_BYTES).map(|byte| format!("{byte:02x}")).collect();
    format!("\"{digits}\"")
}

impl File {
    fn response(&self, tag: &str, asked: &HeaderMap) -> Response<Body> {
        let tag_value = HeaderValue::from_str(tag).unwrap_or(HeaderValue::from_static("\"\""));
        let headers: [(HeaderName, HeaderValue); 8] = [
            (CONTENT_TYPE, HeaderValue::from_static(self.content)),
            (ETAG, tag_value),
            // Kept, but asked for each time: files of two versions of the page do not fit.
            (CACHE_CONTROL, HeaderValue::from_static("no-cache")),
            (CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
            (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
            (X_FRAME_OPTIONS, HeaderValue::from_static("DENY")),
            (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
            (
                HeaderName::from_static("cross-origin-opener-policy"),
                HeaderValue::from_static("same-origin"),
            ),
        ];
        if is_known(asked, tag) {
            (StatusCode::NOT_MODIFIED, headers).into_response()
        } else {
            (headers, self.bytes).into_response()
        }
    }
}

/// Whether the browser has the content already.
fn is_known(asked: &HeaderMap, tag: &str) -> bool {
    let known = asked.get_all(IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    known.flat_map(|list| list.split(',')).any(|known| {
        let known = known.trim();
        known == "*" || known.strip_prefix("W/").unwrap_or(known) == tag
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_compared_as_http_wants_it() {
        let asked = |value: &'static str| {
            let headers = HeaderMap::from_iter([(IF_NONE_MATCH, HeaderValue::from_static(value))]);
            is_known(&headers, "\"ab\"")
        };
        for known in ["\"ab\"", "\"x\", W/\"ab\"", "*"] {
            assert!(asked(known), "{known}");
        }
        for other in ["\"abc\"", "ab", ""] {
            assert!(!asked(other), "{other}");
        }
        assert!(!is_known(&HeaderMap::new(), "\"ab\""));
    }

    #[test]
    fn the_files_load_nothing_from_elsewhere() {
        for File { path, bytes, .. } in &FILES {
            let text = std::str::from_utf8(bytes).expect("text");
            for origin in ["https://", "url("] {
                assert!(!text.contains(origin), "{path} has {origin}");
            }
            // The names of namespaces are no addresses.
            let http = text.matches("http://").count();
            let names = text.matches("http://www.w3.org/2000/svg").count();
            assert_eq!(http, names, "{path} names an address");
        }
    }

    #[test]
    fn the_markup_has_neither_script_nor_style_of_its_own() {
        let markup = std::str::from_utf8(FILES[0].bytes).expect("text");
        for inline in ["<style", " style=", "<script>", " onclick", " onload", "javascript:"] {
            assert!(!markup.contains(inline), "{inline}");
        }
    }
}
