//! The live page: files without data, which are part of the program. The page reads
//! `/admin/live` and `/admin/decisions`, and sends prompts to `/admin/playground`.

use axum::Router;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::HeaderName;
use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};

use super::context::Admin;

const CROSS_ORIGIN_RESOURCE_POLICY: HeaderName =
    HeaderName::from_static("cross-origin-resource-policy");

/// Nothing is loaded from elsewhere, no text in the page can run, and no other page can frame it.
const SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
                               connect-src 'self'; img-src 'self' data:; frame-ancestors 'none'; \
                               base-uri 'none'; form-action 'none'";

/// A file of the page.
struct File {
    path: &'static str,
    kind: &'static str,
    text: &'static str,
}

macro_rules! files {
    ($($path:literal $kind:literal $name:literal),* $(,)?) => {
        &[$(File { path: $path, kind: $kind, text: include_str!(concat!("page/", $name)) }),*]
    };
}

const FILES: &[File] = files![
    "/" "text/html" "index.html",
    "/page/page.css" "text/css" "page.css",
    "/page/attention.js" "text/javascript" "attention.js",
    "/page/charts.js" "text/javascript" "charts.js",
    "/page/cluster.js" "text/javascript" "cluster.js",
    "/page/decisions.js" "text/javascript" "decisions.js",
    "/page/dom.js" "text/javascript" "dom.js",
    "/page/format.js" "text/javascript" "format.js",
    "/page/hits.js" "text/javascript" "hits.js",
    "/page/main.js" "text/javascript" "main.js",
    "/page/playground.js" "text/javascript" "playground.js",
    "/page/ring.js" "text/javascript" "ring.js",
    "/page/stages.js" "text/javascript" "stages.js",
    "/page/stream.js" "text/javascript" "stream.js",
    "/page/tiles.js" "text/javascript" "tiles.js",
    "/page/workers.js" "text/javascript" "workers.js",
];

/// Whether a path is one of the page's, which have no data and need no credential.
pub(super) fn is_page(path: &str) -> bool {
    FILES.iter().any(|file| file.path == path)
}

/// Adds the routes of the page's files.
pub(super) fn add_routes(routes: Router<Admin>) -> Router<Admin> {
    let reply = |file: &'static File| get(async || file_reply(file.kind, file.text));
    FILES.iter().fold(routes, |routes, file| routes.route(file.path, reply(file)))
}

/// A file of a page that loads nothing from elsewhere, of a type such as `text/html`.
pub(crate) fn file_reply(kind: &str, text: &'static str) -> Response {
    let headers = [
        (CONTENT_TYPE, format!("{kind}; charset=utf-8")),
        // Another version of the router has another page.
        (CACHE_CONTROL, "no-cache".to_owned()),
        (CONTENT_SECURITY_POLICY, SECURITY_POLICY.to_owned()),
        (CROSS_ORIGIN_RESOURCE_POLICY, "same-origin".to_owned()),
        (REFERRER_POLICY, "no-referrer".to_owned()),
        (X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
    ];
    (headers, text).into_response()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    #[test]
    fn every_file_of_the_page_is_served() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/admin/page");
        let there = std::fs::read_dir(folder).unwrap();
        let name = |entry: std::fs::DirEntry| entry.file_name().into_string().unwrap();
        let there: BTreeSet<String> = there.map(|entry| name(entry.unwrap())).collect();
        let served = FILES.iter().map(|file| file.path.trim_start_matches("/page/"));
        let served = served.map(|name| if name == "/" { "index.html" } else { name }.to_owned());
        assert_eq!(there, served.collect());
    }

    #[test]
    fn the_page_parses_no_markup_and_runs_no_text() {
        for file in FILES {
            for word in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "new Function",
                "DOMParser",
                "srcdoc",
                "javascript:",
                "http://",
                "https://",
                "localStorage",
                "sessionStorage",
                "document.cookie",
            ] {
                let text = file.text.replace("http://www.w3.org/2000/svg", "");
                assert!(!text.contains(word), "{} has {word}", file.path);
            }
        }
    }
}
