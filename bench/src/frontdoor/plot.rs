//! Draws latency against load as an SVG: one line per target through its numbers of clients.

use std::fmt::Write as _;

use super::report::Cell;

const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 60.0;
const TOP: f64 = 40.0;
const COLOURS: [&str; 7] =
    ["#777777", "#2f7d32", "#d68910", "#8c6d31", "#1f5fbf", "#c0392b", "#8e44ad"];

/// Draws one panel per size. Latencies are medians, on a logarithmic scale.
pub(super) fn draw(cells: &[Cell]) -> String {
    let mut sizes: Vec<&str> = Vec::new();
    for cell in cells {
        if !sizes.contains(&cell.size) {
            sizes.push(cell.size);
        }
    }
    let step = WIDTH + LEFT + 40.0;
    let (width, height) = (step * sizes.len() as f64, HEIGHT + TOP + 60.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (at, size) in sizes.iter().enumerate() {
        let cells: Vec<&Cell> = cells.iter().filter(|cell| cell.size == *size).collect();
        panel(&mut out, step * at as f64 + LEFT, size, &cells);
    }
    out.push_str("</svg>\n");
    out
}

fn panel(out: &mut String, left: f64, size: &str, cells: &[&Cell]) {
    let figures = || cells.iter().flat_map(|cell| &cell.figures).map(|(_, figures)| figures);
    let most = figures().map(|f| f.per_s).fold(1.0, f64::max);
    let low = figures().map(|f| f.p50_ms).fold(f64::INFINITY, f64::min).log10().floor();
    let high = figures().map(|f| f.p50_ms).fold(0.0, f64::max).log10().ceil().max(low + 1.0);
    let x = |per_s: f64| left + per_s / most * WIDTH;
    let y = |ms: f64| TOP + HEIGHT - (ms.log10() - low) / (high - low) * HEIGHT;
    // Writing to a string cannot fail.
    let mut put = |text: String| {
        let _infallible = writeln!(out, "{text}");
    };
    put(format!(
        "<text x=\"{left}\" y=\"20\" font-size=\"14\">{size}: median latency (ms) against replies/s</text>"
    ));
    put(format!(
        "<rect x=\"{left}\" y=\"{TOP}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"none\" stroke=\"black\"/>"
    ));
    for power in low as i32..=high as i32 {
        let (ms, end) = (10f64.powi(power), left + WIDTH);
        let at = y(ms);
        put(format!(
            "<line x1=\"{left}\" x2=\"{end}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#dddddd\"/>"
        ));
        put(format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{ms}</text>",
            left - 6.0,
            at + 4.0
        ));
    }
    for part in 0..=4 {
        let per_s = most * f64::from(part) / 4.0;
        put(format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{per_s:.0}</text>",
            x(per_s),
            TOP + HEIGHT + 18.0
        ));
    }
    let Some(first) = cells.first() else { return };
    for (at, (name, _)) in first.figures.iter().enumerate() {
        let colour = COLOURS[at % COLOURS.len()];
        let of_target = cells.iter().filter_map(|cell| {
            let (_, figures) = cell.figures.iter().find(|(target, _)| target == name)?;
            Some((cell.clients, x(figures.per_s), y(figures.p50_ms)))
        });
        let points: Vec<_> = of_target.collect();
        let line: Vec<String> = points.iter().map(|(_, x, y)| format!("{x:.1},{y:.1}")).collect();
        put(format!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            line.join(" ")
        ));
        for (clients, x, y) in points {
            put(format!(
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"><title>{name}, {clients} at once</title></circle>"
            ));
        }
        put(format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">{name}</text>",
            left + 10.0,
            TOP + 18.0 + 15.0 * at as f64
        ));
    }
}
