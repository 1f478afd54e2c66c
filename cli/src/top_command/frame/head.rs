//! The upper part of a frame: routers, rates, latencies, and where prompt tokens came from.

use super::{Paint, ROUTERS_MAX, cell, figure, plain, styled};
use crate::safe_text::{columns, printable};
use crate::top_command::figures::{age, count, percent, time_ms};
use crate::top_command::grid::Line;
use crate::top_command::live::{Percentiles, Sources};
use crate::top_command::options::Options;
use crate::top_command::view::{Router, View};

/// Maximum number of results of failed requests that are shown of a router.
const RESULTS_MAX: usize = 2;

/// Number of hexadecimal digits of a configuration's hash that are shown.
const HASH_DIGITS: usize = 6;

/// Maximum width of the name of a part of the time to first token.
const STAGE_MAX_COLUMNS: usize = 16;

/// Maximum width of the name of a kind of outcome.
const RESULT_MAX_COLUMNS: usize = 16;

/// Maximum width of the name of a router.
const ROUTER_MAX_COLUMNS: usize = 24;

pub(super) fn lines(view: &View<'_>, options: &Options, width: usize, paint: Paint) -> Vec<Line> {
    let mut lines = vec![first(view, options, width, paint)];
    lines.extend(routers(view, width, paint));
    lines.push(rates(view, paint));
    lines.extend(others(view, width));
    lines.push(latencies(view));
    lines.extend(stages(view, width));
    lines.extend(sources(view, width));
    lines
}

/// The keys, and the order of workers.
pub(super) fn keys(options: &Options, width: usize) -> Line {
    let keys = "q quit  p pause  s sort  m model  \u{2191}\u{2193} scroll";
    let sorted = format!("sorted by {}", options.sort.name());
    let space = width.saturating_sub(columns(keys) + columns(&sorted));
    vec![styled(format!("{keys}{}{sorted}", " ".repeat(space)), Paint::dim())]
}

fn first(view: &View<'_>, options: &Options, width: usize, paint: Paint) -> Line {
    let model = match (&options.model, view.models.len()) {
        (Some(model), _) => model.clone(),
        (None, 1) => view.models[0].to_owned(),
        (None, 0) => "no models".to_owned(),
        (None, count) => format!("all {count} models"),
    };
    let flow = view.flow.map(|flow| format!("  {}", printable(flow, 20))).unwrap_or_default();
    let state = match (options.is_paused, view.routers.iter().any(|r| r.snapshot.is_some())) {
        (true, _) => "PAUSED",
        (false, false) => "connecting",
        (false, true) => "",
    };
    let left = format!("splitrail top  {}{flow}", printable(&model, 40));
    let space = width.saturating_sub(columns(&left) + columns(state));
    vec![styled(left, Paint::title()), plain(" ".repeat(space)), styled(state, paint.changing())]
}

fn routers(view: &View<'_>, width: usize, paint: Paint) -> Vec<Line> {
    let names = view.routers.iter().map(|router| columns(&router.name)).max().unwrap_or_default();
    let name_width = names.min(ROUTER_MAX_COLUMNS);
    let hashes: Vec<_> =
        view.routers.iter().filter_map(|r| Some(&r.snapshot.as_ref()?.config_hash)).collect();
    let differ = hashes.windows(2).any(|two| two[0] != two[1]);
    // Those that need attention are shown in any case.
    let mut order: Vec<&Router> = view.routers.iter().collect();
    order.sort_by_key(|router| router.snapshot.as_ref().is_some_and(|snapshot| snapshot.ready));
    let is_all = order.len() <= ROUTERS_MAX;
    let shown = if is_all { view.routers.iter().collect() } else { order };
    let layout = RouterLayout { name_width, width, differ };
    let mut lines: Vec<_> =
        shown.iter().take(ROUTERS_MAX).map(|router| router_line(router, &layout, paint)).collect();
    if !is_all {
        lines.push(vec![plain(format!("and {} more routers", shown.len() - ROUTERS_MAX))]);
    }
    if differ {
        lines.push(vec![styled("the routers run different configurations", paint.bad())]);
    }
    lines
}

/// What all lines of routers have in common.
struct RouterLayout {
    /// Columns of the names.
    name_width: usize,
    /// Columns of the terminal.
    width: usize,
    /// Whether the routers run different configurations.
    differ: bool,
}

fn router_line(router: &Router, layout: &RouterLayout, paint: Paint) -> Line {
    let RouterLayout { name_width, width, differ } = *layout;
    let name = cell(&router.name, name_width);
    let room = width.saturating_sub(name_width + 2);
    let Some(snapshot) = &router.snapshot else {
        let why = router.error.as_deref().unwrap_or("connecting");
        return vec![plain(name + "  "), styled(printable(why, room), paint.bad())];
    };
    let hash: String = snapshot.config_hash.chars().take(HASH_DIGITS).collect();
    let version = printable(&snapshot.router_version, 16);
    let about = format!("  v{version}  up {:>4}  config ", age(snapshot.uptime_ms));
    let mut spans = vec![plain(name + "  ")];
    let hash_style = if differ { paint.bad() } else { Default::default() };
    match &snapshot.not_ready_why {
        _ if snapshot.ready => spans.push(styled("ready", paint.good())),
        why => {
            let why = format!("not ready: {}", why.as_deref().unwrap_or("unknown"));
            spans.push(styled(printable(&why, room), paint.bad()));
            return Line::from(spans);
        }
    }
    spans.extend([plain(about), styled(printable(&hash, HASH_DIGITS), hash_style)]);
    // These are requests of no model.
    for (result, per_s) in snapshot.unplaced_failures_per_s.iter().take(RESULTS_MAX) {
        let failures = format!("  {} {}/s", printable(result, 8), count(Some(*per_s)));
        spans.push(styled(failures, paint.bad()));
    }
    Line::from(spans)
}

fn rates(view: &View<'_>, paint: Paint) -> Line {
    let totals = &view.totals;
    let failures = format!("failed/s {}", figure(&count(Some(totals.failures_per_s)), 5));
    let style = if totals.failures_per_s > 0.0 { paint.bad() } else { Default::default() };
    vec![
        plain(format!("requests/s {}  ", figure(&count(totals.requests_per_s), 5))),
        styled(failures, style),
        plain(format!(
            "  in flight {}  queued {}  gen tok/s {}",
            figure(&count(Some(totals.requests_in_flight as f64)), 5),
            figure(&count(Some(totals.queue_requests as f64)), 4),
            figure(&count(totals.generation_tokens_per_s), 5),
        )),
    ]
}

/// Requests that ended otherwise than well, and are not the fault of routers and engines, as far as
/// there is room.
fn others(view: &View<'_>, width: usize) -> Option<Line> {
    let mut text = String::new();
    for (result, rate) in &view.totals.others_per_s {
        let result = printable(result, RESULT_MAX_COLUMNS);
        let part = format!("{result}/s {}  ", count(Some(*rate)));
        if columns(&text) + columns(&part) > width + 2 {
            break;
        }
        text += &part;
    }
    (!text.is_empty()).then(|| vec![plain(text.trim_end())])
}

fn latencies(view: &View<'_>) -> Line {
    let three = |percentiles: Option<Percentiles>| {
        let of = |p: fn(Percentiles) -> f64| figure(&time_ms(percentiles.map(p)), 5);
        format!("p50 {} p90 {} p99 {}", of(|p| p.p50), of(|p| p.p90), of(|p| p.p99))
    };
    let totals = &view.totals;
    // Percentiles of several routers cannot be summed.
    let several = view.routers.iter().filter(|router| router.snapshot.is_some()).count() > 1;
    let worst = if several { " (worst)" } else { "" };
    vec![plain(format!(
        "TTFT {}  ITL {}{worst}",
        three(totals.ttft_ms),
        three(totals.inter_token_ms)
    ))]
}

/// Where the time up to the first token goes, the largest part first, as far as there is room.
fn stages(view: &View<'_>, width: usize) -> Option<Line> {
    let mut text = "TTFT parts".to_owned();
    for (stage, ms) in &view.totals.stages_ms {
        let part = format!(" {} {} ", printable(stage, STAGE_MAX_COLUMNS), time_ms(Some(*ms)));
        if columns(&text) + columns(&part) > width + 1 {
            break;
        }
        text += &part;
    }
    (!view.totals.stages_ms.is_empty()).then(|| vec![plain(text)])
}

/// Where prompt tokens came from: one line for each kind of leg that had any.
fn sources(view: &View<'_>, width: usize) -> Vec<Line> {
    let has_prefill = view.rows.iter().any(|row| row.role == "prefill");
    let mut lines = Vec::new();
    if has_prefill {
        lines.push(source_line("prefill", view.totals.prefill, width));
    }
    lines.push(source_line("decode", view.totals.decode, width));
    lines
}

fn source_line(leg: &str, sources: Sources, width: usize) -> Line {
    let parts = [sources.cached, sources.transferred, sources.computed];
    let total: f64 = parts.iter().flatten().sum();
    let ratio = |part: Option<f64>| part.filter(|_| total > 0.0).map(|part| part / total);
    let total = parts.iter().any(Option::is_some).then_some(total);
    let lead = format!("{} tokens/s {}  ", cell(leg, 7), figure(&count(total), 5));
    let share = |part: Option<f64>| figure(&percent(ratio(part)), 4);
    let figures = format!(
        " #cached{} =transferred{} .computed{}",
        share(parts[0]),
        share(parts[1]),
        share(parts[2])
    );
    let room = width.saturating_sub(columns(&lead) + columns(&figures));
    vec![plain(format!(
        "{lead}{}{figures}",
        bar(parts.map(|part| ratio(part).unwrap_or(0.0)), room)
    ))]
}

/// A bar of three shares that sum to 1, or to 0.
fn bar(shares: [f64; 3], width: usize) -> String {
    let mut bar = String::new();
    let (mut sum, mut filled) = (0.0, 0);
    for (share, mark) in shares.into_iter().zip(["#", "=", "."]) {
        sum += share;
        let end = ((sum * width as f64).round() as usize).min(width);
        bar += &mark.repeat(end.saturating_sub(filled));
        filled = filled.max(end);
    }
    cell(&bar, width)
}
