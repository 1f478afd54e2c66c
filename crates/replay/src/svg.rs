//! SVG charts: of a sweep, TTFT percentiles and the hit share against the load; and bars beside each
//! other.

use std::fmt::Write;

use crate::report::PolicyReport;

const WIDTH: f64 = 900.0;
const PANEL: f64 = 320.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 190.0;
const TOP: f64 = 40.0;
const GAP: f64 = 70.0;

/// Colours that colour-blind people can distinguish.
const COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"];

/// Dash patterns of p50, p90 and p99.
const DASHES: [(&str, &str); 3] = [("p50", "none"), ("p90", "7 4"), ("p99", "2 3")];

/// Maps a range of values to a range of pixels.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn at(&self, value: f64) -> f64 {
        let share = (value - self.low) / (self.high - self.low).max(f64::MIN_POSITIVE);
        self.from + share.clamp(0.0, 1.0) * (self.to - self.from)
    }
}

/// Draws the chart; reports without a load are left out.
pub fn svg(reports: &[PolicyReport]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for report in reports {
        if !names.contains(&report.policy.as_str()) {
            names.push(&report.policy);
        }
    }
    let loads = || reports.iter().filter_map(|report| report.load);
    let x = Axis {
        low: loads().fold(f64::INFINITY, f64::min),
        high: loads().fold(f64::NEG_INFINITY, f64::max),
        from: LEFT,
        to: WIDTH - RIGHT,
    };
    let times = reports.iter().flat_map(|r| [r.ttft.p50_s, r.ttft.p99_s]);
    let decade = |s: f64| s.max(1e-3).log10();
    let (low, high) = times.fold((0.0_f64, 1.0_f64), |(low, high), s| {
        (low.min(decade(s).floor()), high.max(decade(s).ceil()))
    });
    let ttft = Axis { low, high, from: TOP + PANEL, to: TOP };
    let below = TOP + PANEL + GAP;
    let hits = Axis { low: 0.0, high: 100.0, from: below + PANEL, to: below };
    let mut picture = Picture::new(below + PANEL + GAP);
    picture.frame(&x, &ttft, "TTFT in seconds");
    for exponent in low as i32..=high as i32 {
        let label = format!("{}", 10f64.powi(exponent));
        picture.tick(ttft.at(exponent.into()), &label, &x);
    }
    picture.frame(&x, &hits, "hits, in % of the ceiling");
    for percent in [0, 25, 50, 75, 100] {
        picture.tick(hits.at(percent.into()), &percent.to_string(), &x);
    }
    let mut marks: Vec<f64> = loads().collect();
    marks.sort_by(f64::total_cmp);
    marks.dedup();
    marks.iter().for_each(|load| picture.load(x.at(*load), *load, &ttft, &hits));
    for (i, name) in names.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let mine = || reports.iter().filter(|report| report.policy == *name);
        for ((_, dash), time) in DASHES.iter().zip([0, 1, 2]) {
            let y = |r: &PolicyReport| [r.ttft.p50_s, r.ttft.p90_s, r.ttft.p99_s][time];
            let points = mine().filter_map(|r| Some((x.at(r.load?), ttft.at(decade(y(r))))));
            picture.line(points, colour, dash);
        }
        let points = mine().filter_map(|r| Some((x.at(r.load?), hits.at(r.ceiling_percent))));
        picture.line(points, colour, "none");
        picture.legend(i, name, colour, "none");
    }
    for (i, (name, dash)) in DASHES.iter().enumerate() {
        picture.legend(names.len() + 1 + i, name, "#444", dash);
    }
    picture.finish()
}

/// Groups of bars, one bar for each series.
#[derive(Clone, Debug)]
pub struct Panel {
    /// What the bars measure, with its unit.
    pub title: String,
    /// The names of the groups.
    pub groups: Vec<String>,
    /// The series by name, each with one value from 0 for each group.
    pub series: Vec<(String, Vec<f64>)>,
}

/// Height of a panel with bars.
const BARS: f64 = 200.0;

/// Draws panels below each other. The series of the first one name those of all.
pub fn bars(panels: &[Panel]) -> String {
    let mut picture = Picture::new(TOP + (BARS + GAP) * panels.len() as f64);
    let x = Axis { low: 0.0, high: 1.0, from: LEFT, to: WIDTH - RIGHT };
    for (i, Panel { title, groups, series }) in panels.iter().enumerate() {
        let top = TOP + (BARS + GAP) * i as f64;
        let most = series.iter().flat_map(|(_, values)| values).fold(0.0_f64, |a, b| a.max(*b));
        // The values of the longest bars stand in the panel.
        let high = (1.25 * most).max(f64::MIN_POSITIVE);
        let y = Axis { low: 0.0, high, from: top + BARS, to: top };
        picture.frame(&x, &y, title);
        picture.tick(y.at(most), &format!("{most:.1}"), &x);
        let slot = (x.to - x.from) / groups.len().max(1) as f64;
        let width = 0.8 * slot / series.len().max(1) as f64;
        for (j, group) in groups.iter().enumerate() {
            let left = x.from + slot * (j as f64 + 0.1);
            picture.add(format_args!(
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{group}</text>",
                left + 0.4 * slot,
                y.from + 18.0
            ));
            for (k, (_, values)) in series.iter().enumerate() {
                let value = values.get(j).copied().unwrap_or_default();
                picture.bar(
                    (left + width * k as f64, width),
                    &y,
                    value,
                    COLOURS[k % COLOURS.len()],
                );
            }
        }
    }
    let names = panels.first().map(|panel| &panel.series[..]).unwrap_or_default();
    for (k, (name, _)) in names.iter().enumerate() {
        picture.legend(k, name, COLOURS[k % COLOURS.len()], "none");
    }
    picture.finish()
}

/// The SVG text. Writing to a string cannot fail.
struct Picture(String);

impl Picture {
    fn new(height: f64) -> Self {
        let mut picture = Self(String::new());
        picture.add(format_args!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
             font-family=\"sans-serif\" font-size=\"12\">\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>"
        ));
        picture
    }

    fn add(&mut self, element: std::fmt::Arguments<'_>) {
        let written = writeln!(self.0, "{element}");
        debug_assert!(written.is_ok(), "a string takes what is written");
    }

    fn frame(&mut self, x: &Axis, y: &Axis, title: &str) {
        let (left, top, width, height) = (x.from, y.to, x.to - x.from, y.from - y.to);
        self.add(format_args!(
            "<rect x=\"{left}\" y=\"{top}\" width=\"{width}\" height=\"{height}\" fill=\"none\" \
             stroke=\"#888\"/><text x=\"{left}\" y=\"{:.1}\" font-weight=\"bold\">{title}</text>",
            top - 10.0
        ));
    }

    fn tick(&mut self, y: f64, label: &str, x: &Axis) {
        self.add(format_args!(
            "<line x1=\"{}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            x.from,
            x.to,
            x.from - 8.0,
            y + 4.0
        ));
    }

    fn load(&mut self, x: f64, load: f64, upper: &Axis, lower: &Axis) {
        for panel in [upper, lower] {
            self.add(format_args!(
                "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{load}</text>",
                panel.from + 18.0
            ));
        }
    }

    fn line(&mut self, points: impl Iterator<Item = (f64, f64)>, colour: &str, dash: &str) {
        let points: Vec<String> = points.map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        self.add(format_args!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" \
             stroke-dasharray=\"{dash}\"/>",
            points.join(" ")
        ));
    }

    /// A bar from a place on, with a width, and its value above it.
    fn bar(&mut self, (left, width): (f64, f64), y: &Axis, value: f64, colour: &str) {
        let top = y.at(value);
        self.add(format_args!(
            "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{:.1}\" \
             fill=\"{colour}\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{value:.1}\
             </text>",
            y.from - top,
            left + width / 2.0,
            top - 3.0
        ));
    }

    fn legend(&mut self, place: usize, name: &str, colour: &str, dash: &str) {
        let (x, y) = (WIDTH - RIGHT + 20.0, TOP + 10.0 + 20.0 * place as f64);
        let name = name.replace('&', "&amp;").replace('<', "&lt;");
        self.add(format_args!(
            "<line x1=\"{x}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\" stroke=\"{colour}\" \
             stroke-width=\"2\" stroke-dasharray=\"{dash}\"/><text x=\"{}\" y=\"{}\">{name}</text>",
            x + 28.0,
            x + 36.0,
            y + 4.0
        ));
    }

    fn finish(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Spread;

    #[test]
    fn bars_stand_in_their_panel_in_proportion_to_their_values() {
        let panel = Panel {
            title: "ms".to_owned(),
            groups: vec!["p50".to_owned(), "p99".to_owned()],
            series: vec![("a<b".to_owned(), vec![1.0, 4.0]), ("c".to_owned(), vec![2.0, 0.0])],
        };
        let text = bars(&[panel]);
        let heights = text.lines().filter(|line| line.contains("fill=\"#"));
        let heights: Vec<&str> =
            heights.filter_map(|line| line.split("height=\"").nth(1)?.split('"').next()).collect();
        assert_eq!(heights, ["40.0", "80.0", "160.0", "0.0"]);
        assert!(text.contains(">a&lt;b</text>") && !text.contains("NaN"), "{text}");
    }

    #[test]
    fn the_lines_of_each_policy_stay_within_the_picture() {
        let report = |policy: &str, load, p99_s| PolicyReport {
            policy: policy.to_owned(),
            load: Some(load),
            ceiling_percent: 50.0,
            ttft: Spread { mean_s: 1.0, p50_s: 0.5, p90_s: 2.0, p99_s },
            ..PolicyReport::default()
        };
        let reports = [report("a<b", 0.5, 3.0), report("a<b", 1.5, 300.0), report("c", 1.0, 9.0)];
        let text = svg(&reports);
        assert_eq!(text.matches("<polyline").count(), 8);
        assert!(text.contains(">a&lt;b</text>") && !text.contains("NaN"), "{text}");
        let ends = text
            .lines()
            .filter_map(|line| line.strip_prefix("<polyline points=\"")?.split('"').next());
        for point in ends.flat_map(|points| points.split(' ')) {
            let (x, y) = point.split_once(',').expect("two figures");
            let (x, y): (f64, f64) = (x.parse().expect("a figure"), y.parse().expect("a figure"));
            assert!((0.0..=WIDTH).contains(&x) && (0.0..=900.0).contains(&y), "{point}");
        }
    }
}
