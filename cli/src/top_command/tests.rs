//! Frames as text. `SPLITRAIL_WRITE_FRAMES=1 cargo test -p splitrail frames` writes those that are
//! expected, and the pictures of docs/images.
#![allow(clippy::unwrap_used)]

use crossterm::style::Color;

use super::frame::{self, Paint};
use super::grid::{Cell, Grid};
use super::options::{Action, Options, Sort};
use super::view::{Router, View};

mod svg;

const HEALTHY: &str = include_str!("fixtures/healthy.json");
const TROUBLED: &str = include_str!("fixtures/troubled.json");
const HOSTILE: &str = include_str!("fixtures/hostile.json");

fn router(name: &str, snapshot: &str) -> Router {
    let snapshot = Some(serde_json::from_str(snapshot).unwrap());
    Router { name: name.to_owned(), snapshot, error: None }
}

fn lost(name: &str, error: &str) -> Router {
    Router { name: name.to_owned(), snapshot: None, error: Some(error.to_owned()) }
}

/// The screen after a frame.
fn drawn(routers: &[Router], options: &Options, size: (u16, u16)) -> Grid {
    frame::draw(size, &View::new(routers, options), options, Paint { has_colour: true })
}

/// The text on the screen, one line for each row.
fn screen(routers: &[Router], options: &Options, size: (u16, u16)) -> String {
    let mut text = String::new();
    for row in drawn(routers, options, size).rows() {
        let row: String = row.iter().filter_map(|cell| cell.symbol).collect();
        text += row.trim_end();
        text.push('\n');
    }
    text
}

#[test]
fn a_router_that_refuses_requests_without_a_model_says_so() {
    let mut snapshot: serde_json::Value = serde_json::from_str(HEALTHY).unwrap();
    snapshot["unplaced_failures_per_s"] = serde_json::json!({"shed": 12.4});
    let routers = [router("router-0", &snapshot.to_string())];
    let text = screen(&routers, &Options::default(), (100, 30));
    let line = text.lines().find(|line| line.starts_with("router-0")).unwrap();
    assert!(line.ends_with("shed 12/s"), "{text}");
}

/// Compares a text with the file that has the expected one.
fn compare(name: &str, text: &str) {
    compare_file(&format!("src/top_command/fixtures/{name}.txt"), text);
}

/// The same, by the path from the folder of this package.
fn compare_file(name: &str, text: &str) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    if std::env::var_os("SPLITRAIL_WRITE_FRAMES").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(text == expected, "{name}: expected\n{expected}\nbut drawn was\n{text}");
}

#[test]
fn frames_show_a_healthy_cluster_in_80_columns_and_24_rows() {
    let routers = [router("127.0.0.1:9090", HEALTHY)];
    compare("healthy", &screen(&routers, &Options::default(), (80, 24)));
}

/// The pictures of the manual are what the program draws.
#[test]
fn frames_of_the_manual_are_those_of_the_program() {
    let routers = [router("127.0.0.1:9090", HEALTHY)];
    let screen = drawn(&routers, &Options::default(), (100, 21));
    let what = "splitrail top in front of two prefill and two decode workers";
    compare_file("../docs/images/top.svg", &svg::svg(&screen, what));
    let routers = [router("10.0.0.1:9090", HEALTHY), router("10.0.0.2:9090", TROUBLED)];
    let mut options = Options::default();
    options.apply(Action::Model, &View::new(&routers, &options).models);
    let screen = drawn(&routers, &options, (100, 27));
    let what = "splitrail top over two routers, with workers that drain, are down or fail";
    compare_file("../docs/images/top-trouble.svg", &svg::svg(&screen, what));
}

#[test]
fn frames_show_drained_and_broken_workers_and_routers_that_differ() {
    let gone = lost("10.0.0.3:9090", "nothing listens at 10.0.0.3:9090");
    let routers = [router("10.0.0.1:9090", HEALTHY), router("10.0.0.2:9090", TROUBLED), gone];
    compare("troubled", &screen(&routers, &Options::default(), (100, 34)));
}

#[test]
fn frames_show_one_model_in_the_chosen_order() {
    let routers = [router("10.0.0.1:9090", HEALTHY), router("10.0.0.2:9090", TROUBLED)];
    let mut options = Options { sort: Sort::KvUsed, ..Options::default() };
    let models = View::new(&routers, &options).models;
    options.apply(Action::Model, &models);
    options.apply(Action::Pause, &models);
    compare("one_model", &screen(&routers, &options, (80, 30)));
}

#[test]
fn frames_keep_hostile_names_in_their_cells() {
    let routers = [router("127.0.0.1:9090", HOSTILE), lost("\u{1b}[2Jx:1", "\u{1b}[2J\nb")];
    let text = screen(&routers, &Options::default(), (80, 24));
    compare("hostile", &text);
    let whole = frame::text(&View::new(&routers, &Options::default()), &Options::default(), 80);
    for text in [text, whole] {
        let steers = |c: char| c != '\n' && (c.is_control() || "\u{202e}\u{200b}".contains(c));
        assert!(!text.contains(steers), "{text:?}");
        assert!(!text.lines().any(|line| line.trim() == "fake line"), "{text}");
    }
}

#[test]
fn every_size_of_a_terminal_has_a_frame() {
    for snapshot in [HEALTHY, TROUBLED, HOSTILE] {
        let routers = [router("a:1", snapshot), router("b:1", HEALTHY), lost("c:1", "no")];
        for width in [1, 2, 9, 40, 80, 300] {
            for height in [1, 2, 3, 5, 8, 12, 24, 100] {
                let options = Options { scroll: usize::from(height), ..Options::default() };
                drawn(&routers, &options, (width, height));
                drawn(&[], &options, (width, height));
            }
        }
    }
}

#[test]
fn without_colour_no_cell_has_one() {
    let routers = [router("10.0.0.2:9090", TROUBLED)];
    let options = Options::default();
    let view = View::new(&routers, &options);
    let has_colour = |has_colour| {
        let screen = frame::draw((80, 24), &view, &options, Paint { has_colour });
        screen.rows().flatten().any(|cell| cell.style.foreground_color.is_some())
    };
    assert!(has_colour(true));
    assert!(!has_colour(false));
}

#[test]
fn long_ids_stay_different_and_addresses_are_shown_where_there_is_room() {
    let mut long = HEALTHY.to_owned();
    for (at, id) in ["p0", "p1", "d0", "d1"].iter().enumerate() {
        let longer = format!("\"of-the-first-rack-10.0.0.1:800{at}\"");
        long = long.replace(&format!("\"{id}\""), &longer);
    }
    let of = |snapshot: &str, width| {
        screen(&[router("a:1", snapshot)], &Options::default(), (width, 24))
    };
    let text = of(&long, 80);
    let shown =
        text.lines().filter(|line| line.contains(" serving ") || line.contains(" warming "));
    let ids: Vec<_> = shown.map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(ids.len(), 4, "{text}");
    assert!(
        ids.iter().zip([":8000", ":8001", ":8002", ":8003"]).all(|(id, end)| id.ends_with(end))
    );
    assert!(!of(HEALTHY, 80).contains("10.0.0.2:8000"));
    assert!(of(HEALTHY, 100).contains("10.0.0.2:8000"), "{}", of(HEALTHY, 100));
}

#[test]
fn workers_that_do_not_fit_are_scrolled_to() {
    let mut first: super::live::LiveSnapshot = serde_json::from_str(HEALTHY).unwrap();
    let worker = first.models[0].workers[0].clone();
    first.models[0].workers = (0..40)
        .map(|at| super::live::Worker { id: format!("p{at:02}"), ..worker.clone() })
        .collect();
    let routers = [Router { name: "a:1".into(), snapshot: Some(first), error: None }];
    let mut options = Options::default();
    let top = screen(&routers, &options, (80, 24));
    assert!(top.contains("p00") && !top.contains("p39") && top.contains("0 lines above"), "{top}");
    options.apply(Action::Scroll(100), &[]);
    let bottom = screen(&routers, &options, (80, 24));
    assert!(bottom.contains("p39") && !bottom.contains("p00 "), "{bottom}");
    assert!(bottom.contains("0 below"), "{bottom}");
}

/// The screen for results per second of one model, and whether anything in the line of the rates is
/// red.
fn with_results(results: serde_json::Value) -> (String, bool) {
    let mut snapshot: serde_json::Value = serde_json::from_str(HEALTHY).unwrap();
    let not_ok = results.as_object().unwrap().iter().filter(|(result, _)| *result != "ok");
    snapshot["models"][0]["failures_per_s"] = not_ok.map(|(k, v)| (k.clone(), v.clone())).collect();
    snapshot["models"][0]["results_per_s"] = results;
    let routers = [router("a:1", &snapshot.to_string())];
    let grid = drawn(&routers, &Options::default(), (80, 24));
    let row = grid.rows().nth(2).unwrap();
    let is_red = row.iter().any(|cell| cell.style.foreground_color == Some(Color::DarkRed));
    (screen(&routers, &Options::default(), (80, 24)), is_red)
}

#[test]
fn only_failed_and_shed_requests_count_as_failed() {
    let results = serde_json::json!({"ok": 9.0, "cancelled": 4.0, "invalid": 2.0, "limited": 1.0});
    let (text, is_red) = with_results(results);
    assert!(text.contains("failed/s     0 ") && !is_red, "{text}");
    assert!(text.contains("cancelled/s 4  invalid/s 2  limited/s 1\n"), "{text}");
    let results = serde_json::json!({"ok": 9.0, "cancelled": 4.0, "failed": 2.0, "shed": 1.0});
    let (text, is_red) = with_results(results);
    assert!(text.contains("failed/s     3 ") && is_red, "{text}");
}
