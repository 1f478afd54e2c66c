//! The ids of the request that a thread works on, for every line that is logged meanwhile.
//!
//! A span of `tracing` would do the same, and would cost each request more than all its lines: it is
//! made, formatted, entered and left even if nothing is logged. Here a pointer is swapped.

use std::cell::RefCell;
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

thread_local! {
    static CURRENT: RefCell<Option<RequestIds>> = const { RefCell::new(None) };
}

/// The ids of a request that its log lines carry. Cheap to clone.
#[derive(Clone, Debug)]
pub struct RequestIds(Arc<Ids>);

#[derive(Debug)]
struct Ids {
    request_id: Box<str>,
    trace_id: Option<u128>,
}

impl RequestIds {
    /// The ids of a request. That of the request must be of plain characters: letters, digits and
    /// `-_.:`.
    pub fn new(request_id: &str, trace_id: Option<u128>) -> Self {
        Self(Arc::new(Ids { request_id: request_id.into(), trace_id }))
    }

    /// The id that the client sees.
    pub fn request_id(&self) -> &str {
        &self.0.request_id
    }

    /// Calls a function whose log lines carry the ids.
    pub fn during<T>(&self, act: impl FnOnce() -> T) -> T {
        let mut ids = Some(self.clone());
        let _entered = RequestIdGuard::new(&mut ids);
        act()
    }

    /// Runs a future whose log lines carry the ids.
    pub async fn around<F: Future>(&self, mut work: Pin<&mut F>) -> F::Output {
        let mut ids = Some(self.clone());
        poll_fn(|context| Self::poll(&mut ids, |context| work.as_mut().poll(context), context))
            .await
    }

    /// Polls something whose log lines carry the ids, which are in `ids` before and after.
    pub fn poll<T>(
        ids: &mut Option<Self>,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<T>,
        context: &mut Context<'_>,
    ) -> Poll<T> {
        let _entered = RequestIdGuard::new(ids);
        poll(context)
    }
}

/// The ids are those of the thread until this is dropped.
struct RequestIdGuard<'a>(&'a mut Option<RequestIds>);

impl<'a> RequestIdGuard<'a> {
    fn new(ids: &'a mut Option<RequestIds>) -> Self {
        swap(ids);
        Self(ids)
    }
}

impl Drop for RequestIdGuard<'_> {
    fn drop(&mut self) {
        swap(self.0);
    }
}

fn swap(ids: &mut Option<RequestIds>) {
    // A thread that ends has no requests.
    let _gone = CURRENT.try_with(|current| std::mem::swap(&mut *current.borrow_mut(), ids));
}

/// Formats events, and adds the ids of the thread's request.
pub(super) struct FormatWithIds<F> {
    pub(super) format: F,
    pub(super) is_json: bool,
}

impl<S, N, F> FormatEvent<S, N> for FormatWithIds<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let ids = CURRENT.try_with(|current| current.borrow().clone()).ok().flatten();
        let Some(RequestIds(ids)) = ids else {
            return self.format.format_event(context, writer, event);
        };
        let mut line = String::new();
        self.format.format_event(context, Writer::new(&mut line), event)?;
        writer.write_str(&if self.is_json { in_json(&line, &ids) } else { in_text(&line, &ids) })
    }
}

fn in_text(line: &str, ids: &Ids) -> String {
    let mut out = line.trim_end_matches('\n').to_owned();
    out.extend([" request_id=\"", &ids.request_id, "\""]);
    if let Some(trace_id) = ids.trace_id {
        out.extend([" trace_id=\"", &hex(trace_id), "\""]);
    }
    out.push('\n');
    out
}

fn in_json(line: &str, ids: &Ids) -> String {
    // The members before are the time and the level.
    const FIELDS: &str = "\"fields\":{";
    let Some(at) = line.find(FIELDS).map(|at| at + FIELDS.len()) else { return line.to_owned() };
    let (head, fields) = line.split_at(at);
    let mut out = head.to_owned();
    out.extend(["\"request_id\":\"", &ids.request_id, "\""]);
    if let Some(trace_id) = ids.trace_id {
        out.extend([",\"trace_id\":\"", &hex(trace_id), "\""]);
    }
    if !fields.starts_with('}') {
        out.push(',');
    }
    out.push_str(fields);
    out
}

/// A trace id as it is written everywhere.
fn hex(trace_id: u128) -> String {
    format!("{trace_id:032x}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io;
    use std::sync::{Mutex, PoisonError};

    use serde_json::Value;
    use tracing_subscriber::fmt::MakeWriter;

    use super::*;

    const TRACE_ID: &str = "000000000000000000000000000000ab";

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl MakeWriter<'_> for Log {
        type Writer = Self;

        fn make_writer(&self) -> Self {
            self.clone()
        }
    }

    impl Log {
        fn text(&self) -> String {
            let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
            String::from_utf8(bytes).unwrap()
        }
    }

    fn nested() {
        let [outer, inner] = [("outer", Some(0xab)), ("inner", None)]
            .map(|(request, trace)| RequestIds::new(request, trace));
        tracing::info!("none");
        outer.during(|| {
            tracing::info!(worker = "w", "one");
            inner.during(|| tracing::info!("two"));
            tracing::info!("three");
        });
        tracing::info!("none again");
    }

    #[test]
    fn lines_carry_the_ids_of_the_innermost_request_in_both_formats() {
        let log = Log::default();
        let builder = tracing_subscriber::fmt().with_writer(log.clone()).with_ansi(false).json();
        let json =
            builder.map_event_format(|format| FormatWithIds { format, is_json: true }).finish();
        tracing::subscriber::with_default(json, nested);
        let ids: Vec<_> = log
            .text()
            .lines()
            .map(|line| {
                let fields = serde_json::from_str::<Value>(line).unwrap()["fields"].clone();
                (
                    fields["request_id"].clone(),
                    fields["trace_id"].clone(),
                    fields["message"].clone(),
                )
            })
            .collect();
        let expected = serde_json::json!([
            [null, null, "none"],
            ["outer", TRACE_ID, "one"],
            ["inner", null, "two"],
            ["outer", TRACE_ID, "three"],
            [null, null, "none again"],
        ]);
        assert_eq!(serde_json::to_value(ids).unwrap(), expected);
        let log = Log::default();
        let builder = tracing_subscriber::fmt().with_writer(log.clone()).with_ansi(false);
        let text =
            builder.map_event_format(|format| FormatWithIds { format, is_json: false }).finish();
        tracing::subscriber::with_default(text, nested);
        let text = log.text();
        let second = text.lines().nth(1).unwrap();
        let ids = format!("request_id=\"outer\" trace_id=\"{TRACE_ID}\"");
        assert!(second.ends_with(&format!(": one worker=\"w\" {ids}")), "{second}");
    }

    #[test]
    fn ids_are_gone_after_a_panic() {
        let ids = RequestIds::new("panics", None);
        let panicked = std::panic::catch_unwind(|| ids.during(|| panic!("on purpose")));
        assert!(panicked.is_err());
        assert!(CURRENT.with_borrow(Option::is_none));
    }
}
